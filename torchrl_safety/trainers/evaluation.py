"""Measuring a policy by its episodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

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

    safe_rate: float | None
    """Share of the episodes in which the safety margin never fell below 0; None without a safety margin."""
    success_rate: float | None
    """Share that reached the target (margin >= 0) with no failure until then; None without a target margin."""
    states: Tensor | None
    """What stood under `state_key`, `[episodes, max_steps + 1, ...]`; what follows an end repeats the last state."""
    safe_interval: tuple[float, float] | None
    """Exact interval of the safe rate."""
    success_interval: tuple[float, float] | None
    """Exact interval of the success rate."""
    episodes: int
    """Number of episodes."""
    safe_episodes: int | None
    """Number of safe ones."""
    success_episodes: int | None
    """Number of successful ones."""
    mean_length: float
    """Mean number of steps of an episode."""
    seconds: float
    """Time that all of them took."""
    returns: Tensor | None = None
    """Undiscounted sum of the rewards of each episode, `[episodes]`; None without a reward key."""
    safe: Tensor | None = None
    """Which episodes were safe, `[episodes]`."""
    success: Tensor | None = None
    """Which episodes were successful, `[episodes]`."""
    lengths: Tensor | None = None
    """Number of steps of each episode, `[episodes]`."""

    def __repr__(self) -> str:
        shown = {
            name: list(value.shape) if isinstance(value, Tensor) else value for name, value in self._asdict().items()
        }
        return f"Evaluation({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def scores(self) -> dict[str, float | None]:
        """The numbers by name, for :func:`~torchrl_safety.trainers.log_scores`."""
        safe_low, safe_high = self.safe_interval or (None, None)
        success_low, success_high = self.success_interval or (None, None)
        returns = self.returns
        return {
            "mean_return": None if returns is None else returns.mean().item(),
            "std_return": None if returns is None else returns.std(correction=0).item(),
            "safe_rate": self.safe_rate,
            "safe_rate_low": safe_low,
            "safe_rate_high": safe_high,
            "success_rate": self.success_rate,
            "success_rate_low": success_low,
            "success_rate_high": success_high,
            "episodes": self.episodes,
            "mean_length": self.mean_length,
            "seconds": self.seconds,
        }


class _Episodes(NamedTuple):
    """What is known of the episodes of one round, `[N]`."""

    length: Tensor
    safe: Tensor | None
    reached: Tensor | None
    returns: Tensor | None
    states: Tensor | None


def evaluate(
    env: EnvBase,
    policy: Callable[[TensorDictBase], TensorDictBase],
    *,
    starts: Tensor | None = None,
    episodes: int | None = None,
    max_steps: int,
    safety_margin: NestedKey | None = "safety_margin",
    target_margin: NestedKey | None = None,
    reward: NestedKey | None = None,
    state_key: NestedKey | None = "observation",
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
        safety_margin: key of the safety margin `[*B, 1]`, >= 0 outside the failure set; None for an ordinary return,
            of which no rates are known.
        target_margin: key of the target margin `[*B, 1]`, >= 0 inside the target; None for ``"target_margin"`` where
            the environment declares it, and no success rate where it does not.
        reward: key of a reward `[*B, 1]` to be summed over each episode; None for no returns.
        state_key: key under which starts are given and states are recorded; None records none, as of images.
        confidence: of the exact intervals of both rates, see :func:`binomial_interval`.

    Raises:
        ValueError: for a setting out of range, not exactly one of `starts` and `episodes`, starts that the
            environment cannot take, a target without a safety margin, or a margin or reward of another shape.
        KeyError: if a reset or a step does not write a margin, or a step the reward.

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
    if safety_margin is None and target_margin is not None:
        raise ValueError(f"target_margin is {target_margin!r}, but safety_margin None: success needs both")
    if starts is not None and state_key is None:
        raise ValueError("state_key is None, so that starts have no place; name the key of the states")
    declared = env.full_observation_spec.keys(True, True)
    if target_margin is None and safety_margin is not None and "target_margin" in declared:
        target_margin = "target_margin"
    binomial_interval(0, 1, confidence=confidence)  # refuses it before anything runs
    began = time.perf_counter()
    module = policy if isinstance(policy, nn.Module) else nn.Module()
    keys = _Keys(safety_margin, target_margin, reward, state_key)
    rounds = []
    with evaluation_mode(module), set_exploration_type(ExplorationType.DETERMINISTIC):
        for first in range(0, count, env.numel()):
            root = env.reset() if starts is None else _reset_to(env, starts, first, keys.state)
            rounds.append(_run(env, policy, root, max_steps, keys))
    # The last round may hold more episodes than are left.
    joined: list[Any] = [None if parts[0] is None else torch.cat(parts)[:count] for parts in zip(*rounds)]
    length, safe, reached, returns, states = joined
    safe_episodes, safe_rate, safe_interval = _rate(safe, confidence)
    success_episodes, success_rate, success_interval = _rate(reached, confidence)
    return Evaluation(
        safe_rate=safe_rate,
        success_rate=success_rate,
        states=states,
        safe_interval=safe_interval,
        success_interval=success_interval,
        episodes=count,
        safe_episodes=safe_episodes,
        success_episodes=success_episodes,
        mean_length=int(length.sum()) / count,
        seconds=time.perf_counter() - began,
        returns=returns,
        safe=safe,
        success=reached,
        lengths=length,
    )


def _rate(true: Tensor | None, confidence: float) -> tuple[int, float, tuple[float, float]] | tuple[None, None, None]:
    """Number and share of the true entries, and the interval of the share."""
    if true is None:
        return None, None, None
    count = int(true.sum())
    return count, count / len(true), binomial_interval(count, len(true), confidence=confidence)


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


class _Keys(NamedTuple):
    """What is read of a state or a step; None is not."""

    safety_margin: NestedKey | None
    target_margin: NestedKey | None
    reward: NestedKey | None
    state: NestedKey | None

    def read(self, tensordict: TensorDictBase, name: str) -> Tensor:
        remedy = f"Let the environment write it in _reset and in _step, or name its key with {name}=..."
        return read(tensordict, getattr(self, name.removesuffix("_key")), remedy)

    def read_like(self, done: Tensor, tensordict: TensorDictBase, name: str) -> Tensor:
        """One number for each episode: others would be counted as those of other episodes."""
        value = self.read(tensordict, name)
        if value.shape != done.shape:
            raise ValueError(
                f"the {name} {getattr(self, name)!r} has shape {list(value.shape)}; give one number for each "
                f"environment, {list(done.shape)}"
            )
        return value


def _run(
    env: EnvBase,
    policy: Callable[[TensorDictBase], TensorDictBase],
    root: TensorDictBase,
    max_steps: int,
    keys: _Keys,
) -> _Episodes:
    """One episode in each member of the batch, from `root` on, flattened to `[N]`."""
    on_reward = set(env.reward_keys)  # which resets do not write
    over = root["done"].clone()
    length = torch.zeros_like(over, dtype=torch.int64)
    safe = reached = returns = None
    if keys.safety_margin is not None:
        is_written = keys.safety_margin not in on_reward
        safe = keys.read_like(over, root, "safety_margin") >= 0 if is_written else torch.ones_like(over)
    if keys.target_margin is not None:
        is_written = keys.target_margin not in on_reward
        reached = keys.read_like(over, root, "target_margin") >= 0 if is_written else torch.zeros_like(over)
        reached = reached if safe is None else reached & safe
    states = [] if keys.state is None else [keys.read(root, "state_key")]
    for _ in range(max_steps):
        # A member whose episode is over begins another one, which counts for nothing: unlike a step beyond the end,
        # every environment allows that.
        transition, root = env.step_and_maybe_reset(policy(root))
        after = transition["next"]
        if safe is not None:
            safe = safe & (over | (keys.read_like(over, after, "safety_margin") >= 0))
        if reached is not None and safe is not None:
            reached = reached | (~over & safe & (keys.read_like(over, after, "target_margin") >= 0))
        if keys.reward is not None:
            gained = keys.read_like(over, after, "reward").masked_fill(over, 0)
            returns = gained if returns is None else returns + gained
        length = length + ~over
        if states:
            held = over.reshape(*env.batch_size, *(1,) * (states[-1].ndim - len(env.batch_size)))
            states.append(torch.where(held, states[-1], after[keys.state]))
        over = over | after["done"]
        if over.all():
            break
    path = None
    if states:
        states += states[-1:] * (max_steps + 1 - len(states))
        path = torch.stack(states, len(env.batch_size))
        path = path.reshape(-1, *path.shape[len(env.batch_size) :])
    return _Episodes(length.reshape(-1), _flat(safe), _flat(reached), _flat(returns), path)


def _flat(part: Tensor | None) -> Tensor | None:
    return None if part is None else part.reshape(-1)


class EpisodeEvaluator:
    """Measure a policy by the same episodes each time, where no exact set is known: :func:`evaluate` after a seed.

    Args:
        env: see :func:`evaluate`; it is seeded before each measurement, so that policies meet the same starts and a
            resumed run measures what the whole one did.
        episodes: their number.
        max_steps: the most steps of one.
        seed: of the environment.
        **keys: `safety_margin`, `target_margin`, `reward`, `state_key` and `confidence` of :func:`evaluate`.

    Example:
        >>> import torch
        >>> from torchrl_safety.envs import DoubleIntegratorEnv
        >>> from torchrl_safety.trainers import EpisodeEvaluator
        >>> env = DoubleIntegratorEnv(2)
        >>> idle = lambda td: td.set("action", torch.ones(2, dtype=torch.int64))
        >>> measure = EpisodeEvaluator(env, episodes=4, max_steps=50, reward="reward")
        >>> first, second = measure(idle), measure(idle)
        >>> bool((first.states == second.states).all())
        True
    """

    def __init__(self, env: EnvBase, *, episodes: int, max_steps: int, seed: int = 0, **keys: Any) -> None:
        self.env, self.episodes, self.max_steps, self.seed, self.keys = env, episodes, max_steps, seed, keys

    def __call__(self, policy: Callable[[TensorDictBase], TensorDictBase]) -> Evaluation:
        """Measure `policy`."""
        self.env.set_seed(self.seed)
        return evaluate(self.env, policy, episodes=self.episodes, max_steps=self.max_steps, **self.keys)
