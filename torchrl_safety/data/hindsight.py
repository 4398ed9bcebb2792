"""Hindsight experience replay while a buffer is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer

from torchrl_safety.data.draws import check_strategy, draw_goals_of_steps
from torchrl_safety.data.episodes import OpenEpisodes, PastGoals, Staged, Steps
from torchrl_safety.data.frames import Entries, end_flags, following_of, positive, rows_of, time_major
from torchrl_safety.data.goals import (
    RELABELLED,
    GoalCondition,
    GoalRelabel,
    TransitionFunction,
    check_finite,
    over_features,
)
from torchrl_safety.data.nstep import NStepTransform
from torchrl_safety.data.pending import PendingTransform, only
from torchrl_safety.data.successors import TrajectoryNumbers


class HindsightTransform(PendingTransform):
    r"""Stores each transition also with goals that its episode did achieve, once that episode has ended.

    .. math:: (S_t, A_t, r_t, S_{t+1}) \to (S_t', A_t, f_R(S_t', A_t, S_{t+1}'), S_{t+1}'), \quad g' = m_k

    with k drawn for each t by `strategy` (:func:`~torchrl_safety.data.draws.draw_goals`): "final" takes the last state,
    "future" and "episode" up to K distinct states after t, or of the whole episode (Andrychowicz et al. 2017,
    algorithm 1 and section 4.5), "random" up to K distinct goals among the `goal_memory` that any env achieved last.
    :class:`~torchrl_safety.data.goals.GoalRelabel` tells what is recomputed. Frames are stored at once; when an episode
    terminates or is truncated, its copies follow the frames of that write, ordered by episode, then step. Each copy is
    an item with a priority of its own, at first the largest, so frames must not hold the buffer's priority key; bool
    ``"relabelled"`` `[M, 1]` tells it from an original. Frames that are refused, also by a function, change nothing.

    It is for buffers whose storage has one batch dimension. Transforms that follow it in the list and have an inverse
    write first; the functions see what they wrote. ``rb.empty()`` and :meth:`clear` drop open episodes and goals; call
    the latter when envs are reset in the middle of an episode. ``rb.add(frame)`` returns the indices of all new rows.

    Args:
        reward_fn, terminated_fn, target_margin_fn, goal_conditions, keep_failures: as in `GoalRelabel`; the functions
            take transitions `[M]`, or `[M, n]` with `n_step`.
        strategy (str): "final", "episode", "future" or "random".
        num_goal_samples (int): K; "final" has one goal for each step.
        num_envs (int or None): None for frames `[]` or `[T]` of one stream, N for `[N]` or `[N, T]`.
        n_step (NStepTransform or None): makes n-step rows of originals and copies, each window of a copy under one
            goal, cut where a relabelled step terminates. Not to be appended to the buffer itself.
        goal_memory (int): how many achieved goals "random" remembers.
        generator (torch.Generator or None): source of random numbers; if None, one seeded from torch's global one.

    Raises:
        ValueError: for a setting out of range, or frames of another layout or kind than expected.
        KeyError: for frames without a goal, a measurement, end flags or an entry to recompute.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> def reward(transition):
        ...     return (transition["next", "achieved_goal"] == transition["next", "desired_goal"]).float()
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=HindsightTransform(reward))
        >>> state, end = torch.arange(4.0).unsqueeze(-1), torch.tensor([[False], [False], [True]])
        >>> goal = {"desired_goal": torch.full((3, 1), 9.0)}
        >>> flags = {"reward": torch.zeros(3, 1), "terminated": torch.zeros_like(end), "truncated": end}
        >>> following = {"achieved_goal": state[1:], **goal, **flags}
        >>> len(rb.extend(TensorDict({"achieved_goal": state[:3], **goal, "next": following}, [3])))
        6
        >>> rb[3:]["next", "reward"].flatten().tolist()
        [0.0, 0.0, 1.0]
    """

    def __init__(
        self,
        reward_fn: TransitionFunction | None,
        *,
        terminated_fn: TransitionFunction | None = None,
        target_margin_fn: TransitionFunction | None = None,
        goal_conditions: GoalCondition | Sequence[GoalCondition] | None = None,
        strategy: str = "final",
        num_goal_samples: int = 4,
        keep_failures: bool = True,
        num_envs: int | None = None,
        n_step: NStepTransform | None = None,
        goal_memory: int = 10_000,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_strategy(strategy, num_goal_samples)
        self.relabel = GoalRelabel(
            reward_fn,
            terminated_fn=terminated_fn,
            target_margin_fn=target_margin_fn,
            goal_conditions=goal_conditions,
            keep_failures=keep_failures,
        )
        self.strategy = strategy
        self.num_goal_samples = num_goal_samples
        self.num_envs = None if num_envs is None else positive("num_envs", num_envs, remedy="None means one stream")
        self.n_step = _check_n_step(n_step, self.num_envs)
        self._open = OpenEpisodes()
        self._past_goals = PastGoals(positive("goal_memory", goal_memory, remedy="10000 is the default"))
        self._generator = _check_generator(generator)
        self.numbers: TrajectoryNumbers | None = None
        """Names the trajectory and step of each row that is written, where someone asks (a replay buffer of ours)."""

    @property
    def step_shape(self) -> list[int]:
        """Batch shape of a single step: `[]`, or `[N]` with several envs."""
        return [] if self.num_envs is None else [self.num_envs]

    def clear(self) -> None:
        """Drops the open episodes and the remembered goals, as after a reset in the middle of an episode."""
        self._open.clear()
        self._past_goals.clear()
        if self.numbers is not None:
            self.numbers.clear()
        if self.n_step is not None:
            self.n_step.clear()

    def __repr__(self) -> str:
        settings = f"strategy={self.strategy!r}, num_goal_samples={self.num_goal_samples}, num_envs={self.num_envs}"
        return f"{type(self).__name__}({settings}, n_step={self.n_step})"

    @torch.inference_mode(False)  # or what is kept of a write could not be written on outside of that mode
    @torch.no_grad()
    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        buffer = self.writing_buffer()
        _refuse_priorities(buffer, tensordict)
        write = self._write(tensordict)
        rows = write.rows
        if rows is None:
            self.check_order()
        elif buffer is not None and tensordict.ndim == 0:
            rows = only(rows)
        self._commit(write)
        return rows

    def _frames(self, tensordict: TensorDictBase) -> Entries:
        name = type(self).__name__
        frames = time_major(tensordict, self.num_envs, name)
        if (RELABELLED,) in frames:
            raise ValueError(
                f"The frames hold {RELABELLED!r} already; write what the env gave, or exclude the entry from frames "
                "that are originals."
            )
        if any(path[0] == "steps" for path in frames):
            raise ValueError(
                f'The frames hold "steps" entries; write one-step frames and let {name}(..., '
                "n_step=NStepTransform(...)) make the windows."
            )
        return frames

    def _check(self, rows: TensorDictBase) -> None:
        """Refuses frames `[M]` that could not be relabelled once their episode ends."""
        at_start = self.strategy == "episode"
        if self._open.is_new:
            self.relabel.check(rows, at_start=at_start)
        measured = self.relabel.measurements(rows) + (self.relabel.start_measurements(rows) if at_start else [])
        keys = [condition.measurement_key for condition in self.relabel.goal_conditions]
        for key, values in zip(keys * 2, measured):
            check_finite(
                values, f"Measurement {key!r} holds NaN or infinite values, which are no goals; mend the frames."
            )

    def _write(self, tensordict: TensorDictBase) -> _Write:
        """All that a write comes to; nothing that counts changes yet."""
        frames = self._frames(tensordict)
        _, ended = end_flags(following_of(frames), type(self).__name__)
        rows = rows_of({path: value.flatten(0, 1) for path, value in frames.items()}, ended.numel(), tensordict.device)
        self._check(rows)
        achieved = self.relabel.measurements(rows) if self.strategy == "random" else []
        write = _Write(rows if ended.numel() else None, ended, achieved)
        if self.n_step is not None:
            originals, pending = self.n_step.advance(tensordict)
            write = write._replace(rows=originals, pending=pending)
        if write.rows is not None:
            _mark(write.rows, False)
        if not ended.numel():
            return write
        staged = self._open.stage(frames, ended)
        write = write._replace(staged=staged)
        if staged.steps is None:
            return write
        generator = self._generator.clone_state()
        copies = self._copied(staged.steps, tensordict.device, generator, achieved)
        rows = copies.rows if write.rows is None else torch.cat([write.rows, copies.rows])
        return write._replace(rows=rows, copies=copies, generator=generator)

    def _commit(self, write: _Write) -> None:
        """Makes a write count, once nothing of it can fail any more."""
        if self.n_step is not None:
            self.n_step.keep(write.pending)
        if write.staged is None:
            return
        self._open.commit(write.staged)
        if write.achieved:
            self._past_goals.write(write.achieved)
        if write.generator is not None:
            self._generator.set_state(write.generator.get_state())
        if self.numbers is not None and self.n_step is None:
            self.numbers.originals(write.ended)
        if self.numbers is not None and write.copies is not None:
            self.numbers.copies(write.copies.trajectory, write.copies.step)

    def _copied(
        self, steps: Steps, device: torch.device | None, generator: torch.Generator, achieved: Sequence[Tensor] = ()
    ) -> _Copies:
        """The hindsight copies of whole episodes; `achieved` goals, one `[M, *]` for each condition, count as past."""
        episodes = rows_of(steps.entries, len(steps.step), device)
        row, trajectory, goals = self._goals(episodes, steps, generator, achieved)
        if self.n_step is None:
            rows = self.relabel(episodes[row], goals)
        else:
            last = (steps.first + steps.length - 1)[row].unsqueeze(1)
            window = row.unsqueeze(1) + torch.arange(self.n_step.n_steps, device=row.device)
            window = torch.minimum(window, last)
            goals = [goal.unsqueeze(1).expand(*window.shape, *goal.shape[1:]) for goal in goals]
            relabelled = self.relabel(episodes[window], goals)
            rows = self.n_step.rows_of_windows(relabelled, window == last)
        return _Copies(_mark(rows, True), trajectory, steps.step[row])

    def copies_of(self, frames: TensorDictBase) -> TensorDictBase:
        """The hindsight copies `[M]` of frames of the usual layout, as if episodes ended with them; nothing is kept."""
        entries = self._frames(frames)
        _, ended = end_flags(following_of(entries), type(self).__name__)
        ended = ended.clone()
        ended[-1:] = True
        steps = OpenEpisodes().stage(entries, ended).steps
        if steps is None:
            raise ValueError(f"The frames {list(frames.batch_size)} hold no step to copy; give some.")
        return self._copied(steps, frames.device, self._generator).rows

    def _goals(
        self, episodes: TensorDictBase, steps: Steps, generator: torch.Generator, achieved: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The steps to copy, as rows of `episodes`, a number for each goal of an episode, and the goals."""
        if self.strategy == "random":
            row, goals = self._past_goals.draw(len(steps.step), self.num_goal_samples, generator, achieved)
            return row, torch.arange(len(row), device=row.device), goals
        row, state = draw_goals_of_steps(self.strategy, steps.step, steps.length, self.num_goal_samples, generator)
        first = steps.first[row]
        at = first + (state - 1).clamp(min=0)
        goals = [measured.index_select(0, at) for measured in self.relabel.measurements(episodes)]
        if self.strategy == "episode":
            start = [measured.index_select(0, first) for measured in self.relabel.start_measurements(episodes)]
            at_start = (state == 0).unsqueeze(1)
            goals = [torch.where(over_features(at_start, goal), before, goal) for before, goal in zip(start, goals)]
        return row, 2 * first + state, goals

    def _settings(self) -> dict[str, Any]:
        conditions = tuple(
            (each.measurement_key, each.measurement_index, each.goal_key, each.goal_index)
            for each in self.relabel.goal_conditions
        )
        return {
            "strategy": self.strategy,
            "num_goal_samples": self.num_goal_samples,
            "keep_failures": self.relabel.keep_failures,
            "num_envs": self.num_envs,
            "goal_memory": self._past_goals.capacity,
            "goal_conditions": conditions,
        }

    def get_extra_state(self) -> dict[str, Any]:
        """The open episodes, remembered goals, random state and settings, as plain values."""
        return {
            **self._settings(),
            "open": self._open.state(),
            "past_goals": self._past_goals.state(),
            "generator": self._generator.get_state(),
            "numbers": None if self.numbers is None else self.numbers.state(),
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Continues from :meth:`get_extra_state`; the settings must be the same, the functions are the caller's."""
        for name, value in self._settings().items():
            if state[name] != value:
                raise ValueError(
                    f"The checkpoint was written with {name}={state[name]!r}, this HindsightTransform has "
                    f"{name}={value!r}; build it with the former."
                )
        self._open.load(state["open"])
        self._past_goals.load(state["past_goals"])
        self._generator.set_state(state["generator"].cpu())
        if self.numbers is not None and state["numbers"] is not None:
            self.numbers.load(state["numbers"])


class _Copies(NamedTuple):
    """Hindsight copies, rows `[M]`, with a number for the trajectory of each, `[M]`, and the step in it, `[M]`."""

    rows: TensorDictBase
    trajectory: Tensor
    step: Tensor


class _Write(NamedTuple):
    """What a write comes to: rows `[M]` to store, or none, and what changes once they can be stored."""

    rows: TensorDictBase | None
    ended: Tensor
    achieved: list[Tensor]
    pending: Any = None
    staged: Staged | None = None
    copies: _Copies | None = None
    generator: torch.Generator | None = None


def _refuse_priorities(buffer: ReplayBuffer | None, frames: TensorDictBase) -> None:
    key = getattr(buffer, "priority_key", None)
    if key is not None and key in frames.keys(True):
        raise ValueError(
            f"The frames hold {key!r}, the priority key of the buffer, but the error of a frame says nothing of its "
            "copies with other goals; exclude it: new items get the largest priority."
        )


def _mark(rows: TensorDictBase, relabelled: bool) -> TensorDictBase:
    shape = (*rows.batch_size, 1)
    device = next(iter(rows.values(True, True))).device
    return rows.set(RELABELLED, torch.full(shape, relabelled, dtype=torch.bool, device=device))


def _check_n_step(n_step: NStepTransform | None, num_envs: int | None) -> NStepTransform | None:
    if n_step is None:
        return None
    if not isinstance(n_step, NStepTransform):
        raise ValueError(f"n_step must be an NStepTransform or None, got {n_step!r}; write n_step=NStepTransform(3).")
    if n_step.num_envs != num_envs:
        raise ValueError(
            f"n_step has num_envs={n_step.num_envs}, HindsightTransform has num_envs={num_envs}; give both the same."
        )
    return n_step


def _check_generator(generator: torch.Generator | None) -> torch.Generator:
    if generator is None:
        return torch.Generator().manual_seed(int(torch.randint(2**63 - 1, ())))
    if not isinstance(generator, torch.Generator):
        raise ValueError(f"generator must be a torch.Generator or None, got {generator!r}: seed one with manual_seed.")
    return generator
