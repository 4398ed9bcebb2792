"""Gymnasium environments side by side, with margins where a safety problem needs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Categorical, Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase

from torchrl_safety.envs.base import END_CRITERIA
from torchrl_safety.envs.gym_cores import Margin, check_settings, is_discrete, is_made_anew, layout, make_envs, reader
from torchrl_safety.envs.stateless import DONE_KEYS, clear_ended, is_plain, require

__all__ = ["SafetyGymEnv"]

Arrays = dict[str, np.ndarray]


class SafetyGymEnv(EnvBase):
    r"""N copies of a Gymnasium environment as one batch, for ordinary return and for safety problems.

    The copies are stepped one after another in this process. `("next", ...)` holds what the step led to, the true final
    observation and its margins :math:`g(s')`, :math:`l(s')` among it, also where an episode ends; only
    `step_and_maybe_reset` starts the next one. Copy `i` is seeded with `seed + i`, as in Gymnasium's vector
    environments.

    Keys: `"observation"` `[N, *]`, or the entries of a Dict observation under their own names, floating-point ones in
    `dtype`, all others in their own type, a Discrete one as an index `[N, 1]`; `"reward"` and, if given,
    `"safety_margin"` and `"target_margin"` `[N, 1]` in `dtype`, the margins also after a reset; `"done"`,
    `"terminated"`, `"truncated"` `[N, 1]`. A step is never both terminated and truncated: termination wins. `"action"`
    is an index `[N]` int64 (Discrete) or `[N, *]` in `dtype` (Box). Box actions out of bounds are clamped to them.
    `env.reset(options=...)` hands options on.

    The world of an episode cannot be saved: :meth:`state_dict` holds the random generators only. After
    :meth:`load_state_dict` :attr:`needs_reset` is true, and the next step must start from `env.reset()`, before which
    pending n-step windows are cleared. A copy (`copy.deepcopy`, pickle) goes on as the original would where Gymnasium
    copies the world; worlds of C++ (Box2D, MuJoCo), which it makes anew, leave the draws and :attr:`needs_reset`. A
    step or a reset that raises, in a margin say, leaves its environments to be reset too.

    Args:
        env: an id such as `"LunarLander-v3"`, or a callable that makes a new environment each time.
        num_envs: N.
        safety_margin: g, >= 0 outside the failure set: `f(env, observation, info) -> float` with one of the Gymnasium
            environments, or the name of an entry of `info`. Read after every reset and every step.
        target_margin: l, >= 0 inside the target set, in the same way.
        max_steps: truncate when this many steps were taken; None keeps the time limit of the id.
        end_criterion: `"env"` (terminated where Gymnasium says so), `"failure"` (also where g < 0) or `"reach_avoid"`
            (also where g < 0 or l >= 0); None is `"failure"` with a safety margin, else `"env"`. There is no
            `"timeout"`, for what follows a termination of Gymnasium's is undefined.
        seed: of the first copy; None draws one from torch.
        dtype: of what is floating-point; None is torch's default dtype.
        device: where tensors are handed over; the environments themselves run on the CPU.
        **env_settings: handed to `gymnasium.make` or to the callable.

    Attributes:
        envs: the N Gymnasium environments.

    Raises:
        ImportError: Gymnasium, or what the environment needs of it, is not installed.
        ValueError: an id that does not exist, a space that has no place here, or a setting out of range.
        KeyError: an entry of `info` that is missing, when it is read.

    Example:
        >>> env = SafetyGymEnv("CartPole-v1", 2, safety_margin=lambda env, observation, info: 2.4 - abs(observation[0]))
        >>> env.rollout(3)["next", "safety_margin"].shape
        torch.Size([2, 3, 1])
    """

    angles: tuple[int, ...] = ()
    """Which entries of an observation are angles that jump at ±π; those of a subclass, none here."""

    def __init__(
        self,
        env: str | Callable[..., Any],
        num_envs: int = 1,
        *,
        safety_margin: Margin | str | None = None,
        target_margin: Margin | str | None = None,
        max_steps: int | None = None,
        end_criterion: str | None = None,
        seed: int | None = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = "cpu",
        **env_settings: Any,
    ) -> None:
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if end_criterion is None:
            end_criterion = "env" if safety_margin is None else "failure"
        margins = {"safety_margin": safety_margin, "target_margin": target_margin}
        check_settings(num_envs, margins, max_steps, end_criterion, seed, dtype)
        device = torch.get_default_device() if device is None else torch.device(device)
        super().__init__(device=device, batch_size=(num_envs,))
        self.end_criterion = end_criterion
        self.max_steps = max_steps
        self.dtype = dtype
        self._margins = {name: reader(name, margin) for name, margin in margins.items() if margin is not None}
        self._is_terminal = END_CRITERIA.get(end_criterion)
        self._real = torch.empty((), dtype=dtype, device="cpu").numpy().dtype
        self.envs = make_envs(env, num_envs, max_steps, env_settings)
        self.is_closed = False
        actions = self.envs[0].action_space
        if any(one.action_space != actions for one in self.envs):
            raise ValueError(f"env={env!r} made environments of different action spaces: it must make the same ones")
        self._discrete = is_discrete(actions)
        self._action_shape = torch.Size((num_envs, *actions.shape))
        if self._discrete:  # as integers of Python, with which comparing is cheap
            self._first_action, self._last_action = int(actions.start), int(actions.n) - 1
        space = self.envs[0].observation_space
        reserved = {"action", "next", "reward", *DONE_KEYS, *self._margins}
        self._observations = layout(space, self._real, reserved)
        self._is_dict = hasattr(space, "spaces")
        self._seeds: list[int | None] = [None] * num_envs
        self._ended = [True] * num_envs
        self._root = self._zeros()
        self._make_specs()
        self._set_seed(seed)

    @property
    def needs_reset(self) -> bool:
        """Whether the next step must start from a reset: at first, and after an end, a loaded state or an error."""
        return True in self._ended

    def get_extra_state(self) -> dict[str, Any]:
        """The random generators of the environments, for :meth:`state_dict`."""
        seeds, states = list(self._seeds), [env.unwrapped.np_random.bit_generator.state for env in self.envs]
        return {"seeds": seeds, "generators": states}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Continues the draws of saved generators; the episodes start anew, see :attr:`needs_reset`."""
        if len(state["generators"]) != len(self.envs):
            raise ValueError(
                f"the saved state is of num_envs={len(state['generators'])}, this environment has {len(self.envs)}: "
                "make it with the same number"
            )
        for env, generator in zip(self.envs, state["generators"]):
            env.unwrapped.np_random.bit_generator.state = generator
        self._seeds = list(state["seeds"])
        self._ended = [True] * len(self.envs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Continues the draws of saved generators; an empty state leaves them as they are."""
        # TorchRL's Collector saves an empty state for an environment without transforms, and loads it strictly.
        return super().load_state_dict(state_dict, strict=strict and bool(state_dict), assign=assign)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "generators": self.get_extra_state()["generators"]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        generators = state.pop("generators")
        super().__setstate__(state)
        for row, env in enumerate(self.envs):
            if is_made_anew(env):
                env.unwrapped.np_random.bit_generator.state = generators[row]
                self._ended[row] = True

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Closes the Gymnasium environments."""
        if not self.is_closed:
            for env in self.envs:
                env.close()
        super().close(raise_if_closed=raise_if_closed)

    def _make_specs(self) -> None:
        shape, device, dtype = self.batch_size, self.device, self.dtype
        column = torch.Size((*shape, 1))
        entries = {**self._observations, **dict.fromkeys(self._margins, ((1,), self._real))}
        self.observation_spec = Composite(
            {
                name: Unbounded(torch.Size((*shape, *size)), dtype=_as_torch(kind), device=device)
                for name, (size, kind) in entries.items()
            },
            shape=shape,
            device=device,
        )
        self.action_spec = self._action_spec()
        self.reward_spec = Unbounded(column, dtype=dtype, device=device)
        self.full_done_spec = Composite(
            {key: Categorical(2, shape=column, dtype=torch.bool, device=device) for key in DONE_KEYS},
            shape=shape,
            device=device,
        )

    def _action_spec(self) -> TensorSpec:
        space, size = self.envs[0].action_space, self._action_shape
        if self._discrete:
            return Categorical(int(space.n), shape=size, dtype=torch.int64, device=self.device)
        if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            return Unbounded(size, dtype=self.dtype, device=self.device)
        kind = {"dtype": self.dtype, "device": self.device}
        low, high = (torch.as_tensor(bound, **kind).expand(size).clone() for bound in (space.low, space.high))
        return Bounded(low, high, size, **kind)

    def _read_actions(self, tensordict: TensorDictBase) -> Sequence[Any]:
        """One action for each Gymnasium environment."""
        action = require(tensordict, "action", "let a policy act first")
        kind = action.dtype
        if action.shape != self._action_shape or (self._discrete and (kind.is_floating_point or kind == torch.bool)):
            form = "integer indices" if self._discrete else "numbers"
            raise ValueError(
                f"action has shape {tuple(action.shape)} and dtype {kind}, expected {form} of shape "
                f"{tuple(self._action_shape)}: follow env.full_action_spec, and build one-hot policies with a "
                "Categorical spec"
            )
        if self._discrete:
            indices, last = action.tolist(), self._last_action
            if min(indices) < 0 or max(indices) > last:
                raise ValueError(f"action={indices} has an index outside 0..{last}: follow env.full_action_spec")
            return [index + self._first_action for index in indices] if self._first_action else indices
        space = self.envs[0].action_space
        numbers = action.detach().cpu().numpy()
        if np.isnan(numbers).any():
            raise ValueError(f"action={numbers.tolist()} has NaN entries: the policy diverged, or its input is NaN")
        return np.clip(numbers, space.low, space.high).astype(space.dtype, copy=False)

    def _zeros(self) -> Arrays:
        """The entries of a root, which the environments are then written into, row by row."""
        n = len(self.envs)
        arrays = {name: np.zeros((n, *size), kind) for name, (size, kind) in self._observations.items()}
        arrays.update({name: np.zeros((n, 1), self._real) for name in self._margins})
        arrays.update({name: np.zeros((n, 1), np.bool_) for name in DONE_KEYS})
        return arrays

    def _write(self, arrays: Arrays, row: int, observation: Any, info: Mapping[str, Any]) -> None:
        if self._is_dict:
            for name in self._observations:
                arrays[name][row] = observation[name]
        else:
            arrays["observation"][row] = observation
        for name, read in self._margins.items():
            margin = read(self.envs[row], observation, info)
            try:
                arrays[name][row, 0] = margin.item() if isinstance(margin, np.ndarray) else float(margin)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name} is {margin!r} in environment {row}: give one number") from error
            if math.isnan(arrays[name][row, 0]):  # below 0 to some readers, not to others
                raise ValueError(f"{name} is NaN in environment {row}: give a number")

    def _advance(self, actions: Sequence[Any], rows: Sequence[int]) -> Arrays:
        """Steps the environments in `rows` and returns the entries of all at next."""
        if True in self._ended and (over := [row for row in rows if self._ended[row]]):
            raise RuntimeError(
                f"the episodes of environments {over} have ended or not begun: call env.reset(), or step with "
                "step_and_maybe_reset"
            )
        arrays = self._zeros()
        reward = np.zeros((len(self.envs), 1), self._real)
        terminated, truncated = arrays["terminated"], arrays["truncated"]
        for row in rows:
            self._ended[row] = True  # until all have been stepped: an error leaves some ahead of what was handed out
        for row in rows:
            step = self.envs[row].step(actions[row])
            observation, reward[row], terminated[row], truncated[row], info = step
            self._write(arrays, row, observation, info)
        if self._is_terminal is not None:
            terminated |= self._is_terminal(arrays["safety_margin"] < 0, arrays.get("target_margin"))
        truncated &= ~terminated
        np.logical_or(terminated, truncated, out=arrays["done"])
        ended = arrays["done"][:, 0].tolist()
        for row in rows:
            self._ended[row] = ended[row]
        if len(rows) < len(self.envs):
            arrays = _merge(rows, arrays, self._root)
        self._root.update(arrays)  # in place, for an attribute of a Module costs several times as much to set
        return {**arrays, "reward": reward}

    def _begin(self, arrays: Arrays, rows: Sequence[int], options: dict[str, Any] | None = None) -> None:
        """Writes new episodes of the environments in `rows`."""
        for row in rows:
            self._ended[row] = True
        for row in rows:
            observation, info = self.envs[row].reset(seed=self._seeds[row], options=options)
            self._seeds[row] = None
            self._write(arrays, row, observation, info)
            for name in DONE_KEYS:
                arrays[name][row] = False
        for row in rows:
            self._ended[row] = False
        self._root.update(arrays)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        stepped = tensordict.get("_step", None)
        return self._wrap(self._tensors(self._advance(self._read_actions(tensordict), self._rows(stepped))))

    def _reset(
        self, tensordict: TensorDictBase | None = None, *, options: dict[str, Any] | None = None
    ) -> TensorDictBase:
        # Always a full batch: TorchRL merges it into the tensordict by the "_reset" mask.
        rows = self._rows(None if tensordict is None else tensordict.get("_reset", None))
        arrays = {name: array.copy() for name, array in self._root.items()}
        self._begin(arrays, rows, options)
        return self._wrap(self._tensors(arrays))

    def _step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        # The same result as TorchRL's step, step_mdp and masked reset, without their generic key handling, which
        # costs more than most environments do. Anything out of the ordinary takes TorchRL's own way.
        if not is_plain(self, tensordict):
            return super()._step_and_maybe_reset(tensordict)
        self._assert_tensordict_shape(tensordict)
        entries = self._tensors(self._advance(self._read_actions(tensordict), range(len(self.envs))))
        root = dict(tensordict.items())
        tensordict._set_str("next", self._wrap(entries), validated=True, inplace=False, non_blocking=False)
        del entries["reward"]
        if True in self._ended:
            clear_ended(root, entries, entries["done"].squeeze(-1))
            arrays = {name: array.copy() for name, array in self._root.items()}
            self._begin(arrays, [row for row, ended in enumerate(self._ended) if ended])
            entries = self._tensors(arrays)
        root.update(entries)
        return tensordict, self._wrap(root)

    def _rows(self, mask: Tensor | None) -> Sequence[int]:
        if mask is None:
            return range(len(self.envs))
        return [row for row, chosen in enumerate(mask.flatten().tolist()) if chosen]

    def _tensors(self, arrays: Arrays) -> dict[str, Tensor]:
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self.device.type == "cpu":
            return tensors
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}

    def _wrap(self, entries: dict[str, Tensor]) -> TensorDict:
        # Neither the constructor nor set, whose checks of shape and device cost several times as much.
        return TensorDict._new_unsafe(entries, batch_size=self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        first = int(torch.randint(2**31, (), device="cpu")) if seed is None else seed
        self._seeds = [first + row for row in range(len(self.envs))]


def _merge(rows: Sequence[int], new: Arrays, old: Arrays) -> Arrays:
    """The `rows` of `new`, all others of `old`."""
    merged = {name: array.copy() for name, array in old.items()}
    for name, array in merged.items():
        array[rows] = new[name][rows]
    return merged


def _as_torch(kind: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty((), kind)).dtype
