"""Encodings of observations before the first layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class AngleEncoding(nn.Module):
    r"""Replace angles by their cosine and sine, :math:`\theta \mapsto (\cos\theta, \sin\theta)`, which do not jump.

    The other entries come first, in their order; then the cosines; then the sines, both in the order of `angles`:
    (x, y, θ) becomes (x, y, cos θ, sin θ). It has no parameters and no buffers.

    Args:
        size: size of the last dimension of the input.
        angles: its entries that are angles in radians, e.g. the `angles` of an environment; empty changes nothing.

    Raises:
        ValueError: for a size below 1, an index outside 0..size-1 or given twice, or an input of another size.

    Example:
        >>> import torch
        >>> from torchrl_safety.modules import AngleEncoding
        >>> encoding = AngleEncoding(3, angles=(2,))
        >>> encoding(torch.tensor([[5.0, 6.0, 0.0]])), encoding.out_features
        (tensor([[5., 6., 1., 0.]]), 4)
    """

    def __init__(self, size: int, angles: Sequence[int]) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"size is {size}; it must be at least 1, the size of the observation")
        self.angles = tuple(int(index) for index in angles)
        if len(set(self.angles)) != len(self.angles) or not all(0 <= index < size for index in self.angles):
            raise ValueError(f"angles is {self.angles}; give different indices in 0..{size - 1}")
        self.size, self.out_features = size, size + len(self.angles)
        self.out_features = size + len(self.angles)
        # Runs of neighbouring entries, so that a forward takes slices: an index tensor would have to follow the device.
        starts = sorted({0, size, *self.angles, *(index + 1 for index in self.angles)})
        self._others = [(a, b - a) for a, b in pairwise(starts) if a not in self.angles]

    def forward(self, input: Tensor) -> Tensor:
        """`[*B, out_features]` of an input `[*B, size]`."""
        if input.shape[-1:] != (self.size,):
            raise ValueError(
                f"the input has shape {list(input.shape)}, the encoding takes `[*B, {self.size}]`: build it with the "
                "size that the observations have"
            )
        others = [input.narrow(-1, *run) for run in self._others]
        angles = [input.narrow(-1, index, 1) for index in self.angles]
        return torch.cat([*others, *(angle.cos() for angle in angles), *(angle.sin() for angle in angles)], dim=-1)

    def extra_repr(self) -> str:
        return f"size={self.size}, angles={self.angles}"
