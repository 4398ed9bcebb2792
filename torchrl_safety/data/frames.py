"""Frames of one or many envs as flat entries with time and env in front."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

Key = tuple[str, ...]
Entries = dict[Key, Tensor]
Kinds = dict[Key, tuple[torch.Size, torch.dtype]]


def time_major(frames: TensorDictBase, num_envs: int | None, owner: str) -> Entries:
    """All entries of frames of the layout that `num_envs` stands for, as `[T, N, *]`; `owner` is named in errors."""
    if not isinstance(frames, TensorDictBase):
        raise TypeError(f"{owner} takes frames as a TensorDict, got a {type(frames).__name__}.")
    view = _layout(frames.batch_size, num_envs, owner)
    entries: Entries = {}
    for key, value in frames.items(True, True, is_leaf=is_leaf_nontensor):
        path = key if isinstance(key, tuple) else (key,)
        if not isinstance(value, Tensor):
            raise TypeError(
                f"Entry {public(path)!r} is a {type(value).__name__}; {owner} moves tensors only. "
                "Exclude the entry from the frames, or store it as a tensor."
            )
        entries[path] = view(value)
    return entries


def following_of(entries: Entries) -> Entries:
    """The entries of "next", without that prefix."""
    return {path[1:]: value for path, value in entries.items() if path[0] == "next"}


def end_flags(following: Entries, owner: str) -> tuple[Tensor, Tensor]:
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
            f"{owner} needs ('next', 'terminated') and at least one of ('next', 'truncated'), ('next', 'done'); "
            f"'next' holds {names(following)}. Write the end flags of the env into the frames."
        )
    ended = functools.reduce(torch.logical_or, flags.values())
    return flags["terminated"], ended.squeeze(-1)


def kinds(entries: Entries) -> Kinds:
    """Shape from the env dimension on, and dtype, of entries `[T, N, *]`."""
    return {path: (value.shape[1:], value.dtype) for path, value in entries.items()}


def check_kinds(before: Kinds, now: Kinds) -> None:
    """Raises KeyError or ValueError where frames differ in kind from those before them."""
    if before == now:
        return
    if before.keys() != now.keys():
        changed = sorted(map(str, map(public, before.keys() ^ now.keys())))
        raise KeyError(
            f"The frames differ from those before them in the keys {changed}; write frames with the same keys, or "
            "empty the buffer (rb.empty()) first."
        )
    path = next(path for path in now if before[path] != now[path])
    (shape, dtype), (new_shape, new_dtype) = before[path], now[path]
    raise ValueError(
        f"Entry {public(path)!r} changed from shape {list(shape)}, {dtype} to {list(new_shape)}, {new_dtype} (env "
        "dimension first); write frames of one kind, or empty the buffer (rb.empty()) first."
    )


def rows_of(entries: Mapping[Key, Tensor], num_rows: int, device: torch.device | None) -> TensorDict:
    """Entries `[M, *]` on the device, if one is given, as a TensorDict `[M]`."""
    rows: dict[str, Any] = {}
    for path, value in entries.items():
        within = rows
        for name in path[:-1]:
            within = within.setdefault(name, {})
        within[path[-1]] = value
    return _unchecked(rows, torch.Size([num_rows]), device)


def _unchecked(entries: dict[str, Any], shape: torch.Size, device: torch.device | None) -> TensorDict:
    """A TensorDict of entries that fit: to check each takes longer than to make it."""
    made = {name: _unchecked(value, shape, device) if type(value) is dict else value for name, value in entries.items()}
    return TensorDict._new_unsafe(made, batch_size=shape, device=device)


def public(path: Key) -> NestedKey:
    """A path as a key that users write."""
    return path[0] if len(path) == 1 else path


def names(entries: Iterable[Key]) -> list[str]:
    """The keys, for an error message."""
    return sorted(str(public(path)) for path in entries)


def positive(name: str, value: Any, *, remedy: str) -> int:
    """The value of a setting that must be an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}; {remedy}.")
    return value


def _layout(shape: torch.Size, num_envs: int | None, owner: str) -> Callable[[Tensor], Tensor]:
    """How to view a leaf of frames with this batch shape as `[T, N, *]`."""
    if num_envs is None:
        if len(shape) < 2:
            return lambda value: value.reshape(-1, 1, *value.shape[len(shape) :])
        raise ValueError(
            f"Frames have batch shape {list(shape)}, but {owner}(num_envs=None) takes one stream, [] "
            f"(one frame) or [T]; for N envs, with frames of shape [N] or [N, T], set num_envs={shape[0]}."
        )
    if len(shape) in (1, 2) and shape[0] == num_envs:
        return lambda value: value.unsqueeze(0) if len(shape) == 1 else value.transpose(0, 1)
    raise ValueError(
        f"Frames have batch shape {list(shape)}, but {owner}(num_envs={num_envs}) takes [{num_envs}] (one step "
        f"of each env) or [{num_envs}, T]; reshape the frames, or set num_envs (None for one stream of shape [T])."
    )
