"""Memory of frames: the episodes that are still running, and the goals that were achieved lately."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_safety.data.frames import Entries, Kinds, check_kinds, kinds
from torchrl_safety.data.goals import draw_distinct

_SMALLEST = 16


class Steps(NamedTuple):
    """The R steps of whole episodes, one episode after the other, each from its start to its end.

    Entries `[R, *]`; number of the step in its episode, from 0; length of the episode; row where the episode starts.
    """

    entries: Entries
    step: Tensor
    length: Tensor
    first: Tensor


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

    def write(self, frames: Entries, ended: Tensor) -> Steps | None:
        """Add frames `[T, N, *]`; the episodes that they end, bool `[T, N]`, by time and then env, or None."""
        self._prepare(frames, ended)
        length, num_envs = ended.shape
        env = torch.arange(num_envs, device=ended.device)
        slot = env * self._room + self._count + torch.arange(length, device=ended.device).unsqueeze(1)
        for path, value in frames.items():
            self._entries[path].flatten(0, 1).index_copy_(0, slot.flatten(), value.flatten(0, 1))
        time, env = ended.nonzero(as_tuple=True)
        if not len(time):
            self._count = self._count + length
            return None
        steps = self._ended_steps(ended, time, env)
        self._keep_the_rest(ended)
        return steps

    def state(self) -> dict[str, Any] | None:
        """The frames as plain values, without the room to grow."""
        if not self._entries:
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

    def _prepare(self, frames: Entries, ended: Tensor) -> None:
        """Room for the frames, on their device, after a look at their kind."""
        now = kinds(frames)
        if not self._entries:
            self._kinds = now
            self._entries = {
                path: value.new_empty(value.shape[1], 0, *value.shape[2:]) for path, value in frames.items()
            }
            self._count = torch.zeros(ended.shape[1], dtype=torch.long, device=ended.device)
        check_kinds(self._kinds, now)
        if self._count.device != ended.device:
            self._count = self._count.to(ended.device)
            self._entries = {path: value.to(ended.device) for path, value in self._entries.items()}
        self._longest += len(ended)
        if self._longest > self._room:
            self._resize(max(self._longest, 2 * self._room, _SMALLEST))

    def _resize(self, room: int) -> None:
        kept = min(room, self._room)
        for path, value in self._entries.items():
            self._entries[path] = value.new_zeros(value.shape[0], room, *value.shape[2:])
            self._entries[path][:, :kept] = value[:, :kept]
        self._room = room

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
        """Add goals, one `[M, m]` for each condition; the oldest make room."""
        if not self._goals:
            self._goals = [values.new_zeros(self.capacity, *values.shape[1:]) for values in measured]
        num = len(measured[0])
        device = measured[0].device
        slot = torch.arange(self._written, self._written + num, device=device)[-self.capacity :] % self.capacity
        for i, values in enumerate(measured):
            self._goals[i] = self._goals[i].to(device)
            self._goals[i].index_copy_(0, slot, values[-self.capacity :].to(self._goals[i].dtype))
        self._written += num

    def draw(self, num_rows: int, num_draws: int, generator: torch.Generator) -> tuple[Tensor, list[Tensor]]:
        """Distinct goals for each row, all equally likely: row of each draw, `[M]`, and goals `[M, m]`."""
        low = torch.zeros(num_rows, dtype=torch.long, device=self._goals[0].device)
        count = torch.full_like(low, min(self._written, self.capacity))
        row, which = draw_distinct(low, count, num_draws, generator)
        return row, [goals.index_select(0, which) for goals in self._goals]

    def state(self) -> dict[str, Any]:
        """The goals as plain values."""
        held = min(self._written, self.capacity)
        return {"written": self._written, "goals": [goals[:held].clone() for goals in self._goals]}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self.clear()
        self._written = state["written"]
        for goals in state["goals"]:
            ring = goals.new_zeros(self.capacity, *goals.shape[1:])
            ring[: len(goals)] = goals
            self._goals.append(ring)
