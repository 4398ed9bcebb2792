"""How states move: arcs of cars, Runge-Kutta steps, and angles that stay in their range."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def wrap_angle(angle: Tensor) -> Tensor:
    """The angles in [-π, π), of any shape; those that lie there already pass through unrounded."""
    # Unlike with a remainder.
    turns = (angle * (1 / math.tau)).add_(0.5).floor_()
    return torch.sub(angle, turns, alpha=math.tau)


def arc_step(pose: Tensor, turn_rate: Tensor, *, speed: float, dt: float) -> Tensor:
    r"""A car of constant speed after a held turn rate, `x' = v cos θ`, `y' = v sin θ`, `θ' = ω`, exactly.

    It moves along a chord of length :math:`v\,dt\,\mathrm{sinc}(\omega\,dt/2)` in direction
    :math:`\theta + \omega\,dt/2`.

    Args:
        pose: (x, y, θ) `[*B, 3]`.
        turn_rate: ω `[*B, 1]`, in rad/s.
        speed: v.
        dt: time in seconds.

    Returns:
        `[*B, 3]`, with θ in [-π, π).
    """
    x, y, heading = pose.split(1, dim=-1)
    chord = (turn_rate * (dt / math.tau)).sinc().mul_(speed * dt)  # torch's sinc(u) is sin(πu)/(πu)
    midway = torch.add(heading, turn_rate, alpha=dt / 2)
    turned = wrap_angle(torch.add(heading, turn_rate, alpha=dt))
    return torch.cat((x.addcmul(chord, midway.cos()), y.addcmul(chord, midway.sin()), turned), dim=-1)


def runge_kutta_step(slope: Callable[[Tensor], Tensor], state: Tensor, dt: float) -> Tensor:
    """One step of the classical Runge-Kutta method of order 4 of `s' = slope(s)`, `[*B, S]` like `state`."""
    first = slope(state)
    second = slope(state.add(first, alpha=dt / 2))
    third = slope(state.add(second, alpha=dt / 2))
    fourth = slope(state.add(third, alpha=dt))
    return state.add(first + fourth, alpha=dt / 6).add(second + third, alpha=dt / 3)
