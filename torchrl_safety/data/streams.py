"""Where the frames of a replay buffer stand in the episodes of the envs that wrote them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

_TENSORS = ("bounds", "episode", "begins")
_NUMBERS = ("num_envs", "capacity", "num_steps")


class Span(NamedTuple):
    """Rows of a buffer and the bounds of their episodes, `[B]`; positions below `oldest` are overwritten."""

    position: Tensor
    start: Tensor
    end: Tensor
    oldest: int
    num_envs: int


class Streams:
    r"""Bounds of the episodes of N envs whose frames fill the slots of a ring in turn.

    .. math:: p = f N + e, \qquad \mathrm{slot}(p) = p \bmod C

    is the position of frame :math:`f` of env :math:`e`. A storage of one dimension holds the N frames of a step side
    by side, one of shape `[T, N]` in a row; counted flat, the two are the same. The bounds of an episode are kept once,
    under its number among those of its env, so that an episode costs one write at either end however long it is.

    Args:
        num_envs (int): number of envs N.
        capacity (int): number of slots C, over all dimensions of the storage.
        device (device): where the bounds live.

    Example:
        >>> streams = Streams(1, 10, torch.device("cpu"))
        >>> streams.extend(torch.tensor([[False], [True], [False]])).squeeze(1).tolist()
        [[0, 0], [1, 0], [2, 1]]
        >>> [bound.tolist() for bound in streams.bounds_of(torch.tensor([0, 1]))]
        [[0, 2], [1, -1]]
    """

    def __init__(self, num_envs: int, capacity: int, device: torch.device) -> None:
        self.num_envs = num_envs
        self.capacity = capacity
        self.num_steps = 0
        # An env's frames that are still there lie in as many episodes at most, and these have consecutive numbers.
        self._num_kept = -(-capacity // num_envs)
        self.bounds = torch.full((self._num_kept * num_envs, 2), -1, dtype=torch.long, device=device)
        self.episode = torch.zeros(num_envs, dtype=torch.long, device=device)
        self.begins = torch.ones(num_envs, dtype=torch.bool, device=device)

    @property
    def num_frames(self) -> int:
        """Number of frames written so far, over all envs; the position of the next one."""
        return self.num_steps * self.num_envs

    def extend(self, ended: Tensor) -> Tensor:
        """Takes in steps, of which each tells whether its episode `ended` there, bool `[T, N]`.

        Returns:
            Position of each frame and entry of its episode in the table of bounds, int64 `[T, N, 2]`.
        """
        ended = ended.to(self.bounds.device)
        begins = torch.cat([self.begins.unsqueeze(0), ended[:-1]])
        episode = self.episode + (begins.long().cumsum(0) - self.begins.long())
        position = torch.arange(self.num_frames, self.num_frames + ended.numel(), device=ended.device).view_as(episode)
        entry = self._entry(episode)
        self._note("start", position, entry, begins)
        self._note("end", position, entry, ended)
        self.num_steps += len(ended)
        self.episode = episode[-1] + ended[-1].long()
        self.begins = ended[-1].clone()
        return torch.stack((position, entry), -1)

    def _entry(self, episode: Tensor) -> Tensor:
        """Where the bounds of episodes `[*, N]` are kept."""
        env = torch.arange(self.num_envs, device=episode.device)
        return (episode % self._num_kept) * self.num_envs + env

    def end_episodes(self) -> None:
        """Ends the open episodes at the newest frames."""
        is_open = ~self.begins
        newest = torch.arange(self.num_frames - self.num_envs, self.num_frames, device=is_open.device)
        self._note("end", newest, self._entry(self.episode), is_open)
        self.episode = self.episode + is_open.long()
        self.begins = torch.ones_like(self.begins)

    def bounds_of(self, entry: Tensor) -> tuple[Tensor, Tensor]:
        """First and last position of the episodes with these entries `[B]`, of frames that are still there.

        A last position below that of the frame means that the episode is open.
        """
        start, end = self.bounds.index_select(0, entry).unbind(1)
        return start, end

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        return {name: getattr(self, name) for name in _NUMBERS} | {
            name: getattr(self, name).clone() for name in _TENSORS
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Streams:
        """The streams that :meth:`state_dict` describes."""
        streams = cls(state["num_envs"], state["capacity"], state["bounds"].device)
        streams.num_steps = state["num_steps"]
        for name in _TENSORS:
            setattr(streams, name, state[name].clone())
        return streams

    def _note(self, bound: Literal["start", "end"], position: Tensor, entry: Tensor, where: Tensor) -> None:
        # Positions only grow, so the largest is the newest.
        column = self.bounds.select(1, ("start", "end").index(bound))
        column.scatter_reduce_(0, entry.flatten(), torch.where(where, position, -1).flatten(), "amax")


def _drawn(uniform: Tensor, low: Tensor, high: Tensor, step: int, before: int = 0) -> Tensor:
    """Draws from `low`, `low + step`, ..., `high` and so many `before`: how many steps above `low`, with a fraction."""
    count = high - low
    if step > 1:
        count.div_(step, rounding_mode="floor")
    ahead = count.add_(before + 1).mul(uniform)
    return ahead.sub_(before) if before else ahead


def _future(uniform: Tensor, span: Span) -> tuple[Tensor, Tensor | None]:
    ahead = _drawn(uniform, span.position, span.end, span.num_envs).long()
    return torch.add(span.position, ahead, alpha=span.num_envs), None


def _final(uniform: Tensor, span: Span) -> tuple[Tensor, Tensor | None]:
    return span.end, None


def _episode(uniform: Tensor, span: Span) -> tuple[Tensor, Tensor | None]:
    # Of an episode that has lost its beginning there are the states from its oldest frame on.
    if span.num_envs == 1:
        first = span.start.clamp_min(span.oldest)
    else:
        first = torch.maximum(span.start, (span.start - span.oldest).remainder_(span.num_envs).add_(span.oldest))
    # The state before them all is the root of that frame, the others are the "next" of theirs.
    ahead = _drawn(uniform, first, span.end, span.num_envs, before=1)
    # Integers are cut towards 0, to which -1 comes thereby.
    return torch.add(first, ahead.long(), alpha=span.num_envs), ahead < 0


DRAWS: dict[str, Callable[[Tensor, Span], tuple[Tensor, Tensor | None]]] = {
    "future": _future,
    "final": _final,
    "episode": _episode,
}
"""From uniform numbers `[B]`: position of the frame whose "next" gives the goal, and where its root does instead."""
