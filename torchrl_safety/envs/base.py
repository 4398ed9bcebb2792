"""What every native environment shares: specs, resets, margins, ends, and the random generator."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Categorical, Composite, Unbounded

from torchrl_safety.envs.settings import check_box, check_choice, check_count
from torchrl_safety.envs.stateless import StatelessEnv, clear_ended, is_plain, require

__all__ = ["NativeEnv"]

PROBLEMS = ("avoid", "reach_avoid")


# Named, because an environment that holds one of them must be picklable.
def _at_failure(failed: Tensor, _: Any) -> Tensor:
    return failed


def _at_failure_or_target(failed: Tensor, target_margin: Any) -> Tensor:
    return failed | (target_margin >= 0)


def _never(failed: Tensor, _: Any) -> Tensor:
    return torch.zeros_like(failed)


# From whether g(s') < 0, and l(s'), to whether the episode has ended.
END_CRITERIA: dict[str, Callable[[Any, Any], Any]] = {
    "failure": _at_failure,
    "reach_avoid": _at_failure_or_target,
    "timeout": _never,
}


class NativeEnv(StatelessEnv):
    r"""A batched environment written in tensor operations, with margins at the root and at next.

    A step takes the state `s` from the tensordict and writes `s' = dynamics(s, control, disturbance)`, `g(s')`,
    `l(s')` (reach-avoid only) and the reward :math:`-1[g(s') < 0]`, whose ordinary return is the problem "do not
    fail". The environment itself holds nothing but its random generator, so any state can be stepped from.

    A subclass gives :meth:`dynamics`, :meth:`safety_margin`, :meth:`target_margin` and :meth:`sample_states`, all of
    which take any leading shape, and passes its bounds and tables to this constructor.

    Keys: `"observation"` `[N, S]`, `"safety_margin"`, `"target_margin"`, `"reward"` `[N, 1]` in `dtype`;
    `"step_count"` `[N, 1]` int64 with `max_steps`; `"done"`, `"terminated"`, `"truncated"` `[N, 1]`. Actions are
    `"action"` and, with a disturbance, `"disturbance"`: int64 `[N]` (a row of the table) or `[N, C]` in `dtype`.
    Continuous actions out of bounds are clamped to them; a NaN stays one, so that the
    losses, which refuse NaN margins, find it. A step is never both terminated and
    truncated: termination wins. `env.reset(TensorDict({"observation": states}, [N]))` starts from given states.

    Transforms that rewrite `"observation"` in place would rewrite the state as well; give them other out-keys, or
    keep the state under a key of its own with `state_key`.

    Args:
        num_envs: N, the batch size.
        state_dim: S, the length of a state.
        control_table: `[K, C]` controls that a discrete action indexes; bounds are its column-wise extremes.
        disturbance_table: the same for the disturbance, or None for a single player.
        problem: `"avoid"` or `"reach_avoid"`.
        discrete: Categorical actions if true, Bounded ones if false.
        end_criterion: `"failure"` (terminated when g < 0), `"reach_avoid"` (g < 0 or l >= 0) or `"timeout"` (never).
        max_steps: truncate when this many steps were taken; None never truncates.
        state_key: where the state is carried; another name than `"observation"` is written in addition to it.
        generator: draws the start states; its state is in :meth:`state_dict`.
        seed: seeds an own generator; not together with `generator`.
        dtype: floating-point type of states, margins, rewards and continuous actions; None is torch's default dtype.
        device: where everything lives; None is torch's default device.

    Raises:
        ValueError: an unknown problem or end criterion, a setting out of range, or settings that exclude each other.
    """

    angles: tuple[int, ...] = ()
    """Which entries of a state are angles in radians, for encodings that should not see them jump at ±π."""

    needs_reset = False
    """Whether a step must start from a reset even though a state is at hand, as :class:`SafetyGymEnv` may."""

    _supports_set_state = True

    def __init__(
        self,
        num_envs: int = 1,
        *,
        state_dim: int,
        control_table: Tensor,
        disturbance_table: Tensor | None = None,
        problem: str = "avoid",
        discrete: bool = True,
        end_criterion: str = "failure",
        max_steps: int | None = None,
        state_key: str = "observation",
        generator: torch.Generator | None = None,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        _check_settings(problem, end_criterion, max_steps)
        super().__init__(num_envs, generator=generator, seed=seed, dtype=dtype, device=device)
        self.problem = problem
        self.discrete = discrete
        self.end_criterion = end_criterion
        self.max_steps = max_steps
        self.state_key = state_key
        self._state_shape = torch.Size((num_envs, state_dim))
        self._is_terminal = END_CRITERIA[end_criterion]
        self._tables: dict[str, str] = {}
        for player, table in (("action", control_table), ("disturbance", disturbance_table)):
            if table is not None:
                self._tables[player] = f"_{player}_table"
                self.register_buffer(
                    f"_{player}_table", table.to(device=self.device, dtype=self.dtype), persistent=False
                )
        self._make_specs()

    @abc.abstractmethod
    def dynamics(self, state: Tensor, control: Tensor, disturbance: Tensor | None) -> Tensor:
        """The next state `[*B, S]` from `[*B, S]`, a control `[*B, C]` and a disturbance `[*B, C_d]` or None."""

    @abc.abstractmethod
    def safety_margin(self, state: Tensor) -> Tensor:
        """`g(s)` `[*B, 1]` of states `[*B, S]`; g >= 0 outside the failure set."""

    @abc.abstractmethod
    def target_margin(self, state: Tensor) -> Tensor:
        """`l(s)` `[*B, 1]` of states `[*B, S]`; l >= 0 inside the target set."""

    @abc.abstractmethod
    def sample_states(self, n: int, generator: torch.Generator) -> Tensor:
        """`n` start states `[n, S]`, drawn from `generator`."""

    def uniform(self, low: Tensor, high: Tensor, n: int, generator: torch.Generator) -> Tensor:
        """`n` rows, uniform between `low` and `high` `[S]`; a CPU generator gives the same rows on every device."""
        unit = torch.rand(n, low.shape[-1], dtype=self.dtype, device=generator.device, generator=generator)
        return torch.addcmul(low, unit.to(low.device), high - low)

    def reward(self, safety_margin: Tensor) -> Tensor:
        """The reward of a state with this safety margin, -1 where it is negative and 0 elsewhere, in its shape."""
        return (safety_margin >= 0).to(safety_margin.dtype).sub_(1)  # not a negated 0, which would print as -0

    def control(self, action: Tensor, player: str = "action") -> Tensor:
        """The control `[*B, C]` that an action stands for: a row of the table, or itself clamped to the bounds.

        Args:
            action: int64 `[*B]` (discrete) or `[*B, C]` (continuous).
            player: `"action"` or `"disturbance"`, whose table or bounds to use.

        Raises:
            ValueError: an index that the table does not have.
        """
        table = getattr(self, self._tables[player])
        if not self.discrete:
            return action.to(table.dtype).clamp(table.amin(0), table.amax(0))
        try:
            return table.index_select(0, action.reshape(-1).long()).reshape(*action.shape, table.shape[-1])
        except IndexError as error:
            raise ValueError(f"{player} has an index outside 0..{len(table) - 1}: give rows of the table") from error

    def zero_action(self, player: str = "disturbance") -> Tensor:
        """The action that stands for no control: int64 `[N]`, a row of the table, or zeros `[N, C]`.

        Args:
            player: `"action"` or `"disturbance"`.

        Raises:
            ValueError: a player that this environment does not have, a table without a row of zeros, or bounds without
                0 between them.
        """
        check_choice("player", player, tuple(self._tables))
        spec, table = self.full_action_spec[player], getattr(self, self._tables[player])
        if not self.discrete:
            action = spec.zero()
            if not spec.is_in(action):
                raise ValueError(f"0 is not between the bounds of {player!r}: this player always acts")
            return action
        rows = (table == 0).all(-1).nonzero()
        if not len(rows):
            raise ValueError(f"no row of the table of {player!r} is zero: this player always acts")
        return torch.full(self.batch_size, int(rows[0]), dtype=torch.int64, device=self.device)

    def _floating(self, state: Tensor) -> Tensor:
        """States in their own floating-point type, whole numbers in `dtype`."""
        return state if state.is_floating_point() else state.to(self.dtype)

    def _set_start_box(self, names: str, low: Sequence[float], high: Sequence[float]) -> None:
        """Keeps the corners of the box of the starts, whose entries have these names, as in `"x, v"`."""
        for side, corner in zip(("low", "high"), check_box(names, low, high)):
            corner = corner.to(device=self.device, dtype=self.dtype)
            self.register_buffer(f"_start_{side}", corner, persistent=False)

    def _make_specs(self) -> None:
        shape, device, dtype = self.batch_size, self.device, self.dtype
        column = torch.Size((*shape, 1))

        def real(size: torch.Size) -> Unbounded:
            return Unbounded(size, dtype=dtype, device=device)

        observation = {"observation": real(self._state_shape), "safety_margin": real(column)}
        if self.state_key != "observation":
            observation[self.state_key] = real(self._state_shape)
        if self.problem == "reach_avoid":
            observation["target_margin"] = real(column)
        if self.max_steps is not None:
            observation["step_count"] = Bounded(0, self.max_steps, column, dtype=torch.int64, device=device)
        self.observation_spec = Composite(observation, shape=shape, device=device)
        self.state_spec = Composite({self.state_key: real(self._state_shape)}, shape=shape, device=device)
        self.action_spec = Composite(
            {player: self._action_spec(getattr(self, name)) for player, name in self._tables.items()},
            shape=shape,
            device=device,
        )
        self.reward_spec = Bounded(-1.0, 0.0, column, dtype=dtype, device=device)
        self.full_done_spec = self._done_spec()

    def _action_spec(self, table: Tensor) -> Categorical | Bounded:
        if self.discrete:
            return Categorical(len(table), shape=self.batch_size, dtype=torch.int64, device=self.device)
        size = (*self.batch_size, table.shape[-1])
        low, high = table.amin(0).expand(size), table.amax(0).expand(size)
        return Bounded(low.clone(), high.clone(), size, dtype=self.dtype, device=self.device)

    def _read_control(self, tensordict: TensorDictBase, player: str) -> Tensor:
        remedy = "build the env without this disturbance, or let both players act"
        action = require(tensordict, player, "let a policy act first" if player == "action" else remedy)
        table = getattr(self, self._tables[player])
        expected = self.batch_size if self.discrete else torch.Size((*self.batch_size, table.shape[-1]))
        wrong_kind = self.discrete and (action.is_floating_point() or action.dtype == torch.bool)
        if action.shape != expected or wrong_kind:
            kind = "integer indices" if self.discrete else "numbers"
            other = "continuous actions need discrete=False" if self.discrete else "indices need discrete=True"
            raise ValueError(
                f"{player} has shape {tuple(action.shape)} and dtype {action.dtype}, expected {kind} of shape "
                f"{tuple(expected)}: follow env.full_action_spec ({other}), and build one-hot policies with a "
                "Categorical spec"
            )
        return self.control(action, player)

    def _state_entries(self, state: Tensor) -> dict[str, Tensor]:
        entries = {"observation": state, "safety_margin": self.safety_margin(state)}
        if self.state_key != "observation":
            entries[self.state_key] = state.clone()
        if self.problem == "reach_avoid":
            entries["target_margin"] = self.target_margin(state)
        return entries

    def _step_entries(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        state = require(tensordict, self.state_key, "call env.reset() first and keep the key in the tensordict")
        state = state.to(self.dtype)
        control = self._read_control(tensordict, "action")
        disturbance = self._read_control(tensordict, "disturbance") if "disturbance" in self._tables else None
        entries = self._state_entries(self.dynamics(state, control, disturbance))
        failed = entries["safety_margin"] < 0
        terminated = self._is_terminal(failed, entries.get("target_margin"))
        if self.max_steps is None:
            truncated, done = torch.zeros_like(terminated), terminated.clone()
        else:
            step_count = require(tensordict, "step_count", "call env.reset() first and keep the key") + 1
            done = terminated | (step_count >= self.max_steps)
            truncated = done ^ terminated
            entries["step_count"] = step_count
        entries["reward"] = self.reward(entries["safety_margin"])
        entries.update(done=done, terminated=terminated, truncated=truncated)
        return entries

    def _reset(self, tensordict: TensorDictBase | None = None, set_state: bool = False, **_: Any) -> TensorDictBase:
        # Always a full batch: TorchRL merges it into the tensordict by the "_reset" mask.
        given = tensordict is not None and set_state and tensordict.get("_reset", None) is None
        state = self._given_states(tensordict) if given else self.sample_states(self.numel(), self._generator)
        return self._wrap(self._reset_entries(state))

    def _reset_entries(self, state: Tensor) -> dict[str, Tensor]:
        entries = self._state_entries(state)
        column = (*self.batch_size, 1)
        if self.max_steps is not None:
            entries["step_count"] = torch.zeros(column, dtype=torch.int64, device=self.device)
        return {**entries, **self._not_done()}

    def _given_states(self, tensordict: TensorDictBase | None) -> Tensor:
        assert tensordict is not None
        state = require(tensordict, self.state_key, "put the states there, or reset with set_state=False")
        if state.shape != self._state_shape:
            raise ValueError(
                f"{self.state_key} has shape {tuple(state.shape)} at reset, expected {tuple(self._state_shape)}: "
                "give one state per environment"
            )
        state = state.to(device=self.device, dtype=self.dtype, copy=True)
        if not state.isfinite().all():
            raise ValueError(f"{self.state_key} has NaN or infinite entries at reset: give finite states")
        return state

    def _resolve_set_state(
        self, set_state: bool | None, tensordict: TensorDictBase | None, select_reset_only: bool
    ) -> bool | None:
        # Unsaid, given states are used exactly when there are some and no mask asks for a partial reset.
        masked = tensordict is not None and tensordict.get("_reset", None) is not None
        if set_state and masked and not select_reset_only:
            raise ValueError(
                "set_state=True with a '_reset' mask is ambiguous: a mask draws fresh states; leave out one of them"
            )
        if set_state is None and not select_reset_only:
            return tensordict is not None and not masked and self.state_key in tensordict.keys()  # noqa: SIM118
        return super()._resolve_set_state(set_state, tensordict, select_reset_only)

    def _step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        # The same result as TorchRL's step, step_mdp and masked reset, without their generic key handling, which
        # costs more than the dynamics do in small batches. Anything out of the ordinary takes TorchRL's own way.
        if not is_plain(self, tensordict):
            return super()._step_and_maybe_reset(tensordict)
        self._assert_tensordict_shape(tensordict)
        entries = self._step_entries(tensordict)
        root = dict(tensordict.items())
        tensordict.set("next", self._wrap(entries))
        del entries["reward"]
        done = entries["done"]
        if done.any():
            clear_ended(root, entries, done.squeeze(-1))
            fresh = self.sample_states(self.numel(), self._generator)
            step_count = entries.get("step_count")
            entries = self._reset_entries(torch.where(done, fresh, entries[self.state_key]))
            if step_count is not None:
                entries["step_count"] = step_count.masked_fill(done, 0)
        root.update(entries)
        return tensordict, self._wrap(root)


def _check_settings(problem: str, end_criterion: str, max_steps: int | None) -> None:
    check_choice("problem", problem, PROBLEMS)
    check_choice("end_criterion", end_criterion, tuple(END_CRITERIA))
    if end_criterion == "reach_avoid" and problem != "reach_avoid":
        raise ValueError(
            f"end_criterion='reach_avoid' needs a target, which problem={problem!r} does not have: "
            "use problem='reach_avoid' or end_criterion='failure'"
        )
    if max_steps is not None:
        check_count("max_steps", max_steps, "or None for no truncation")
