"""Goals of goal-conditioned tasks: where they stand, and how a transition is relabelled."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor

RELABELLED = "relabelled"

TransitionFunction = Callable[[TensorDictBase], Tensor]


@dataclass(frozen=True)
class GoalCondition:
    r"""Which entries of a state are a goal, and which are the measurement that should match it.

    .. math:: S_t = (m_t, g_t, x_t), \qquad S_t' = (m_t, m_k, x_t)

    with the goal :math:`g_t` replaced by the measurement of another state (Andrychowicz et al. 2017, "Hindsight
    Experience Replay", section 3.2; one cell of MATLAB's `GoalConditionInfo`, whose indices count from 1). A state is
    the root of a transition or its ``"next"``.

    Args:
        measurement_key (key): entry that holds the measurement, `[*B, *, D]`, in the unit of the goal.
        measurement_index (sequence of ints or None): its elements in the last dimension, from 0; None for all.
        goal_key (key): entry that holds the goal, `[*B, *, D']`; may be the entry of the measurement.
        goal_index (sequence of ints or None): its elements, matched to those of the measurement one by one.

    Raises:
        ValueError: if an index is empty, negative or repeated, or the two differ in length.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> condition = GoalCondition("observation", [1, 2], "observation", [3, 4])
        >>> state = TensorDict({"observation": torch.arange(6.0)}, [])
        >>> condition.measurement(state).tolist(), condition.goal(state).tolist()
        ([1.0, 2.0], [3.0, 4.0])
        >>> condition.set_goal(state, condition.measurement(state))
        >>> state["observation"].tolist()
        [0.0, 1.0, 2.0, 1.0, 2.0, 5.0]
    """

    measurement_key: NestedKey
    measurement_index: Sequence[int] | None
    goal_key: NestedKey
    goal_index: Sequence[int] | None

    def __post_init__(self) -> None:
        for name in ("measurement_key", "goal_key"):
            object.__setattr__(self, name, _check_key(name, getattr(self, name)))
        for name in ("measurement_index", "goal_index"):
            object.__setattr__(self, name, _check_index(name, getattr(self, name)))
        if self.measurement_index is None or self.goal_index is None:
            return
        if len(self.measurement_index) != len(self.goal_index):
            raise ValueError(
                f"measurement_index {list(self.measurement_index)} and goal_index {list(self.goal_index)} differ in "
                "length; give each element of the goal the element that measures it."
            )

    @classmethod
    def gymnasium(cls, prefix: NestedKey | None = None) -> GoalCondition:
        """The condition of ``"achieved_goal"`` / ``"desired_goal"`` observations, under `prefix` where one is given.

        Examples:
            >>> GoalCondition.gymnasium("observation").goal_key
            ('observation', 'desired_goal')
        """
        start: tuple[str, ...] = ()
        if prefix is not None:
            start = (prefix,) if isinstance(prefix, str) else tuple(prefix)
        return cls((*start, "achieved_goal"), None, (*start, "desired_goal"), None)

    def measurement(self, state: TensorDictBase) -> Tensor:
        """The measurement of a state, `[*B, *, m]`."""
        return _elements(state, self.measurement_key, self.measurement_index)

    def goal(self, state: TensorDictBase) -> Tensor:
        """The goal of a state, `[*B, *, m]`."""
        return _elements(state, self.goal_key, self.goal_index)

    def set_goal(self, state: TensorDictBase, goal: Tensor) -> None:
        """Puts `goal` `[*B, *, m]` into the state, in a new tensor of the dtype that the entry has."""
        state.set(self.goal_key, _entry(state, self.goal_key).clone())
        self.write_goal(state, goal)

    def write_goal(self, state: TensorDictBase, goal: Tensor, where: Tensor | None = None) -> None:
        """Writes `goal` `[*B, *, m]` into the entry that the state has, in rows `where` bool `[*B, 1]`, or in all."""
        elements = self.check_fit(state, goal)
        _write(elements, goal if goal.dtype == elements.dtype else goal.to(elements.dtype), where)
        if self.goal_index is not None:  # the elements are a copy
            entry: Tensor = state.get(self.goal_key)
            entry[..., _positions(self.goal_index, entry.device)] = elements

    def check_fit(self, state: TensorDictBase, goal: Tensor) -> Tensor:
        """The goal of a state, once another goal fits its place; raises ValueError where it does not."""
        elements = self.goal(state)
        if goal.shape != elements.shape:
            raise ValueError(
                f"A goal of shape {list(goal.shape)} does not fit the goal {self.goal_key!r}, which has shape "
                f"{list(elements.shape)}; make measurement_index and goal_index of {self} name the same number of "
                "elements."
            )
        if not torch.can_cast(goal.dtype, elements.dtype):
            raise ValueError(
                f"A goal of type {goal.dtype}, as {self.measurement_key!r} measures it, would be cut to fit the goal "
                f"{self.goal_key!r} of type {elements.dtype}; store both in one type."
            )
        return elements


class GoalRelabel:
    r"""Gives transitions other goals and recomputes what depends on the goal.

    .. math:: r' = f_R(S_t', A_t, S_{t+1}'), \quad
        d' = f_D(S_t', A_t, S_{t+1}') \vee (d \wedge \neg f_D(S_t, A_t, S_{t+1}))

    (Andrychowicz et al. 2017, algorithm 1.) A termination that the transition's own goal does not explain is a failure
    and stays, unless `keep_failures` is False. Each function takes a transition TensorDict `[*B]`, any B, and returns
    `[*B, 1]`. They are called in the order target margin, terminated, reward, and see what those before them wrote.
    Truncated stays, done is terminated or truncated. A target margin at the root, where the frames hold one, is
    recomputed by showing `target_margin_fn` the root in the place of ``"next"``. Without a function an entry stays.

    Args:
        reward_fn (callable or None): reward `[*B, 1]`; None only beside a `target_margin_fn`.
        terminated_fn (callable or None): whether ``"next"`` ends the episode at its goal, bool `[*B, 1]`.
        target_margin_fn (callable or None): target margin l of ``"next"``, >= 0 at the goal, `[*B, 1]`.
        goal_conditions (GoalCondition, sequence of them or None): None means `GoalCondition.gymnasium()`.
        keep_failures (bool): whether terminations that are no success of the original goal stay.

    Raises:
        ValueError: for settings that contradict each other, or results of another shape, dtype or not finite.
        KeyError: for transitions without an entry that is to be replaced.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> state = {"achieved_goal": torch.ones(3, 2), "desired_goal": torch.zeros(3, 2)}
        >>> flags = {"reward": torch.zeros(3, 1), "terminated": torch.zeros(3, 1, dtype=torch.bool)}
        >>> frames = TensorDict({**state, "next": {**state, **flags}}, [3])
        >>> def reached(transition):
        ...     following = transition["next"]
        ...     return (following["achieved_goal"] == following["desired_goal"]).all(-1, keepdim=True)
        >>> relabel = GoalRelabel(lambda transition: reached(transition).float(), terminated_fn=reached)
        >>> relabel(frames, relabel.measurements(frames))["next", "reward"].flatten().tolist()
        [1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        reward_fn: TransitionFunction | None,
        *,
        terminated_fn: TransitionFunction | None = None,
        target_margin_fn: TransitionFunction | None = None,
        goal_conditions: GoalCondition | Sequence[GoalCondition] | None = None,
        keep_failures: bool = True,
    ) -> None:
        functions = {"reward_fn": reward_fn, "terminated_fn": terminated_fn, "target_margin_fn": target_margin_fn}
        for name, function in functions.items():
            if function is not None and not callable(function):
                raise ValueError(f"{name} must be callable or None, got {function!r}; pass a function of a transition.")
        if reward_fn is None and target_margin_fn is None:
            raise ValueError(
                "reward_fn and target_margin_fn are both None, so nothing would depend on the new goal; pass one."
            )
        if not isinstance(keep_failures, bool):
            raise ValueError(f"keep_failures must be True or False, got {keep_failures!r}.")
        self.reward_fn = reward_fn
        self.terminated_fn = terminated_fn
        self.target_margin_fn = target_margin_fn
        self.goal_conditions = check_conditions(goal_conditions)
        self.keep_failures = keep_failures

    def measurements(self, transitions: TensorDictBase) -> list[Tensor]:
        """What the states that the steps lead to measure, one `[*B, *, m]` for each condition."""
        following = _following(transitions)
        return [condition.measurement(following) for condition in self.goal_conditions]

    def start_measurements(self, transitions: TensorDictBase) -> list[Tensor]:
        """What the states that the steps start from measure, one `[*B, *, m]` for each condition."""
        return [condition.measurement(transitions) for condition in self.goal_conditions]

    def check(self, transitions: TensorDictBase, *, at_start: bool = False) -> None:
        """Raises KeyError, IndexError or ValueError unless transitions can be relabelled; calls no function.

        With `at_start`, what the states measure that the steps start from must fit as a goal, too.
        """
        following = _following(transitions)
        for condition in self.goal_conditions:
            for measured in (following, transitions) if at_start else (following,):
                goal = condition.measurement(measured)
                condition.check_fit(transitions, goal)
                condition.check_fit(following, goal)
        functions = {
            "target_margin": self.target_margin_fn,
            "terminated": self.terminated_fn,
            "reward": self.reward_fn,
        }
        for key, function in functions.items():
            if function is None:
                continue
            entry = _entry(following, key)
            _check_shape(key, entry, transitions.batch_size)
            if key == "terminated" and entry.dtype != torch.bool:
                raise ValueError(f"Entry ('next', {key!r}) has type {entry.dtype}, expected torch.bool; convert it.")

    @torch.no_grad()
    def __call__(self, transitions: TensorDictBase, goals: Sequence[Tensor]) -> TensorDictBase:
        """New transitions `[*B]` with these goals, one `[*B, *, m]` for each condition; the old ones are left alone."""
        relabelled = transitions.copy()
        goal_keys = {condition.goal_key for condition in self.goal_conditions}
        for state, keys in (
            (relabelled, goal_keys | {"target_margin"}),
            (_following(relabelled), goal_keys | {"target_margin", "terminated", "done", "reward"}),
        ):
            for key in keys:
                value = state.get(key, None)
                if value is not None:
                    state.set(key, value.clone())
        self.relabel_(relabelled, goals)
        return relabelled

    @torch.no_grad()
    def relabel_(self, transitions: TensorDictBase, goals: Sequence[Tensor], where: Tensor | None = None) -> None:
        """Relabels in place: entries of rows `where` bool `[*B, 1]`, or of all, are written into their own memory.

        The functions are called once for all rows, of which those elsewhere have their own goal and keep their entries.
        """
        if len(goals) != len(self.goal_conditions):
            raise ValueError(
                f"got {len(goals)} goals for {len(self.goal_conditions)} goal conditions; pass one goal for each."
            )
        following = _following(transitions)
        if self.terminated_fn is not None:
            before = _entry(following, "terminated")
            failed = self._failures(self.terminated_fn, transitions, before)
        for condition, goal in zip(self.goal_conditions, goals):
            condition.write_goal(transitions, goal, where)
            condition.write_goal(following, goal, where)
        if self.target_margin_fn is not None:
            self._write_margins(self.target_margin_fn, transitions, following, where)
        if self.terminated_fn is not None:
            terminated = _result("terminated_fn", self.terminated_fn, transitions, "terminated", before)
            if failed is not None:
                terminated = terminated | failed
            done = following.get("done", None)
            if done is not None:
                truncated = following.get("truncated", None)
                _write(done, terminated | (done & ~before if truncated is None else truncated), where)
            _write(before, terminated, where)
        if self.reward_fn is not None:
            entry = _entry(following, "reward")
            _write(entry, _result("reward_fn", self.reward_fn, transitions, "reward", entry), where)

    def _failures(
        self, terminated_fn: TransitionFunction, transitions: TensorDictBase, terminated: Tensor
    ) -> Tensor | None:
        """Which terminations, `[*B, 1]`, the transitions' own goals do not explain; None if there are none to keep."""
        # On an accelerator, looking would mean waiting.
        if not self.keep_failures or (terminated.device.type == "cpu" and not terminated.any()):
            return None
        return terminated & ~_result("terminated_fn", terminated_fn, transitions, "terminated", terminated)

    @staticmethod
    def _write_margins(
        margin_fn: TransitionFunction, transitions: TensorDictBase, following: TensorDictBase, where: Tensor | None
    ) -> None:
        entry = _entry(following, "target_margin")
        margin = _result("target_margin_fn", margin_fn, transitions, "target_margin", entry)
        start_entry = transitions.get("target_margin", None)
        if start_entry is not None:
            at_root = transitions.exclude("next")
            at_root = at_root.copy().set("next", at_root)
            start = _result("target_margin_fn", margin_fn, at_root, "target_margin", start_entry)
            _write(start_entry, start, where)
        _write(entry, margin, where)


def check_conditions(
    goal_conditions: GoalCondition | Sequence[GoalCondition] | None,
) -> tuple[GoalCondition, ...]:
    """The conditions as a tuple; raises ValueError if they are none, or two write the same element of a goal."""
    if goal_conditions is None:
        return (GoalCondition.gymnasium(),)
    conditions = (goal_conditions,) if isinstance(goal_conditions, GoalCondition) else tuple(goal_conditions)
    if not conditions or not all(isinstance(condition, GoalCondition) for condition in conditions):
        raise ValueError(
            f"goal_conditions must be a GoalCondition or a sequence of them, got {goal_conditions!r}; None means "
            "GoalCondition.gymnasium()."
        )
    for i, condition in enumerate(conditions):
        for other in conditions[:i]:
            elements, others = condition.goal_index, other.goal_index
            shared = elements is None or others is None or set(elements) & set(others)
            if condition.goal_key == other.goal_key and shared:
                raise ValueError(f"{other} and {condition} write the same elements of the goal; keep one of them.")
    return conditions


def _check_key(name: str, key: Any) -> NestedKey:
    parts = (key,) if isinstance(key, str) else key
    if not isinstance(parts, tuple) or not parts or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{name} must be a string or a tuple of strings, got {key!r}; name an entry of the state.")
    return unravel_key(parts)


def _check_index(name: str, index: Any) -> tuple[int, ...] | None:
    if index is None:
        return None
    if isinstance(index, str) or not hasattr(index, "__iter__"):
        raise ValueError(f"{name} must be a sequence of integers or None, got {index!r}; write {name}=[...].")
    numbers = tuple(operator.index(number) for number in index)
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise ValueError(f"{name} must hold distinct integers from 0, got {list(numbers)}; None takes all elements.")
    return numbers


def _entry(state: TensorDictBase, key: NestedKey) -> Tensor:
    value = state.get(key, None)
    if not isinstance(value, Tensor):
        present = sorted(map(str, state.keys(True, True)))
        raise KeyError(
            f"Entry {key!r} is missing: the state holds {present}. Write it into both states of a transition, the root "
            "and 'next' (what is recomputed, into 'next' alone), or name another key."
        )
    return value


def _elements(state: TensorDictBase, key: NestedKey, index: Sequence[int] | None) -> Tensor:
    value = _entry(state, key)
    if value.ndim <= state.ndim:
        raise ValueError(
            f"Entry {key!r} has shape {list(value.shape)}, which is the batch shape and no feature dimension; "
            "unsqueeze it to [*B, 1]."
        )
    if index is None:
        return value
    if max(index) >= value.shape[-1]:
        raise IndexError(
            f"Index {max(index)} is outside entry {key!r}, whose last dimension has {value.shape[-1]} elements; "
            "indices count from 0."
        )
    return value[..., _positions(tuple(index), value.device)]


@functools.lru_cache(maxsize=64)
def _positions(index: tuple[int, ...], device: torch.device) -> Tensor:
    # Kept, because a list sent to an accelerator would be waited for each time.
    return torch.tensor(index, device=device)


def _following(transitions: TensorDictBase) -> TensorDictBase:
    following = transitions.get("next", None)
    if not isinstance(following, TensorDictBase):
        raise KeyError(f"Entry 'next' is missing: the transition holds {sorted(map(str, transitions.keys()))}.")
    return following


def over_features(where: Tensor, value: Tensor) -> Tensor:
    """A mask `[*B, 1]` as one for all features of values `[*B, *]`, however many dimensions these have."""
    extra = value.ndim - where.ndim
    return where.reshape(where.shape + (1,) * extra) if extra else where


def _write(entry: Tensor, value: Tensor, where: Tensor | None) -> None:
    """Writes the value, of the same dtype, into the memory of the entry, in some rows or in all."""
    if where is None:
        entry.copy_(value)
    else:
        torch.where(over_features(where, entry), value, entry, out=entry)


def _result(name: str, function: TransitionFunction, transitions: TensorDictBase, key: str, entry: Tensor) -> Tensor:
    """What a function of the user says of transitions, once it fits the entry of "next" that it is to replace."""
    result = function(transitions)
    shape = torch.Size([*transitions.batch_size, 1])
    if not isinstance(result, Tensor) or result.shape != shape:
        got = list(result.shape) if isinstance(result, Tensor) else f"a {type(result).__name__}"
        raise ValueError(f"{name} must return a tensor of shape {list(shape)}, got {got}; keep a trailing 1.")
    _check_shape(key, entry, transitions.batch_size)
    if result.dtype != entry.dtype:
        if not (result.is_floating_point() and entry.is_floating_point()):
            raise ValueError(
                f"{name} must return {entry.dtype}, as ('next', {key!r}) is, got {result.dtype}; convert it."
            )
        result = result.to(entry.dtype)
    check_finite(result, f"{name} returned NaN or infinite values; return finite ones for every goal.")
    return result


def _check_shape(key: str, entry: Tensor, batch_size: torch.Size) -> None:
    if entry.shape != (*batch_size, 1):
        raise ValueError(
            f"Entry ('next', {key!r}) has shape {list(entry.shape)}, expected {[*batch_size, 1]}; unsqueeze it to "
            "[*B, 1]."
        )


def check_finite(value: Tensor, message: str) -> None:
    """Raises ValueError with this message if the values are not all finite."""
    if not value.is_floating_point():
        return
    if value.device.type == "cuda":
        torch._assert_async(value.isfinite().all())  # looking would mean waiting
    elif not math.isfinite(value.sum().item()) and not value.isfinite().all():  # a sum may overflow
        raise ValueError(message)
