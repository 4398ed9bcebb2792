"""The seam between a replay buffer and a transform that holds frames back."""

from __future__ import annotations

import abc
import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer
from torchrl.envs.transforms import Compose, Transform


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
        self.attach(calling_method()[0])
        return super().train(mode)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the sample unchanged: the work was done when it was written."""
        return tensordict

    def writing_buffer(self) -> ReplayBuffer | None:
        """The buffer that is being written, attached and checked; None outside a buffer."""
        buffer, method = calling_method()
        self.attach(buffer)
        if buffer is None:
            return None
        if method not in ("add", "extend"):
            raise RuntimeError(
                f"{type(self).__name__} holds frames back and stores them later in turn, so they have no chosen slots; "
                "write them with rb.extend or rb.add, not with rb[index] = frames."
            )
        if buffer.dim_extend:
            raise ValueError(
                f"{type(self).__name__} emits rows of batch shape [M], but the storage has {buffer.dim_extend + 1} "
                "batch dimensions; use a storage with ndim=1."
            )
        pending = _pending_transforms(buffer)
        owned = {part for transform in pending for part in transform.modules() if part is not transform}
        names = [type(transform).__name__ for transform in pending if transform not in owned]
        if len(names) > 1:
            raise ValueError(
                f"{' and '.join(names)} stand in one buffer, and each would hold back what the other emits; keep one, "
                "and for hindsight with n-step windows pass the latter to the former: HindsightTransform(..., "
                "n_step=NStepTransform(...))."
            )
        return buffer

    def check_order(self) -> None:
        """Refuses to hand "no rows" to a transform that would try to invert them."""
        container = self.__dict__["_container"]
        chain = container() if container is not None else None
        name = type(self).__name__
        for transform in chain if isinstance(chain, Compose) else ():
            if transform is self:
                return
            if any(_inverts(part) for part in transform.modules()):
                raise ValueError(
                    f"{type(transform).__name__} stands before {name}, so its inverse would run on rows that "
                    f"are not there yet; put {name} first: rb.insert_transform(0, {name}(...))."
                )

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


def only(rows: TensorDictBase) -> TensorDictBase:
    """The one row that a buffer's ``add`` can take while it is still TorchRL's own."""
    if len(rows) > 1:
        raise ValueError(
            f"{len(rows)} rows became ready at once, and rb.add stores one; use rb.extend(frame.unsqueeze(0))."
        )
    return rows[0]


def calling_method(*names: str) -> tuple[ReplayBuffer | None, str]:
    """The replay buffer whose method is being run, if any, and the name of that method; only of these, where given."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        # To look at the variables of a frame is slow.
        if not names or name in names:
            owner = frame.f_locals.get("self")
            if isinstance(owner, ReplayBuffer):
                return owner, name
        frame = frame.f_back
    return None, ""


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


def _inverts(part: torch.nn.Module) -> bool:
    """Whether a transform does anything to what is written into a buffer."""
    if not isinstance(part, Transform) or isinstance(part, Compose):
        return False
    return bool(part.in_keys_inv) or type(part)._inv_call is not Transform._inv_call


def _pending_transforms(buffer: ReplayBuffer) -> list[PendingTransform]:
    return [part for part in buffer.transform.modules() if isinstance(part, PendingTransform)]
