"""Memory of frames: the episodes that are still running, and the goals that were achieved lately."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_safety.data.draws import draw_distinct
from torchrl_safety.data.frames import Entries, Kinds, check_kinds, kinds
from torchrl_safety.data.goals import over_features

_SMALLEST = 16


class Steps(NamedTuple):
    """The R steps of whole episodes, one episode after the other, each from its start to its end.

    Entries `[R, *]`; number of the step in its episode, from 0; length of the episode; row where the episode starts.
    """

    entries: Entries
    step: Tensor
    length: Tensor
    first: Tensor


class Staged(NamedTuple):
    """Frames that were staged: their kinds, whether they end their episodes, bool `[T, N]`, and the episodes so ended.

    The episodes stand by time and then env; None where there are none.
    """

    kinds: Kinds
    ended: Tensor
    steps: Steps | None


class OpenEpisodes:
    """The frames of N envs since the last end of an episode, a growing tensor `[N, C, *]` for each entry.

    A write costs what it writes, and an end of an episode what that episode holds, however long the others are.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all frames and what kind they were of."""
        self._kinds: Kinds = {}
        self._entries: Entries = {}
        self._count = torch.zeros(0, dtype=torch.long)
        self._room = 0
        self._longest = 0  # an upper bound of the counts, known without waiting for an accelerator

    def stage(self, frames: Entries, ended: Tensor) -> Staged:
        """Put frames `[T, N, *]` with these ends, bool `[T, N]`, behind the others; :meth:`commit` makes them count."""
        now = kinds(frames)
        self._prepare(frames, now, ended)
        length, num_envs = ended.shape
        env = torch.arange(num_envs, device=ended.device)
        slot = env * self._room + self._count + torch.arange(length, device=ended.device).unsqueeze(1)
        for path, value in frames.items():
            self._entries[path].flatten(0, 1).index_copy_(0, slot.flatten(), value.flatten(0, 1))
        time, env = ended.nonzero(as_tuple=True)
        return Staged(now, ended, self._ended_steps(ended, time, env) if len(time) else None)

    def commit(self, staged: Staged) -> None:
        """Count the frames that were staged last, and let go of the episodes that they end."""
        self._kinds = staged.kinds
        if staged.steps is not None:
            self._keep_the_rest(staged.ended)
        else:
            self._count = self._count + len(staged.ended)
            self._longest += len(staged.ended)

    @property
    def is_new(self) -> bool:
        """Whether no frames were committed yet, so that any kind of frames may come."""
        return not self._kinds

    def state(self) -> dict[str, Any] | None:
        """The frames as plain values, without the room to grow."""
        if self.is_new:
            return None
        longest = int(self._count.max())
        return {
            "count": self._count.clone(),
            "entries": {path: value[:, :longest].clone() for path, value in self._entries.items()},
        }

    def load(self, state: dict[str, Any] | None) -> None:
        """Continue from :meth:`state`."""
        self.clear()
        if state is None:
            return
        self._count = state["count"].clone()
        self._entries = {path: value.clone() for path, value in state["entries"].items()}
        self._kinds = {
            path: (value[:, :0].transpose(0, 1).shape[1:], value.dtype) for path, value in self._entries.items()
        }
        self._room = self._longest = int(self._count.max())

    def _prepare(self, frames: Entries, now: Kinds, ended: Tensor) -> None:
        """Room for the frames, on their device, after a look at their kind."""
        if not self.is_new:
            check_kinds(self._kinds, now)
        else:
            self._room = self._longest = 0
            self._entries = {
                path: value.new_empty(value.shape[1], 0, *value.shape[2:]) for path, value in frames.items()
            }
            self._count = torch.zeros(ended.shape[1], dtype=torch.long, device=ended.device)
        if self._count.device != ended.device:
            self._count = self._count.to(ended.device)
            self._entries = {path: value.to(ended.device) for path, value in self._entries.items()}
        needed = self._longest + len(ended)
        if needed > self._room:
            self._resize(max(needed, 2 * self._room, _SMALLEST))

    def _resize(self, room: int) -> None:
        kept = min(room, self._room)
        resized = {
            path: value.new_zeros(value.shape[0], room, *value.shape[2:]) for path, value in self._entries.items()
        }
        for path, value in resized.items():
            value[:, :kept] = self._entries[path][:, :kept]
        self._entries, self._room = resized, room

    def _ended_steps(self, ended: Tensor, time: Tensor, env: Tensor) -> Steps:
        before = torch.where(ended, torch.arange(len(ended), device=ended.device).unsqueeze(1), -1)
        before = before.cummax(0).values.roll(1, 0)  # the last end before each step of the write
        before[0] = -1
        previous = before[time, env]
        start = torch.where(previous < 0, 0, self._count[env] + previous + 1)
        length = self._count[env] + time + 1 - start
        first = length.cumsum(0) - length
        episode = torch.arange(len(length), device=length.device).repeat_interleave(length)
        step = torch.arange(len(episode), device=length.device) - first[episode]
        slot = env[episode] * self._room + start[episode] + step
        entries = {path: value.flatten(0, 1).index_select(0, slot) for path, value in self._entries.items()}
        return Steps(entries, step, length[episode], first[episode])

    def _keep_the_rest(self, ended: Tensor) -> None:
        """Move what follows the last end of each env to the front."""
        written = len(ended)
        since = ended.flip(0).long().cummax(0).values.logical_not().sum(0)  # steps after the last end, or all
        some = ended.any(0)
        old = self._count + written
        self._count = torch.where(some, since, old)
        env = torch.arange(len(some), device=some.device).repeat_interleave(since * some)
        if len(env):
            start = (since * some).cumsum(0) - since * some
            offset = torch.arange(len(env), device=env.device) - start[env]
            target = env * self._room + offset
            source = target + (old - self._count)[env]
            for value in self._entries.values():
                flat = value.flatten(0, 1)
                flat.index_copy_(0, target, flat.index_select(0, source))
        self._longest = int(self._count.max())
        if self._room > 4 * max(self._longest, _SMALLEST):
            self._resize(max(2 * self._longest, _SMALLEST))


class PastGoals:
    """The goals achieved lately, up to `capacity` of them, in a ring for each goal condition."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Forget all goals."""
        self._goals: list[Tensor] = []
        self._written = 0

    def write(self, measured: Sequence[Tensor]) -> None:
        """Add goals, one `[M, *]` for each condition; the oldest make room."""
        self._prepare(measured)
        num = len(measured[0])
        device = measured[0].device
        slot = torch.arange(self._written, self._written + num, device=device)[-self.capacity :] % self.capacity
        for i, values in enumerate(measured):
            self._goals[i].index_copy_(0, slot, values[-self.capacity :].to(self._goals[i].dtype))
        self._written += num

    def draw(
        self, num_rows: int, num_draws: int, generator: torch.Generator, new: Sequence[Tensor] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Distinct goals for each row, as if the `new` ones were written already, all equally likely.

        Returns:
            Row of each draw, `[M]`, and its goals, one `[M, *]` for each condition.
        """
        num_new = len(new[0]) if new else 0
        held = min(self._written + num_new, self.capacity)
        if not held:
            raise ValueError(
                "strategy 'random' has no goals to draw from: none was achieved since the transform was made, emptied "
                "or cleared; write frames first, or take another strategy."
            )
        if new:
            self._prepare(new)
        low = torch.zeros(num_rows, dtype=torch.long, device=self._goals[0].device)
        row, which = draw_distinct(low, torch.full_like(low, held), num_draws, generator)
        if not num_new:
            return row, [goals.index_select(0, which) for goals in self._goals]
        kept = min(num_new, self.capacity)
        # Where a slot stands among those that the new goals are going to fill.
        place = (which - (self._written + num_new - kept)) % self.capacity
        is_new, place = place < kept, place.clamp(max=kept - 1) + (num_new - kept)
        drawn = []
        for old, values in zip(self._goals, new):
            values = values.index_select(0, place).to(old.dtype)
            drawn.append(torch.where(over_features(is_new.unsqueeze(1), values), values, old.index_select(0, which)))
        return row, drawn

    def _prepare(self, measured: Sequence[Tensor]) -> None:
        """A ring for such goals, on their device."""
        if not self._written:
            self._goals = [values.new_zeros(self.capacity, *values.shape[1:]) for values in measured]
        elif self._goals[0].device != measured[0].device:
            self._goals = [goals.to(measured[0].device) for goals in self._goals]

    def state(self) -> dict[str, Any]:
        """The goals as plain values."""
        held = min(self._written, self.capacity)
        return {"written": self._written, "goals": [goals[:held].clone() for goals in self._goals if held]}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self.clear()
        self._written = state["written"]
        for goals in state["goals"]:
            ring = goals.new_zeros(self.capacity, *goals.shape[1:])
            ring[: len(goals)] = goals
            self._goals.append(ring)
