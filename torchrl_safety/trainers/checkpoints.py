"""Checkpoints of whole runs on TorchRL's checkpoint format."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase
from torchrl.checkpoint import Checkpoint, CheckpointRotation, GlobalRNGState, StateDictCheckpointAdapter

CHECKPOINTS = "checkpoints"
"""Folder of a run that holds its checkpoints."""


class _TorchPayload(StateDictCheckpointAdapter):
    """TorchRL's adapter for one `torch.save` file a component, with a failed write told as what it is."""

    def __init__(self) -> None:
        super().__init__("torch")

    def save(self, component: Any, path: Path, **options: Any) -> Any:
        """Write the state of `component` below `path`."""
        try:
            return super().save(component, path, **options)
        except RuntimeError as error:  # torch.save speaks of positions in a file
            raise OSError(f"{path} could not be written; is the disk full? ({error})") from error


def make_checkpoint(**components: Any) -> Checkpoint:
    """A TorchRL checkpoint of `components` (anything with a state_dict) and of the global random generators.

    Payloads are written with `torch.save` and load with ``weights_only=True``; a save is atomic, so a killed
    run leaves either the old or the new checkpoint. A save that fails raises an OSError and leaves the old one.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torchrl_safety.trainers import make_checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = make_checkpoint(net=torch.nn.Linear(2, 1)).save(f"{folder}/step-1")
        ...     sorted(make_checkpoint(net=torch.nn.Linear(2, 1)).load(path).loaded)
        ['net', 'rng']
    """
    checkpoint = Checkpoint()
    for name, component in {**components, "rng": GlobalRNGState()}.items():
        checkpoint.register(name, component, adapter=_TorchPayload())
    return checkpoint


def rotation(run_folder: str | Path, *, keep_last: int = 2) -> CheckpointRotation:
    """The newest `keep_last` checkpoints of a run, in its folder :data:`CHECKPOINTS`.

    For the one process that runs it: what a killed process left half-written or half-removed is cleared away.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torchrl_safety.trainers import find_checkpoint, make_checkpoint, rotation
        >>> checkpoint = make_checkpoint(net=torch.nn.Linear(2, 1))
        >>> with tempfile.TemporaryDirectory() as run_folder:
        ...     paths = [rotation(run_folder).save(checkpoint, step=step) for step in (10, 20, 30)]
        ...     find_checkpoint(run_folder) == paths[-1], paths[0].exists()
        (True, False)
    """
    folder = Path(run_folder) / CHECKPOINTS
    for leftover in (*folder.glob(".checkpoint-*.stage-*"), *folder.glob(".checkpoint-*.delete-*")):
        shutil.rmtree(leftover)
    return CheckpointRotation(folder, keep_last=keep_last)


def set_later_aside(checkpoint: str | Path) -> None:
    """Rename the later checkpoints beside `checkpoint`, from which a run goes on, to ``abandoned-...``.

    Else the newest checkpoint of the folder would be one of the branch that was left. Nothing is deleted, but what an
    earlier call set aside under the same name.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torchrl_safety.trainers import find_checkpoint, make_checkpoint, rotation
        >>> from torchrl_safety.trainers.checkpoints import set_later_aside
        >>> checkpoint = make_checkpoint(net=torch.nn.Linear(2, 1))
        >>> with tempfile.TemporaryDirectory() as run_folder:
        ...     first, second = [rotation(run_folder).save(checkpoint, step=step) for step in (10, 20)]
        ...     set_later_aside(first)
        ...     find_checkpoint(run_folder) == first, second.exists()
        (True, False)
    """
    checkpoint = Path(checkpoint)
    for later in sorted(checkpoint.parent.glob("checkpoint-*")):
        if later.name > checkpoint.name:
            aside = later.with_name(f"abandoned-{later.name}")
            if aside.exists():
                shutil.rmtree(aside)
            later.rename(aside)


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint at `path`: itself, or the newest one if `path` is the folder of a run.

    Raises:
        FileNotFoundError: if there is none.
    """
    path = Path(path).expanduser()
    if Checkpoint.is_checkpoint(path):
        return path
    folder = path / CHECKPOINTS
    if folder.is_dir() and (latest := CheckpointRotation(folder, keep_last=1).latest()) is not None:
        return latest
    raise FileNotFoundError(
        f"{str(path)!r} is no checkpoint: give the folder of a run (it holds {CHECKPOINTS!r}) or one checkpoint in it"
    )


@contextmanager
def catch_interrupt() -> Iterator[list[int]]:
    """Let the step in progress end when the process is interrupted (Ctrl-C) or terminated.

    Yields a list that stays empty until then; a training loop looks at it after each step, saves and leaves. A second
    signal raises KeyboardInterrupt at once. The earlier handlers are put back at the end.

    Example:
        >>> import os, signal
        >>> from torchrl_safety.trainers import catch_interrupt
        >>> with catch_interrupt() as interrupted:
        ...     for step in range(10):
        ...         if step == 3:
        ...             os.kill(os.getpid(), signal.SIGINT)
        ...         if interrupted:
        ...             break
        >>> step
        3
    """
    received: list[int] = []

    def note(number: int, _: Any) -> None:
        received.append(number)
        signal.signal(number, signal.default_int_handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Progress:
    """How far a run has come: what a checkpoint must know besides the parts of the learner.

    Args:
        state: the environment's tensordict from which the next step starts.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_safety.trainers import Progress
        >>> progress, resumed = (Progress(TensorDict({"observation": [float(i)]})) for i in range(2))
        >>> progress.frames = 64
        >>> resumed.load_state_dict(progress.state_dict())
        >>> resumed.frames, resumed.state["observation"]
        (64, tensor([0.]))
    """

    def __init__(self, state: TensorDictBase) -> None:
        self.state = state
        self.frames, self.updates, self.seconds = 0, 0, 0.0
        self.rows: list[dict[str, float | None]] = []

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, the state among them."""
        return {**vars(self), "state": self.state.to_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved progress."""
        state = self.state.empty().update(state_dict["state"])
        vars(self).update({**state_dict, "state": state})
