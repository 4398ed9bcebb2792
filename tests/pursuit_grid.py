"""The pursuit-evasion game solved on a grid by someone else: values, gradients, and the controls that they give.

`cases/air3d_61.npz` holds V on 61³ points of (x, y, ψ) for v = R = 5, w = 1 and a horizon of 2.8 s, ψ in [0, 2π) and
periodic. `cases/air3d_barrier.npz` holds points of the semi-permeable surface that leaves the rim of the capture disc,
traced backwards in time, with the grid's value there: where that is not about 0, the surface is already inside the
safe set, behind the line on which its left and right halves meet.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_CASES = Path(__file__).parent / "cases"
HORIZON = 2.8


class PursuitGrid:
    """Trilinear interpolation, constant beyond the borders in x and y."""

    def __init__(self) -> None:
        with np.load(_CASES / "air3d_61.npz") as file:
            value = torch.from_numpy(file["V"]).double()
            self.low, self.high = torch.from_numpy(file["lo"]), torch.from_numpy(file["hi"])
            assert float(file["T"]) == HORIZON
        self.shape = torch.tensor(value.shape)
        # ψ is periodic and its last point is one spacing before 2π.
        self.spacing = (self.high - self.low) / (self.shape - torch.tensor([1, 1, 0]))
        slopes = []
        for dim, step in enumerate(self.spacing.tolist()):
            slope = (value.roll(-1, dim) - value.roll(1, dim)) / (2 * step)
            if dim < 2:  # no neighbour beyond the border: that of the next point inside
                ends = slope.index_select(dim, torch.tensor([1, value.shape[dim] - 2]))
                slope = slope.index_copy(dim, torch.tensor([0, value.shape[dim] - 1]), ends)
            slopes.append(slope)
        self.table = torch.stack((value, *slopes), dim=-1)

    def __call__(self, state: Tensor) -> Tensor:
        """V and its gradient `[*B, 4]` at states `[*B, 3]`."""
        turned = torch.cat((state[..., :2], state[..., 2:].remainder(math.tau)), dim=-1)
        place = (turned - self.low) / self.spacing
        last = self.shape - 1
        place = torch.cat((place[..., :2].clamp(min=0).minimum(last[:2]), place[..., 2:]), dim=-1)
        corner = torch.cat((place[..., :2].floor().minimum(last[:2] - 1), place[..., 2:].floor()), dim=-1).long()
        part, result = place - corner, torch.zeros(*state.shape[:-1], 4, dtype=torch.float64)
        for offset in itertools.product((0, 1), repeat=3):
            up = torch.tensor(offset)
            weight = torch.where(up.bool(), part, 1 - part).prod(-1, keepdim=True)
            x, y, heading = (corner + up).remainder(torch.tensor([10**9, 10**9, int(self.shape[2])])).unbind(-1)
            result += weight * self.table[x, y, heading]
        return result

    def controls(self, state: Tensor) -> tuple[Tensor, Tensor]:
        r"""The turn rates `[*B, 1]` of evader and pursuer that the gradient p of V gives, with w = 1.

        The Hamiltonian :math:`\max_u \min_d p \cdot f` is linear in both: :math:`u = sgn(p_x y - p_y x - p_ψ)`,
        :math:`d = -sgn(p_ψ)`.
        """
        x, y, _ = state.split(1, dim=-1)
        _, slope_x, slope_y, slope_heading = self(state).split(1, dim=-1)
        return (slope_x * y - slope_y * x - slope_heading).sign(), -slope_heading.sign()


def barrier() -> Tensor:
    """Points `[K, 3]` of the barrier, (x, y, ψ), where it still separates."""
    with np.load(_CASES / "air3d_barrier.npz") as file:
        points, value = torch.from_numpy(file["pts"]).double(), torch.from_numpy(file["Vgrid"])
    return points[value.abs() < 0.04]
