"""Checks of the options that a training script reads from a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def _is_device(value: Any) -> bool:
    try:
        torch.zeros(1, device=value).item()
    except (RuntimeError, AssertionError):
        return False
    return True


KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "flags": ("true or false", lambda value: isinstance(value, bool)),
    "whole": ("a whole number of at least 1", lambda value: type(value) is int and value >= 1),
    "positive": ("a positive number", lambda value: type(value) in (int, float) and 0 < value < math.inf),
    "device": ("a device that PyTorch can use here, e.g. cpu", _is_device),
    "shares": ("a number in [0, 1]", lambda value: type(value) in (int, float) and 0 <= value <= 1),
}


def check_options(config: Any, **names: str) -> None:
    """Refuse options of the wrong kind before anything is built.

    Args:
        config: nested mapping of options.
        **names: kind -> option names separated by blanks, a dot for each level. Kinds: `flags` (true, false), `whole`
            (integers >= 1), `positive` (numbers > 0), `shares` (numbers in [0, 1]), `device`.

    Raises:
        ValueError: for the first option that does not fit, with its name, its value and what to give.

    Example:
        >>> from torchrl_safety.trainers import check_options
        >>> check_options({"frames": 10, "lr": {"start": 1e-3}}, whole="frames", positive="lr.start")
        >>> check_options({"frames": 0}, whole="frames")
        Traceback (most recent call last):
        ValueError: frames is 0; give a whole number of at least 1
    """
    for kind, options in names.items():
        wanted, fits = KINDS[kind]
        for option in options.split():
            value = config
            for level in option.split("."):
                value = value[level]
            if not fits(value):
                raise ValueError(f"{option} is {value!r}; give {wanted}")
