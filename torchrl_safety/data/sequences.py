"""Sub-sequences of stored episodes, found from their first steps."""

from __future__ import annotations

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
        first: the first steps as a sampler gives them: int64 `[B]`, or one `[B]` for each dimension of the storage.
        length: steps of a sequence, at least 1.
        cursor: where the writer will write next along time, `buffer.writer._cursor`; as the storage remembers it when
            `None`. A full list storage, or one that was loaded, does not.
        done_key: flags of the last step of each episode, terminated or truncated, `[*, 1]` bool.

    Returns:
        The index `[B, length]`, or one for each dimension of the storage, and which entries are valid, `[B, length]`.

    Raises:
        ValueError: if `length` is less than 1.
        KeyError: if the storage has no entry `done_key`.
        RuntimeError: if the storage is full, so that its newest step could lie anywhere, and no cursor is known.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(6), batch_size=2)
        >>> done = torch.tensor([0, 0, 1, 0, 0, 0]).bool().unsqueeze(1)
        >>> _ = rb.extend(TensorDict({"next": {"done": done}}, [6]))
        >>> index, valid = sequence_index(rb.storage, torch.tensor([1, 3]), 3)
        >>> index.tolist(), valid.tolist()
        ([[1, 2, 2], [3, 4, 5]], [[True, True, False], [True, True, True]])
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}: ask for the steps of a sequence.")
    time, *place = first if isinstance(first, tuple) else (first,)
    num_steps = storage.shape[0] if storage.ndim > 1 else len(storage)
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
    return (index if isinstance(first, tuple) else index[0]), valid


def _newest_step(storage: Storage, num_steps: int, cursor: int | None) -> int:
    if cursor is not None:
        return (cursor - 1) % num_steps
    last_written = storage._last_cursor_index
    if last_written is not None:
        return int(last_written)
    if len(storage) < storage.max_size:
        return num_steps - 1
    raise RuntimeError(
        f"the {type(storage).__name__} is full and does not know where it was written last, so the newest step is not "
        "known: pass cursor=buffer.writer._cursor."
    )


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
