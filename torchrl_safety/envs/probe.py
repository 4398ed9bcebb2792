"""Rolling an environment out without leaving traces, and looking inside its wrappers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase, unravel_key
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import TensorSpec
from torchrl.envs import Compose, EnvBase, GymLikeEnv, Transform, TransformedEnv

from torchrl_safety.envs.base import NativeEnv
from torchrl_safety.envs.gym import SafetyGymEnv

__all__ = [
    "RAISED",
    "WHERE",
    "Rollout",
    "base_env",
    "gym_layers",
    "leaf_specs",
    "one_line",
    "reward_keys",
    "roll_out",
    "transforms_of",
    "undisturbed",
]

# What an environment that is not wired properly is seen to raise; anything else is left to its traceback.
RAISED = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
RESETS = 3
WHERE = ("at reset", "after a step")


class Rollout(NamedTuple):
    """What a roll-out gave, step by step; its readers return None where a key is missing or its shape varies."""

    resets: list[TensorDictBase]
    steps: list[TensorDictBase]
    """Each with its root and `"next"`."""
    follows: list[TensorDictBase]
    """The roots that came after the steps: of the same episode, or of a new one."""

    def at_reset(self, key: NestedKey) -> Tensor | None:
        """`[R, *B, ...]` after every reset."""
        return _stacked(self.resets, key)

    def before(self, key: NestedKey) -> Tensor | None:
        """`[T, *B, ...]` at the root of every step."""
        return _stacked(self.steps, key)

    def after(self, key: NestedKey) -> Tensor | None:
        """`[T, *B, ...]` after every step."""
        return _stacked(self.steps, unravel_key(("next", key)))

    def follow(self, key: NestedKey) -> Tensor | None:
        """`[T, *B, ...]` at the root that came next."""
        return _stacked(self.follows, key)


def _stacked(tensordicts: Sequence[TensorDictBase], key: NestedKey) -> Tensor | None:
    values = [tensordict.get(key, None) for tensordict in tensordicts]
    if not values or not all(isinstance(value, Tensor) for value in values):
        return None
    return torch.stack(values) if len({(value.shape, value.dtype) for value in values}) == 1 else None


def base_env(env: EnvBase) -> EnvBase:
    """The environment inside all transforms."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def leaf_specs(env: EnvBase) -> dict[NestedKey, TensorSpec]:
    """The spec of every observation and reward."""
    specs = [*env.full_observation_spec.items(True, True), *env.full_reward_spec.items(True, True)]
    return {unravel_key(key): spec for key, spec in specs}


def reward_keys(env: EnvBase) -> set[NestedKey]:
    """The keys under which a step writes rewards."""
    return {unravel_key(key) for key in env.reward_keys}


def transforms_of(env: EnvBase) -> Iterator[Transform]:
    """Every transform around the environment, from the innermost to the outermost."""

    def flat(transform: Transform) -> Iterator[Transform]:
        if isinstance(transform, Compose):
            for part in transform.transforms:
                yield from flat(part)
        else:
            yield transform

    if isinstance(env, TransformedEnv):
        yield from transforms_of(env.base_env)
        yield from flat(env.transform)


def gym_layers(env: EnvBase) -> Iterator[Any]:
    """The Gymnasium environment within, from its outermost wrapper to its core; nothing for other environments."""
    base = base_env(env)
    layer = base._env if isinstance(base, GymLikeEnv) else base.envs[0] if isinstance(base, SafetyGymEnv) else None
    while layer is not None:
        yield layer
        layer = getattr(layer, "__dict__", {}).get("env")


@contextmanager
def undisturbed(env: EnvBase, seed: int) -> Iterator[None]:
    """Seeds torch, and puts back the random states of torch, NumPy, a native and a Gymnasium environment."""
    base, logger = base_env(env), logging.getLogger("torchrl")
    state = base.get_extra_state() if isinstance(base, NativeEnv | SafetyGymEnv) else None
    core: Any = getattr(next(gym_layers(env), None), "unwrapped", None)
    draws = getattr(core, "np_random", None)
    drawn: Any = draws.bit_generator.state if isinstance(draws, np.random.Generator) else None
    on_gpu = env.device is not None and env.device.type == "cuda"
    level, numpy_state = logger.level, np.random.get_state()  # noqa: NPY002
    logger.setLevel(logging.WARNING)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[env.device] if on_gpu else []):
            torch.default_generator.manual_seed(seed)
            if on_gpu:
                with torch.cuda.device(env.device):
                    torch.cuda.manual_seed(seed)
            yield
    finally:
        logger.setLevel(level)
        np.random.set_state(numpy_state)  # noqa: NPY002
        if isinstance(draws, np.random.Generator):
            draws.bit_generator.state = drawn
            core.np_random = draws  # seeding had put another generator in its place
        if isinstance(base, NativeEnv | SafetyGymEnv) and state is not None:
            base.set_extra_state(state)


def roll_out(env: EnvBase, steps: int, seed: int) -> tuple[Rollout, list[str]]:
    """Some resets and `steps` steps of random actions; and what was raised on the way, a sentence each."""
    data = Rollout([], [], [])
    unseeded: list[str] = []
    try:
        env.set_seed(seed)
    except RAISED as error:
        unseeded = [_raised(f"env.set_seed({seed})", error)]
    try:
        for _ in range(RESETS):
            data.resets.append(env.reset().clone())
    except RAISED as error:
        return data, [_raised("env.reset()", error)]
    tensordict = data.resets[-1].clone()
    for step in range(steps):
        try:
            transition, tensordict = env.step_and_maybe_reset(env.rand_action(tensordict))
        except RAISED as error:
            return data, [*unseeded, _raised(f"env.step_and_maybe_reset(...) of step {step}", error)]
        data.steps.append(transition.clone())
        data.follows.append(tensordict.clone())
    return data, unseeded


def _raised(call: str, error: Exception) -> str:
    plain_number = isinstance(error, AttributeError) and "no attribute 'dtype'" in str(error)
    remedy = (
        "an info entry is a plain Python number, emit np.array([value], np.float32)"
        if plain_number
        else "call it by hand to see where"
    )
    return f"{call} raises {type(error).__name__}, {one_line(error)}: {remedy}"


def one_line(error: Exception) -> str:
    """The message of an error, in one line of moderate length."""
    line = " ".join(str(error).split())
    return line if len(line) <= 300 else f"{line[:300]} ..."
