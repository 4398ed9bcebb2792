"""Native environments with margins and exact solutions."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_safety.envs.attack_defense import AttackDefenseEnv
    from torchrl_safety.envs.base import NativeEnv
    from torchrl_safety.envs.bicycle import BicycleEnv
    from torchrl_safety.envs.bit_flip import BitFlipEnv
    from torchrl_safety.envs.cartpole import CartPoleEnv
    from torchrl_safety.envs.checks import check_safety_env
    from torchrl_safety.envs.double_integrator import DoubleIntegratorEnv
    from torchrl_safety.envs.dubins_car import DubinsCarEnv
    from torchrl_safety.envs.goal_double_integrator import GoalDoubleIntegratorEnv
    from torchrl_safety.envs.gym import SafetyGymEnv
    from torchrl_safety.envs.lunar_lander import LunarLanderEnv
    from torchrl_safety.envs.pendulum import PendulumEnv
    from torchrl_safety.envs.point_mass import PointMassEnv
    from torchrl_safety.envs.pursuit_evasion import PursuitEvasionEnv
    from torchrl_safety.envs.transforms import SplitPlayers

__all__ = [
    "AttackDefenseEnv",
    "BicycleEnv",
    "BitFlipEnv",
    "CartPoleEnv",
    "DoubleIntegratorEnv",
    "DubinsCarEnv",
    "GoalDoubleIntegratorEnv",
    "LunarLanderEnv",
    "NativeEnv",
    "PendulumEnv",
    "PointMassEnv",
    "PursuitEvasionEnv",
    "SafetyGymEnv",
    "SplitPlayers",
    "check_safety_env",
]

# Loaded on first use: torchrl.envs takes seconds to import and pulls in mujoco where it is installed.
_HOMES = {
    "AttackDefenseEnv": "attack_defense",
    "BicycleEnv": "bicycle",
    "BitFlipEnv": "bit_flip",
    "CartPoleEnv": "cartpole",
    "DoubleIntegratorEnv": "double_integrator",
    "DubinsCarEnv": "dubins_car",
    "GoalDoubleIntegratorEnv": "goal_double_integrator",
    "LunarLanderEnv": "lunar_lander",
    "NativeEnv": "base",
    "PendulumEnv": "pendulum",
    "PointMassEnv": "point_mass",
    "PursuitEvasionEnv": "pursuit_evasion",
    "SafetyGymEnv": "gym",
    "SplitPlayers": "transforms",
    "check_safety_env": "checks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: choose one of {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
