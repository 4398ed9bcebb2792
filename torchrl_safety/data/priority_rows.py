"""What users and TorchRL pass to a prioritized sampler, checked: indices and priorities as rows, sizes, settings."""

from __future__ import annotations

import functools
import math
import sys

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


def items_in(storage: Storage) -> int:
    """Number of items in a storage, which counts in whole rows where it has several dimensions."""
    if storage.ndim == 1:
        return len(storage)
    shape = storage.shape
    return 0 if shape is None else shape.numel()


def check_size(storage: Storage, capacity: int) -> None:
    """Refuse a storage with more slots than a sampler of that `capacity`.

    Raises:
        ValueError: if it has.
    """
    num_slots = storage.max_size
    if storage.ndim > 1 and (shape := storage.shape) is not None:
        width = shape[1:].numel()
        num_slots = -(-num_slots // width) * width
    if num_slots > capacity:
        raise ValueError(
            f"max_capacity={capacity} of the sampler is less than the {num_slots} items that its storage can hold: "
            f"build the sampler with max_capacity={num_slots}, or a smaller storage."
        )


@functools.lru_cache(maxsize=64)
def largest_priority(*, alpha: float, eps: float, capacity: int) -> float:
    """The largest priority of which `capacity` items have leaves `(priority + eps)^alpha` with a finite sum."""
    highest = sys.float_info.max
    # Half of it is left to rounding.
    exponent = math.log(highest / 2 / capacity) / alpha if alpha else math.inf
    return (math.exp(exponent) if exponent < math.log(highest) else highest) - eps


def check_alpha(alpha: float, priority: float | Tensor, *, eps: float, capacity: int) -> None:
    """Refuse an `alpha` with which `capacity` items of the largest `priority`, `[]`, may have no finite sum.

    Raises:
        ValueError: if it is too large (on CUDA a device-side assertion stops the program).
    """
    largest = largest_priority(alpha=alpha, eps=eps, capacity=capacity)
    if isinstance(priority, Tensor) and priority.device.type == "cuda":
        torch._assert_async(priority <= largest)
    elif priority > largest:
        raise ValueError(
            f"alpha={alpha:g} is too large for the priority {float(priority):g}: the sum of (priority + eps)^alpha "
            f"over {capacity} items with eps={eps:g} can overflow; choose a smaller alpha, or keep priorities to at "
            f"most {largest:g}; nothing was changed."
        )


def checked_priorities(
    priority: float | Tensor, slot: Tensor, *, alpha: float, eps: float, capacity: int
) -> tuple[Tensor, float | None]:
    """`priority` as float64 `[B]` for the slots `[B]`, and the largest of them where looking at it costs no wait.

    Args:
        priority: one for each slot, or one for all.
        slot: int64 `[B]`.
        alpha, eps, capacity: what bounds the priorities, see :func:`largest_priority`.

    Raises:
        ValueError: if a priority is NaN, infinite, negative or too large, or there is neither one for each slot nor one
            for all.
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
    largest = largest_priority(alpha=alpha, eps=eps, capacity=capacity)
    highest = None
    if priority.device.type == "cuda":
        torch._assert_async(((priority >= 0) & (priority <= largest)).all())
    elif priority.numel():
        lowest, highest = (bound.item() for bound in priority.aminmax())
        if not (lowest >= 0 and highest < torch.inf):
            bad = lowest if not lowest >= 0 else highest
            raise ValueError(
                f"priority is {bad}: pass finite errors that are not negative, such as the unweighted |TD error|; "
                "nothing was changed."
            )
        if highest > largest:
            raise ValueError(
                f"priority is {highest:g}, with which the sum of (priority + eps)^alpha can overflow at "
                f"alpha={alpha:g}: scale or clip the errors to at most {largest:g}, or set a smaller alpha; nothing "
                "was changed."
            )
    return priority, highest


def tensor_on(value: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`value` as a tensor; a number becomes one without a wait for an accelerator."""
    if isinstance(value, int | float):
        return torch.full((), value, dtype=dtype, device=device)
    return torch.as_tensor(value, dtype=dtype, device=device)


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Refuse a setting outside `[low, high]`, or infinite."""
    if not (low <= value <= high) or value == torch.inf:
        raise ValueError(f"{name} must lie in [{low:g}, {high:g}] and be finite, got {value}.")


def check_choice(name: str, value: str | None, choices: tuple[str | None, ...]) -> None:
    """Refuse a setting that is none of the `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}.")
