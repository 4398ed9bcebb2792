"""The folder of a training run: its options, progress, metrics, checkpoints, pictures and summary.

Needs the extra `examples` (TensorBoard, matplotlib, tqdm), which is imported when a run starts.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from torchrl_safety.trainers.checkpoints import (
    CHECKPOINTS,
    Progress,
    catch_interrupt,
    make_checkpoint,
    rotation,
    set_later_aside,
)
from torchrl_safety.trainers.plots import plot_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE = {
    "mean_return": "mean return of the policy",
    "iou": "IoU with the exact set",
    "false_safe": "false-safe rate",
    "false_unsafe": "false-unsafe rate",
    "safe_rate": "safe rate of the policy",
    "success_rate": "success rate of the policy",
    "frames": "frames",
    "updates": "updates",
    "seconds": "seconds",
}
"""What :meth:`TrainingRun.finish` prints."""

SHOWN = {
    "mean_return": "return",
    "gamma": "γ",
    "loss": "loss",
    "safe_rate": "safe rate",
    "success_rate": "success rate",
    "iou": "IoU",
}
"""What :meth:`TrainingRun.report` shows beside the progress bar."""


class TrainingRun:
    """A run in its folder; a context in which an interrupt waits for the end of the step.

    Writes ``config.yaml``, ``metrics.csv``, TensorBoard's events, checkpoints, and at the end ``summary.json``,
    ``curves.png`` and the figures that :meth:`finish` is told to draw.

    Args:
        folder: where everything goes.
        saved: the checkpoint to continue, or None.
        config: the options as YAML text, for ``config.yaml``.
        budget: the number of frames after which the run ends.
        checkpoints: how many times it is saved.
        state: the environment's tensordict from which the next step starts.
        device: where a checkpoint is loaded.
        **components: what a checkpoint holds besides the progress, see :func:`make_checkpoint`.

    Attributes:
        state: the environment's tensordict.
        frames: steps of the environment so far.
        updates: updates so far.
        rows: the rows of ``metrics.csv``.
        interrupted: whether the run was asked to stop.

    Raises:
        ValueError: if the folder already holds a run and none is resumed.
    """

    def __init__(
        self,
        folder: Path,
        saved: Path | None,
        *,
        config: str,
        budget: int,
        checkpoints: int,
        state: TensorDictBase,
        device: torch.device | str = "cpu",
        **components: Any,
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        self.folder, self.budget, self.checkpoints = folder, budget, checkpoints
        self._progress = Progress(state)
        self._checkpoint = make_checkpoint(**components, progress=self._progress)
        if saved is not None:
            self._checkpoint.load(saved, map_location=device)
            set_later_aside(saved)
        elif any((folder / CHECKPOINTS).glob("checkpoint-*")):  # without one, nothing can be continued or lost
            raise ValueError(
                f"{folder} already holds a run: continue it with resume={folder}, or choose another folder"
            )
        (folder / ".config.yaml").write_text(config)
        (folder / ".config.yaml").replace(folder / "config.yaml")  # whole or not at all
        self._saves = rotation(folder)
        self._started = time.perf_counter() - self._progress.seconds
        self._before = self.frames
        # What a stopped run told TensorBoard after the checkpoint is told again.
        self._writer = SummaryWriter(folder, purge_step=None if saved is None else self.frames + 1)
        self._bar = tqdm(
            total=budget, initial=min(self.frames, budget), unit="frame", unit_scale=True, dynamic_ncols=True
        )

    @property
    def state(self) -> TensorDictBase:
        return self._progress.state

    @state.setter
    def state(self, state: TensorDictBase) -> None:
        self._progress.state = state

    @property
    def frames(self) -> int:
        return self._progress.frames

    @property
    def updates(self) -> int:
        return self._progress.updates

    @property
    def rows(self) -> list[dict[str, float | None]]:
        return self._progress.rows

    @property
    def interrupted(self) -> bool:
        return bool(self._signals)

    def __enter__(self) -> TrainingRun:
        self._catcher = catch_interrupt()
        self._signals = self._catcher.__enter__()
        return self

    def __exit__(self, *fault: Any) -> None:
        self._catcher.__exit__(*fault)
        self._bar.close()
        self._writer.close()

    def advance(self, frames: int) -> None:
        """Count the frames that were just collected."""
        self._before = self.frames
        self._progress.frames += frames
        self._bar.update(min(self.frames, self.budget) - self._bar.n)

    def count_update(self) -> None:
        """Count an update."""
        self._progress.updates += 1

    def due(self, times: int) -> bool:
        """Whether one of `times` evenly spaced moments of the run, the end among them, has just been passed."""
        before, now = (min(frames, self.budget) * times // self.budget for frames in (self._before, self.frames))
        return now > before

    def report(self, scores: Mapping[str, float | None], **more: float) -> None:
        """One row to the progress bar, TensorBoard and metrics.csv."""
        self._progress.seconds = time.perf_counter() - self._started
        row = {**more, **scores, "frames": self.frames, "seconds": self._progress.seconds}
        self.rows.append(row)
        shown = ((label, row.get(key)) for key, label in SHOWN.items())
        self._bar.set_postfix_str(", ".join(f"{label} {value:.4g}" for label, value in shown if value is not None))
        for key, value in row.items():
            if key != "frames" and value is not None:
                self._writer.add_scalar(key, value, self.frames)
        with (self.folder / "metrics.csv").open("w", newline="") as file:
            table = csv.DictWriter(file, list(dict.fromkeys(key for past in self.rows for key in past)))
            table.writeheader()
            table.writerows(self.rows)

    def warn(self, text: str) -> None:
        """A line above the progress bar."""
        self._bar.write(text)

    def save_if_due(self) -> None:
        """Save at one of the `checkpoints` moments; save and end the program when it was interrupted."""
        if self.due(self.checkpoints) or self.interrupted:
            self._progress.seconds = time.perf_counter() - self._started
            self._writer.flush()  # a resumed run tells only what comes after the checkpoint
            self._saves.save(self._checkpoint, step=self.frames)
        if self.interrupted:
            self._bar.close()
            print(f"stopped after {self.frames} frames; continue with resume={self.folder}", file=sys.stderr)
            sys.exit(130)

    def finish(
        self,
        scores: Mapping[str, float | None],
        *,
        draw: Callable[[], Mapping[str, Figure]] | None = None,
        **facts: str | int,
    ) -> None:
        """``summary.json``, the pictures and the table, in this order: a picture that fails loses no result.

        Args:
            scores: what was measured at the end.
            draw: makes the figures, file name without its ending -> matplotlib figure.
            **facts: further entries of the summary: seed, problem, environment.
        """
        self._progress.seconds = time.perf_counter() - self._started
        self._bar.close()
        summary: dict[str, Any] = {
            **scores,
            "frames": self.frames,
            "updates": self.updates,
            "seconds": round(self._progress.seconds, 1),
            **facts,
        }
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        for name, figure in (draw() if draw is not None else {}).items():
            figure.savefig(self.folder / f"{name}.png", dpi=120)
            self._writer.add_figure(name, figure, self.frames)
        if self.rows:
            known = [name for name, value in self.rows[-1].items() if value is not None]
            drawn = [name for name in known if name not in ("frames", "seconds")]
            plot_curves(self.rows, drawn).savefig(self.folder / "curves.png")
        for key, label in TABLE.items():
            if (shown := summary.get(key)) is not None:
                print(f"{label:<34}{shown:>10,}" if isinstance(shown, int) else f"{label:<34}{shown:>10.4f}")
        print(f"written to {self.folder}")
