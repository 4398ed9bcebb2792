"""What shared tests parametrize over: a new backup joins `BACKUPS` and `OPERATORS` and inherits every law."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from hypothesis import settings
from torch import Tensor

from torchrl_safety.objectives import (
    AvoidBackup,
    Backup,
    DiscountedReturnBackup,
    LipschitzReachAvoidBackup,
    ReachAvoidBackup,
    ReachBackup,
)

SIGNALS = ("safety_margin", "target_margin", "reward")

BACKUPS: tuple[tuple[Backup, tuple[str, ...]], ...] = (
    (AvoidBackup(), ("safety_margin",)),
    (ReachBackup(), ("target_margin",)),
    (ReachAvoidBackup(), ("safety_margin", "target_margin")),
    (ReachAvoidBackup(terminal_type="g"), ("safety_margin", "target_margin")),
    (LipschitzReachAvoidBackup(), ("safety_margin", "target_margin")),
    (DiscountedReturnBackup(), ("reward",)),
)
"""`(backup, names of the signals it reads)`."""


CASES: list[dict] = json.loads((Path(__file__).parent / "cases" / "backups.json").read_text())
"""Numeric cases; lists run over the time steps of one trajectory.

`td0[p][t]`, `lambda_return[p][t]`; `n_step[p]`: the window of the first k steps, with its own `terminated` and
`bootstrap`; `categorical[p]`: every atom through the map of the first step, not terminated, and projected.
"""

CASE_BACKUPS: dict[str, Backup] = {
    "avoid": AvoidBackup(),
    "reach": ReachBackup(),
    "reach_avoid": ReachAvoidBackup(),
    "lipschitz": LipschitzReachAvoidBackup(),
    "return": DiscountedReturnBackup(),
}
"""The problems p of the cases."""


class Operator(NamedTuple):
    """A backup in plain Python floats, written from the papers' equations and not from the algebra."""

    running: Callable[[float, float, float, float, float], float]
    terminal: Callable[[float, float, float], float]

    def __call__(self, signals: dict[str, float], value: float, gamma: float, terminated: bool = False) -> float:
        g, l, r = (float(signals.get(name, float("nan"))) for name in SIGNALS)  # noqa: E741
        return self.terminal(g, l, r) if terminated else self.running(g, l, r, value, gamma)


def _reach_avoid(g, l, r, v, gamma):  # noqa: E741
    return (1 - gamma) * min(l, g) + gamma * min(g, max(l, v))


OPERATORS: dict[str, Operator] = {
    "AvoidBackup()": Operator(
        lambda g, l, r, v, gamma: (1 - gamma) * g + gamma * min(g, v),  # noqa: E741
        lambda g, l, r: g,  # noqa: E741
    ),
    "ReachBackup()": Operator(
        lambda g, l, r, v, gamma: (1 - gamma) * l + gamma * max(l, v),  # noqa: E741
        lambda g, l, r: l,  # noqa: E741
    ),
    "ReachAvoidBackup(terminal_type='all')": Operator(_reach_avoid, lambda g, l, r: min(l, g)),  # noqa: E741
    "ReachAvoidBackup(terminal_type='g')": Operator(_reach_avoid, lambda g, l, r: g),  # noqa: E741
    "LipschitzReachAvoidBackup()": Operator(
        lambda g, l, r, v, gamma: min(g, max(l, gamma * v)),  # noqa: E741
        lambda g, l, r: min(l, g),  # noqa: E741
    ),
    "DiscountedReturnBackup()": Operator(
        lambda g, l, r, v, gamma: r + gamma * v,  # noqa: E741
        lambda g, l, r: r,  # noqa: E741
    ),
}
"""`repr(backup)` -> the same operator, recomputed."""

LAWS = settings(max_examples=60, deadline=None, derandomize=True)
"""The hypothesis profile of the shared laws: quick and repeatable."""


def random_signals(
    names: tuple[str, ...], shape: tuple[int, ...], *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Normal signals of this shape, among them target margins above the safety margin."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name in names}
