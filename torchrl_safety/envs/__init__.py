"""Native environments with margins and exact solutions."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_safety.envs.base import NativeEnv
    from torchrl_safety.envs.double_integrator import DoubleIntegratorEnv

__all__ = ["DoubleIntegratorEnv", "NativeEnv"]

# Loaded on first use: torchrl.envs takes seconds to import and pulls in mujoco where it is installed.
_HOMES = {"DoubleIntegratorEnv": "double_integrator", "NativeEnv": "base"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: choose one of {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
