"""The environments of the examples for control, and how a policy is measured in each."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import nn
from torchrl.data import Categorical
from torchrl.envs import EnvBase

from torchrl_safety.envs import (
    AttackDefenseEnv,
    BicycleEnv,
    CartPoleEnv,
    DoubleIntegratorEnv,
    DubinsCarEnv,
    LunarLanderEnv,
    PendulumEnv,
    PointMassEnv,
    PursuitEvasionEnv,
    SafetyGymEnv,
)
from torchrl_safety.modules import RainbowNetwork, greedy_policy
from torchrl_safety.objectives import Backup
from torchrl_safety.trainers import (
    EpisodeEvaluator,
    Evaluation,
    ExactSetEvaluator,
    SetEvaluation,
    SetMetrics,
    evaluation_mode,
    plot_value_distribution,
    save_gif,
)

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
GAMES: dict[str, Callable[..., EnvBase]] = {
    "double_integrator": DoubleIntegratorEnv,
    "pursuit_evasion": PursuitEvasionEnv,
    "attack_defense": AttackDefenseEnv,
    "bicycle": BicycleEnv,
}
"""Those of two players, for game_safety.py."""
ENDS = {"avoid": "failure", "reach_avoid": "reach_avoid", "return": "failure"}
"""What ends the roll-outs that are measured in a native environment."""
LEVELS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Shares of the mass, counted from the worst, at which a value distribution is read."""
SIDE_BY_SIDE = 20
"""The most Gymnasium environments that a policy is measured in at once."""


def make_env(cfg: DictConfig, num_envs: int, **settings: Any) -> EnvBase:
    """The environment of ``cfg.env``; `settings` take the place of entries of it."""
    given = {key: value for key, value in cfg.env.items() if key not in ("name", "grid", "plane", "scale", "support")}
    settings = {"seed": cfg.seed, "device": cfg.device, **given, **settings}
    make, problem = {**ENVS, **GAMES}[cfg.env.name], cfg.problem.name
    if cfg.env.name in GYMNASIUM:
        return make_gymnasium(cfg, num_envs, settings)
    if problem == "return":
        problem = "avoid"  # its reward is there in either
    return make(num_envs, problem=problem, **settings)


def make_gymnasium(cfg: DictConfig, num_envs: int, settings: dict[str, Any]) -> EnvBase:
    """A Gymnasium environment, from which a value of single actions can be learned for ``cfg.problem``."""
    name, problem = cfg.env.name, cfg.problem.name
    given = {"problem": problem} if name != "gymnasium" else {"env": settings.pop("id")}
    try:
        env = ENVS[name](num_envs=num_envs, **given, **settings)
        start = env.reset()
    except (TypeError, AssertionError, KeyError) as error:  # with which Gymnasium and its environments refuse settings
        raise ValueError(f"env={name} cannot be made or begun ({error.args[0]}): correct its settings") from error
    env.set_seed(settings["seed"])
    if not isinstance(env.action_spec, Categorical):
        raise ValueError(f"env={name} has continuous actions: choose one with discrete actions, e.g. env.id=Acrobot-v1")
    shape = tuple(env.observation_spec["observation"].shape[1:]) if "observation" in start else ()
    if len(shape) == 3 and shape[2] < min(shape[:2]):
        raise ValueError(
            f"env={name} has images of shape {shape}, (height, width, channels), and the network reads (channels, "
            "height, width): register it with a wrapper that transposes them, gymnasium.wrappers.TransformObservation"
        )
    margins = {"avoid": ["safety_margin"], "reach_avoid": ["safety_margin", "target_margin"], "return": []}[problem]
    missing = [key for key in ("observation", *margins) if key not in start]
    if missing:
        raise ValueError(
            f"env={name} has no {' and no '.join(missing)}, which problem={problem} needs: name an entry of info with "
            f"env.{missing[0]}=..., or choose problem=return"
            if missing[0] != "observation"
            else f"env={name} has the observations {sorted(env.observation_spec.keys())}, not one: choose another"
        )
    return env


class ExactSet:
    """The learned set against the exact one, and roll-outs from inside it."""

    def __init__(self, cfg: DictConfig, backup: Backup, **settings: Any) -> None:
        self.labels = cfg.env.grid.labels
        self.measure = ExactSetEvaluator(
            make_env(cfg, cfg.rollouts, max_steps=None, end_criterion=ENDS[cfg.problem.name], **settings),
            backup,
            low=cfg.env.grid.low,
            high=cfg.env.grid.high,
            grid=cfg.env.grid.nodes,
            level=cfg.problem.level if "level" in cfg.problem else 0.0,  # in the files of a script that asks for one
            rollout_steps=cfg.rollout_steps,
            seed=cfg.seed,
        )

    def __call__(self, policy: nn.Module, next_value: Callable[[torch.Tensor], torch.Tensor]) -> SetEvaluation:
        return self.measure(policy, next_value)

    def conclude(self, found: SetEvaluation, network: RainbowNetwork, title: str, folder: Path) -> dict[str, Figure]:
        """Pictures of what was found; of a value distribution also how the set moves with the caution of its reader."""
        if network.support is not None:
            with evaluation_mode(network), (folder / "levels.csv").open("w", newline="") as file:
                table = csv.DictWriter(file, ["reading", "level", *SetMetrics._fields])
                table.writeheader()
                table.writerows(self.read_carefully(network))
        return {"value_map": self.picture(found, title)}

    def picture(self, found: SetEvaluation, title: str) -> Figure:
        """The learned value and both sets."""
        return self.measure.picture(found, labels=self.labels, title=title)

    def read_carefully(self, network: RainbowNetwork) -> Iterator[dict[str, str | float]]:
        """The set where a quantile, or the mean of the worst share, of the greedy action's value is at least 0."""
        for reading in ("quantile", "cvar"):
            for level in LEVELS:

                def value(states: torch.Tensor, reading: str = reading, level: float = level) -> torch.Tensor:
                    logits = network.logits(states)
                    mean = logits.softmax(-1) @ network.support
                    greedy = mean.argmax(-1)[..., None, None].expand(*mean.shape[:-1], 1, network.atoms)
                    return getattr(network, reading)(logits.gather(-2, greedy), level)

                metrics = self.measure.measure_set(value)[1]
                yield {"reading": reading, "level": level, **metrics._asdict()}


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

    def conclude(self, found: Evaluation, network: RainbowNetwork, title: str, folder: Path) -> dict[str, Figure]:
        """Pictures of the returns, of the value distribution at a start, and of one episode as ``policy.gif``."""
        figure = Figure(layout="constrained")
        plot = figure.subplots()
        assert found.returns is not None
        plot.hist(found.returns.tolist(), bins=20)
        plot.set(xlabel="return", ylabel="episodes", title=f"{title}mean return {found.returns.mean():.1f}")
        figures = {"returns": figure}
        with evaluation_mode(network):
            if network.support is not None:
                start = self.measure.env.reset()["observation"][0]
                probs = network.logits(start).softmax(-1)
                figures["value_distribution"] = plot_value_distribution(network.support, probs, title=title)
            if self.cfg.video:
                self.film(greedy_policy(network), folder / "policy.gif")
        return figures

    def film(self, policy: nn.Module, path: Path) -> None:
        """One episode of the policy, every second step of it, as an animated picture."""
        env = make_env(self.cfg, 1, render_mode="rgb_array", seed=self.cfg.seed + 1_000_000)
        state, pictures = env.reset(), []
        for step in range(self.cfg.rollout_steps):
            if step % 2 == 0:
                pictures.append(env.envs[0].render()[::2, ::2])
            transition, state = env.step_and_maybe_reset(policy(state))
            if transition["next", "done"].any():
                break
        save_gif(pictures, path)


def make_measure(cfg: DictConfig, backup: Backup) -> ExactSet | Episodes:
    """What measures a policy in the environment of ``cfg.env``."""
    return ExactSet(cfg, backup) if cfg.env.name in NATIVE else Episodes(cfg)
