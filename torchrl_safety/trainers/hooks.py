"""Schedules and evaluations as hooks of TorchRL's Trainer, and scores to any of its loggers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torchrl.record.loggers import Logger
from torchrl.trainers import Trainer, TrainerHookBase

Scores = Mapping[str, float | None]


class Schedule(Protocol):
    """What moves with the number of frames, e.g. a :class:`~torchrl_safety.trainers.StepGamma`."""

    def step(self, frames: int) -> Any:
        """The value after `frames` frames."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must know."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state."""


class ScheduleHook(TrainerHookBase):
    """A schedule that a TorchRL Trainer steps with the frames that it has collected.

    It is stepped when training starts or resumes, and before the updates of each batch.

    Args:
        schedule: any schedule of this package, or an object with its three methods.
        apply: takes the value and puts it where it is used; None for a schedule that does so itself.

    Example:
        >>> from torchrl_safety.modules import RainbowNetwork
        >>> from torchrl_safety.objectives import CategoricalDQNLoss
        >>> from torchrl_safety.trainers import ScheduleHook, StepGamma
        >>> loss = CategoricalDQNLoss(RainbowNetwork(2, 3, support=(-1.0, 1.0)))
        >>> hook = ScheduleHook(StepGamma(1000), lambda gamma: setattr(loss, "gamma", gamma))
        >>> hook.state_dict()  # hook.register(trainer, "gamma") puts it to work
        {'gamma': 0.99}
    """

    def __init__(self, schedule: Schedule, apply: Callable[[Any], Any] | None = None) -> None:
        self.schedule, self.apply = schedule, apply

    def __call__(self) -> None:
        """Step the schedule and apply its value."""
        value = self.schedule.step(self._trainer.collected_frames)
        if self.apply is not None:
            self.apply(value)

    def register(self, trainer: Trainer, name: str = "schedule") -> None:
        """Add this hook to `trainer`; its state is saved under `name`, which differs for each hook."""
        self._trainer = weakref.proxy(trainer)  # the trainer holds the hook
        trainer.register_op("setup", self)
        trainer.register_op("pre_optim_steps", self)
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, Any]:
        """The state of the schedule."""
        return self.schedule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.schedule.load_state_dict(state_dict)


def log_scores(logger: Logger, scores: Scores, step: int, *, prefix: str = "") -> None:
    """Write scores to a TorchRL logger (CSV, TensorBoard, ...); a score that is None is left out.

    Args:
        logger: one of `torchrl.record.loggers`.
        scores: name -> value, e.g. the `scores` of an :class:`~torchrl_safety.trainers.Evaluation`.
        step: number of frames.
        prefix: goes before each name, e.g. `"evaluation/"`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from torchrl.record import CSVLogger
        >>> from torchrl_safety.trainers import log_scores
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log_scores(CSVLogger("run", folder), {"safe_rate": 0.75, "success_rate": None}, step=100)
        ...     [(file.name, file.read_text()) for file in Path(folder).rglob("*.csv")]
        [('safe_rate.csv', '100,0.75\\n')]
    """
    for name, value in scores.items():
        if value is not None:
            logger.log_scalar(f"{prefix}{name}", value, step=step)


class EvaluationHook(TrainerHookBase):
    """An evaluation that a TorchRL Trainer runs after the updates of a batch, every so many frames and at the end.

    Args:
        measure: takes nothing and returns scores, e.g. `lambda: evaluate(env, policy, ...).scores`.
        interval: the number of frames after which one is due.
        logger: where the scores go; None for the logger of the trainer, if it has one.
        prefix: goes before the name of each score.

    Attributes:
        rows: one mapping per evaluation, the number of `"frames"` and the scores, as `plot_curves` takes them.

    Raises:
        ValueError: if `interval` is less than 1.

    Example:
        >>> from torchrl_safety.envs import DoubleIntegratorEnv
        >>> from torchrl_safety.trainers import EvaluationHook, evaluate
        >>> env = DoubleIntegratorEnv(8, seed=0)
        >>> hook = EvaluationHook(lambda: evaluate(env, env.rand_action, episodes=8, max_steps=9).scores, interval=500)
        >>> hook.rows  # hook.register(trainer) puts it to work
        []
    """

    def __init__(
        self, measure: Callable[[], Scores], *, interval: int, logger: Logger | None = None, prefix: str = "evaluation/"
    ) -> None:
        if not interval >= 1:
            raise ValueError(f"interval is {interval}; it must be at least 1 frame")
        self.measure, self.interval, self.logger, self.prefix = measure, interval, logger, prefix
        self.rows: list[dict[str, float | None]] = []
        self._frames = 0

    def __call__(self) -> None:
        """Evaluate if it is due."""
        frames, before = self._trainer.collected_frames, self._frames
        self._frames = frames
        last = before < self._trainer.total_frames <= frames
        if not last and frames // self.interval == before // self.interval:
            return
        scores = dict(self.measure())
        self.rows.append({"frames": frames, **scores})
        logger = self._trainer.logger if self.logger is None else self.logger
        if logger is not None:
            log_scores(logger, scores, frames, prefix=self.prefix)

    def register(self, trainer: Trainer, name: str = "evaluation") -> None:
        """Add this hook to `trainer`; its state is saved under `name`, which differs for each hook."""
        self._trainer = weakref.proxy(trainer)  # the trainer holds the hook
        trainer.register_op("post_steps", self)
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, Any]:
        """The rows so far, and the number of frames at the last look."""
        return {"frames": self._frames, "rows": [dict(row) for row in self.rows]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self._frames, self.rows = int(state_dict["frames"]), [dict(row) for row in state_dict["rows"]]
