"""Bits to be flipped until they equal a goal: the classic test of hindsight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Categorical, Composite
from torchrl.envs import EnvBase

from torchrl_safety.envs.base import _DONE_KEYS, _check_count, _make_generator, _require

__all__ = ["BitFlipEnv"]


class BitFlipEnv(EnvBase):
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
        dtype = torch.get_default_dtype() if dtype is None else dtype
        _check_count("num_envs", num_envs, "the number of copies that run side by side")
        _check_count("bits", bits, "the length of the state and of the goal")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype={dtype} must be a floating-point type, such as torch.float32")
        if not isinstance(generator, torch.Generator | None):
            raise ValueError(f"generator={generator!r} must be a torch.Generator; pass a number as seed")
        if generator is not None and seed is not None:
            raise ValueError(
                f"seed={seed} and generator=... exclude each other: seed the generator, or pass one of them"
            )
        device = torch.get_default_device() if device is None else torch.device(device)
        super().__init__(device=device, batch_size=(num_envs,))
        self.bits, self.dtype = bits, dtype
        self._generator = _make_generator(generator, seed, device)
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
        self.full_done_spec = Composite(
            {key: Categorical(2, shape=column, dtype=torch.bool, device=device) for key in _DONE_KEYS},
            shape=shape,
            device=device,
        )

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        # Always a full batch: TorchRL merges it into the tensordict by the "_reset" mask.
        shape = (2, *self.batch_size, self.bits)
        drawn = torch.randint(2, shape, generator=self._generator, device=self._generator.device)
        state, goal = drawn.to(device=self.device, dtype=self.dtype)
        column = (*self.batch_size, 1)
        ends = {key: torch.zeros(column, dtype=torch.bool, device=self.device) for key in _DONE_KEYS}
        return self._wrap(state, goal, torch.zeros(column, dtype=torch.int64, device=self.device), **ends)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        remedy = "call env.reset() first and keep the key in the tensordict"
        state, goal, count = (
            _require(tensordict, key, remedy) for key in ("observation", "desired_goal", "step_count")
        )
        following = self._flip(state, _require(tensordict, "action", "let a policy act first"))
        step_count = count + 1
        terminated = (following == goal).all(-1, keepdim=True)
        done = terminated | (step_count >= self.bits)
        out = self._wrap(
            following,
            goal.clone(),
            step_count,
            reward=terminated.to(self.dtype) - 1,
            done=done,
            terminated=terminated,
            truncated=done ^ terminated,
        )
        stepped = tensordict.get("_step", None)
        if stepped is None:
            return out
        return out.where(stepped.reshape(self.batch_size), self._skip_tensordict(tensordict))

    def _flip(self, state: Tensor, action: Tensor) -> Tensor:
        if action.shape != self.batch_size or action.is_floating_point() or action.dtype == torch.bool:
            raise ValueError(
                f"action has shape {tuple(action.shape)} and dtype {action.dtype}, expected integer indices of shape "
                f"{tuple(self.batch_size)}: build one-hot policies with a Categorical spec"
            )
        place = torch.arange(self.bits, device=action.device)
        return torch.where(action.unsqueeze(-1) == place, 1 - state, state)

    def _wrap(self, state: Tensor, goal: Tensor, step_count: Tensor, **entries: Tensor) -> TensorDict:
        entries |= {"observation": state, "achieved_goal": state.clone(), "desired_goal": goal}
        return TensorDict({**entries, "step_count": step_count}, batch_size=self.batch_size, device=self.device)

    def get_extra_state(self) -> dict[str, Tensor]:
        """The generator's state, as a tensor, for :meth:`state_dict`."""
        return {"generator": self._generator.get_state()}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Continues the draws of a saved generator; the inverse of :meth:`get_extra_state`."""
        self._generator.set_state(state["generator"].cpu())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Continues the draws of a saved generator; an empty state leaves it as it is."""
        # TorchRL's Collector saves an empty state for an environment without transforms, and loads it strictly.
        return super().load_state_dict(state_dict, strict=strict and bool(state_dict), assign=assign)

    def _set_seed(self, seed: int | None) -> None:
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
