"""Safety objectives, replay and networks as TorchRL components."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"
__all__ = ["data", "envs", "modules", "objectives", "trainers"]


def __getattr__(name: str) -> ModuleType:
    # On first use: TorchRL takes seconds to import.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    return import_module(f"{__name__}.{name}")
