"""The environments of rainbow_safety.py, and how a policy is measured in each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import nn
from torchrl.envs import EnvBase

from torchrl_safety.envs import (
    CartPoleEnv,
    DoubleIntegratorEnv,
    DubinsCarEnv,
    LunarLanderEnv,
    PendulumEnv,
    PointMassEnv,
    SafetyGymEnv,
)
from torchrl_safety.objectives import Backup
from torchrl_safety.trainers import EpisodeEvaluator, Evaluation, ExactSetEvaluator, SetEvaluation

NATIVE: dict[str, Callable[..., EnvBase]] = {
    "double_integrator": DoubleIntegratorEnv,
    "dubins_car": DubinsCarEnv,
    "pendulum": PendulumEnv,
    "point_mass": PointMassEnv,
}
GYMNASIUM: dict[str, Callable[..., EnvBase]] = {
    "lunar_lander": LunarLanderEnv,
    "cartpole": CartPoleEnv,
    "gymnasium": SafetyGymEnv,
}
ENVS = {**NATIVE, **GYMNASIUM}
ENDS = {"avoid": "failure", "reach_avoid": "reach_avoid", "return": "failure"}
"""What ends the roll-outs that are measured in a native environment."""
SIDE_BY_SIDE = 20
"""The most Gymnasium environments that a policy is measured in at once."""


def make_env(cfg: DictConfig, num_envs: int, **settings: Any) -> EnvBase:
    """The environment of ``cfg.env``; `settings` take the place of entries of it."""
    given = {key: value for key, value in cfg.env.items() if key not in ("name", "grid", "support")}
    settings = {"seed": cfg.seed, "device": cfg.device, **given, **settings}
    make, problem = ENVS[cfg.env.name], cfg.problem.name
    if cfg.env.name == "gymnasium":
        return make(settings.pop("id"), num_envs, **settings)
    if cfg.env.name in NATIVE and problem == "return":
        problem = "avoid"  # its reward is there in either
    return make(num_envs, problem=problem, **settings)


class ExactSet:
    """The learned set against the exact one, and roll-outs from inside it."""

    def __init__(self, cfg: DictConfig, backup: Backup) -> None:
        self.labels = cfg.env.grid.labels
        self.measure = ExactSetEvaluator(
            make_env(cfg, cfg.rollouts, max_steps=None, end_criterion=ENDS[cfg.problem.name]),
            backup,
            low=cfg.env.grid.low,
            high=cfg.env.grid.high,
            grid=cfg.env.grid.nodes,
            level=cfg.problem.level,
            rollout_steps=cfg.rollout_steps,
            seed=cfg.seed,
        )

    def __call__(self, policy: nn.Module, next_value: Callable[[torch.Tensor], torch.Tensor]) -> SetEvaluation:
        return self.measure(policy, next_value)

    def figures(self, found: SetEvaluation, title: str) -> dict[str, Figure]:
        """Pictures of what was found."""
        return {"value_map": self.measure.picture(found, labels=self.labels, title=title)}


class Episodes:
    """Return, and safe and success rates where there are margins, over the same episodes each time."""

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        env = make_env(cfg, min(cfg.rollouts, SIDE_BY_SIDE))
        is_return = cfg.problem.name == "return"
        self.measure = EpisodeEvaluator(
            env,
            episodes=cfg.rollouts,
            max_steps=cfg.rollout_steps,
            seed=cfg.seed + 1_000_000,  # far from those of training
            safety_margin=None if is_return else "safety_margin",
            reward="reward",
            state_key=None,
        )

    def __call__(self, policy: nn.Module, next_value: Callable[[torch.Tensor], torch.Tensor]) -> Evaluation:
        return self.measure(policy)

    def figures(self, found: Evaluation, title: str) -> dict[str, Figure]:
        """Pictures of what was found: how the returns are distributed."""
        figure = Figure(layout="constrained")
        plot = figure.subplots()
        assert found.returns is not None
        plot.hist(found.returns.tolist(), bins=20)
        plot.set(xlabel="return", ylabel="episodes", title=f"{title}mean return {found.returns.mean():.1f}")
        return {"returns": figure}


def make_measure(cfg: DictConfig, backup: Backup) -> ExactSet | Episodes:
    """What measures a policy in the environment of ``cfg.env``."""
    return ExactSet(cfg, backup) if cfg.env.name in NATIVE else Episodes(cfg)
