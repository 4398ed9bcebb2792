"""n-step transitions that keep the raw signals of their window, assembled while a replay buffer is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from torchrl_safety.data.frames import (
    Entries,
    Key,
    check_kinds,
    end_flags,
    following_of,
    kinds,
    names,
    positive,
    public,
    rows_of,
    time_major,
)
from torchrl_safety.data.pending import PendingTransform, only

TERMINATED: Key = ("terminated",)
VALID: Key = ("valid",)


class NStepTransform(PendingTransform):
    r"""Turns consecutive frames into n-step transitions that carry the raw signals of their window.

    The row of frame :math:`t` spans :math:`k = \min(n, \text{steps to the end of the episode})` steps: its root is the
    root of frame :math:`t`, its ``"next"`` is the ``"next"`` of frame :math:`t+k-1` (observation :math:`s_{t+k}` and
    the end flags of that step), and ``("steps", ...)`` holds what happened in between, so that a loss can compose

    .. math:: (F_t \circ F_{t+1} \circ \dots \circ F_{t+k-1})(V(s_{t+k}))

    with the discount of the day (Sutton & Barto 2018, eq. 7.1; γ is never applied to stored data). A row leaves once
    its window is full or its episode ends (terminated or truncated), so every frame is emitted exactly once; rows are
    ordered by the time they become ready, then by env, then oldest first. Added keys, for rows of batch shape `[M]`:
    ``("steps", signal)`` `[M, n, *]` (zero where not valid), ``("steps", "terminated")`` and ``("steps", "valid")``
    bool `[M, n, 1]`.

    Append it to any :class:`~torchrl.data.ReplayBuffer` whose storage has one batch dimension. It acts when the buffer
    is written and is the identity when it is sampled; put it before (in the list) transforms that have an inverse, so
    that it writes last. Pending frames are part of the buffer's state and are dropped by ``rb.empty()`` and
    :meth:`clear`; call the latter when envs are reset in the middle of an episode. Once attached, ``rb.add(frame)``
    stores every row that became ready (none to n per env) and returns their indices, as ``rb.extend`` does.

    Args:
        n_steps (int): longest window n, in env steps; at least 1.
        signals (sequence of keys): entries of ``"next"`` to keep step by step, each `[*B, *]` with at least one feature
            dimension; raw, with the sign and unit the env gives them.
        num_envs (int or None): None for one stream, written as `[]` (one frame) or `[T]`; N for N envs side by side,
            written as `[N]` (one step of each) or `[N, T]`.

    Raises:
        ValueError: for a setting out of range, or frames whose shapes do not fit the layout or the frames before them.
        KeyError: for frames without a signal, or without end flags.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rb = rb.append_transform(NStepTransform(3, signals=("safety_margin",)))
        >>> flags = {name: torch.zeros(5, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
        >>> margin = torch.arange(5.0).unsqueeze(-1)
        >>> frames = TensorDict({"observation": margin, "next": {"safety_margin": margin, **flags}}, [5])
        >>> len(rb.extend(frames))  # frames 3 and 4 wait for the rest of their windows
        3
        >>> rb[:]["steps", "safety_margin"][2].flatten()
        tensor([2., 3., 4.])
    """

    def __init__(
        self, n_steps: int, *, signals: Sequence[NestedKey] = ("reward",), num_envs: int | None = None
    ) -> None:
        super().__init__()
        self.n_steps = positive("n_steps", n_steps, remedy="1 keeps ordinary one-step transitions")
        self.num_envs = None if num_envs is None else positive("num_envs", num_envs, remedy="None means one stream")
        self.signals = _check_signals(signals)
        self._pending: _Frames | None = None

    @property
    def step_shape(self) -> list[int]:
        """Batch shape of a single step: `[]`, or `[N]` with several envs."""
        return [] if self.num_envs is None else [self.num_envs]

    def clear(self) -> None:
        """Drops the frames whose windows are not complete, as after a reset in the middle of an episode."""
        self._pending = None

    def __repr__(self) -> str:
        signals = tuple(map(public, self.signals))
        return f"{type(self).__name__}({self.n_steps}, signals={signals}, num_envs={self.num_envs})"

    @torch.no_grad()
    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        buffer = self.writing_buffer()
        rows, pending = self.advance(tensordict)
        if rows is None:
            self.check_order()
        elif buffer is not None and tensordict.ndim == 0:
            rows = only(rows)
        self.keep(pending)
        return rows

    def rows_of_windows(self, windows: TensorDictBase, last: Tensor) -> TensorDictBase:
        """One row `[M]` for each window `[M, n]` of frames, held together by nothing but their place in it.

        A window ends at its first step that ended an episode or is marked in `last`, bool `[M, n]`; each has one.
        """
        frames, following = self._split(windows, len(windows))
        ended = frames.ended | last.t()
        valid = _valid_steps(ended.t())
        start, env = torch.zeros_like(valid[:, 0], dtype=torch.long), torch.arange(len(valid), device=valid.device)
        return self._rows(frames, following, _Windows(start, valid.sum(-1) - 1, env, valid), 0, windows.device)

    def keep(self, pending: _Frames | None) -> None:
        """Makes the frames that :meth:`advance` would keep the pending ones."""
        self._pending = pending

    def advance(self, new_frames: TensorDictBase) -> tuple[TensorDict | None, _Frames | None]:
        """The rows `[M]` that new frames complete, or None, and the frames to keep; nothing changes yet."""
        new, following = self._split(new_frames, self.num_envs)
        held = 0 if self._pending is None else self._pending.ended.shape[0]
        frames = _join(self._pending, new)
        rows = None
        if len(new.ended):
            windows = _ready_windows(frames.ended, self.n_steps, held)
            if len(windows.start):
                rows = self._rows(frames, following, windows, held, new_frames.device)
        return rows, _tail(frames, self.n_steps - 1)

    def _split(self, frames: TensorDictBase, num_envs: int | None) -> tuple[_Frames, Entries]:
        """The frames with time and env in front, `[T, N, *]`: what windows need of them, and their "next" entries."""
        name = type(self).__name__
        entries = time_major(frames, num_envs, name)
        following = following_of(entries)
        root = {path: value for path, value in entries.items() if path[0] != "next"}
        if any(path[0] == "steps" for path in root):
            raise ValueError('The frames hold "steps" entries already; apply NStepTransform once, to one-step frames.')
        terminated, ended = end_flags(following, name)
        steps = {signal: _signal(following, signal) for signal in self.signals}
        return _Frames(root, steps | {TERMINATED: terminated}, ended), following

    def _rows(
        self, frames: _Frames, following: Entries, windows: _Windows, held: int, device: torch.device | None
    ) -> TensorDict:
        """The transitions of windows, `[M]`; the "next" entries are those of the frames from `held` on."""
        start, last, env, valid = windows
        length, num_envs = frames.ended.shape
        at_start, at_last = start * num_envs + env, (last - held) * num_envs + env
        rows: Entries = {}
        for path, value in frames.root.items():
            rows[path] = value.flatten(0, 1).index_select(0, at_start)
        for path, value in following.items():
            rows[("next", *path)] = value.flatten(0, 1).index_select(0, at_last)
        offsets = torch.arange(self.n_steps, device=start.device)
        window = (start.unsqueeze(-1) + offsets).clamp_(max=length - 1) * num_envs + env.unsqueeze(-1)
        for path, value in frames.steps.items():
            steps = value.flatten(0, 1)[window]
            missing = ~valid.reshape(valid.shape + (1,) * (steps.ndim - 2))
            rows[("steps", *path)] = steps.masked_fill_(missing, 0)
        rows[("steps", *VALID)] = valid.unsqueeze(-1)
        return rows_of(rows, len(start), device)

    def get_extra_state(self) -> dict[str, Any]:
        """The pending frames and the settings they were gathered under, as plain values."""
        pending = None if self._pending is None else _map(torch.clone, self._pending)._asdict()
        return {"n_steps": self.n_steps, "num_envs": self.num_envs, "signals": self.signals, "pending": pending}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Continues from :meth:`get_extra_state`; the settings must be the same."""
        for name in ("n_steps", "num_envs", "signals"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"The checkpoint was written with {name}={state[name]!r}, this NStepTransform has "
                    f"{name}={getattr(self, name)!r}; build it with the former."
                )
        pending = state["pending"]
        self.keep(None if pending is None else _map(torch.clone, _Frames(**pending)))


class _Frames(NamedTuple):
    """What windows need of consecutive frames, `[T, N, *]`: roots, per-step entries, and whether an episode ended."""

    root: Entries
    steps: Entries
    ended: Tensor


def _map(fn: Callable[[Tensor], Tensor], frames: _Frames) -> _Frames:
    root = {path: fn(value) for path, value in frames.root.items()}
    return _Frames(root, {path: fn(value) for path, value in frames.steps.items()}, fn(frames.ended))


def _join(past: _Frames | None, new: _Frames) -> _Frames:
    """The frames one after the other, in memory of their own: a caller may overwrite what it passed in."""
    if past is None:
        return _map(lambda value: torch.cat([value]), new)
    if past.ended.device != new.ended.device:
        past = _map(lambda value: value.to(new.ended.device), past)
    root = _join_entries(past.root, new.root)
    return _Frames(root, _join_entries(past.steps, new.steps), torch.cat([past.ended, new.ended]))


def _join_entries(past: Entries, new: Entries) -> Entries:
    check_kinds(kinds(past), kinds(new))
    return {path: torch.cat([past[path], value]) for path, value in new.items()}


def _tail(frames: _Frames, length: int) -> _Frames | None:
    """The last frames, without holding on to the memory of a long chunk."""
    if not length:
        return None
    first = max(0, len(frames.ended) - length)
    return _map((lambda value: value[first:].clone()) if first > length else (lambda value: value[first:]), frames)


class _Windows(NamedTuple):
    """First step, last step and env of windows, each `[M]`, and which of their n steps exist, bool `[M, n]`."""

    start: Tensor
    last: Tensor
    env: Tensor
    valid: Tensor


def _valid_steps(ended: Tensor) -> Tensor:
    """Which steps of windows `[*, n]` come before or at the first that ended an episode."""
    ends = ended.long()
    return ends.cumsum(-1) == ends  # no end at an earlier step of the window


def _ready_windows(ended: Tensor, n_steps: int, held: int) -> _Windows:
    """The windows that the frames from `held` on complete.

    Args:
        ended (Tensor): whether an episode ended at a step, bool `[L, N]`.
        n_steps (int): longest window.
        held (int): how many of the L frames were there before; they completed what they could.

    Returns:
        The windows, ordered by last step, env, first step.
    """
    length = len(ended)
    ends = torch.nn.functional.pad(ended.t(), (0, n_steps - 1)).unfold(1, n_steps, 1)  # [N, L, n]
    valid = _valid_steps(ends)
    first = torch.arange(length, device=ended.device)
    last = first + valid.sum(-1) - 1
    complete = ends.any(-1) | (first <= length - n_steps)
    env, start = (complete & (last >= held)).nonzero(as_tuple=True)
    last, valid = last[env, start], valid[env, start]
    if length - held > 1:
        order = last.argsort(stable=True)
        start, last, env, valid = start[order], last[order], env[order], valid[order]
    return _Windows(start, last, env, valid)


def _signal(following: Entries, signal: Key) -> Tensor:
    value = following.get(signal)
    if value is None:
        raise KeyError(
            f"Signal {public(signal)!r} is missing: 'next' holds {names(following)}. Let the env write "
            f"{('next', *signal)!r}, or name the signals to keep: NStepTransform(n, signals=(...))."
        )
    if value.ndim < 3:
        raise ValueError(
            f"Signal {public(signal)!r} has the batch shape of the frames and no feature dimension; unsqueeze "
            f"{('next', *signal)!r} to [*B, 1]."
        )
    return value


def _check_signals(signals: Sequence[NestedKey]) -> tuple[Key, ...]:
    if isinstance(signals, str):
        raise ValueError(f"signals must be a sequence of keys, got {signals!r}; write signals=({signals!r},).")
    paths = tuple((signal,) if isinstance(signal, str) else tuple(signal) for signal in signals)
    for path in paths:
        if not path or not all(isinstance(name, str) for name in path):
            raise ValueError(f"signals must hold keys of 'next' (strings, or tuples of strings), got {path!r}.")
        if path in (TERMINATED, VALID):
            raise ValueError(f"signals holds {public(path)!r}, which NStepTransform writes itself; leave it out.")
    if len(set(paths)) != len(paths):
        raise ValueError(f"signals names an entry twice: {list(map(public, paths))}; name each once.")
    return paths
