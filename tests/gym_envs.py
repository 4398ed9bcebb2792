"""Gymnasium environments of the tests: one with margins where Gymnasium has room for them, one that counts."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces
from torchrl.data import Unbounded
from torchrl.envs import GymWrapper, default_info_dict_reader


class GymDoubleIntegrator(gymnasium.Env):
    """A unit mass between walls at -1 and 1, pushed by -1, 0 or 1; the reward is g, `info["l_x"]` is l.

    `info["l_x"]` is an array of shape `(1,)`, in `reset` as in `step`. A failure terminates, the clock truncates.
    """

    def __init__(self, *, max_steps: int = 20, dt: float = 0.05, target_radius: float = 0.2) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(3)
        self.max_steps, self.dt, self.target_radius = max_steps, dt, target_radius

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.steps = 0
        self.state = self.np_random.uniform([-1.0, -2.2], [1.0, 2.2])
        return self.observation(), self.info()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        position, velocity = self.state
        push = float(action) - 1
        position += velocity * self.dt + push * self.dt**2 / 2
        self.state = np.array([position, velocity + push * self.dt])
        self.steps += 1
        margin = 1 - abs(float(position))
        terminated = margin < 0
        truncated = self.steps >= self.max_steps and not terminated
        return self.observation(), margin, terminated, truncated, self.info()

    def observation(self) -> np.ndarray:
        return self.state.astype(np.float32)

    def target_margin(self) -> float:
        return self.target_radius - float(np.abs(self.state).max())

    def info(self) -> dict:
        return {"l_x": np.array([self.target_margin()], np.float32)}


MARGINS = {"safety_margin": "reward", "target_margin": "l_x"}
"""Where the margins are once wrapped, as `loss.set_keys(**MARGINS)` and `check_safety_env(env, **MARGINS)` take it."""


def wrap(core: gymnasium.Env, **settings) -> GymWrapper:
    """For TorchRL, with index actions and `"l_x"` `[1]` beside the observation."""
    env = GymWrapper(core, categorical_action_encoding=True, **settings)
    env.set_info_dict_reader(default_info_dict_reader(["l_x"], spec=[Unbounded((1,))]))
    return env


class Recorder(gymnasium.Env):
    """Counts its steps in the observation; ends by itself at step `terminates`; the action taken is in info."""

    def __init__(
        self,
        observation_space: spaces.Space | None = None,
        action_space: spaces.Space | None = None,
        terminates: int = 5,
    ) -> None:
        self.observation_space = observation_space or spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space = action_space or spaces.Discrete(3)
        self.terminates = terminates

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.episode = (options or {}).get("count", 0), self.np_random.integers(1000)
        return self.observation(), {}

    def step(self, action):
        self.count += 1
        return self.observation(), 0.5 * self.count, self.count >= self.terminates, False, {"action": action}

    def observation(self):
        space = self.observation_space
        if isinstance(space, spaces.Box) and space.shape == (2,):
            return np.array([self.count, self.episode], space.dtype)
        # What is drawn is remembered, so that a test sees whether it arrived.
        space.seed(int(self.episode) + self.count)
        self.shown = space.sample()
        return self.shown


def count_margin(env, observation, info) -> float:
    return 3.5 - observation[0]
