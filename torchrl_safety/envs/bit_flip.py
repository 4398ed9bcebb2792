"""Bits to be flipped until they equal a goal: the classic test of hindsight."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Categorical, Composite

from torchrl_safety.envs.settings import check_count
from torchrl_safety.envs.stateless import StatelessEnv, require

__all__ = ["BitFlipEnv"]


class BitFlipEnv(StatelessEnv):
    r"""n bits and a goal of n bits; an action flips one bit, and only the goal itself is rewarded.

    :math:`s'_i = s_i \oplus 1[i = a]`, :math:`r = 0` where :math:`s' = \mathrm{goal}` and -1 elsewhere. The goal
    terminates an episode, n steps truncate it; termination wins. Both s and the goal are uniform on
    :math:`\{0, 1\}^n`, so that without hindsight a reward is hardly ever seen.
    Source: Andrychowicz et al. 2017, "Hindsight Experience Replay", section 3.1.

    Keys: `"observation"`, `"achieved_goal"` (its copy) and `"desired_goal"` `[N, n]` of 0 and 1, `"reward"` `[N, 1]`
    in `dtype`; `"action"` int64 `[N]` in 0..n-1; `"step_count"` `[N, 1]` int64; `"done"`, `"terminated"`,
    `"truncated"` `[N, 1]`. The environment holds nothing but its random generator: any state can be stepped from.

    Args:
        num_envs: N, the batch size.
        bits: n, the number of bits, of actions and of steps, at least 1.
        generator: draws starts and goals; its state is in :meth:`state_dict`.
        seed: seeds an own generator; not together with `generator`.
        dtype: floating-point type of bits and rewards; None is torch's default dtype.
        device: where everything lives; None is torch's default device.

    Raises:
        ValueError: a setting out of range, or settings that exclude each other.

    Example:
        >>> env = BitFlipEnv(2, bits=3, seed=0)
        >>> state = env.reset().set("action", torch.tensor([0, 2]))
        >>> (env.step(state)["next", "observation"] != state["observation"]).tolist()
        [[True, False, False], [False, False, True]]
    """

    def __init__(
        self,
        num_envs: int = 1,
        bits: int = 15,
        *,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_count("bits", bits, "the length of the state and of the goal")
        super().__init__(num_envs, generator=generator, seed=seed, dtype=dtype, device=device)
        self.bits = bits
        self._make_specs()

    def _make_specs(self) -> None:
        shape, device, dtype = self.batch_size, self.device, self.dtype
        column = torch.Size((*shape, 1))

        def bits() -> Bounded:
            return Bounded(0.0, 1.0, (*shape, self.bits), dtype=dtype, device=device)

        count = Bounded(0, self.bits, column, dtype=torch.int64, device=device)
        self.observation_spec = Composite(
            observation=bits(),
            achieved_goal=bits(),
            desired_goal=bits(),
            step_count=count,
            shape=shape,
            device=device,
        )
        self.state_spec = Composite(
            observation=bits(), desired_goal=bits(), step_count=count.clone(), shape=shape, device=device
        )
        self.action_spec = Categorical(self.bits, shape=shape, dtype=torch.int64, device=device)
        self.reward_spec = Bounded(-1.0, 0.0, column, dtype=dtype, device=device)
        self.full_done_spec = self._done_spec()

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        # Always a full batch: TorchRL merges it into the tensordict by the "_reset" mask.
        shape = (2, *self.batch_size, self.bits)
        drawn = torch.randint(2, shape, generator=self._generator, device=self._generator.device)
        state, goal = drawn.to(device=self.device, dtype=self.dtype)
        step_count = torch.zeros((*self.batch_size, 1), dtype=torch.int64, device=self.device)
        return self._wrap({**self._entries(state, goal, step_count), **self._not_done()})

    def _step_entries(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        remedy = "call env.reset() first and keep the key in the tensordict"
        state, goal, count = (require(tensordict, key, remedy) for key in ("observation", "desired_goal", "step_count"))
        following = self._flip(state, require(tensordict, "action", "let a policy act first"))
        step_count = count + 1
        terminated = (following == goal).all(-1, keepdim=True)
        done = terminated | (step_count >= self.bits)
        ends = {"done": done, "terminated": terminated, "truncated": done ^ terminated}
        reward = terminated.to(self.dtype) - 1
        return {**self._entries(following, goal.clone(), step_count), "reward": reward, **ends}

    def _flip(self, state: Tensor, action: Tensor) -> Tensor:
        if action.shape != self.batch_size or action.is_floating_point() or action.dtype == torch.bool:
            raise ValueError(
                f"action has shape {tuple(action.shape)} and dtype {action.dtype}, expected integer indices of shape "
                f"{tuple(self.batch_size)}: build one-hot policies with a Categorical spec"
            )
        place = torch.arange(self.bits, device=action.device)
        return torch.where(action.unsqueeze(-1) == place, 1 - state, state)

    def _entries(self, state: Tensor, goal: Tensor, step_count: Tensor) -> dict[str, Tensor]:
        places = {"observation": state, "achieved_goal": state.clone(), "desired_goal": goal}
        return {**places, "step_count": step_count}
