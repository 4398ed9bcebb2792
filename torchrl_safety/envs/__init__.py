"""Native environments with margins and exact solutions."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_safety.envs.base import NativeEnv
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

__all__ = [
    "BitFlipEnv",
    "CartPoleEnv",
    "DoubleIntegratorEnv",
    "DubinsCarEnv",
    "GoalDoubleIntegratorEnv",
    "LunarLanderEnv",
    "NativeEnv",
    "PendulumEnv",
    "PointMassEnv",
    "SafetyGymEnv",
    "check_safety_env",
]

# Loaded on first use: torchrl.envs takes seconds to import and pulls in mujoco where it is installed.
_HOMES = {
    "BitFlipEnv": "bit_flip",
    "CartPoleEnv": "cartpole",
    "DoubleIntegratorEnv": "double_integrator",
    "DubinsCarEnv": "dubins_car",
    "GoalDoubleIntegratorEnv": "goal_double_integrator",
    "LunarLanderEnv": "lunar_lander",
    "NativeEnv": "base",
    "check_safety_env": "checks",
    "PendulumEnv": "pendulum",
    "PointMassEnv": "point_mass",
    "SafetyGymEnv": "gym",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: choose one of {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
