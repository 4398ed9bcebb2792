"""Which item of a buffer follows which, however the items are interleaved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Successors:
    """For each slot of a buffer, the slot of the next step of its trajectory.

    Items name their trajectory, a number that is never used again, and their step in it. A trajectory is continued by
    the write that comes after, or not at all. A link is checked at its other end, so that a slot which was rewritten
    since is no successor.

    Args:
        capacity: number of slots.
    """

    def __init__(self, capacity: int) -> None:
        self._next = torch.full((capacity,), -1, dtype=torch.long)
        self._trajectory = torch.full((capacity,), -1, dtype=torch.long)
        self._step = torch.zeros(capacity, dtype=torch.long)
        self.clear()

    def clear(self) -> None:
        """Forget every item."""
        self._trajectory.fill_(-1)
        self._last = torch.zeros(0, dtype=torch.long)  # last slot of each trajectory of the newest write

    def write(self, slot: Tensor, trajectory: Tensor, step: Tensor) -> None:
        """Take note of the items of one write, each `[M]`; of items with the same slot the last one counts."""
        if not len(slot):
            return
        slot, trajectory, step = (value[-len(self._next) :].cpu() for value in (slot, trajectory, step))
        before = self._last[~torch.isin(self._last, slot)]  # the others are no longer what they were
        self._next[slot] = -1
        self._trajectory[slot], self._step[slot] = trajectory, step
        known = self._trajectory[before]
        order = step.argsort(stable=True)
        order = order[trajectory[order].argsort(stable=True)]
        # The trajectories of the write before stand in front of their continuation.
        slots = torch.cat([before, slot[order]])
        ids = torch.cat([known, trajectory[order]])
        slots, ids = slots[sorting := ids.argsort(stable=True)], ids[sorting]
        joined = ids[1:] == ids[:-1]
        self._next[slots[:-1][joined]] = slots[1:][joined]
        ends = torch.cat([~joined, torch.ones(1, dtype=torch.bool)])
        self._last = slots[ends & torch.isin(ids, trajectory)]

    def follow(self, slot: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The slots of up to `length` steps from each `slot` `[B]` on, and which of them exist, both `[B, length]`.

        Where a trajectory, or what the buffer still holds of it, is shorter, its last slot is repeated.
        """
        first, exists = slot.cpu(), torch.ones(slot.shape, dtype=torch.bool)
        slots, valid = [first], [exists]
        for i in range(1, length):
            following = self._next[slots[-1]]
            at = following.clamp(min=0)
            is_next = (self._trajectory[at] == self._trajectory[first]) & (self._step[at] == self._step[first] + i)
            exists = exists & (following >= 0) & is_next
            slots.append(torch.where(exists, at, slots[-1]))
            valid.append(exists)
        return torch.stack(slots, -1).to(slot.device), torch.stack(valid, -1).to(slot.device)

    def breaks(self, slot: Tensor, ended: Tensor, num_envs: int) -> bool:
        """Whether a trajectory changes between steps of `num_envs` streams side by side, `[T * N]`, without an end."""
        number = self._trajectory[slot.cpu()].reshape(-1, num_envs)
        return bool(((number[1:] != number[:-1]) & ~ended.cpu().reshape(-1, num_envs)[:-1]).any())

    def moved(self, slot: Tensor, capacity: int) -> Successors:
        """The links among the items of these slots, oldest first, in a buffer that holds them as its first items."""
        moved = Successors(capacity)
        moved.write(torch.arange(len(slot)), self._trajectory[slot], self._step[slot])
        return moved

    def state_dict(self) -> dict[str, Tensor]:
        """Everything, as tensors."""
        return {name: value.clone() for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from :meth:`state_dict`."""
        for name, value in state.items():
            setattr(self, name, value.clone())


class TrajectoryNumbers:
    """Names the trajectory of every row that hindsight writes, and the step in it.

    An original belongs to the episode of its env, a copy to those of the same episode with the same goal.
    """

    def __init__(self) -> None:
        self._unused = 0
        self.clear()

    def clear(self) -> None:
        """Whatever comes next starts a new trajectory."""
        self._open = torch.zeros(0, dtype=torch.long)  # number of the running episode of each env
        self._steps = torch.zeros(0, dtype=torch.long)  # and how many steps it has
        self._rows: list[tuple[Tensor, Tensor]] = []

    def originals(self, ended: Tensor) -> None:
        """Number frames `[T, N]` with these ends, flattened by time and then env."""
        ended = ended.cpu()
        length, num_envs = ended.shape
        if len(self._open) != num_envs:
            self._open, self._steps = self._fresh(num_envs), torch.zeros(num_envs, dtype=torch.long)
        time = torch.arange(length + 1).unsqueeze(1)
        ends = torch.cat([torch.zeros(1, num_envs, dtype=torch.bool), ended])  # whether an episode ended before a step
        start = torch.where(ends, time, -1).cummax(0).values
        episode = ends.long().cumsum(0)
        later = self._fresh(num_envs * int(episode[-1].max())).reshape(-1, num_envs)
        numbers = torch.cat([self._open.unsqueeze(0), later]).gather(0, episode)
        steps = torch.where(start < 0, self._steps + time, time - start)
        self._open, self._steps = numbers[-1], steps[-1]
        self._rows.append((numbers[:-1].flatten(), steps[:-1].flatten()))

    def copies(self, trajectory: Tensor, step: Tensor) -> None:
        """Number copies `[M]`; `trajectory` counts from 0 and tells the trajectories of this write apart."""
        if len(trajectory):
            first = self._fresh(int(trajectory.max()) + 1)[0]
            self._rows.append((first + trajectory.cpu(), step.cpu()))

    def take(self) -> tuple[Tensor, Tensor]:
        """Numbers and steps of the rows since the last call, each `[M]`."""
        rows, self._rows = self._rows, []
        if not rows:
            return torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)
        numbers, steps = zip(*rows)
        return torch.cat(numbers), torch.cat(steps)

    def state(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {"open": self._open.clone(), "steps": self._steps.clone(), "unused": self._unused}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self.clear()
        self._open, self._steps, self._unused = state["open"].clone(), state["steps"].clone(), state["unused"]

    def _fresh(self, count: int) -> Tensor:
        self._unused += count
        return torch.arange(self._unused - count, self._unused)
