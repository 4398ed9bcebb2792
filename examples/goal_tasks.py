"""The tasks of hindsight_prioritized.py: an environment whose goal is in its state, and how hindsight relabels it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import mujoco
import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import DoubleToFloat, EnvBase, GymEnv, TransformedEnv

from torchrl_safety.data import GoalCondition
from torchrl_safety.envs import BitFlipEnv, GoalDoubleIntegratorEnv
from torchrl_safety.objectives import Backup, DiscountedReturnBackup, ReachAvoidBackup


class Task(NamedTuple):
    """A problem whose goal is part of the state."""

    env: EnvBase
    backup: Backup
    inputs: list[str]
    """What the networks read."""
    relabel: dict[str, Any]
    """Arguments of HindsightTransform."""


def make_task(cfg: DictConfig, *, num_envs: int, seed: int, **settings: Any) -> Task:
    """The task that ``cfg.env`` describes; `settings` take the place of entries of it."""
    settings = {**{key: value for key, value in cfg.env.items() if key not in ("name", "grid")}, **settings}
    return TASKS[cfg.env.name](settings, num_envs, seed, cfg.device)


def _bit_flip(settings: dict[str, Any], num_envs: int, seed: int, device: str) -> Task:
    return _reach(BitFlipEnv(num_envs, seed=seed, device=device, **settings), 0.5, ends_at_goal=True)


def _robot(settings: dict[str, Any], num_envs: int, seed: int, device: str) -> Task:
    """An environment of the Gymnasium-Robotics kind: the three entries of a goal, and a clock."""
    threshold, ends_at_goal, id = (settings.pop(key) for key in ("threshold", "ends_at_goal", "id"))
    if package := settings.pop("package"):
        try:
            importlib.import_module(package)  # which registers its environments
        except ModuleNotFoundError as error:
            raise ValueError(f"{id} needs {package}: pip install 'torchrl-safety[robotics]' ({error})") from error
    env = TransformedEnv(GymEnv(id, device=device, categorical_action_encoding=True, **settings), DoubleToFloat())
    env.set_seed(seed)
    return _reach(env, threshold, ends_at_goal=ends_at_goal)


def _reach(env: EnvBase, threshold: float, *, ends_at_goal: bool) -> Task:
    """Being at the goal is worth 0, any other step -1."""

    def reached(transition: TensorDictBase) -> Tensor:
        following = transition["next"]
        away = following["achieved_goal"] - following["desired_goal"]
        return torch.linalg.vector_norm(away, dim=-1, keepdim=True) <= threshold

    def reward(transition: TensorDictBase) -> Tensor:
        return reached(transition).to(transition["next", "reward"].dtype) - 1

    relabel = {"reward_fn": reward, "goal_conditions": GoalCondition.gymnasium()}
    if ends_at_goal:
        relabel["terminated_fn"] = reached
    return Task(env, DiscountedReturnBackup(), ["observation", "desired_goal"], relabel)


def _goal_double_integrator(settings: dict[str, Any], num_envs: int, seed: int, device: str) -> Task:
    env = GoalDoubleIntegratorEnv(num_envs, seed=seed, device=device, **settings)

    def target_margin(transition: TensorDictBase) -> Tensor:
        return env.target_margin(transition["next", "observation"])

    condition = GoalCondition("observation", [0], "observation", [2])
    relabel: dict[str, Any] = {"reward_fn": None, "target_margin_fn": target_margin, "goal_conditions": condition}
    if env.end_criterion == "reach_avoid":
        relabel["terminated_fn"] = lambda transition: transition["next", "target_margin"] >= 0
    return Task(env, ReachAvoidBackup(), ["observation"], relabel)


TASKS: dict[str, Callable[[dict[str, Any], int, int, str], Task]] = {
    "bit_flip": _bit_flip,
    "fetch_reach": _robot,
    "point_maze": _robot,
    "goal_double_integrator": _goal_double_integrator,
}
SIMULATED = tuple(name for name, make in TASKS.items() if make is _robot)
"""Tasks that run one simulator, and whose state a checkpoint keeps by :class:`Simulator`."""


class Simulator:
    """What a checkpoint must know of a Gymnasium environment on MuJoCo: physics, goal, clock and random numbers."""

    def __init__(self, env: TransformedEnv) -> None:
        self.gym = env.base_env._env
        self.core = self.gym.unwrapped
        clock = self.gym
        while not hasattr(clock, "_elapsed_steps"):
            clock = clock.env  # an environment without a clock would never end
        self.clock = clock

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        core, kind = self.core, mujoco.mjtState.mjSTATE_INTEGRATION
        physics = np.empty(mujoco.mj_stateSize(core.model, kind))
        mujoco.mj_getState(core.model, core.data, physics, kind)
        return {
            "physics": torch.from_numpy(physics),
            "goal": torch.from_numpy(np.array(core.goal)),
            "steps": self.clock._elapsed_steps,
            "random": core.np_random.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        core, kind = self.core, mujoco.mjtState.mjSTATE_INTEGRATION
        physics = state["physics"].cpu().numpy()
        mujoco.mj_setState(core.model, core.data, physics, kind)
        mujoco.mj_forward(core.model, core.data)  # which disturbs the warm start
        mujoco.mj_setState(core.model, core.data, physics, kind)
        core.goal = state["goal"].cpu().numpy()
        self.clock._elapsed_steps = state["steps"]
        core.np_random.bit_generator.state = state["random"]
