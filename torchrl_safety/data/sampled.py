"""The seam between a replay buffer and a transform that changes the transitions it samples."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer
from torchrl.envs.transforms import Compose, Transform

from torchrl_safety.data.goals import RELABELLED
from torchrl_safety.data.pending import PendingTransform, calling_method
from torchrl_safety.data.prioritized import PrioritizedSampler


class SampledTransform(Transform, abc.ABC):
    """A replay-buffer transform that follows what is written and changes some of the transitions that are sampled.

    TorchRL tells a transform neither that its buffer is emptied nor which slots it sampled. Once such a transform is
    attached to a buffer, that one buffer's `empty` also clears it, and `update_tensordict_priority` passes over rows
    marked ``"relabelled"``, whose error says nothing about the transition in the slot.
    """

    num_envs: int | None
    # What is known of the streams lives in this process; TorchRL refuses buffers that share it between processes.
    requires_shared_write_state = True

    @abc.abstractmethod
    def clear(self) -> None:
        """Forget what was written."""

    @abc.abstractmethod
    def end_write(self, is_stored: bool) -> None:
        """Take note that a write of the buffer is over, and whether it stored its frames."""

    def train(self, mode: bool = True) -> SampledTransform:
        """Set the (unused) training mode; a buffer does this to each transform that it is given."""
        _attach(calling_method()[0])
        super().train(mode)
        return self

    def check_place(self, buffer: ReplayBuffer) -> None:
        """Raises ValueError unless this is the first transform of the buffer, and the only one that arranges frames."""
        name = type(self).__name__
        leaves = [part for part in buffer.transform.modules() if isinstance(part, Transform)]
        leaves = [part for part in leaves if not isinstance(part, Compose)]
        arranging = [part for part in leaves if isinstance(part, SampledTransform | PendingTransform)]
        others = [type(part).__name__ for part in arranging if part is not self]
        if others:
            raise ValueError(
                f"{others[0]} and {name} stand in one buffer, and each must see single frames; keep one, and for "
                f"windows of n steps write {name}(..., n_steps=n, signals=(...))."
            )
        if leaves[0] is not self:
            raise ValueError(
                f"{type(leaves[0]).__name__} stands before {name} and would still see the old goals; the order is "
                f"relabel, recompute, n steps, other transforms: rb.insert_transform(0, {name}(...))."
            )


def _attach(buffer: ReplayBuffer | None) -> None:
    """Lets methods of this one buffer know of relabelling.

    The replacements look the transforms up when called, copy and pickle with the buffer, and do what they replace once
    no such transform is left in it.
    """
    if buffer is None:
        return
    for name, replacement in _REPLACEMENTS.items():
        method = getattr(buffer, name, None)
        if method is not None and getattr(method, "func", None) is not replacement:
            vars(buffer)[name] = functools.partial(replacement, buffer, method)


def _sampled_transforms(buffer: ReplayBuffer) -> list[SampledTransform]:
    return [part for part in buffer.transform.modules() if isinstance(part, SampledTransform)]


@contextlib.contextmanager
def _writing(buffer: ReplayBuffer) -> Iterator[list[SampledTransform]]:
    """The transforms, each in its place, which are told how the write ended."""
    transforms = _sampled_transforms(buffer)
    for transform in transforms:
        transform.check_place(buffer)
    is_stored = False
    try:
        yield transforms
        is_stored = True
    finally:
        for transform in transforms:
            transform.end_write(is_stored)


def _add(buffer: ReplayBuffer, add: Callable[[Any], Any], data: Any) -> Any:
    with _writing(buffer) as transforms:
        if buffer.storage.ndim == 1 and any(transform.num_envs is not None for transform in transforms):
            # One frame of each env is several rows.
            return buffer.extend(data)
        return add(data)


def _extend(buffer: ReplayBuffer, extend: Callable[..., Any], data: Any, **kwargs: Any) -> Any:
    with _writing(buffer):
        return extend(data, **kwargs)


def _empty(buffer: ReplayBuffer, empty: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    empty(*args, **kwargs)
    for transform in _sampled_transforms(buffer):
        transform.clear()


def _update_tensordict_priority(buffer: ReplayBuffer, update: Callable[[Any], Any], data: TensorDictBase) -> Any:
    """Passes over relabelled rows: their error says nothing about the transition that is in the buffer."""
    is_relabelled = data.get(RELABELLED, None)
    if is_relabelled is None or not _sampled_transforms(buffer):
        return update(data)
    is_relabelled = is_relabelled.reshape(data.batch_size)
    if not isinstance(buffer.sampler, PrioritizedSampler):
        rows = data[~is_relabelled]
        return update(rows) if len(rows) else None
    index = data.get("index")
    kept = index.masked_fill(is_relabelled.reshape(data.batch_size + (1,) * (index.ndim - data.ndim)), -1)
    # The sampler notes on the index when it was drawn.
    vars(kept).update(vars(index))
    return update(data.copy().set("index", kept))


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "add": _add,
    "extend": _extend,
    "empty": _empty,
    "update_tensordict_priority": _update_tensordict_priority,
}
