"""Measuring a policy by its episodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.envs import EnvBase, ExplorationType, set_exploration_type

from torchrl_safety.objectives.signals import read


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """`module` in evaluation mode without gradients; every submodule's own mode is put back.

    Example:
        >>> from torch import nn
        >>> from torchrl_safety.trainers import evaluation_mode
        >>> layer = nn.Dropout()
        >>> with evaluation_mode(layer):
        ...     print(layer.training)
        False
        >>> layer.training
        True
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


def binomial_interval(count: int, total: int, *, confidence: float = 0.95) -> tuple[float, float]:
    r"""The exact interval of a probability, of which `count` of `total` independent trials came out true.

    Its ends are the :math:`p` at which a count so high, or so low, has the probability :math:`(1 - confidence)/2`, so
    that it covers the true one at least with that confidence, for every `total`. Source: Clopper and Pearson 1934.

    Args:
        count: trials that came out true.
        total: trials, at least 1.
        confidence: in (0, 1).

    Raises:
        ValueError: for a count outside 0..total, or a confidence outside (0, 1).

    Example:
        >>> from torchrl_safety.trainers import binomial_interval
        >>> low, high = binomial_interval(99, 100)
        >>> round(low, 4), round(high, 4)
        (0.9455, 0.9997)
    """
    from scipy.special import betaincinv

    if not 0 <= count <= total or total < 1:
        raise ValueError(f"count={count} of total={total}; need 0 <= count <= total and at least one trial")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; it must lie in (0, 1), e.g. 0.95")
    tail = (1 - confidence) / 2
    low = float(betaincinv(count, total - count + 1, tail)) if count else 0.0
    high = float(betaincinv(count + 1, total - count, 1 - tail)) if count < total else 1.0
    return low, high


class Evaluation(NamedTuple):
    """Rates over the episodes of :func:`evaluate`, and their states."""

    safe_rate: float
    """Share of the episodes in which the safety margin never fell below 0."""
    success_rate: float | None
    """Share that reached the target (margin >= 0) with no failure until then; None without a target margin."""
    states: Tensor
    """What stood under `state_key`, `[episodes, max_steps + 1, ...]`; what follows an end repeats the last state."""
    safe_interval: tuple[float, float]
    """Exact interval of the safe rate."""
    success_interval: tuple[float, float] | None
    """Exact interval of the success rate."""
    episodes: int
    """Number of episodes."""
    safe_episodes: int
    """Number of safe ones."""
    success_episodes: int | None
    """Number of successful ones."""
    mean_length: float
    """Mean number of steps of an episode."""
    seconds: float
    """Time that all of them took."""

    def __repr__(self) -> str:
        fields = (f"{name}={value!r}" for name, value in self._asdict().items() if name != "states")
        return f"Evaluation({', '.join(fields)}, states={list(self.states.shape)})"

    @property
    def scores(self) -> dict[str, float | None]:
        """The numbers by name, for :func:`~torchrl_safety.trainers.log_scores`."""
        success_low, success_high = self.success_interval or (None, None)
        return {
            "safe_rate": self.safe_rate,
            "safe_rate_low": self.safe_interval[0],
            "safe_rate_high": self.safe_interval[1],
            "success_rate": self.success_rate,
            "success_rate_low": success_low,
            "success_rate_high": success_high,
            "episodes": self.episodes,
            "mean_length": self.mean_length,
            "seconds": self.seconds,
        }


class _Episodes(NamedTuple):
    """What is known of the episodes of one round, `[N]`."""

    safe: Tensor
    length: Tensor
    states: Tensor
    reached: Tensor | None


def evaluate(
    env: EnvBase,
    policy: Callable[[TensorDictBase], TensorDictBase],
    *,
    starts: Tensor | None = None,
    episodes: int | None = None,
    max_steps: int,
    safety_margin: NestedKey = "safety_margin",
    target_margin: NestedKey | None = None,
    state_key: NestedKey = "observation",
    confidence: float = 0.95,
) -> Evaluation:
    """Run episodes of a policy and report how often it stays safe and reaches the target.

    Safe means that the safety margin never falls below 0 (a NaN counts as below); success means that the target margin
    is >= 0 at some step, with no failure until then. An episode ends where the environment terminates or truncates it,
    or after `max_steps`. Episodes run side by side in the batch of the environment, in as many rounds as it takes.

    The policy acts deterministically: under `ExplorationType.DETERMINISTIC` (the mode of a categorical, the squashed
    mean of a tanh-normal) and, if it is a module, in evaluation mode (noisy layers use their means), without gradients.

    Args:
        env: any TorchRL environment, batched or not, that writes its margins after a reset and after a step. A margin
            that stands on a reward key is read from the first step on.
        policy: writes the action.
        starts: first states `[N, ...]`, for an environment that can be reset to given ones; else
        episodes: their number N, starting where the resets of the environment put them.
        max_steps: the most steps of an episode.
        safety_margin: key of the safety margin `[*B, 1]`, >= 0 outside the failure set.
        target_margin: key of the target margin `[*B, 1]`, >= 0 inside the target; None for ``"target_margin"`` where
            the environment declares it, and no success rate where it does not.
        state_key: key under which starts are given and states are recorded.
        confidence: of the exact intervals of both rates, see :func:`binomial_interval`.

    Raises:
        ValueError: for a setting out of range, not exactly one of `starts` and `episodes`, or starts that the
            environment cannot take.
        KeyError: if a reset or a step does not write a margin.

    Example:
        >>> import torch
        >>> from torchrl_safety.envs import DoubleIntegratorEnv
        >>> from torchrl_safety.trainers import evaluate
        >>> env = DoubleIntegratorEnv(2)
        >>> idle = lambda td: td.set("action", torch.ones(2, dtype=torch.int64))
        >>> evaluate(env, idle, starts=torch.tensor([[0.0, 0.0], [0.0, 1.0]]), max_steps=100).safe_rate
        0.5
    """
    count = _count(starts, episodes, max_steps)
    if target_margin is None and "target_margin" in env.full_observation_spec.keys(True, True):
        target_margin = "target_margin"
    binomial_interval(0, 1, confidence=confidence)  # refuses it before anything runs
    began = time.perf_counter()
    module = policy if isinstance(policy, nn.Module) else nn.Module()
    rounds = []
    with evaluation_mode(module), set_exploration_type(ExplorationType.DETERMINISTIC):
        for first in range(0, count, env.numel()):
            root = env.reset() if starts is None else _reset_to(env, starts, first, state_key)
            rounds.append(_run(env, policy, root, max_steps, safety_margin, target_margin, state_key))
    # The last round may hold more episodes than are left.
    safe, length, states = (torch.cat(parts)[:count] for parts in zip(*(found[:3] for found in rounds)))
    reached = [found.reached for found in rounds if found.reached is not None]
    safe_episodes = int(safe.sum())
    success_episodes = int(torch.cat(reached)[:count].sum()) if reached else None
    return Evaluation(
        safe_rate=safe_episodes / count,
        success_rate=None if success_episodes is None else success_episodes / count,
        states=states,
        safe_interval=binomial_interval(safe_episodes, count, confidence=confidence),
        success_interval=(
            None if success_episodes is None else binomial_interval(success_episodes, count, confidence=confidence)
        ),
        episodes=count,
        safe_episodes=safe_episodes,
        success_episodes=success_episodes,
        mean_length=int(length.sum()) / count,
        seconds=time.perf_counter() - began,
    )


def _count(starts: Tensor | None, episodes: int | None, max_steps: int) -> int:
    if (starts is None) == (episodes is None):
        raise ValueError(
            "give either starts (first states `[N, ...]`) or episodes (their number, started by the resets of the "
            "environment)"
        )
    for name, value in (("episodes", episodes), ("max_steps", max_steps)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
    if starts is None:
        assert episodes is not None
        return episodes
    if starts.ndim == 0 or not len(starts):
        raise ValueError(f"starts has shape {list(starts.shape)}; give at least one state, `[N, ...]`")
    return len(starts)


def _reset_to(env: EnvBase, starts: Tensor, first: int, state_key: NestedKey) -> TensorDictBase:
    """A reset to the starts from `first` on; where they run out, the last one is repeated."""
    chosen = torch.arange(first, first + env.numel(), device=starts.device).clamp(max=len(starts) - 1)
    states = starts[chosen].reshape(*env.batch_size, *starts.shape[1:])
    given = TensorDict({state_key: states}, env.batch_size, device=env.device)
    try:
        return env.reset(given, set_state=True)
    except NotImplementedError as error:
        raise ValueError(
            f"{type(env).__name__} cannot be reset to given starts: pass episodes=... instead, which begin where its "
            "own resets put them"
        ) from error


def _run(
    env: EnvBase,
    policy: Callable[[TensorDictBase], TensorDictBase],
    root: TensorDictBase,
    max_steps: int,
    safety_margin: NestedKey,
    target_margin: NestedKey | None,
    state_key: NestedKey,
) -> _Episodes:
    """One episode in each member of the batch, from `root` on, flattened to `[N]`."""
    remedy = "Let the environment write it in _reset and in _step, or name its key with {}=..."
    on_reward = set(env.reward_keys)  # which resets do not write
    over = root["done"].clone()
    safe, length = torch.ones_like(over), torch.zeros_like(over, dtype=torch.int64)
    if safety_margin not in on_reward:
        safe = read(root, safety_margin, remedy.format("safety_margin")) >= 0
    reached = None
    if target_margin in on_reward:
        reached = torch.zeros_like(over)
    elif target_margin is not None:
        reached = safe & (read(root, target_margin, remedy.format("target_margin")) >= 0)
    states = [read(root, state_key, remedy.format("state_key"))]
    for _ in range(max_steps):
        # A member whose episode is over begins another one, which counts for nothing: unlike a step beyond the end,
        # every environment allows that.
        transition, root = env.step_and_maybe_reset(policy(root))
        after = transition["next"]
        safe = safe & (over | (read(after, safety_margin, remedy.format("safety_margin")) >= 0))
        if reached is not None and target_margin is not None:
            target = read(after, target_margin, remedy.format("target_margin"))
            reached = reached | (~over & safe & (target >= 0))
        length = length + ~over
        held = over.reshape(*env.batch_size, *(1,) * (states[-1].ndim - len(env.batch_size)))
        states.append(torch.where(held, states[-1], after[state_key]))
        over = over | after["done"]
        if over.all():
            break
    states += states[-1:] * (max_steps + 1 - len(states))
    path = torch.stack(states, len(env.batch_size))
    return _Episodes(
        safe.reshape(-1),
        length.reshape(-1),
        path.reshape(-1, *path.shape[len(env.batch_size) :]),
        None if reached is None else reached.reshape(-1),
    )
