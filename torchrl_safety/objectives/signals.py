"""Reading a backup's signals, step by step, from a transition or from an n-step window."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor

STEPS = "steps"
"""Where n-step windows keep the raw signals of their steps, `[*B, n, 1]`."""


class MissingKeyError(KeyError):
    """A KeyError that prints its message as it is, not as a quoted key."""

    def __str__(self) -> str:
        return str(self.args[0])


def read(tensordict: TensorDictBase, key: NestedKey, remedy: str) -> Tensor:
    """The entry `key`, or a KeyError that names it, what is there and what to do."""
    value = tensordict.get(key, None)
    if value is None:
        present = ", ".join(sorted(map(repr, tensordict.keys(True, True))))
        raise MissingKeyError(f"the key {key!r} is missing; present: {present}. {remedy}")
    return value


def refuse_unless(holds: Tensor, fault: str) -> None:
    """A ValueError on the CPU, an asynchronous assert on accelerators and under compile, unless the `[]` bool holds."""
    if holds.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(holds, fault)
    elif not holds:
        raise ValueError(fault)


def refuse_outside(index: Tensor, size: int, fault: str) -> None:
    """:func:`refuse_unless` all entries of `index` lie in 0..size - 1."""
    if index.device.type == "cpu" and not torch.compiler.is_compiling() and index.numel():
        lowest, highest = index.aminmax()
        if lowest.item() >= 0 and highest.item() < size:
            return
    refuse_unless(((index >= 0) & (index < size)).all(), fault)


def refuse_unless_finite(value: Tensor, fault: str) -> None:
    """:func:`refuse_unless` all entries of `value` are finite."""
    # A finite sum has finite terms, and takes a quarter of the time.
    if value.device.type == "cpu" and not torch.compiler.is_compiling() and math.isfinite(value.detach().sum()):
        return
    refuse_unless(torch.isfinite(value).all(), fault)


def check_number(name: str, value: float | Tensor, low: float, high: float) -> float:
    """`value` as a number, refused outside [low, high]."""
    is_one = value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, int | float)
    if not is_one or not low <= float(value) <= high:
        raise ValueError(f"{name} is {value!r}; it must lie in [{low}, {high}], as one number")
    return float(value)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    """`value`, refused unless it is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; choose one of {list(choices)}")
    return value


def check_finite(name: str, value: Tensor) -> None:
    """Refuse NaN and infinities in a signal."""
    refuse_unless_finite(
        value,
        f"the signal {name} holds NaN or inf; a margin or reward must be finite. Check the environment that wrote it",
    )


def _check_column(key: NestedKey, value: Tensor, other_key: NestedKey, other: Tensor) -> None:
    """Refuse shapes that would broadcast: `[B]` against `[B, 1]` gives `[B, B]` in silence."""
    if value.shape != other.shape or value.shape[-1:] != (1,):
        raise ValueError(
            f"{key!r} has shape {list(value.shape)}, {other_key!r} has {list(other.shape)}: both must be `[*B, 1]` "
            "(`[*B, n, 1]` in windows); add the trailing dimension with unsqueeze(-1)"
        )


def next_key(key: NestedKey) -> NestedKey:
    """Where `key` stands in the next state of a transition."""
    return unravel_key(("next", key))


def steps_key(key: NestedKey) -> NestedKey:
    """Where `key` stands in the steps of an n-step window."""
    return unravel_key((STEPS, key))


def read_steps(
    tensordict: TensorDictBase,
    keys: Mapping[str, NestedKey],
    *,
    terminated: NestedKey,
    done: NestedKey,
    bootstrap: bool,
) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """The signals of every step of a batch of transitions or windows, and where its steps end.

    A transition counts as a window of one step, so that losses see one layout only.

    Args:
        tensordict: transitions, or windows with :data:`STEPS`, batch shape `[*B]`.
        keys: signal name -> key below ``"next"`` (transition) or :data:`STEPS` (window).
        terminated: key of the flag of a real end; `done` of any end.
        bootstrap: whether a truncated step continues into the next value; else it is treated as terminal.

    Returns:
        signals `[*B, n, 1]`, the flag of terminal steps `[*B, n, 1]`, and the validity of the steps (``None``: all).

    Raises:
        KeyError: for a key that is not there.
        ValueError: for a signal that is NaN or infinite, or lacks the trailing dimension.
    """
    windows = STEPS in tensordict
    place = steps_key if windows else next_key
    remedy = (
        "Give NStepTransform(signals=...) every signal that the backup reads, or name its key with loss.set_keys(...)"
        if windows
        else "Let the environment write it, or name its key with loss.set_keys(...)"
    )
    ended_key, valid_key = next_key(terminated if bootstrap else done), steps_key("valid")
    ended = read(tensordict, ended_key, "Collect it with the environment's flags")
    valid = read(tensordict, valid_key, "Build the windows with NStepTransform") if windows else None
    if valid is not None:
        _check_column(ended_key, ended, valid_key, valid[..., 0, :])
    like_key, like = (ended_key, ended) if valid is None else (valid_key, valid)
    signals = {}
    for name, key in keys.items():
        signal = read(tensordict, place(key), remedy)
        _check_column(place(key), signal, like_key, like)
        signal = signal if valid is None else signal.masked_fill(~valid, 0)  # anything may stand where no step is
        check_finite(repr(place(key)), signal)
        signals[name] = signal if windows else signal.unsqueeze(-2)
    if valid is None:
        return signals, ended.unsqueeze(-2), None
    # Only the last step of a window can end the episode.
    follows = torch.nn.functional.pad(valid[..., 1:, :], (0, 0, 0, 1))
    return signals, valid & ~follows & ended.unsqueeze(-2), valid
