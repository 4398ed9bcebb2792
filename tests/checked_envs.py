"""The faults that the checks find in Gymnasium environments."""

from __future__ import annotations

import gymnasium
from gym_envs import MARGINS, GymDoubleIntegrator, wrap

from torchrl_safety.envs.checks import safety_env_faults


def gym_faults(core: gymnasium.Env, **settings) -> list[str]:
    return safety_env_faults(wrap(core), **{**MARGINS, "steps": 100, **settings})


def the_fault(faults: list[str]) -> str:
    assert len(faults) == 1, faults
    return faults[0]


class Margins(GymDoubleIntegrator):
    """`info` written by a function of the target margin."""

    def __init__(self, entry, *, at_reset: bool = True) -> None:
        super().__init__()
        self.entry, self.at_reset = entry, at_reset

    def info(self) -> dict:
        return {"l_x": self.entry(self.target_margin())} if self.steps or self.at_reset else {}


class AutoReset(GymDoubleIntegrator):
    """Hands back the first observation of the next episode in place of the last one."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        if terminated or truncated:
            observation, info = self.reset()
        return observation, reward, terminated, truncated, info


class Flags(GymDoubleIntegrator):
    """Its ends rewritten by a function of `terminated` and `truncated`."""

    def __init__(self, flags) -> None:
        super().__init__()
        self.flags = flags

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, *self.flags(terminated, truncated), info
