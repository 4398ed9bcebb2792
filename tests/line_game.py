"""A game on a line whose every outcome can be worked out by hand, and players that always do the same."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from torchrl_safety.envs import NativeEnv
from torchrl_safety.envs.settings import action_levels

WALL, TARGET = 3.5, 1.5


class LineGameEnv(NativeEnv):
    """`x' = x + u + d` with u in -2, 0, 2 and d in -1, 0, 1, from x = 0; fails beyond ±3.5, target at x >= 1.5."""

    def __init__(self, num_envs=1, *, discrete=True, **settings) -> None:
        super().__init__(
            num_envs,
            state_dim=1,
            control_table=action_levels(2.0),
            disturbance_table=action_levels(1.0),
            discrete=discrete,
            **settings,
        )

    def dynamics(self, state: Tensor, control: Tensor, disturbance: Tensor | None) -> Tensor:
        assert disturbance is not None
        return state + control + disturbance

    def safety_margin(self, state: Tensor) -> Tensor:
        return WALL - state.abs()

    def target_margin(self, state: Tensor) -> Tensor:
        return state - TARGET

    def sample_states(self, n: int, generator: torch.Generator) -> Tensor:
        return self.uniform(torch.zeros(1), torch.zeros(1), n, generator)


def outcome(control: float, disturbance: float, steps: int, *, stops_at_target: bool = False) -> tuple[bool, bool]:
    """Whether a pair of constant players was safe, and whether it succeeded, within so many steps."""
    x, safe, reached = 0.0, True, False
    for _ in range(steps):
        x += control + disturbance
        safe = safe and abs(x) <= WALL
        reached = reached or (safe and x >= TARGET)
        if not safe or (stops_at_target and reached):
            break
    return safe, reached


class Constant(nn.Module):
    """Always the action that its parameter holds."""

    def __init__(self, action: int) -> None:
        super().__init__()
        self.action = nn.Parameter(torch.tensor(float(action)))

    def forward(self, observation: Tensor) -> Tensor:
        return self.action.expand(observation.shape[:-1]).round().long()


def constant(action: int, key: str = "action") -> TensorDictModule:
    """A policy that always takes this index; `policy.module.action` changes it."""
    return TensorDictModule(Constant(action), ["observation"], [key])


def change(policy: TensorDictModule, action: int) -> None:
    """Let a constant policy take another index from now on, in place, as training does."""
    with torch.no_grad():
        policy.module.action.fill_(action)


def acts(policy: TensorDictModule, key: str = "action") -> int:
    """The index that a constant policy takes."""
    return int(policy(TensorDict({"observation": torch.zeros(1, 1)}, [1]))[key])
