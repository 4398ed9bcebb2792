"""n-step transitions that keep the raw signals of their window, assembled while a replay buffer is written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor
from torchrl.envs.transforms import Compose, Transform

from torchrl_safety.data.pending import PendingTransform, calling_buffer

Key = tuple[str, ...]

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
        self.n_steps = _positive("n_steps", n_steps, remedy="1 keeps ordinary one-step transitions")
        self.num_envs = None if num_envs is None else _positive("num_envs", num_envs, remedy="None means one stream")
        self.signals = _check_signals(signals)
        self._pending: _Frames | None = None

    @property
    def step_shape(self) -> list[int]:
        """Batch shape of a single step: `[]`, or `[N]` with several envs."""
        return [] if self.num_envs is None else [self.num_envs]

    def clear(self) -> None:
        """Drops the frames whose windows are not complete, as after a reset in the middle of an episode."""
        self._pending = None

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the sample unchanged: the work was done when it was written."""
        return tensordict

    def __repr__(self) -> str:
        signals = tuple(map(_public, self.signals))
        return f"{type(self).__name__}({self.n_steps}, signals={signals}, num_envs={self.num_envs})"

    @torch.no_grad()
    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        buffer = calling_buffer()
        self.attach(buffer)
        if buffer is not None and buffer.dim_extend:
            raise ValueError(
                f"NStepTransform emits rows of batch shape [M], but the storage has {buffer.dim_extend + 1} batch "
                "dimensions; use a storage with ndim=1."
            )
        new, following = self._split(tensordict)
        held = 0 if self._pending is None else self._pending.ended.shape[0]
        frames = _join(self._pending, new)
        rows = self._rows(frames, following, held, tensordict.device) if len(new.ended) else None
        if rows is None:
            self._check_order()
        elif buffer is not None and tensordict.ndim == 0:
            rows = _only(rows)
        self._pending = _tail(frames, self.n_steps - 1)
        return rows

    def _split(self, frames: TensorDictBase) -> tuple[_Frames, dict[Key, Tensor]]:
        """The frames with time and env in front, `[T, N, *]`: what windows need of them, and their "next" entries."""
        if not isinstance(frames, TensorDictBase):
            raise TypeError(f"NStepTransform takes frames as a TensorDict, got a {type(frames).__name__}.")
        time_major = _layout(frames.batch_size, self.num_envs)
        root: dict[Key, Tensor] = {}
        following: dict[Key, Tensor] = {}
        for key, value in frames.items(True, True, is_leaf=is_leaf_nontensor):
            path = key if isinstance(key, tuple) else (key,)
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"Entry {_public(path)!r} is a {type(value).__name__}; NStepTransform moves tensors only. "
                    "Exclude the entry from the frames, or store it as a tensor."
                )
            if path[0] == "next":
                following[path[1:]] = time_major(value)
            else:
                root[path] = time_major(value)
        if any(path[0] == "steps" for path in root):
            raise ValueError('The frames hold "steps" entries already; apply NStepTransform once, to one-step frames.')
        terminated, ended = _end_flags(following)
        steps = {signal: _signal(following, signal) for signal in self.signals}
        return _Frames(root, steps | {TERMINATED: terminated}, ended), following

    def _rows(
        self, frames: _Frames, following: dict[Key, Tensor], held: int, device: torch.device | None
    ) -> TensorDict | None:
        """The transitions that the newest frames complete, `[M]`, or None."""
        start, last, env, valid = _ready_windows(frames.ended, self.n_steps, held)
        if not len(start):
            return None
        length, num_envs = frames.ended.shape
        at_start, at_last = start * num_envs + env, (last - held) * num_envs + env
        rows: dict[str, Any] = {}
        for path, value in frames.root.items():
            _put(rows, path, value.flatten(0, 1).index_select(0, at_start))
        for path, value in following.items():
            _put(rows, ("next", *path), value.flatten(0, 1).index_select(0, at_last))
        offsets = torch.arange(self.n_steps, device=start.device)
        window = (start.unsqueeze(-1) + offsets).clamp_(max=length - 1) * num_envs + env.unsqueeze(-1)
        for path, value in frames.steps.items():
            steps = value.flatten(0, 1)[window]
            missing = ~valid.reshape(valid.shape + (1,) * (steps.ndim - 2))
            _put(rows, ("steps", *path), steps.masked_fill_(missing, 0))
        _put(rows, ("steps", *VALID), valid.unsqueeze(-1))
        return TensorDict(rows, [len(start)], device=device)

    def _check_order(self) -> None:
        """Refuses to hand "no rows" to a transform that would try to invert them."""
        container = self.__dict__["_container"]
        chain = container() if container is not None else None
        for transform in chain if isinstance(chain, Compose) else ():
            if transform is self:
                return
            if any(_inverts(part) for part in transform.modules()):
                raise ValueError(
                    f"{type(transform).__name__} stands before NStepTransform, so its inverse would run on rows that "
                    "are not there yet; put NStepTransform first: rb.insert_transform(0, NStepTransform(...))."
                )

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
        self._pending = None if pending is None else _map(torch.clone, _Frames(**pending))


class _Frames(NamedTuple):
    """What windows need of consecutive frames, `[T, N, *]`: roots, per-step entries, and whether an episode ended."""

    root: dict[Key, Tensor]
    steps: dict[Key, Tensor]
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


def _join_entries(past: dict[Key, Tensor], new: dict[Key, Tensor]) -> dict[Key, Tensor]:
    if past.keys() != new.keys():
        changed = sorted(map(str, map(_public, past.keys() ^ new.keys())))
        raise KeyError(
            f"The frames differ from those before them in the keys {changed}; write frames with the same keys, or "
            "empty the buffer (rb.empty()) first."
        )
    joined = {}
    for path, value in new.items():
        before = past[path]
        if before.shape[1:] != value.shape[1:] or before.dtype != value.dtype:
            raise ValueError(
                f"Entry {_public(path)!r} changed from shape {list(before.shape[1:])}, {before.dtype} to "
                f"{list(value.shape[1:])}, {value.dtype} (env dimension first); write frames of one kind, or empty the "
                "buffer (rb.empty()) first."
            )
        joined[path] = torch.cat([before, value])
    return joined


def _tail(frames: _Frames, length: int) -> _Frames | None:
    """The last frames, without holding on to the memory of a long chunk."""
    if not length:
        return None
    first = max(0, len(frames.ended) - length)
    return _map((lambda value: value[first:].clone()) if first > length else (lambda value: value[first:]), frames)


def _ready_windows(ended: Tensor, n_steps: int, held: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The windows that the frames from `held` on complete.

    Args:
        ended (Tensor): whether an episode ended at a step, bool `[L, N]`.
        n_steps (int): longest window.
        held (int): how many of the L frames were there before; they completed what they could.

    Returns:
        First step, last step and env of each window, each `[M]`, and which of its n steps exist, bool `[M, n]`; ordered
        by last step, env, first step.
    """
    length = len(ended)
    ends = torch.nn.functional.pad(ended.t().long(), (0, n_steps - 1)).unfold(1, n_steps, 1)  # [N, L, n]
    ends_so_far = ends.cumsum(-1)
    valid = ends_so_far == ends  # no end at an earlier step of the window
    first = torch.arange(length, device=ended.device)
    last = first + valid.sum(-1) - 1
    complete = (ends_so_far[..., -1] > 0) | (first <= length - n_steps)
    env, start = (complete & (last >= held)).nonzero(as_tuple=True)
    last, valid = last[env, start], valid[env, start]
    if length - held > 1:
        order = last.argsort(stable=True)
        start, last, env, valid = start[order], last[order], env[order], valid[order]
    return start, last, env, valid


def _layout(shape: torch.Size, num_envs: int | None) -> Callable[[Tensor], Tensor]:
    """How to view a leaf of frames with this batch shape as `[T, N, *]`."""
    if num_envs is None:
        if len(shape) < 2:
            return lambda value: value.reshape(-1, 1, *value.shape[len(shape) :])
        raise ValueError(
            f"Frames have batch shape {list(shape)}, but NStepTransform(num_envs=None) takes one stream, [] "
            f"(one frame) or [T]; for N envs, with frames of shape [N] or [N, T], set num_envs={shape[0]}."
        )
    if len(shape) in (1, 2) and shape[0] == num_envs:
        return lambda value: value.unsqueeze(0) if len(shape) == 1 else value.transpose(0, 1)
    raise ValueError(
        f"Frames have batch shape {list(shape)}, but NStepTransform(num_envs={num_envs}) takes [{num_envs}] (one step "
        f"of each env) or [{num_envs}, T]; reshape the frames, or set num_envs (None for one stream of shape [T])."
    )


def _end_flags(following: dict[Key, Tensor]) -> tuple[Tensor, Tensor]:
    """Whether the step terminated, `[T, N, 1]`, and whether the episode ended there for any reason, `[T, N]`."""
    flags = {}
    for name in ("terminated", "truncated", "done"):
        value = following.get((name,))
        if value is None:
            continue
        if value.ndim != 3 or value.shape[-1] != 1:
            raise ValueError(
                f"Entry ('next', {name!r}) has the per-frame shape {list(value.shape[2:])}, expected [1]; unsqueeze it "
                "to [*B, 1]."
            )
        flags[name] = value.bool()
    if "terminated" not in flags or len(flags) == 1:
        raise KeyError(
            "NStepTransform needs ('next', 'terminated') and at least one of ('next', 'truncated'), ('next', 'done'); "
            f"'next' holds {_names(following)}. Write the end flags of the env into the frames."
        )
    ended = functools.reduce(torch.logical_or, flags.values())
    return flags["terminated"], ended.squeeze(-1)


def _signal(following: dict[Key, Tensor], signal: Key) -> Tensor:
    value = following.get(signal)
    if value is None:
        raise KeyError(
            f"Signal {_public(signal)!r} is missing: 'next' holds {_names(following)}. Let the env write "
            f"{('next', *signal)!r}, or name the signals to keep: NStepTransform(n, signals=(...))."
        )
    if value.ndim < 3:
        raise ValueError(
            f"Signal {_public(signal)!r} has the batch shape of the frames and no feature dimension; unsqueeze "
            f"{('next', *signal)!r} to [*B, 1]."
        )
    return value


def _inverts(part: torch.nn.Module) -> bool:
    """Whether a transform does anything to what is written into a buffer."""
    if not isinstance(part, Transform) or isinstance(part, Compose):
        return False
    return bool(part.in_keys_inv) or type(part)._inv_call is not Transform._inv_call


def _only(rows: TensorDict) -> TensorDictBase:
    """The one row that a buffer's ``add`` can take while it is still TorchRL's own."""
    if len(rows) > 1:
        raise ValueError(
            f"{len(rows)} rows became ready at once, and rb.add stores one; use rb.extend(frame.unsqueeze(0))."
        )
    return rows[0]


def _put(rows: dict[str, Any], path: Key, value: Tensor) -> None:
    for name in path[:-1]:
        rows = rows.setdefault(name, {})
    rows[path[-1]] = value


def _public(path: Key) -> NestedKey:
    return path[0] if len(path) == 1 else path


def _names(entries: Iterable[Key]) -> list[str]:
    return sorted(str(_public(path)) for path in entries)


def _positive(name: str, value: Any, *, remedy: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}; {remedy}.")
    return value


def _check_signals(signals: Sequence[NestedKey]) -> tuple[Key, ...]:
    if isinstance(signals, str):
        raise ValueError(f"signals must be a sequence of keys, got {signals!r}; write signals=({signals!r},).")
    paths = tuple((signal,) if isinstance(signal, str) else tuple(signal) for signal in signals)
    for path in paths:
        if not path or not all(isinstance(name, str) for name in path):
            raise ValueError(f"signals must hold keys of 'next' (strings, or tuples of strings), got {path!r}.")
        if path in (TERMINATED, VALID):
            raise ValueError(f"signals holds {_public(path)!r}, which NStepTransform writes itself; leave it out.")
    if len(set(paths)) != len(paths):
        raise ValueError(f"signals names an entry twice: {list(map(_public, paths))}; name each once.")
    return paths
