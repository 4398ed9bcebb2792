"""What a prioritized sampler knows of the item in each slot."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_safety.data.priority_tree import GroupExtreme, group_of, groups_of

_GROUP = 64
_LATEST = 2**31 - 1
# How a default priority of 0 is kept, whose minus would look like an updated 0.
_ZERO = torch.finfo(torch.float64).tiny


class ItemRecords:
    """The priority of each item, whether an update or a default gave it, and when the item was written.

    Time counts the writes. Rows for no slot go to the slot `capacity`.

    Args:
        capacity: number of slots.
        forgets_evicted: whether the largest priority is that of the items that are here, or the largest ever seen.
        device: where the records lie.
    """

    def __init__(self, capacity: int, *, forgets_evicted: bool, device: torch.device) -> None:
        self.capacity = capacity
        self.forgets_evicted = forgets_evicted
        self.time = 0
        # Updated priorities as they are, default ones with a minus, -inf where there is no item. So the largest entry
        # is the largest updated priority.
        groups = capacity // _GROUP + 1
        self._signed = torch.full((groups, _GROUP), -torch.inf, dtype=torch.float64, device=device)
        self._largest = GroupExtreme(self._signed, largest=True)
        self._highest_ever = torch.full((), -1.0, dtype=torch.float64, device=device)
        # Four bytes a slot: times count from `_origin`, which moves up when they run out.
        self._origin = 0
        self._written_at = torch.zeros(capacity + 1, dtype=torch.int32, device=device)

    def priorities(self, slot: Tensor | None = None) -> Tensor:
        """The priorities of the slots `[B]`, of all of them when `None`, float64; -1 where there is no item."""
        signed = self._signed.view(-1)
        return _priority_of(signed.narrow(0, 0, self.capacity) if slot is None else signed.index_select(0, slot))

    def default_priority(self) -> Tensor:
        """The priority of a new item, `[]` float64: the largest that came with an update, 1 before the first."""
        highest = self._highest()
        return torch.where(highest >= 0, highest, 1.0)

    def _highest(self) -> Tensor:
        """The largest updated priority, `[]`; below 0 when there is none."""
        return self._largest.read(self._signed) if self.forgets_evicted else self._highest_ever

    def write(self, slot: Tensor) -> Tensor:
        """New items lie in the slots `[B]`; returns their priority, `[]`."""
        self._written_at.index_fill_(0, slot, self._next_time())
        signed = self._signed.view(-1)
        if self.forgets_evicted:
            signed.index_fill_(0, slot, -torch.inf)
            self._largest.forget(group_of(slot))
        priority = self.default_priority()
        signed.index_fill_(0, slot, _as_default(priority))
        return priority

    def write_run(self, run: slice) -> float:
        """:meth:`write` into neighbouring slots on a CPU."""
        self._written_at[run].fill_(self._next_time())
        signed = self._signed.view(-1)[run]
        if self.forgets_evicted:
            signed.fill_(-torch.inf)
            self._largest.forget(groups_of(run))
        highest = self._highest().item()
        priority = highest if highest >= 0 else 1.0
        signed.fill_(-max(priority, _ZERO))
        return priority

    def _next_time(self) -> int:
        """Counts a write; returns when it is, from the origin on."""
        self.time += 1
        if self.time - self._origin > _LATEST:
            # Older times become one: a batch drawn two billion writes ago counts as stale.
            self._written_at.clamp_(min=0).sub_(_LATEST)
            self._origin += _LATEST
        return self.time - self._origin

    def update(
        self,
        slot: Tensor,
        priority: Tensor,
        applies: Tensor | None,
        *,
        highest: float | None = None,
        is_drawn: bool = False,
    ) -> None:
        """Items `[B]` get a priority `[B]`; where `applies` is False the slot is `capacity`.

        `highest` is the largest of the priorities, where that is known; `is_drawn` says that the items are of a sample.
        """
        updated = applies
        if slot.numel() == 1 and not is_drawn:
            # `TensorDictReplayBuffer.add` hands a new item's default priority back as if it were an error.
            known = self._signed.view(-1).index_select(0, slot)
            is_news = known.isinf() | ((priority - known.abs()).abs() > 1e-6 * known.abs() + _ZERO)
            signed = torch.where(is_news | (known >= 0), priority, _as_default(priority))
            updated = is_news if applies is None else applies & is_news
        else:
            signed = priority
        if applies is not None:
            signed = torch.where(applies, signed, -torch.inf)
        self._signed.view(-1).scatter_(0, slot, signed)
        if self.forgets_evicted:
            self._largest.forget(group_of(slot))
        elif updated is None and highest is not None:
            self._highest_ever.clamp_(min=highest)
        else:
            seen = priority if updated is None else torch.where(updated, priority, -1.0)
            # In place: a tensor made in inference mode could not be changed outside of it.
            torch.maximum(self._highest_ever, seen.amax(), out=self._highest_ever)

    def array(self) -> np.ndarray:
        """The memory that holds each slot's priority, where the records lie on a CPU."""
        return self._signed.view(-1).numpy()

    def written(self, group: Tensor, highest: float) -> None:
        """Takes note that updated priorities of these groups of 64 `[B]` are new, the largest of them `highest`."""
        if self.forgets_evicted:
            self._largest.forget(group)
        else:
            self._highest_ever.clamp_(min=highest)

    def is_fresh(self, slot: Tensor, stamp: Tensor) -> Tensor:
        """Whether each slot was last written at the time `stamp` or before, bool `[B]`."""
        return self._written_at.index_select(0, slot) <= stamp - self._origin

    def clear(self) -> None:
        """No slot holds an item, and what was drawn before is stale in every slot."""
        self._signed.fill_(-torch.inf)
        self._largest.forget_all()
        self._highest_ever.fill_(-1.0)
        self.time += 1
        self._origin = self.time
        self._written_at.zero_()

    def moved(self, slot: Tensor, capacity: int) -> ItemRecords:
        """The items of these slots `[M]` as the first ones of other records; what was drawn before is stale."""
        moved = ItemRecords(capacity, forgets_evicted=self.forgets_evicted, device=self._signed.device)
        moved._signed.view(-1).narrow(0, 0, len(slot)).copy_(self._signed.view(-1).index_select(0, slot))
        moved._largest.forget_all()
        moved._highest_ever.copy_(self._highest_ever)
        moved.time = moved._origin = self.time + 1
        return moved

    def to(self, device: torch.device) -> ItemRecords:
        """A copy on another device."""
        moved = ItemRecords(self.capacity, forgets_evicted=self.forgets_evicted, device=device)
        moved.load_state_dict(self.state_dict())
        return moved

    def state_dict(self) -> dict[str, Any]:
        """Copies of all records."""
        return {
            "time": self.time,
            "origin": self._origin,
            "written_at": self._written_at.clone(),
            "highest_ever": self._highest_ever.clone(),
            "signed_priority": self._signed.clone(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of the same capacity; its device may differ."""
        self.time, self._origin = state_dict["time"], state_dict["origin"]
        self._written_at.copy_(state_dict["written_at"])
        self._highest_ever.copy_(state_dict["highest_ever"])
        self._signed.copy_(state_dict["signed_priority"])
        self._largest.forget_all()


def _as_default(priority: Tensor) -> Tensor:
    """How default priorities are kept: below 0, also those of 0."""
    return priority.clamp_min(_ZERO).neg_()


def _priority_of(signed: Tensor) -> Tensor:
    """What is kept, as priorities, -1 where there is no item."""
    size = torch.where(signed == -_ZERO, 0.0, signed.abs())
    return torch.where(signed == -torch.inf, -1.0, size)
