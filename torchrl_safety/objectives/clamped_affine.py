"""The algebra in which every safety backup lives: clamped affine maps and their composition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, tensorclass
from torch import Tensor

Parts = tuple[Tensor, Tensor, Tensor, Tensor]


def affine(slope: Tensor, offset: Tensor, value: Tensor) -> Tensor:
    """`slope * value + offset`, where a zero slope ignores the value: 0 * inf and 0 * nan are 0 here."""
    # The backward of relu: the value where the slope is positive, else 0. On a CPU torch.where takes five times longer.
    counted = torch.ops.aten.threshold_backward.default(value, slope, 0)
    return torch.addcmul(offset, slope, counted)


def _apply(outer: Parts, value: Tensor) -> Tensor:
    slope, offset, low, high = outer
    # Not torch.clamp: where low equals high, as for margins l > g, it hands no gradient to the bounds.
    return torch.minimum(torch.maximum(affine(slope, offset, value), low), high)


def _compose(outer: Parts, inner: Parts) -> Parts:
    slope, offset = outer[:2]
    return slope * inner[0], affine(slope, offset, inner[1]), _apply(outer, inner[2]), _apply(outer, inner[3])


def check_factor(name: str, value: float | Tensor, shape: torch.Size) -> None:
    """Refuse a factor that is a number outside [0, 1], or a tensor that enlarges `shape`, as `[B]` does `[B, 1]`."""
    if not isinstance(value, Tensor):
        if isinstance(value, int | float) and not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}: it must lie in [0, 1]")
        return
    fits = value.dim() <= len(shape) and all(a in (1, b) for a, b in zip(reversed(value.shape), reversed(shape)))
    if not fits:
        raise ValueError(
            f"{name} has shape {list(value.shape)}, which does not fit {list(shape)}: "
            f"pass {name} as a number, or with the trailing dimension, e.g. {name}.unsqueeze(-1)"
        )


def _choose(mask: Tensor, one: Tensor, other: Tensor) -> Tensor:
    # Avoid and reach have the margin in both places, and choosing is the slowest elementwise operation on a CPU.
    return one if one is other and one.shape == mask.shape else torch.where(mask, one, other)


def _narrow(parts: Parts, dim: int, start: int, length: int) -> Parts:
    slope, offset, low, high = (part.narrow(dim, start, length) for part in parts)
    return slope, offset, low, high


def _rows(parts: Parts, rows: slice) -> Parts:
    slope, offset, low, high = (part[rows] for part in parts)
    return slope, offset, low, high


def _in_turn(maps: Parts, value: Tensor) -> Tensor:
    """Backwards, one step at a time."""
    results = []
    for step in reversed(list(zip(*(part.unbind(0) for part in maps)))):
        value = _apply(step, value)
        results.append(value)
    return torch.stack(results[::-1])


def _in_blocks(maps: Parts, value: Tensor) -> Tensor:
    """Compose all pairs of steps at once, find the values at the pairs, in turn or again in blocks, then go inside."""
    length = len(maps[0])
    even = length - length % 2
    first, second = _rows(maps, slice(0, even, 2)), _rows(maps, slice(1, even, 2))
    rest = value.unsqueeze(0) if even == length else _in_turn(_rows(maps, slice(even, None)), value)
    at_first = suffix_values(_compose(first, second), rest[0])
    at_second = _apply(second, torch.cat((at_first[1:], rest[:1])))
    results = torch.stack((at_first, at_second), 1).flatten(0, 1)
    return results if even == length else torch.cat((results, rest))


def _fastest(length: int, width: int) -> Callable[[Parts, Tensor], Tensor]:
    # Measured on one CPU thread in float32, microseconds in turn / in blocks / by doubling: 12 x 64: 84, 100, 190;
    # 1000 x 1: 9800, 340, 440; 1000 x 64: 12000, 530, 3800; 48 x 1024: 420, 280; 128 x 2048: 2000, 1700; 16 x 4096:
    # 150, 200; 128 x 16384: 5000, 11000. In turn wins where there are few calls to make, and where a call is so wide
    # that the work counts and not the calls. Doubling, `ClampedAffine.scan`, does log T times the work and never wins.
    return _in_turn if length <= 12 or width > 2048 else _in_blocks


def suffix_values(maps: Parts, value: Tensor) -> Tensor:
    r"""All :math:`(F_t \circ \dots \circ F_{T-1})(v)` over the leading dimension of `maps`, of at least one step."""
    # Composing scales infinite bounds, which would spoil the gradient of a slope: 0 * inf again, and out of reach.
    way = _in_turn if maps[0].requires_grad else _fastest(len(maps[0]), value.numel())
    return way(maps, value)


def _own_tensorclass(cls: type) -> type:
    """`tensorclass` with the docstring of the class kept and with arguments by position also under `torch.compile`."""
    doc = cls.__doc__
    made = tensorclass(cls)
    made.__doc__ = doc
    by_keyword = made.__init__

    def __init__(self: Any, slope: Tensor, offset: Tensor, low: Tensor, high: Tensor, **settings: Any) -> None:
        by_keyword(self, slope=slope, offset=offset, low=low, high=high, **settings)

    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    made.__init__ = __init__
    return made


@_own_tensorclass
class ClampedAffine:
    r"""A monotone map :math:`F(v) = \mathrm{clamp}(a v + b,\; low,\; high)` with slope :math:`a \ge 0`.

    Every backup of this package is such a map of the next value, and the family is closed under
    composition, so n-step targets, :math:`\lambda`-returns and categorical projections are
    compositions of it. ``outer @ inner`` is the map that applies ``inner`` first. The dynamic-programming
    operators are those of Fisac et al. 2019 (avoid) and Hsu et al. 2021 (reach-avoid).

    Args:
        slope: :math:`a \ge 0`, shape `[*B, 1]`.
        offset: :math:`b`, shape `[*B, 1]`, in the unit of the value.
        low: lower bound, shape `[*B, 1]`; may be ``-inf``.
        high: upper bound, shape `[*B, 1]`; may be ``inf``.

    A zero slope ignores its argument, even an infinite one or NaN.

    Example:
        >>> import torch
        >>> from torchrl_safety.objectives import ClampedAffine
        >>> one = torch.ones(1)
        >>> inner = ClampedAffine(one, one, -9 * one, 2 * one)  # v -> min(v + 1, 2)
        >>> outer = ClampedAffine(2 * one, 0 * one, -9 * one, 9 * one)  # v -> 2 v
        >>> (outer @ inner)(torch.tensor([5.0]))
        tensor([4.])
    """

    slope: Tensor
    offset: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, parts: Parts) -> ClampedAffine:
        """The map with these `(slope, offset, low, high)`."""
        # A quarter of the time of the constructor, which a loss of small networks would spend in the algebra.
        fields = TensorDict._new_unsafe(dict(zip(("slope", "offset", "low", "high"), parts)), torch.Size())
        return cls.from_tensordict(fields)  # type: ignore[attr-defined]  # mypy does not see a tensorclass's methods

    @classmethod
    def constant(cls, value: Tensor) -> ClampedAffine:
        """The map that is `value` everywhere: nothing that follows it matters."""
        return cls.of((torch.zeros_like(value), value, value, value))

    @classmethod
    def identity_like(cls, value: Tensor) -> ClampedAffine:
        """The identity, with the shape, dtype and device of `value`."""
        infinite = torch.full_like(value, torch.inf)
        return cls.of((torch.ones_like(value), torch.zeros_like(value), -infinite, infinite))

    @property
    def parts(self) -> Parts:
        """`(slope, offset, low, high)`."""
        return self.slope, self.offset, self.low, self.high

    def __call__(self, value: Tensor) -> Tensor:
        """Apply the map to `value` `[*B, N]`; the same map acts on all `N` entries.

        Raises:
            ValueError: if the leading dimensions differ (a `[B]` value against a `[B, 1]` map would broadcast).
        """
        slope = self.slope
        if value.shape[:-1] != slope.shape[:-1] or value.dim() != slope.dim():
            raise ValueError(
                f"a value of shape {list(value.shape)} does not fit a map of shape {list(slope.shape)}: "
                "only the last dimension may differ; give the value the trailing dimension, e.g. value.unsqueeze(-1)"
            )
        return _apply(self.parts, value)

    def after(self, inner: ClampedAffine) -> ClampedAffine:
        """`self @ inner`, in the spelling that `torch.compile` can trace."""
        return self.of(_compose(self.parts, inner.parts))

    def __matmul__(self, inner: ClampedAffine) -> ClampedAffine:
        return self.after(inner)

    def ended(self, mask: Tensor, value: Tensor) -> ClampedAffine:
        """The constant `value` `[*B, 1]` where `mask` `[*B, 1]` is true, this map elsewhere."""
        slope, offset, low, high = self.parts
        offset, low, high = (_choose(mask, value, part) for part in (offset, low, high))
        return self.of((torch.where(mask, 0.0, slope), offset, low, high))

    def compose(self, time_dim: int = -2) -> ClampedAffine:
        r"""The composition :math:`F_0 \circ F_1 \circ \dots \circ F_{T-1}` over `time_dim`, which it removes."""
        *outer, inner = self._steps(time_dim)
        while outer:
            inner = _compose(outer.pop(), inner)
        return self.of(inner)

    def in_turn(self, value: Tensor, time_dim: int = -2) -> Tensor:
        """`self.compose(time_dim)(value)` at less cost, from the last step to the first."""
        steps = self._steps(time_dim)
        value = self.of(steps.pop())(value)
        while steps:
            value = _apply(steps.pop(), value)
        return value

    def _steps(self, time_dim: int) -> list[Parts]:
        steps = list(zip(*(part.unbind(time_dim) for part in self.parts)))
        if not steps:
            raise ValueError(f"nothing to compose: time dimension {time_dim} has length 0; pass at least one step")
        return steps

    def scan(self, time_dim: int = -2, *, suffix: bool = False) -> ClampedAffine:
        r"""All partial compositions over `time_dim`, whose length is kept, in :math:`\lceil \log_2 T \rceil` rounds.

        Entry `t` is :math:`F_0 \circ \dots \circ F_t`, or :math:`F_t \circ \dots \circ F_{T-1}` with ``suffix=True``.
        """
        parts, length, shift = self.parts, self.slope.shape[time_dim], 1
        while shift < length:
            early = _narrow(parts, time_dim, 0, length - shift)
            late = _narrow(parts, time_dim, shift, length - shift)
            alone = _narrow(parts, time_dim, length - shift if suffix else 0, shift)
            composed = _compose(early, late)
            order = zip(composed, alone) if suffix else zip(alone, composed)
            slope, offset, low, high = (torch.cat(pair, time_dim) for pair in order)
            parts, shift = (slope, offset, low, high), 2 * shift
        return self.of(parts)
