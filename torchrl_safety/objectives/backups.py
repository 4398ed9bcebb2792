"""The operators: which signals a problem reads, and the clamped affine map of one step.

A :class:`Backup` is the only thing that losses, estimators and n-step targets know of a problem. The module
functions (:func:`avoid_target`, :func:`reach_avoid_target`, :func:`target`) evaluate the same maps
elementwise on numpy arrays or torch tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_safety.objectives.clamped_affine import ClampedAffine, check_factor

AVOID = "avoid"
REACH_AVOID = "reach-avoid"
TERMINAL_TYPES = ("all", "g")


def check_terminal_type(terminal_type: str) -> str:
    """`terminal_type` itself if it is ``"all"`` (terminal value min(l, g)) or ``"g"``; else a ValueError."""
    if terminal_type not in TERMINAL_TYPES:
        raise ValueError(f"terminal_type is {terminal_type!r}; choose one of {list(TERMINAL_TYPES)}")
    return terminal_type


class Backup(ABC):
    r"""A problem: the signals it reads at the next state and the map of the next value that one step makes.

    Subclasses give :attr:`signals`, the map of a step that goes on, and the value of a step that ends.

    Example:
        >>> import torch
        >>> from torchrl_safety.objectives import Backup, ClampedAffine
        >>> class ShortestPath(Backup):  # 1 + v, and 1 for the last step
        ...     signals = ("reward",)
        ...
        ...     def running(self, signals, gamma):
        ...         one = torch.ones_like(signals["reward"])
        ...         return ClampedAffine(one, one, -torch.inf * one, torch.inf * one)
        ...
        ...     def terminal(self, signals):
        ...         return torch.ones_like(signals["reward"])
        >>> going_on = torch.tensor([False])
        >>> ShortestPath().step_map({"reward": torch.zeros(1)}, gamma=1.0, terminated=going_on)(torch.tensor([3.0]))
        tensor([4.])
    """

    signals: tuple[str, ...]
    """Names of the signals read, among ``"safety_margin"``, ``"target_margin"`` and ``"reward"``."""

    @abstractmethod
    def running(self, signals: Mapping[str, Tensor], gamma: float | Tensor) -> ClampedAffine:
        """The map of a step after which the episode goes on."""

    @abstractmethod
    def terminal(self, signals: Mapping[str, Tensor]) -> Tensor:
        """The value of a step at which the episode ends."""

    def step_map(self, signals: Mapping[str, Tensor], *, gamma: float | Tensor, terminated: Tensor) -> ClampedAffine:
        """The map from the next value to the target of this step.

        Args:
            signals: the tensors named by :attr:`signals`, read at the next state, each `[*B, 1]`.
            gamma: discount in [0, 1]; a tensor broadcasts against `[*B, 1]`.
            terminated: bool `[*B, 1]`; true where the episode really ended.

        Returns:
            A map with fields `[*B, 1]`; a terminated step is a constant, so nothing after it matters.

        Raises:
            KeyError: if a signal is missing; none has a default.
            ValueError: if shapes disagree, a signal is not floating-point, or a number `gamma` lies outside [0, 1].
        """
        check_factor("gamma", gamma, terminated.shape)
        read = {}
        for name in self.signals:
            if name not in signals:
                raise KeyError(
                    f"{type(self).__name__} reads the signal {name!r}, which is missing; present: {sorted(signals)}. "
                    "Write it from the environment, or name its key with set_keys"
                )
            read[name] = signals[name]
            if read[name].shape != terminated.shape:
                raise ValueError(
                    f"signal {name!r} has shape {list(read[name].shape)}, terminated {list(terminated.shape)}: "
                    "both must be `[*B, 1]`; add the trailing dimension with unsqueeze(-1)"
                )
            if not read[name].is_floating_point():
                raise ValueError(
                    f"signal {name!r} has dtype {read[name].dtype}: margins and rewards are floating-point numbers; "
                    "convert it, e.g. with .float() (a flag is no margin: False would be 0, which is safe)"
                )
        return self.running(read, gamma).ended(terminated.bool(), self.terminal(read))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _full(value: float | Tensor, like: Tensor) -> Tensor:
    """`value`, a number or a tensor, in the shape and precision of `like`."""
    if not isinstance(value, Tensor):
        return torch.full_like(like, value)
    return value.to(like.dtype).expand_as(like)


class AvoidBackup(Backup):
    r"""Stay safe forever: :math:`(1-\gamma) g + \gamma \min(g, v)`; a terminal step is worth :math:`g`.

    :math:`g \ge 0` outside the failure set. The value is at most :math:`g`, and for :math:`\gamma < 1` it
    over-approximates the safe set. Source: Fisac et al. 2019, eq. 7; ISAACS (Hsu et al. 2022), eq. 6-7.

    Example:
        >>> import torch
        >>> from torchrl_safety.objectives import AvoidBackup
        >>> step = AvoidBackup().step_map(
        ...     {"safety_margin": torch.tensor([0.5])}, gamma=0.9, terminated=torch.tensor([False])
        ... )
        >>> step(torch.tensor([-1.0]))
        tensor([-0.8500])
    """

    signals = ("safety_margin",)

    def running(self, signals: Mapping[str, Tensor], gamma: float | Tensor) -> ClampedAffine:
        margin = signals["safety_margin"]
        return ClampedAffine.of((_full(gamma, margin), (1 - gamma) * margin, _full(-torch.inf, margin), margin))

    def terminal(self, signals: Mapping[str, Tensor]) -> Tensor:
        return signals["safety_margin"]


class ReachBackup(Backup):
    r"""Reach the target: :math:`(1-\gamma) l + \gamma \max(l, v)`; a terminal step is worth :math:`l`.

    :math:`l \ge 0` inside the target set. The dual of :class:`AvoidBackup`.

    Example:
        >>> import torch
        >>> from torchrl_safety.objectives import ReachBackup
        >>> step = ReachBackup().step_map(
        ...     {"target_margin": torch.tensor([-0.5])}, gamma=0.9, terminated=torch.tensor([False])
        ... )
        >>> step(torch.tensor([1.0]))
        tensor([0.8500])
    """

    signals = ("target_margin",)

    def running(self, signals: Mapping[str, Tensor], gamma: float | Tensor) -> ClampedAffine:
        margin = signals["target_margin"]
        return ClampedAffine.of((_full(gamma, margin), (1 - gamma) * margin, margin, _full(torch.inf, margin)))

    def terminal(self, signals: Mapping[str, Tensor]) -> Tensor:
        return signals["target_margin"]


class ReachAvoidBackup(Backup):
    r"""Reach the target, safe until then: :math:`(1-\gamma) m + \gamma \min(g, \max(l, v))`, :math:`m = \min(l, g)`.

    The anchor is :math:`m`, never :math:`g`: with :math:`g`, loitering safely forever would count as a win. For
    :math:`\gamma < 1` the value under-approximates the reach-avoid set.
    Source: Hsu et al. 2021 (RSS), eq. 15; Gameplay Filters (Hsu et al. 2024), eq. 5b and 6a.

    Args:
        terminal_type: a terminal step is worth :math:`m` (``"all"``) or :math:`g` (``"g"``).

    Raises:
        ValueError: for another `terminal_type`.

    Example:
        >>> import torch
        >>> from torchrl_safety.objectives import ReachAvoidBackup
        >>> margins = {"safety_margin": torch.tensor([0.5]), "target_margin": torch.tensor([-1.0])}
        >>> step = ReachAvoidBackup().step_map(margins, gamma=1.0, terminated=torch.tensor([False]))
        >>> step(torch.tensor([0.8]))
        tensor([0.5000])
    """

    signals = ("safety_margin", "target_margin")

    def __init__(self, terminal_type: str = "all") -> None:
        self.terminal_type = check_terminal_type(terminal_type)

    def running(self, signals: Mapping[str, Tensor], gamma: float | Tensor) -> ClampedAffine:
        safety = signals["safety_margin"]
        both = torch.minimum(safety, signals["target_margin"])
        anchor = (1 - gamma) * both
        return ClampedAffine.of((_full(gamma, both), anchor, both, gamma * safety + anchor))

    def terminal(self, signals: Mapping[str, Tensor]) -> Tensor:
        safety = signals["safety_margin"]
        return safety if self.terminal_type == "g" else torch.minimum(safety, signals["target_margin"])

    def __repr__(self) -> str:
        return f"ReachAvoidBackup(terminal_type={self.terminal_type!r})"


class LipschitzReachAvoidBackup(Backup):
    r"""Reach-avoid whose sign is right at every discount: :math:`\min(g, \max(l, \gamma v))`.

    A terminal step is worth :math:`\min(l, g)`.
    Source: Li et al., "Certifiable reachability learning using a new Lipschitz continuous value function" (LCRL).

    Example:
        >>> import torch
        >>> from torchrl_safety.objectives import LipschitzReachAvoidBackup
        >>> margins = {"safety_margin": torch.tensor([0.5]), "target_margin": torch.tensor([-1.0])}
        >>> step = LipschitzReachAvoidBackup().step_map(margins, gamma=0.5, terminated=torch.tensor([False]))
        >>> step(torch.tensor([0.8]))
        tensor([0.4000])
    """

    signals = ("safety_margin", "target_margin")

    def running(self, signals: Mapping[str, Tensor], gamma: float | Tensor) -> ClampedAffine:
        safety = signals["safety_margin"]
        both = torch.minimum(safety, signals["target_margin"])
        return ClampedAffine.of((_full(gamma, both), torch.zeros_like(both), both, safety))

    def terminal(self, signals: Mapping[str, Tensor]) -> Tensor:
        return torch.minimum(signals["safety_margin"], signals["target_margin"])


class DiscountedReturnBackup(Backup):
    r"""The ordinary return: :math:`r + \gamma v`; a terminal step is worth :math:`r` (Bellman 1957).

    Example:
        >>> import torch
        >>> from torchrl_safety.objectives import DiscountedReturnBackup
        >>> reward, ended = torch.tensor([1.0]), torch.tensor([False])
        >>> DiscountedReturnBackup().step_map({"reward": reward}, gamma=0.5, terminated=ended)(torch.tensor([4.0]))
        tensor([3.])
    """

    signals = ("reward",)

    def running(self, signals: Mapping[str, Tensor], gamma: float | Tensor) -> ClampedAffine:
        reward = signals["reward"]
        return ClampedAffine.of((_full(gamma, reward), reward, _full(-torch.inf, reward), _full(torch.inf, reward)))

    def terminal(self, signals: Mapping[str, Tensor]) -> Tensor:
        return signals["reward"]


def _as_tensor(x: Any, device: torch.device) -> Tensor:
    if isinstance(x, Tensor):
        return x
    if isinstance(x, bool | int | float):
        # Not through numpy, which torch.compile cannot trace here, nor by `as_tensor`, which waits for an accelerator.
        return torch.full((), x, dtype=torch.float64 if isinstance(x, float) else None, device=device)
    # Copied, because torch takes neither read-only arrays nor negative strides.
    return torch.as_tensor(np.array(x, order="C"), device=device)


def _elementwise(backup: Backup, signals: Mapping[str, Any], v_next: Any, not_done: Any, gamma: Any) -> Any:
    if isinstance(gamma, int | float):
        check_factor("gamma", gamma, torch.Size())
    inputs = [*signals.values(), v_next, not_done, gamma]
    device = next((x.device for x in inputs if isinstance(x, Tensor)), torch.device("cpu"))
    tensors = [_as_tensor(x, device) for x in inputs]
    if len({t.dim() for t in tensors} - {0}) > 1:
        raise ValueError(
            f"the inputs {[*signals, 'v_next', 'not_done', 'gamma']} have shapes {[list(t.shape) for t in tensors]}: "
            "give them the same number of dimensions, because [B] beside [B, 1] would become [B, B]"
        )
    # A Python number takes the precision of the arrays beside it; alone it is a double.
    arrays = [x for x in (*signals.values(), v_next) if hasattr(x, "dtype")]
    floats = [t.dtype for t, x in zip(tensors, inputs) if any(x is a for a in arrays) and t.is_floating_point()]
    dtype = reduce(torch.promote_types, floats) if floats else torch.float64
    *margins, value, going_on, discount = (x.unsqueeze(-1) for x in torch.broadcast_tensors(*tensors))
    named = {name: margin.to(dtype) for name, margin in zip(signals, margins)}
    # One discount for all stays 0-d: it keeps its precision and promotes nothing.
    discount = discount.to(dtype) if tensors[-1].dim() else tensors[-1]
    step = backup.step_map(named, gamma=discount, terminated=going_on == 0)
    result = step(value.to(dtype)).squeeze(-1)
    return result if any(isinstance(x, Tensor) for x in inputs) else result.numpy()


def avoid_target(g: Any, v_next: Any, not_done: Any, gamma: Any) -> Any:
    r"""Elementwise target of :class:`AvoidBackup`: :math:`(1-\gamma) g + \gamma\min(g, v)`, or :math:`g` at the end.

    Args:
        g: safety margin at the next state (:math:`\ge 0` is safe), numpy or torch, any shape.
        v_next: next value, of the shape of `g` or a scalar, like the arguments below.
        not_done: 1 or true on steps after which the episode goes on, 0 or false on terminal ones.
        gamma: discount in [0, 1].

    Returns:
        A tensor if any input is one, else a numpy array.

    Raises:
        ValueError: if the inputs that are no scalars differ in their number of dimensions, or `gamma` is no discount.

    Example:
        >>> from torchrl_safety.objectives import backups
        >>> float(backups.avoid_target(0.5, -1.0, 0, 0.9))
        0.5
    """
    return _elementwise(AvoidBackup(), {"safety_margin": g}, v_next, not_done, gamma)


def reach_avoid_target(g: Any, l: Any, v_next: Any, not_done: Any, gamma: Any, terminal_type: str = "all") -> Any:  # noqa: E741
    r"""Elementwise target of :class:`ReachAvoidBackup`: :math:`(1-\gamma)\min(l,g) + \gamma\min(g,\max(l,v))`.

    Args:
        g: safety margin at the next state (:math:`\ge 0` is safe), numpy or torch, any shape.
        l: target margin at the next state (:math:`\ge 0` is inside the target).
        v_next: next value.
        not_done: 1 or true on steps after which the episode goes on, 0 or false on terminal ones.
        gamma: discount in [0, 1].
        terminal_type: a terminal step is worth min(l, g) (``"all"``) or g (``"g"``).

    Example:
        >>> from torchrl_safety.objectives import backups
        >>> float(backups.reach_avoid_target(0.5, -0.25, 1.0, 0, 0.9))
        -0.25
    """
    return _elementwise(
        ReachAvoidBackup(terminal_type), {"safety_margin": g, "target_margin": l}, v_next, not_done, gamma
    )


def target(mode: str, g: Any, v_next: Any, not_done: Any, gamma: Any, l: Any = None, terminal_type: str = "all") -> Any:  # noqa: E741
    """The target of `mode` :data:`AVOID` or :data:`REACH_AVOID`; arguments as in the function of that name.

    Raises:
        ValueError: for another mode, or when reach-avoid is given no target margin `l`.

    Example:
        >>> from torchrl_safety.objectives import backups
        >>> float(backups.target(backups.AVOID, 0.5, 2.0, 1, 1.0))
        0.5
    """
    if mode == AVOID:
        return avoid_target(g, v_next, not_done, gamma)
    if mode != REACH_AVOID:
        raise ValueError(f"mode is {mode!r}; choose one of {[AVOID, REACH_AVOID]}")
    if l is None:
        raise ValueError("mode 'reach-avoid' needs the target margin: pass l=")
    return reach_avoid_target(g, l, v_next, not_done, gamma, terminal_type)
