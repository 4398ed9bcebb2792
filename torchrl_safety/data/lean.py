"""A TensorDict replay buffer that takes the short way to a batch and back."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensorclass
from tensordict.nn.utils import _set_dispatch_td_nn_modules
from tensordict.utils import expand_as_right
from torch import Tensor
from torch.compiler import is_compiling
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer, TensorStorage
from torchrl.data.replay_buffers.samplers import RandomSampler
from torchrl.data.replay_buffers.storages.utils import _collate_id
from torchrl.data.replay_buffers.writers import TensorDictRoundRobinWriter

from torchrl_safety.data.pending import PendingTransform
from torchrl_safety.data.prioritized import PrioritizedSampler

# Of these the index and what comes with it are known: `[B]`, within the items that are there, on the sampler's device.
_SAMPLERS = (PrioritizedSampler, RandomSampler)
_STORAGES = (LazyTensorStorage, TensorStorage)


class LeanReplayBuffer(TensorDictReplayBuffer):
    """A :class:`torchrl.data.TensorDictReplayBuffer` whose batches, priority updates and writes cost less.

    Same arguments, batches, random numbers, transforms and errors. What is saved is TorchRL's bookkeeping around them:
    a batch is gathered from the tensors of the storage, once each, and becomes a TensorDict together with its index
    and weights; one priority an item goes to the sampler as it is; frames are copied into neighbouring slots. That
    holds for storages in memory with one dimension (:class:`LazyTensorStorage`) and the samplers
    :class:`PrioritizedSampler` and :class:`torchrl.data.RandomSampler`; anything else (memmap, lists, prefetch,
    `pin_memory`, sample units, ...) works as in the parent and takes as long. With transforms what they do is added.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage
        >>> from torchrl_safety.data import LeanReplayBuffer, PrioritizedSampler
        >>> rb = LeanReplayBuffer(storage=LazyTensorStorage(100), sampler=PrioritizedSampler(100), batch_size=4)
        >>> index = rb.extend(TensorDict({"observation": torch.randn(10, 3)}, [10]))
        >>> batch = rb.sample()
        >>> rb.update_tensordict_priority(batch.set("td_error", torch.rand(4)))
        >>> sorted(batch.keys())
        ['index', 'observation', 'priority_stamp', 'priority_weight', 'td_error']
    """

    def sample(
        self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None
    ) -> TensorDictBase:
        """As that of the parent."""
        size = self._batch_size if batch_size is None else batch_size
        if (
            return_info
            or include_info is not None
            or size is None
            or self._batch_size not in (None, size)
            or self._prefetch
            or self._service_shutdown
            or self._sample_dependency is not None
            or not self._is_lean()
            or type(self)._sample is not LeanReplayBuffer._sample
        ):
            return super().sample(batch_size, return_info, include_info)
        batch, info = self._sample(size)
        return _with_info(batch, info) if self._transforms_samples() else batch

    def _sample(self, batch_size: int) -> tuple[TensorDictBase, dict[str, Any]]:
        if not self._is_lean():
            return super()._sample(batch_size)
        has_transforms = self._transforms_samples()
        with self._replay_lock, self._write_lock:
            index, info = self._sampler.sample(self._storage, batch_size)
            info["index"] = index
            if self._writer.tracks_generations:
                info["index_generation"] = self._writer.generations_of(index)
            # Transforms see what is stored, and what the sampler says comes after them.
            batch = self._gather(index, {} if has_transforms else info)
        if has_transforms:
            if batch.is_locked:
                batch.unlock_()
            with _set_dispatch_td_nn_modules(True):
                batch = self._transform(batch)
        return batch, info

    def extend(self, tensordicts: TensorDictBase, *, update_priority: bool | None = None) -> Tensor:
        """As that of the parent."""
        if isinstance(tensordicts, TensorDictBase) and not tensordicts.ndim:
            raise RuntimeError(
                "extend takes a batch of frames, got a single one of shape []; use add(frame), or give "
                "extend(frame.unsqueeze(0))"
            )
        is_plain = type(tensordicts) is TensorDict and type(self._writer) is TensorDictRoundRobinWriter
        if not is_plain or not self._is_lean() or self._writer._generation is not None:
            return super().extend(tensordicts, update_priority=update_priority)
        data = self._transform.inv(tensordicts) if self._transform else tensordicts.copy()
        if data is None:
            return torch.zeros((0, 1), dtype=torch.long)
        capacity = self._storage.max_size
        if len(data) <= capacity:
            index = self._write(data)
        else:  # of rows for one slot the last counts, which one write on several threads does not promise
            index = torch.cat([self._write(rows) for rows in data.split(capacity)])
        if update_priority is not False and (priority := data.get(self.priority_key, None)) is not None:
            try:
                self.update_priority(index, priority)
            except (ValueError, IndexError) as error:
                raise RuntimeError(
                    f"the frames are written, but their {self.priority_key!r} are no priorities: {error} Leave them "
                    "out, or pass update_priority=False"
                ) from error
        return index

    def _write(self, data: TensorDictBase) -> Tensor:
        """Stores rows `[M]` in the next slots, which are returned; the data get them as `"index"`."""
        storage, writer = self._storage, self._writer
        with self._replay_lock, self._write_lock:
            start, size, capacity = writer._cursor, len(data), storage.max_size
            index = torch.arange(start, start + size, device=data.device or "cpu")
            if start + size > capacity:
                index %= capacity
            data.set("index", index)
            copies = _copies(storage._storage, data, start, capacity)
            if copies is None:
                return self._extend(data)  # which writes to the same slots
            writer._cursor = (start + size) % capacity
            writer._write_count += size
            storage._set_last_cursor(index)
            storage._get_new_len(data, index)
            for slots, rows in copies:
                slots.copy_(rows)
            storage._bump_mutation_revision()
            writer._mark_update_entities(index)
            self._sampler.extend(index)
        return index

    def _gather(self, index: Tensor, more: dict[str, Tensor]) -> TensorDictBase:
        """The items in these slots `[B]`, and `more` entries `[B]` for them."""
        storage = self._storage
        num_items = len(storage)
        length = None if num_items == storage.max_size else num_items
        batch = _rows(storage._storage, index, length, more) if index.device == storage.device else None
        if batch is None:
            batch = storage.get(index.to(storage.device))
            for key, value in more.items():
                batch.set(key, value)
        return batch

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """As that of the parent."""
        if type(self.__dict__.get("_sampler")) is PrioritizedSampler and self._storage.ndim == 1 and data.ndim == 1:
            priority, index = data.get(self.priority_key, None), data.get("index", None)
            if (
                isinstance(priority, Tensor)
                and isinstance(index, Tensor)
                and index.ndim == 1
                and priority.numel() == index.numel() == len(data)
                and self._sample_unit is None
            ):
                self.update_priority(index, priority if priority.ndim == 1 else priority.reshape(-1))
                return
        super().update_tensordict_priority(data)

    def _transforms_samples(self) -> bool:
        return any(type(part).forward is not PendingTransform.forward for part in self._transform or ())

    def _is_lean(self) -> bool:
        """Whether a batch is what the sampler's index selects of the storage's tensors, and nothing else."""
        if not self._initialized or type(self._sampler) not in _SAMPLERS or type(self._storage) not in _STORAGES:
            return False
        items = self._storage._storage
        return (
            self._storage.initialized  # not so where an empty state was loaded over these items
            and type(items) is TensorDict
            and items.ndim == 1
            and self._storage.ndim == 1
            and self._sample_unit is None
            and self._collate_fn is _collate_id
            and not self._pin_memory
            and not is_compiling()
        )


def _with_info(batch: Any, info: dict[str, Tensor]) -> Any:
    """A batch that transforms have seen, with the index and what else the sampler says of its rows `[B]`."""
    if is_tensorclass(batch):
        return batch
    if not isinstance(batch, TensorDictBase):
        raise RuntimeError(
            f"The transforms made a {type(batch).__name__} of the batch, which has no place for its index; let them "
            "return a TensorDict."
        )
    is_locked = batch.is_locked
    if is_locked:
        batch.unlock_()
    for key, value in info.items():
        try:
            batch.set(key, expand_as_right(value, batch) if value.ndim < batch.ndim else value)
        except RuntimeError as error:
            raise RuntimeError(
                f"The transforms made a batch of shape {list(batch.batch_size)}, into which {key!r} of shape "
                f"{list(value.shape)} does not fit; let them keep the rows in the first dimension."
            ) from error
    return batch.lock_() if is_locked else batch


def _copies(items: TensorDict, data: TensorDictBase, start: int, capacity: int) -> list[tuple[Tensor, Tensor]] | None:
    """Each slots of `items` `[capacity]` from `start` on, and round, with the rows of `data` for them.

    `None` where the two hold anything but the same ordinary tensors, or the very same ones in a write that goes round.
    """
    if type(data) is not TensorDict or data.ndim != 1 or not 0 < len(data) <= capacity:
        return None
    if items.is_locked or items.keys() != data.keys():
        return None
    before = min(len(data), capacity - start)
    copies = []
    for key, value in items.items():
        new = data.get(key)
        if type(value) is TensorDict:
            nested = _copies(value, new, start, capacity)
            if nested is None:
                return None
            copies += nested
        elif type(value) is Tensor and type(new) is Tensor and not new.requires_grad:
            if new.dtype != value.dtype or new.shape[1:] != value.shape[1:]:
                return None
            copies.append((value[start : start + before], new[:before]))
            if before < len(new):
                if _share_memory(value, new):  # the first copy may overwrite rows of the second
                    return None
                copies.append((value[: len(new) - before], new[before:]))
        else:
            return None
    return copies


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _rows(items: TensorDict, index: Tensor, length: int | None, more: dict[str, Tensor]) -> TensorDict | None:
    """`items[:length][index]` with `more` entries, where it holds nothing but ordinary tensors; else `None`."""
    if items._has_names():
        return None
    entries: dict[str, Any] = {}
    for key, value in items.items():
        if key in more:
            entries[key] = more[key]
        elif type(value) is Tensor:
            entries[key] = (value if length is None else value[:length]).index_select(0, index)
        elif type(value) is TensorDict:
            entries[key] = _rows(value, index, length, {})
            if entries[key] is None:
                return None
        else:
            return None
    entries.update(more)
    shape = torch.Size((index.shape[0], *items.batch_size[1:]))
    return TensorDict._new_unsafe(entries, batch_size=shape, device=items.device)
