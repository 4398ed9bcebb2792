"""Checks of what environments are built from; each error names the setting, its value and the remedy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def check_count(name: str, value: int, remedy: str) -> None:
    """Raises ValueError unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1, {remedy}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown: choose one of {', '.join(map(repr, choices))}")


def check_positive(**values: float) -> None:
    """Raises ValueError for the first of the named values that is not positive and finite."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value} must be positive and finite")


def check_share(share: float, meaning: str) -> None:
    """Raises ValueError unless `share`, whose meaning is told, lies in (0, 1]."""
    if not 0 < share <= 1:
        raise ValueError(f"share={share} must lie in (0, 1]: {meaning}")


def check_dtype(dtype: torch.dtype) -> None:
    """Raises ValueError unless `dtype` is a floating-point type."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype} must be a floating-point type, such as torch.float32")


def check_generator(generator: torch.Generator | None, seed: int | None) -> None:
    """Raises ValueError unless at most one of a torch.Generator and a seed is given."""
    if not isinstance(generator, torch.Generator | None):
        raise ValueError(f"generator={generator!r} must be a torch.Generator; pass a number as seed")
    if generator is not None and seed is not None:
        raise ValueError(f"seed={seed} and generator=... exclude each other: seed the generator, or pass one of them")


def check_box(names: str, low: Sequence[float] | Tensor, high: Sequence[float] | Tensor) -> tuple[Tensor, Tensor]:
    """The corners `[S]` of a box of states on the CPU; `names` are those of its S entries, as in `"x, v"`.

    Raises:
        ValueError: corners of another length, not finite, or reversed.
    """
    corners = torch.as_tensor(low, device="cpu"), torch.as_tensor(high, device="cpu")
    size = (len(names.split(",")),)
    if any(corner.shape != size for corner in corners) or not _is_box(*corners):
        raise ValueError(f"start_low={low} and start_high={high} must be finite ({names}) with low <= high")
    return corners


def _is_box(low: Tensor, high: Tensor) -> bool:
    return bool((low <= high).all() & (high - low).isfinite().all())


def action_levels(*bounds: float) -> Tensor:
    r"""Every combination of :math:`-b_i, 0, b_i`, a table `[3^C, C]` in float64 on the CPU, the last varying fastest.

    Example:
        >>> action_levels(2.0).tolist()
        [[-2.0], [0.0], [2.0]]
        >>> action_levels(1.0, 2.0)[5].tolist()
        [0.0, 2.0]
    """
    levels = [(-bound, 0.0, bound) for bound in bounds]
    return torch.tensor(list(itertools.product(*levels)), dtype=torch.float64, device="cpu")
