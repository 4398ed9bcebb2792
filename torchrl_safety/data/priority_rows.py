"""Indices and priorities, in the forms that users and TorchRL pass them, as checked rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage


def flat_slots(
    index: int | Tensor,
    storage: Storage | None,
    *,
    capacity: int,
    num_items: int,
    device: torch.device,
    is_drawn: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Flat slots int64 `[B]`, and which of them are items (`None`: all are). The rest become `capacity`.

    Args:
        index: integers `[]` or `[B]`, or `[B, ndim]` for a storage of `ndim > 1`; negative ones are no items.
        storage: the storage of the items; its shape is needed where it has several dimensions.
        capacity: number of slots of the sampler.
        num_items: slots from 0 on that hold an item.
        device: where the slots are wanted.
        is_drawn: a slot that was drawn and is empty now belongs to a buffer that was emptied since: no mistake.

    Raises:
        ValueError: if the indices are no integers.
        IndexError: if an index lies beyond the items and was not drawn (on a CPU).
    """
    if isinstance(index, Tensor) and (index.is_floating_point() or index.dtype == torch.bool):
        raise ValueError(f"index has dtype {index.dtype}: pass integers, such as mask.nonzero() of a bool mask.")
    slot = tensor_on(index, torch.long, device)
    if storage is not None and storage.ndim > 1 and slot.ndim > 1:
        flat = slot.select(-1, 0)
        for dim, size in list(enumerate(storage.shape))[1:]:
            flat = flat * size + slot.select(-1, dim)
        slot = flat
    slot = slot.reshape(-1)
    if not slot.numel():
        return slot, None
    if slot.device.type == "cpu":
        lowest, highest = (bound.item() for bound in slot.aminmax())
        if highest >= num_items and not is_drawn:
            raise IndexError(
                f"index {highest} names an empty slot, the buffer holds {num_items} items and the sampler "
                f"has max_capacity={capacity}: pass indices of items that were written."
            )
        if lowest >= 0 and highest < num_items:
            return slot, None
    is_item = (slot >= 0) & (slot < num_items)
    return torch.where(is_item, slot, capacity), is_item


def run_of(index: int | Tensor) -> slice | None:
    """The slots as a slice where they are neighbours in rising order on a CPU, as in most writes of a buffer."""
    if not isinstance(index, Tensor) or index.ndim != 1 or index.dtype != torch.long or index.device.type != "cpu":
        return None
    num_rows = index.numel()
    if not num_rows:
        return None
    start = int(index[0].item())
    is_run = torch.equal(index, torch.arange(start, start + num_rows, device=index.device))
    return slice(start, start + num_rows) if is_run else None


def checked_priorities(priority: float | Tensor, slot: Tensor) -> Tensor:
    """`priority` as float64 `[B]` for the slots `[B]`.

    Raises:
        ValueError: if a priority is NaN, infinite or negative, or there is neither one for each slot nor one for all.
    """
    if isinstance(priority, Tensor):
        priority = priority.detach()
    priority = tensor_on(priority, torch.float64, slot.device)
    if priority.numel() not in (1, slot.numel()):
        raise ValueError(
            f"priority has shape {list(priority.shape)} for {slot.numel()} indices: pass one priority for each "
            "index, or one for all; for indices of several dimensions also pass the storage."
        )
    priority = priority.reshape(-1)
    if priority.shape != slot.shape:
        priority = priority.expand(slot.shape)
    if priority.device.type == "cuda":
        torch._assert_async(((priority >= 0) & (priority < torch.inf)).all())
    elif priority.numel():
        lowest, highest = (bound.item() for bound in priority.aminmax())
        if not (lowest >= 0 and highest < torch.inf):
            bad = lowest if not lowest >= 0 else highest
            raise ValueError(
                f"priority is {bad}: pass finite errors that are not negative, such as the unweighted |TD error|; "
                "nothing was changed."
            )
    return priority


def tensor_on(value: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`value` as a tensor; a number becomes one without a wait for an accelerator."""
    if isinstance(value, int | float):
        return torch.full((), value, dtype=dtype, device=device)
    return torch.as_tensor(value, dtype=dtype, device=device)
