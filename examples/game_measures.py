"""How far a learned game is right: its set against an exact one, a grid's or its own players, and its worst opponents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from control_tasks import ENDS, ExactSet, make_env
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import Tensor, nn
from torchrl.envs import EnvBase

from torchrl_safety.objectives import Backup
from torchrl_safety.trainers import evaluate, evaluation_mode, plot_value_map, set_metrics, state_value

Value = Callable[[Tensor], Tensor]
"""Critic values `[*B, 1]` of states `[*B, S]`."""
CHUNK = 4_096
"""The most states that a network is asked about at once."""


def own_value(env: EnvBase, backup: Backup, value: Value, states: Tensor) -> Tensor:
    """The learned value `[N]` of states `[N, S]` themselves; the set is where it is at least 0."""
    margins = {"safety_margin": env.safety_margin, "target_margin": env.target_margin}
    parts = []
    for part in states.split(CHUNK):
        signals = {name: margins[name](part) for name in backup.signals}
        parts.append(state_value(backup, signals, value(part)).squeeze(-1))
    return torch.cat(parts)


class GridSolution(NamedTuple):
    """The sign of the value of the pursuit on a grid, by someone else."""

    axes: list[Tensor]
    value: Tensor
    """`[*grid]`, in multiples of the capture radius."""

    @classmethod
    def load(cls, path: str | Path, env: EnvBase) -> GridSolution:
        """Reads V, lo, hi of the game (v, w, R) = (5, 1, 5), in the lengths of `env`."""
        if not np.isclose(env.speed, env.max_turn_rate * env.capture_radius):
            raise ValueError(
                f"solution={path} is that of v = w R, but the environment has speed={env.speed}, "
                f"max_turn_rate={env.max_turn_rate}, capture_radius={env.capture_radius}: leave it out"
            )
        scale = env.capture_radius / 5
        with np.load(path) as file:
            value = torch.as_tensor(file["V"], dtype=env.dtype) * scale
            ends = list(zip(file["lo"].tolist(), file["hi"].tolist(), value.shape))
        # The heading is periodic and its last node is one spacing before 2π.
        axes = [torch.linspace(low, high, n, dtype=env.dtype) * scale for low, high, n in ends[:2]]
        axes.append(torch.linspace(*ends[2][:2], ends[2][2] + 1, dtype=env.dtype)[:-1])
        return cls(axes, value)

    def states(self) -> Tensor:
        """The nodes `[*grid, 3]`, headings in [-π, π)."""
        states = torch.stack(torch.meshgrid(*self.axes, indexing="ij"), -1)
        states[..., 2] = (states[..., 2] + torch.pi).remainder(2 * torch.pi) - torch.pi
        return states


class PlayedSet:
    """The learned set where no exact one is known: who wins from the states that it claims, and from the others.

    Starts are always the same, drawn as the environment draws them, of those that have not failed and are not in the
    target. The scores: `claimed`, the share of them in the learned set; `safe_rate` and `success_rate` of both
    players' roll-outs from there; `lost_elsewhere`, the share of the other starts from which the controller lost. With
    a solution on a grid also how the set compares with that.
    """

    class Found(NamedTuple):
        scores: dict[str, float | None]
        value: Tensor
        """On the plane that is drawn, `[n, m]`."""

    def __init__(self, cfg: DictConfig, backup: Backup, **settings) -> None:
        self.cfg, self.backup = cfg, backup
        self.env = make_env(cfg, cfg.rollouts, max_steps=None, end_criterion=ENDS[cfg.problem.name], **settings)
        states = self.env.sample_states(20 * cfg.rollouts, torch.Generator().manual_seed(cfg.seed))
        playable = self.env.safety_margin(states) >= 0
        if "target_margin" in backup.signals:
            playable &= self.env.target_margin(states) < 0
        self.starts = states[playable.squeeze(-1)][: cfg.rollouts]
        self.solution = None if cfg.solution is None else GridSolution.load(cfg.solution, self.env)
        plane = cfg.env.plane
        counts = [plane.nodes] * 2 if isinstance(plane.nodes, int) else plane.nodes
        self.axes = [torch.linspace(*ends) for ends in zip(plane.low, plane.high, counts)]
        self.plane = torch.tensor(list(plane.through), dtype=self.env.dtype).repeat(*counts, 1)
        self.plane[..., :2] = torch.stack(torch.meshgrid(*self.axes, indexing="ij"), -1)

    def __call__(self, policy: nn.Module, value: Value) -> PlayedSet.Found:
        with evaluation_mode(policy):
            claimed = own_value(self.env, self.backup, value, self.starts) >= self.cfg.problem.level
            drawn = own_value(self.env, self.backup, value, self.plane.flatten(0, 1)).reshape(self.plane.shape[:2])
            scores = {} if self.solution is None else self.compare(value)._asdict()
        played = evaluate(self.env, policy, starts=self.starts, max_steps=self.cfg.rollout_steps)
        won = played.safe if self.cfg.problem.name == "avoid" else played.success
        scores |= {
            "claimed": share(claimed),
            "safe_rate": share(played.safe[claimed]),
            "success_rate": None if played.success is None else share(played.success[claimed]),
            "lost_elsewhere": share(~won[~claimed]),
        }
        return self.Found(scores, drawn)

    def compare(self, value: Value):
        """The learned set against the grid's, node by node."""
        states = self.solution.states()
        found = own_value(self.env, self.backup, value, states.flatten(0, -2)).reshape(states.shape[:-1])
        return set_metrics(found >= self.cfg.problem.level, self.solution.value >= 0)

    def picture(self, found: PlayedSet.Found, title: str) -> Figure:
        """The value on the plane of ``cfg.env.plane``."""
        return plot_value_map(
            tuple(self.axes), found.value, level=self.cfg.problem.level, labels=tuple(self.cfg.env.plane.labels), title=title
        )


def share(true: Tensor) -> float | None:
    """Of the true entries; None of nothing."""
    return true.double().mean().item() if len(true) else None


def make_measure(cfg: DictConfig, backup: Backup, **settings) -> ExactSet | PlayedSet:
    """What measures a game in the environment of ``cfg.env``."""
    return (ExactSet if "grid" in cfg.env else PlayedSet)(cfg, backup, **settings)
