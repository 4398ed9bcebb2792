"""The seam between a replay buffer and a transform that holds frames back."""

from __future__ import annotations

import abc
import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torchrl.data import ReplayBuffer
from torchrl.envs.transforms import Transform


class PendingTransform(Transform, abc.ABC):
    """A replay-buffer transform that keeps frames until they are complete, and so may write none or many rows at once.

    TorchRL tells a transform neither that its buffer is emptied nor lets `add` store other than one row. Once such a
    transform is attached to a buffer (append, insert, constructor, inside a Compose), that one buffer's `empty` also
    drops the pending frames and its `add(step)` stores every row that became ready, as `extend` does.
    """

    # Pending frames live in this process; TorchRL refuses buffers that share such a transform between processes.
    requires_shared_write_state = True

    @property
    @abc.abstractmethod
    def step_shape(self) -> list[int]:
        """Batch shape of the single step that `add` takes."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Drop the pending frames."""

    def train(self, mode: bool = True) -> PendingTransform:
        """Set the (unused) training mode; a buffer does this to each transform that it is given."""
        self.attach(calling_buffer())
        return super().train(mode)

    @staticmethod
    def attach(buffer: ReplayBuffer | None) -> None:
        """Let this one buffer's `empty` drop pending frames, and its `add` store any number of rows.

        The replacements look the transforms up when called, copy and pickle with the buffer, and do what they replace
        once no such transform is left in it.
        """
        if buffer is None or getattr(vars(buffer).get("empty"), "func", None) is _empty:
            return
        vars(buffer)["empty"] = functools.partial(_empty, buffer, buffer.empty)
        vars(buffer)["add"] = functools.partial(_add, buffer, buffer.add)


def calling_buffer() -> ReplayBuffer | None:
    """The replay buffer whose method is being run, if any.

    A buffer does not tell its transforms about itself, but whenever it attaches or runs one it is on the call stack.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, ReplayBuffer):
            return owner
        frame = frame.f_back
    return None


def _empty(buffer: ReplayBuffer, empty: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    empty(*args, **kwargs)
    for transform in _pending_transforms(buffer):
        transform.clear()


def _add(buffer: ReplayBuffer, add: Callable[[Any], Any], data: Any) -> Any:
    transforms = _pending_transforms(buffer)
    if not transforms:
        return add(data)
    step = transforms[0].step_shape
    if list(data.batch_size) != step:
        raise ValueError(
            f"rb.add takes one step, batch shape {step} for {transforms[0]}, got {list(data.batch_size)}; write "
            "several steps with rb.extend."
        )
    return buffer.extend(data if step else data.unsqueeze(0))


def _pending_transforms(buffer: ReplayBuffer) -> list[PendingTransform]:
    return [part for part in buffer.transform.modules() if isinstance(part, PendingTransform)]
