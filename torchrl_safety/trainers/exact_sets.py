"""Measuring a learned set against an exact one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.envs import EnvBase

from torchrl_safety.objectives.backups import Backup
from torchrl_safety.trainers.evaluation import evaluate, evaluation_mode
from torchrl_safety.trainers.plots import plot_value_map

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHUNK = 65_536
"""The most states that a value is asked for at once, so that a grid in many dimensions fits into memory."""


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


class SetEvaluation(NamedTuple):
    """What :class:`ExactSetEvaluator` finds."""

    scores: dict[str, float | None]
    """`iou`, `false_safe`, `false_unsafe`, `safe_rate`, `success_rate`."""
    value: Tensor
    """Learned value of each state of the grid itself, `[*grid]`."""
    states: Tensor
    """Roll-outs `[N, T + 1, S]`."""


class ExactSetEvaluator:
    """Measures a learned value and its policy against the exact solution of a native environment.

    The set is read off a grid (see :func:`state_value`); the roll-outs start in the exact set shrunk a little, where
    a good policy does not fail, and outside the target, if there is one. Both use the same states every time and no
    global randomness.

    Args:
        env: an environment with `exact_safe` and `well_inside`; one roll-out is made per member of its batch.
        backup: the problem that the value solves.
        low: least coordinates of the grid, one per dimension S of the state.
        high: greatest coordinates. Of an angle (`env.angles`) that goes all the way round, the last node is left out,
            so that no state counts twice.
        grid: number of nodes per dimension, one for all or one for each.
        level: the learned set is where the value is at least this.
        shrink: the share to which the exact set is shrunk for the starts, see `env.well_inside`.
        rollout_steps: length of the roll-outs.
        seed: draws the starts.

    Attributes:
        axes: coordinates of the nodes, one `[n]` per dimension.
        grid: the nodes `[*grid, S]`.
        exact: whether they lie in the exact set, bool `[*grid]`.
        starts: first states of the roll-outs `[N, S]`.

    Raises:
        ValueError: if corners or nodes do not fit the dimension of the state, there is no exact solution, or no node
            lies in the shrunk set.

    Example:
        >>> import torch
        >>> from torchrl_safety.envs import DoubleIntegratorEnv
        >>> from torchrl_safety.objectives import AvoidBackup
        >>> from torchrl_safety.trainers import ExactSetEvaluator
        >>> env = DoubleIntegratorEnv(8)
        >>> evaluator = ExactSetEvaluator(env, AvoidBackup(), low=(-1.2, -2.2), high=(1.2, 2.2), rollout_steps=200)
        >>> brake = lambda td: td.set("action", 1 - td["observation"][..., 1].sign().long())
        >>> evaluator(brake, lambda states: env.exact_value(states).unsqueeze(-1)).scores["safe_rate"]
        1.0
    """

    def __init__(
        self,
        env: EnvBase,
        backup: Backup,
        *,
        low: Sequence[float],
        high: Sequence[float],
        grid: int | Sequence[int] = 201,
        level: float = 0.0,
        shrink: float = 0.95,
        rollout_steps: int = 200,
        seed: int = 0,
    ) -> None:
        if not (callable(getattr(env, "exact_safe", None)) and callable(getattr(env, "well_inside", None))):
            raise ValueError(
                f"{type(env).__name__} has no exact solution: give it exact_safe(state) and well_inside(state, share), "
                "or measure the policy alone with evaluate(...)"
            )
        self.env, self.backup, self.level, self.rollout_steps = env, backup, level, rollout_steps
        self.axes = _axes(env, low, high, grid)
        self.grid = torch.stack(torch.meshgrid(*self.axes, indexing="ij"), -1)
        self.exact = env.exact_safe(self.grid)
        startable = env.well_inside(self.grid, shrink)
        if "target_margin" in backup.signals:  # at the target there is nothing left to do, and to leave it may be fatal
            startable &= env.target_margin(self.grid).squeeze(-1) < 0
        inside = self.grid[startable]
        if not len(inside):
            raise ValueError(
                f"no node of the grid lies in the exact set shrunk by shrink={shrink}, outside the target, so no "
                f"roll-out can start: take more nodes than grid={grid}"
            )
        source = torch.Generator().manual_seed(seed)
        draws = torch.randint(len(inside), env.batch_size, generator=source, device="cpu")
        self.starts = inside[draws.to(inside.device)]
        margins = {
            "safety_margin": env.safety_margin,
            "target_margin": env.target_margin,
            "reward": lambda states: env.reward(env.safety_margin(states)),
        }
        self.signals = {name: margins[name](self.grid) for name in backup.signals}

    def __call__(
        self, policy: Callable[[TensorDictBase], TensorDictBase], next_value: Callable[[Tensor], Tensor]
    ) -> SetEvaluation:
        """Measure `policy`, and the set of `next_value`, which maps states `[*, S]` to critic values `[*, 1]`."""
        with evaluation_mode(policy if isinstance(policy, nn.Module) else nn.Module()):
            value, metrics = self.measure_set(next_value)
        rolled = evaluate(
            self.env, policy, starts=self.starts, max_steps=self.rollout_steps, state_key=self.env.state_key
        )
        assert rolled.states is not None  # a state key was given
        scores = {**metrics._asdict(), "safe_rate": rolled.safe_rate, "success_rate": rolled.success_rate}
        return SetEvaluation(scores, value, rolled.states)

    @torch.no_grad()
    def measure_set(self, next_value: Callable[[Tensor], Tensor]) -> tuple[Tensor, SetMetrics]:
        """The value `[*grid]` of the states themselves, read off `next_value`, and how its set compares."""
        parts = [next_value(part) for part in self.grid.flatten(0, -2).split(CHUNK)]
        following = torch.cat(parts).reshape(*self.exact.shape, 1)
        value = state_value(self.backup, self.signals, following).squeeze(-1)
        return value, set_metrics(value >= self.level, self.exact)

    def picture(self, found: SetEvaluation, *, labels: Sequence[str], title: str = "") -> Figure:
        """The value and both sets on the plane of the first two coordinates in which the others are 0.

        Args:
            found: what was measured.
            labels: names of the first two coordinates.
            title: title of the picture, before the IoU.
        """
        at = dict.fromkeys(range(2, len(self.axes)), 0.0)
        axes, value, exact = self.plane(found.value, at=at)
        return plot_value_map(
            axes,
            value,
            exact=exact,
            states=None if at else found.states[:8],
            level=self.level,
            labels=(labels[0], labels[1]),
            title=f"{title}IoU {found.scores['iou']:.3f}",
        )

    def plane(self, value: Tensor, *, at: Mapping[int, float]) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        """A plane through the grid, as :func:`~torchrl_safety.trainers.plot_value_map` takes it.

        Args:
            value: `[*grid]`.
            at: dimension -> coordinate, for all dimensions but two; the nearest nodes are taken.

        Returns:
            the two axes left, and on them, `[n, m]`, the value, and the exact one or, in an environment that only
            knows its set, whether a node lies in that.

        Raises:
            ValueError: if the dimensions left are not two.
        """
        left = [axis for dimension, axis in enumerate(self.axes) if dimension not in at]
        if len(left) != 2 or len(left) + len(at) != len(self.axes):
            raise ValueError(f"at={dict(at)} leaves no plane of {len(self.axes)} dimensions: fix all but two of them")
        nodes = {i: int((self.axes[i] - coordinate).abs().argmin()) for i, coordinate in at.items()}
        index = tuple(nodes.get(i, slice(None)) for i in range(len(self.axes)))
        exact_value = getattr(self.env, "exact_value", None)
        exact = self.exact[index] if exact_value is None else exact_value(self.grid[index])
        return (left[0], left[1]), value[index], exact


def _axes(env: EnvBase, low: Sequence[float], high: Sequence[float], grid: int | Sequence[int]) -> list[Tensor]:
    counts = [grid] * len(low) if isinstance(grid, int) else list(grid)
    size = env.observation_spec[env.state_key].shape[-1]
    if not len(low) == len(high) == len(counts) == size:
        raise ValueError(f"low={low}, high={high} and grid={grid} must have one entry for each of {size} dimensions")
    axes = []
    for dimension, (first, last, count) in enumerate(zip(low, high, counts)):
        round_trip = dimension in env.angles and math.isclose(last - first, 2 * math.pi, rel_tol=1e-4)
        axis = torch.linspace(first, last, count + round_trip, device=env.device, dtype=env.dtype)
        axes.append(axis[:count])
    return axes
