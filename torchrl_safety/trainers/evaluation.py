"""Measuring a learned set against an exact one, and a policy by its roll-outs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.envs import EnvBase

from torchrl_safety.objectives.backups import Backup
from torchrl_safety.objectives.signals import read


class SetMetrics(NamedTuple):
    """How a predicted set compares with the exact one; all in [0, 1]."""

    iou: float
    """Size of the intersection over size of the union."""
    false_safe: float
    """Share of the unsafe states that are called safe."""
    false_unsafe: float
    """Share of the safe states that are called unsafe."""


def set_metrics(predicted: Tensor, exact: Tensor) -> SetMetrics:
    r"""Compare a predicted set with the exact one, state by state.

    :math:`IoU = |P \cap E| / |P \cup E|`, false-safe :math:`= |P \setminus E| / |E^c|`,
    false-unsafe :math:`= |E \setminus P| / |E|`. An empty denominator gives IoU 1 and rates 0.

    Args:
        predicted: bool, any shape; true where the state is claimed to be in the solution set.
        exact: bool, the same shape.

    Raises:
        ValueError: if the shapes differ or a tensor is not bool.

    Example:
        >>> import torch
        >>> from torchrl_safety.trainers import set_metrics
        >>> set_metrics(torch.tensor([True, True, False, False]), torch.tensor([True, False, False, False]))
        SetMetrics(iou=0.5, false_safe=0.3333333333333333, false_unsafe=0.0)
    """
    if predicted.shape != exact.shape:
        raise ValueError(f"predicted {list(predicted.shape)} and exact {list(exact.shape)} differ in shape")
    for name, mask in (("predicted", predicted), ("exact", exact)):
        if mask.dtype != torch.bool:
            raise ValueError(f"{name} has dtype {mask.dtype}; pass a bool mask, e.g. value >= 0")
    both, either = (predicted & exact).sum().item(), (predicted | exact).sum().item()
    safe, unsafe = exact.sum().item(), (~exact).sum().item()
    return SetMetrics(
        iou=both / either if either else 1.0,
        false_safe=(predicted.sum().item() - both) / unsafe if unsafe else 0.0,
        false_unsafe=(safe - both) / safe if safe else 0.0,
    )


def state_value(backup: Backup, signals: Mapping[str, Tensor], next_value: Tensor) -> Tensor:
    r"""The value of a state itself from a critic, whose value counts from the next state on.

    One undiscounted step with the margins at the state: avoid :math:`\min(g, V)`, reach :math:`\max(l, V)`,
    reach-avoid :math:`\min(g, \max(l, V))`. The solution set is where it is :math:`\ge 0`.

    Args:
        backup: the problem.
        signals: its signals at the state, `[*B, 1]`.
        next_value: :math:`\max_a Q(s, a)`, `[*B, 1]`.

    Example:
        >>> import torch
        >>> from torchrl_safety.objectives import AvoidBackup
        >>> from torchrl_safety.trainers import state_value
        >>> state_value(AvoidBackup(), {"safety_margin": torch.tensor([-0.1])}, torch.tensor([0.5]))
        tensor([-0.1000])
    """
    running = torch.zeros_like(next_value, dtype=torch.bool)
    return backup.step_map(signals, gamma=1.0, terminated=running)(next_value)


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


class Evaluation(NamedTuple):
    """Rates over the episodes of :func:`evaluate`, and their states."""

    safe_rate: float
    """Share of the episodes in which the safety margin never fell below 0."""
    success_rate: float | None
    """Share that reached the target (margin >= 0) with no failure until then; None without a target margin."""
    states: Tensor
    """Observations `[N, T + 1, ...]` of the roll-outs; what follows an end repeats the last state."""


def evaluate(
    env: EnvBase,
    policy: Callable[[TensorDictBase], TensorDictBase],
    *,
    starts: Tensor,
    max_steps: int,
    safety_margin: NestedKey = "safety_margin",
    target_margin: NestedKey = "target_margin",
) -> Evaluation:
    """Roll a policy out from given states and report how often it stays safe and reaches the target.

    Safe means that the safety margin never falls below 0; success means that the target margin is >= 0 at some step,
    with no failure until then. An episode is frozen where the environment terminates it. A policy that is a module
    runs in evaluation mode, so that noisy layers use their means.

    Args:
        env: a batched environment that resets to `"observation"`s given to it, and writes its margins after a reset
            and after a step.
        policy: writes the action.
        starts: first observations, `[N, ...]` with `N` the batch of the environment.
        max_steps: length of the roll-outs.
        safety_margin: key of the safety margin `[N, 1]`, >= 0 outside the failure set.
        target_margin: key of the target margin `[N, 1]`, >= 0 inside the target; success is None without it.

    Raises:
        ValueError: if `starts` does not fit the batch of the environment.
        KeyError: if a reset or a step writes no safety margin.

    Example:
        >>> import torch
        >>> from torchrl_safety.envs import DoubleIntegratorEnv
        >>> from torchrl_safety.trainers import evaluate
        >>> env = DoubleIntegratorEnv(2)
        >>> idle = lambda td: td.set("action", torch.ones(2, dtype=torch.int64))
        >>> evaluate(env, idle, starts=torch.tensor([[0.0, 0.0], [0.0, 1.0]]), max_steps=100).safe_rate
        0.5
    """
    if starts.shape[: len(env.batch_size)] != env.batch_size:
        raise ValueError(
            f"starts has shape {list(starts.shape)}, the environment batch {list(env.batch_size)}: give one start per "
            "environment, or build the environment with num_envs=len(starts)"
        )
    module = policy if isinstance(policy, nn.Module) else nn.Module()
    with evaluation_mode(module):
        return _roll_out(env, policy, starts, max_steps, safety_margin, target_margin)


def _roll_out(
    env: EnvBase,
    policy: Callable[[TensorDictBase], TensorDictBase],
    starts: Tensor,
    max_steps: int,
    safety_margin: NestedKey,
    target_margin: NestedKey,
) -> Evaluation:
    remedy = "Let the environment write it in _reset and in _step, or name its key with safety_margin=..."
    tensordict = env.reset(TensorDict({"observation": starts}, env.batch_size))
    safe = read(tensordict, safety_margin, remedy) >= 0
    target = tensordict.get(target_margin, None)
    reached = None if target is None else safe & (target >= 0)
    over = torch.zeros_like(safe)
    states = [tensordict["observation"]]
    for _ in range(max_steps):
        after = env.step(policy(tensordict)).get("next")
        safe = safe & (over | (read(after, safety_margin, remedy) >= 0))
        if reached is not None:
            reached = reached | (~over & safe & (after[target_margin] >= 0))
        states.append(torch.where(over, states[-1], after["observation"]))
        over = over | after["terminated"]
        tensordict = after
    success = None if reached is None else reached.float().mean().item()
    return Evaluation(safe.float().mean().item(), success, torch.stack(states, len(env.batch_size)))


class SetEvaluation(NamedTuple):
    """What :class:`ExactSetEvaluator` finds."""

    scores: dict[str, float | None]
    """`iou`, `false_safe`, `false_unsafe`, `safe_rate`, `success_rate`."""
    value: Tensor
    """Learned value of each state of the grid itself, `[n, n]`."""
    states: Tensor
    """Roll-outs `[N, T + 1, 2]`."""


class ExactSetEvaluator:
    """Measures a learned value and its policy against the exact solution of a planar native environment.

    The set is read off a grid (see :func:`state_value`); the roll-outs start in the exact set shrunk towards the
    origin, where a good policy does not fail. Both use the same states every time and no global randomness.

    Args:
        env: an environment with `exact_value`; one roll-out is made per member of its batch.
        backup: the problem that the value solves.
        half_size: the grid spans [-half_size, half_size] in either dimension.
        grid: number of nodes per dimension.
        level: the learned set is where the value is at least this.
        shrink: the factor by which the exact set is shrunk for the starts.
        rollout_steps: length of the roll-outs.
        seed: draws the starts.

    Example:
        >>> import torch
        >>> from torchrl_safety.envs import DoubleIntegratorEnv
        >>> from torchrl_safety.objectives import AvoidBackup
        >>> from torchrl_safety.trainers import ExactSetEvaluator
        >>> env = DoubleIntegratorEnv(8)
        >>> evaluator = ExactSetEvaluator(env, AvoidBackup(), half_size=(1.2, 2.2), rollout_steps=200)
        >>> brake = lambda td: td.set("action", 1 - td["observation"][..., 1].sign().long())
        >>> evaluator(brake, lambda states: env.exact_value(states).unsqueeze(-1)).scores["safe_rate"]
        1.0
    """

    def __init__(
        self,
        env: EnvBase,
        backup: Backup,
        *,
        half_size: Sequence[float],
        grid: int = 201,
        level: float = 0.0,
        shrink: float = 0.95,
        rollout_steps: int = 200,
        seed: int = 0,
    ) -> None:
        self.env, self.backup, self.level, self.rollout_steps = env, backup, level, rollout_steps
        self.axes = [torch.linspace(-top, top, grid, device=env.device, dtype=env.dtype) for top in half_size]
        self.grid = torch.stack(torch.meshgrid(*self.axes, indexing="ij"), -1)
        self.exact = env.exact_value(self.grid)
        inside = self.grid[env.exact_value(self.grid / shrink) >= 0]
        if not len(inside):
            raise ValueError(
                f"no node of the grid lies in the exact set shrunk by shrink={shrink}, so no roll-out can start: take "
                f"more nodes than grid={grid}"
            )
        source = torch.Generator().manual_seed(seed)
        draws = torch.randint(len(inside), env.batch_size, generator=source, device="cpu")
        self.starts = inside[draws.to(inside.device)]
        safety = env.safety_margin(self.grid)
        self.signals = {"safety_margin": safety, "reward": env.reward(safety)}
        self.signals["target_margin"] = env.target_margin(self.grid)

    def __call__(
        self, policy: Callable[[TensorDictBase], TensorDictBase], next_value: Callable[[Tensor], Tensor]
    ) -> SetEvaluation:
        """Measure `policy`, and the set of `next_value`, which maps states `[*, 2]` to critic values `[*, 1]`."""
        with evaluation_mode(policy if isinstance(policy, nn.Module) else nn.Module()):
            value = state_value(self.backup, self.signals, next_value(self.grid)).squeeze(-1)
        rolled = evaluate(self.env, policy, starts=self.starts, max_steps=self.rollout_steps)
        metrics = set_metrics(value >= self.level, self.exact >= 0)
        scores = {**metrics._asdict(), "safe_rate": rolled.safe_rate, "success_rate": rolled.success_rate}
        return SetEvaluation(scores, value, rolled.states)
