"""Checks of the options that a training script reads from a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch


def _is_device(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        torch.zeros(1, device=value).item()
    except (RuntimeError, AssertionError):
        return False
    return True


def _is_whole(value: Any, least: int = 1) -> bool:
    return type(value) is int and least <= value < 2**63


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -math.inf < value < math.inf


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _all(fits: Callable[[Any], bool], value: Any) -> bool:
    """Whether `value` is a list, of nothing but entries that fit."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(fits, value))


def _is_interval(value: Any) -> bool:
    return _all(_is_number, value) and len(value) == 2 and value[0] < value[1]


KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = MappingProxyType(
    {
        "flags": ("true or false", lambda value: isinstance(value, bool)),
        "whole": ("a whole number of at least 1", _is_whole),
        "counts": ("a whole number of at least 0", lambda value: _is_whole(value, 0)),
        "numbers": ("a finite number", _is_number),
        "positive": ("a positive number", _is_positive),
        "limits": ("a positive number, or null for none", lambda value: value is None or _is_positive(value)),
        "amounts": ("a number of at least 0", lambda value: _is_number(value) and value >= 0),
        "shares": ("a number in [0, 1]", lambda value: _is_number(value) and 0 <= value <= 1),
        "intervals": ("two finite numbers, the smaller one first, e.g. [-1, 1]", _is_interval),
        "widths": (
            "a list of whole numbers of at least 1, e.g. [128, 128]",
            lambda value: _all(_is_whole, value),
        ),
        "corners": ("a list of finite numbers, one for each coordinate", lambda value: _all(_is_number, value)),
        "nodes": (
            "a whole number of at least 2, or a list with one for each coordinate",
            lambda value: _is_whole(value, 2) or _all(partial(_is_whole, least=2), value),
        ),
        "labels": (
            "a list of at least two names",
            lambda value: _all(lambda name: isinstance(name, str), value) and len(value) >= 2,
        ),
        "device": ("a device that PyTorch can use here, e.g. cpu", _is_device),
    }
)


def check_options(config: Any, *, choices: Mapping[str, Iterable[Any]] | None = None, **names: str) -> None:
    """Refuse options of the wrong kind before anything is built.

    Args:
        config: nested mapping of options.
        choices: option name -> the values that it may have.
        **names: kind -> option names separated by blanks, a dot for each level. Kinds: `flags` (true, false), `whole`
            (integers >= 1), `counts` (integers >= 0), `numbers` (finite), `positive` (> 0), `limits` (> 0 or None),
            `amounts` (>= 0), `shares` (in [0, 1]), `intervals` (two numbers that rise), `widths` (lists of integers
            >= 1), `corners` (lists of numbers), `nodes` (an integer >= 2 or a list of them), `labels` (two or more
            texts), `device`.

    Raises:
        ValueError: for the first option that does not fit or is missing, with its name, its value and what to give.

    Example:
        >>> from torchrl_safety.trainers import check_options
        >>> check_options({"frames": 10, "lr": {"start": 1e-3}}, whole="frames", positive="lr.start")
        >>> check_options({"frames": 0}, whole="frames")
        Traceback (most recent call last):
        ValueError: frames is 0; give a whole number of at least 1
        >>> check_options({"env": {"name": "boat"}}, choices={"env.name": ["car", "point"]})
        Traceback (most recent call last):
        ValueError: env.name is 'boat'; choose one of ['car', 'point']
    """
    for option, allowed in (choices or {}).items():
        allowed = list(allowed)
        if (value := _read(config, option)) not in allowed:
            spelled = ", ".join("null" if choice is None else repr(choice) for choice in allowed)
            raise ValueError(f"{option} is {value!r}; choose one of [{spelled}]")
    for kind, options in names.items():
        wanted, fits = KINDS[kind]
        for option in options.split():
            if not fits(value := _read(config, option)):
                raise ValueError(f"{option} is {value!r}; give {wanted}")


def _read(config: Any, option: str) -> Any:
    value = config
    above: list[str] = []
    for level in option.split("."):
        if not isinstance(value, Mapping) or level not in value:
            instead = "" if isinstance(value, Mapping) else f", for {'.'.join(above)} is {value!r}"
            raise ValueError(f"{option} is missing{instead}; give it a value of its own")
        value = value[level]
        above.append(level)
    return value
