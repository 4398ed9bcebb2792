"""The environments of two players, each with its equations of motion and its mirror, for tests that all share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_safety.envs import AttackDefenseEnv, BicycleEnv, DoubleIntegratorEnv, NativeEnv, PursuitEvasionEnv


class Game(NamedTuple):
    """An environment, and what is known of it from elsewhere."""

    name: str
    build: Callable[..., NativeEnv]
    slope: Callable[[np.ndarray, np.ndarray, np.ndarray], list[float]]
    """s' of state, control and disturbance, as the papers have it."""
    mirror: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    """Signs of state, control and disturbance in the mirror."""
    low: tuple[float, ...]
    high: tuple[float, ...]
    """A box of states in which no stop is met within a step."""
    exact: bool
    """Whether a step is exact, not one of Runge-Kutta."""

    def states(self, n: int, seed: int = 0) -> Tensor:
        """`n` states, uniform in the box, in float64."""
        unit = torch.rand(n, len(self.low), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        low, high = torch.tensor(self.low, dtype=torch.float64), torch.tensor(self.high, dtype=torch.float64)
        return low + unit * (high - low)


def _double_integrator(s, u, d):
    return [s[1], u[0] + d[0]]


def _pursuit(s, u, d):
    x, y, psi = s
    return [-5 + 5 * math.cos(psi) + u[0] * y, 5 * math.sin(psi) - u[0] * x, d[0] - u[0]]


def _attack(s, u, d):
    cars = [(s[2], u[0]), (s[5], d[0])]
    return [entry for angle, rate in cars for entry in (0.75 * math.cos(angle), 0.75 * math.sin(angle), rate)]


def _bicycle(s, u, d):
    _, _, v, psi, delta = s
    motion = [v * math.cos(psi), v * math.sin(psi), u[0], v * math.tan(delta) / 0.257, u[1]]
    return [entry + push for entry, push in zip(motion, d)]


def _opposed_double_integrator(*args, **settings) -> DoubleIntegratorEnv:
    return DoubleIntegratorEnv(*args, **{"max_disturbance": 0.5, **settings})


GAMES = (
    Game(
        "double integrator",
        _opposed_double_integrator,
        _double_integrator,
        ((-1, -1), (-1,), (-1,)),
        (-1.0, -2.0),
        (1.0, 2.0),
        True,
    ),
    Game(
        "pursuit evasion",
        PursuitEvasionEnv,
        _pursuit,
        ((1, -1, -1), (-1,), (-1,)),
        (-6.0, -10.0, -math.pi),
        (20.0, 10.0, math.pi),
        True,
    ),
    Game(
        "attack defense",
        AttackDefenseEnv,
        _attack,
        ((1, -1, -1, 1, -1, -1), (-1,), (-1,)),
        (-1.0, -1.0, -math.pi, -1.0, -1.0, -math.pi),
        (1.0, 1.0, math.pi, 1.0, 1.0, math.pi),
        True,
    ),
    Game(
        "bicycle",
        lambda *args, **settings: BicycleEnv(
            *args,
            **{
                "max_steering_rate": 1.0,
                "boxes": [(2.0, 0.0, 0.25, 0.1), (5.0, 0.3, 0.2, 0.1), (5.0, -0.3, 0.2, 0.1)],
                **settings,
            },
        ),
        _bicycle,
        ((1, -1, 1, -1, -1), (1, -1), (1, -1, 1, -1, -1)),
        (0.0, -0.6, 0.8, -math.pi, -0.2),
        (6.0, 0.6, 1.6, math.pi, 0.2),
        False,
    ),
)
"""Every game with both players, on a track whose boxes are their own mirror image."""
