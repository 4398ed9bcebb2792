"""The Gymnasium environments of a batch one by one: made, and their spaces and margins read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from torchrl_safety.envs.settings import check_choice, check_count

Margin = Callable[[Any, Any, Mapping[str, Any]], float]
ENDS = ("env", "failure", "reach_avoid")


def check_settings(
    num_envs: int,
    margins: Mapping[str, Any],
    max_steps: int | None,
    end_criterion: str,
    seed: int | None,
    dtype: torch.dtype,
) -> None:
    check_count("num_envs", num_envs, "the number of copies that run side by side")
    if max_steps is not None:
        check_count("max_steps", max_steps, "or None for the time limit of the environment")
    for name, margin in margins.items():
        if not (margin is None or isinstance(margin, str) or callable(margin)):
            raise ValueError(f"{name}={margin!r} must be a function of (env, observation, info) or a name in info")
    check_choice("end_criterion", end_criterion, ENDS)
    needed = {"env": (), "failure": ("safety_margin",), "reach_avoid": ("safety_margin", "target_margin")}
    missing = [name for name in needed[end_criterion] if margins[name] is None]
    if missing:
        raise ValueError(f"end_criterion={end_criterion!r} needs {' and '.join(missing)}: pass it, or use 'env'")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise ValueError(f"seed={seed!r} must be a whole number of at least 0, or None to draw one")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype={dtype} must be torch.float32 or torch.float64, the types that Gymnasium computes in")


def make_envs(env: str | Callable[..., Any], num_envs: int, max_steps: int | None, settings: dict) -> list[Any]:
    try:
        import gymnasium
    except ImportError as error:
        raise ImportError("SafetyGymEnv needs Gymnasium: pip install 'torchrl-safety[gym]'") from error
    if isinstance(env, str):
        limit: dict[str, Any] = {} if max_steps is None else {"max_episode_steps": max_steps}
        try:
            return [gymnasium.make(env, **limit, **settings) for _ in range(num_envs)]
        except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
            raise ImportError(f"env={env!r} lacks a dependency ({error}): pip install 'torchrl-safety[gym]'") from error
        except gymnasium.error.Error as error:
            raise ValueError(
                f"env={env!r} cannot be made ({error}): give an id that gymnasium.make takes, or a callable"
            ) from error
    if not callable(env):
        raise ValueError(f"env={env!r} must be an id, such as 'CartPole-v1', or a callable that makes an environment")
    made = [env(**settings) for _ in range(num_envs)]
    if not all(isinstance(one, gymnasium.Env) for one in made):
        raise ValueError(f"env={env!r} made a {type(made[0]).__name__}: it must make one gymnasium.Env")
    if len({id(one.unwrapped) for one in made}) < num_envs:
        raise ValueError(f"env={env!r} made the same environment twice: it must make a new one each time")
    return made if max_steps is None else [gymnasium.wrappers.TimeLimit(one, max_steps) for one in made]


def is_discrete(space: Any) -> bool:
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return True
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return False
    raise ValueError(
        f"the action space {space} has no place here: wrap the environment so that it is Discrete or a floating-point "
        "Box"
    )


def layout(space: Any, real: np.dtype, reserved: set[str]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """The shape of one row and the type of every entry of an observation."""
    from gymnasium import spaces

    leaves = dict(space.spaces) if isinstance(space, spaces.Dict) else {"observation": space}
    for name, leaf in leaves.items():
        if name in reserved:
            raise ValueError(f"the observation has an entry {name!r}, which is a key of the environment: rename it")
        if not isinstance(leaf, spaces.Box | spaces.Discrete | spaces.MultiBinary | spaces.MultiDiscrete):
            raise ValueError(
                f"the space of {name!r}, {leaf}, has no place here: flatten it with "
                "gymnasium.wrappers.FlattenObservation"
            )
    return {
        name: (leaf.shape or (1,), real if np.issubdtype(leaf.dtype, np.floating) else np.dtype(leaf.dtype))
        for name, leaf in leaves.items()
    }


def is_made_anew(env: Any) -> bool:
    """Whether a copy of the environment is a new one of the same arguments, which was never reset."""
    from gymnasium.utils import EzPickle

    layers = [env]
    while layers[-1] is not env.unwrapped:
        layers.append(layers[-1].env)
    return any(isinstance(layer, EzPickle) for layer in layers)


def reader(name: str, margin: Margin | str) -> Margin:
    return partial(_read_info, name, margin) if isinstance(margin, str) else margin  # both can be pickled


def _read_info(name: str, entry: str, env: Any, observation: Any, info: Mapping[str, Any]) -> float:
    if entry not in info:
        raise KeyError(
            f"{name}={entry!r} is not in info, which holds {sorted(map(str, info))}: emit it in reset and in step, or "
            f"pass a function as {name}"
        )
    return info[entry]
