"""Sub-sequences of stored episodes, found from their first steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, is_tensor_collection
from torch import Tensor
from torchrl.data.replay_buffers.storages import ListStorage, Storage

_DONE = ("next", "done")


def sequence_index(
    storage: Storage,
    first: Tensor | tuple[Tensor, ...],
    length: int,
    *,
    cursor: int | None = None,
    done_key: NestedKey = _DONE,
) -> tuple[Tensor | tuple[Tensor, ...], Tensor]:
    r"""Where the steps that follow given first steps lie, up to the end of the episode.

    .. math:: \mathrm{index}_{b,k} = (i_b + \min(k, m_b)) \bmod N, \qquad \mathrm{valid}_{b,k} = [k \le m_b]

    m_b is the number of steps that follow i_b in its episode, at most `length - 1`: it stops at the first step that is
    done and at the newest step of the storage, behind which the oldest begins. Places that are not valid repeat the
    last step that is. Of the storage only `done` is read, at B x `length` places. Time is the first dimension of a
    storage; sequences keep to their place in the others, such as one environment.

    Args:
        storage: a tensor, memory-mapped or list storage, written in turn.
        first: the first steps as a sampler or a batch gives them: integers `[B]`, or for a storage of `ndim > 1` one
            `[B]` for each dimension, or `[B, ndim]`.
        length: steps of a sequence, at least 1.
        cursor: where the writer will write next along time, `buffer.writer._cursor`; needed once the storage is full.
            What a storage itself remembers of its writes is wrong after a load.
        done_key: flags of the last step of each episode, terminated or truncated, `[*, 1]` bool.

    Returns:
        The index `[B, length]`, one for each dimension of the storage or `[B, length, ndim]`, as `first` is given, and
        which entries are valid, bool `[B, length]`.

    Raises:
        ValueError: if `length` is less than 1, or `first` does not fit the dimensions of the storage.
        IndexError: if a first step lies beyond the items of the storage (on a CPU).
        KeyError: if the storage has no entry `done_key`.
        RuntimeError: if the storage is empty, or it is full, so that its newest step could lie anywhere, and there is
            no cursor.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(6), batch_size=2)
        >>> done = torch.tensor([0, 0, 1, 0, 0, 0]).bool().unsqueeze(1)
        >>> _ = rb.extend(TensorDict({"next": {"done": done}}, [6]))
        >>> index, valid = sequence_index(rb.storage, torch.tensor([1, 3]), 3, cursor=rb.writer._cursor)
        >>> index.tolist(), valid.tolist()
        ([[1, 2, 2], [3, 4, 5]], [[True, True, False], [True, True, True]])
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}: ask for the steps of a sequence.")
    time, *place = _coordinates(first, storage.ndim)
    if not time.numel():
        nothing = time.unsqueeze(1).expand(-1, length)
        return _as_given([nothing] * (1 + len(place)), first), nothing.bool()
    if not len(storage):
        raise RuntimeError("the storage is empty, so no sequence begins in it: add items first.")
    num_steps = storage.shape[0] if storage.ndim > 1 else len(storage)
    _check_bounds(time, num_steps)
    newest = _newest_step(storage, num_steps, cursor)
    offset = torch.arange(length, device=time.device)
    reach = (newest - time).remainder(num_steps).unsqueeze(1)
    place = [where.unsqueeze(1).expand(-1, length) for where in place]

    def at(steps_on: Tensor) -> tuple[Tensor, ...]:
        return ((time.unsqueeze(1) + steps_on).remainder(num_steps), *place)

    done = _flags(storage, at(torch.minimum(offset, reach)), done_key)
    ended_before = (done.cumsum(1) - done.long()) > 0
    valid = (offset <= reach) & ~ended_before
    index = at(torch.minimum(offset, valid.sum(1, keepdim=True) - 1))
    return _as_given(index, first), valid


def _coordinates(first: Tensor | tuple[Tensor, ...], ndim: int) -> tuple[Tensor, ...]:
    """One `[B]` for each dimension of the storage."""
    by_dim = first if isinstance(first, tuple) else first.unbind(-1) if ndim > 1 and first.ndim > 1 else (first,)
    if len(by_dim) != ndim or any(part.ndim != 1 or part.shape != by_dim[0].shape for part in by_dim):
        shapes = [list(part.shape) for part in (first if isinstance(first, tuple) else (first,))]
        forms = "integers [B]" if ndim == 1 else f"a tuple of {ndim} integer tensors [B], or one [B, {ndim}]"
        raise ValueError(f"first has the shapes {shapes} for a storage with ndim={ndim}: pass {forms}.")
    for part in by_dim:
        if part.is_floating_point() or part.dtype == torch.bool:
            raise ValueError(f"first has dtype {part.dtype}: pass integers, such as mask.nonzero() of a bool mask.")
    return by_dim


def _as_given(index: Sequence[Tensor], first: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    if isinstance(first, tuple):
        return tuple(index)
    return index[0] if first.ndim == 1 else torch.stack(tuple(index), -1)


def _check_bounds(time: Tensor, num_steps: int) -> None:
    # On an accelerator it would be a wait.
    if time.device.type != "cpu":
        return
    lowest, highest = (bound.item() for bound in time.aminmax())
    if lowest < 0 or highest >= num_steps:
        bad = lowest if lowest < 0 else highest
        raise IndexError(f"first step {bad} is outside the storage: pass steps in [0, {num_steps}), as they are drawn.")


def _newest_step(storage: Storage, num_steps: int, cursor: int | None) -> int:
    if len(storage) < storage.max_size:
        return num_steps - 1
    if cursor is None:
        raise RuntimeError(
            f"the {type(storage).__name__} is full, so its newest step could lie anywhere: pass "
            "cursor=buffer.writer._cursor."
        )
    return (cursor - 1) % num_steps


def _flags(storage: Storage, index: tuple[Tensor, ...], key: NestedKey) -> Tensor:
    """The flags `key` at the places `index`, `[B, L]` bool, on the device of the index."""
    shape, device = index[0].shape, index[0].device
    if isinstance(storage, ListStorage):
        # Each item is an object of its own; there is nothing to gather from.
        rows = [_entry(storage[i], key) for i in index[0].reshape(-1).tolist()]
        return torch.stack(rows).reshape(*shape, -1).any(-1).to(device)
    flags = _entry(storage[:], key)
    return flags[tuple(part.to(flags.device) for part in index)].reshape(*shape, -1).any(-1).to(device)


def _entry(items: Any, key: NestedKey) -> Tensor:
    if not is_tensor_collection(items):
        raise KeyError(f"the storage holds {type(items).__name__}, not TensorDicts: {key!r} cannot be read from it.")
    entry = items.get(key, None)
    if entry is None:
        present = sorted(map(str, items.keys(include_nested=True, leaves_only=True)))
        raise KeyError(
            f"{key!r} is not in the storage, which holds {present}: store the flags of the last steps, or name them "
            "with done_key."
        )
    return entry
