"""Schedules that move a hyperparameter with the number of frames."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class StepGamma:
    r"""A discount in steps: :math:`\gamma(f) = \min(\gamma_{end}, 1 - (1-\gamma_0) r^{\lfloor f / p \rfloor})`.

    :math:`f` is the fraction of the training budget that is used. The defaults go .99, .999 at 20 %, .9999 at 40 %.
    The discount never decreases, also when a run is resumed with a longer budget. Source: Hsu et al. 2022 (ISAACS),
    training details.

    Args:
        total_frames: the training budget, in frames.
        gamma_start: :math:`\gamma_0` in [0, 1].
        ratio: :math:`r` in (0, 1), by which :math:`1 - \gamma` shrinks at each step.
        period: :math:`p > 0`, the length of a step as a fraction of the budget.
        gamma_end: :math:`\gamma_{end}` in [gamma_start, 1].

    Raises:
        ValueError: for a setting out of range.

    Example:
        >>> from torchrl_safety.trainers import StepGamma
        >>> schedule = StepGamma(1000)
        >>> [schedule.step(frames) for frames in (0, 200, 400)]
        [0.99, 0.999, 0.9999]
    """

    def __init__(
        self,
        total_frames: int,
        *,
        gamma_start: float = 0.99,
        ratio: float = 0.1,
        period: float = 0.2,
        gamma_end: float = 0.9999,
    ) -> None:
        _check_budget(total_frames)
        if not 0 <= gamma_start <= gamma_end <= 1:
            raise ValueError(
                f"gamma_start={gamma_start}, gamma_end={gamma_end}; need 0 <= gamma_start <= gamma_end <= 1"
            )
        if not 0 < ratio < 1:
            raise ValueError(f"ratio is {ratio}; it must lie in (0, 1)")
        _check_period(period)
        self.total_frames, self.gamma_start, self.ratio = total_frames, gamma_start, ratio
        self.period, self.gamma_end = period, gamma_end
        self.gamma = gamma_start

    def step(self, frames: int) -> float:
        """The discount after `frames` frames; never below one returned before."""
        steps = _steps_passed(frames, self.total_frames, self.period)
        scheduled = min(self.gamma_end, round(1 - (1 - self.gamma_start) * self.ratio**steps, 12))
        self.gamma = max(self.gamma, scheduled)
        return self.gamma

    def state_dict(self) -> dict[str, Any]:
        """The discount reached so far."""
        return {"gamma": self.gamma}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved discount."""
        self.gamma = float(state_dict["gamma"])


class GeometricGamma:
    r"""A discount that rises smoothly: :math:`1-\gamma(f) = (1-\gamma_0)^{1-s} (1-\gamma_{end})^s`, `s = min(1, f/p)`.

    :math:`f` is the fraction of the training budget that is used, so that :math:`1 - \gamma`, one over the horizon,
    shrinks by the same factor in equal times. The discount never decreases, also when a run is resumed with a longer
    budget.

    Args:
        total_frames: the training budget, in frames.
        gamma_start: :math:`\gamma_0` in [0, 1).
        gamma_end: :math:`\gamma_{end}` in [gamma_start, 1).
        fraction: :math:`p > 0`, the fraction of the budget after which :math:`\gamma_{end}` is reached.

    Raises:
        ValueError: for a setting out of range.

    Example:
        >>> from torchrl_safety.trainers import GeometricGamma
        >>> schedule = GeometricGamma(1000)
        >>> [schedule.step(frames) for frames in (0, 200, 400, 1000)]
        [0.99, 0.999, 0.9999, 0.9999]
    """

    def __init__(
        self, total_frames: int, *, gamma_start: float = 0.99, gamma_end: float = 0.9999, fraction: float = 0.4
    ) -> None:
        _check_budget(total_frames)
        if not 0 <= gamma_start <= gamma_end < 1:
            raise ValueError(
                f"gamma_start={gamma_start}, gamma_end={gamma_end}; need 0 <= gamma_start <= gamma_end < 1: no number "
                "of equal shrinkings takes 1 - gamma to 0"
            )
        _check_fraction(fraction)
        self.total_frames, self.gamma_start, self.gamma_end = total_frames, gamma_start, gamma_end
        self.fraction = fraction
        self.gamma = gamma_start

    def step(self, frames: int) -> float:
        """The discount after `frames` frames; never below one returned before."""
        share = _share(frames, self.total_frames, self.fraction)
        scheduled = round(1 - _geometric(1 - self.gamma_start, 1 - self.gamma_end, share), 12)
        self.gamma = max(self.gamma, scheduled)
        return self.gamma

    def state_dict(self) -> dict[str, Any]:
        """The discount reached so far."""
        return {"gamma": self.gamma}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved discount."""
        self.gamma = float(state_dict["gamma"])


class StdCap:
    r"""The largest standard deviation of a policy, which shrinks: :math:`c(f) = c_0 (c_{end}/c_0)^{\min(1, f/p)}`.

    :math:`f` is the fraction of the training budget that is used. The cap never rises again, also when a run is
    resumed with a longer budget. Hand it to a head that keeps to it
    (:class:`~torchrl_safety.modules.CappedNormalParams`).

    Args:
        total_frames: the training budget, in frames.
        start: :math:`c_0 > 0`, in the units of the action before any squashing.
        end: :math:`c_{end}` in (0, start].
        fraction: :math:`p > 0`, the fraction of the budget after which the end is reached.

    Raises:
        ValueError: for a setting out of range.

    Example:
        >>> from torchrl_safety.trainers import StdCap
        >>> schedule = StdCap(1000, start=1.0, end=0.25, fraction=0.5)
        >>> [schedule.step(frames) for frames in (0, 250, 500, 1000)]
        [1.0, 0.5, 0.25, 0.25]
    """

    def __init__(self, total_frames: int, *, start: float, end: float, fraction: float = 1.0) -> None:
        _check_budget(total_frames)
        if not 0 < end <= start < math.inf:
            raise ValueError(f"start={start}, end={end}; need 0 < end <= start, both finite: a cap shrinks")
        _check_fraction(fraction)
        self.total_frames, self.start, self.end, self.fraction = total_frames, start, end, fraction
        self.cap = start

    def step(self, frames: int) -> float:
        """The cap after `frames` frames; never above one returned before."""
        share = _share(frames, self.total_frames, self.fraction)
        self.cap = min(self.cap, _geometric(self.start, self.end, share))
        return self.cap

    def state_dict(self) -> dict[str, Any]:
        """The cap reached so far."""
        return {"cap": self.cap}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved cap."""
        self.cap = float(state_dict["cap"])


class TemperatureReset:
    r"""A :class:`StepGamma` at whose jumps the entropy temperature starts over.

    When :meth:`step` raises the discount, the `log_alpha` of the loss goes back to :math:`\log \alpha_{init}`, and
    what the optimiser remembers of it is forgotten; everything else stays. So does the `log_alpha_disturbance` of a
    game. Step this object instead of the schedule.
    Whether a jump is due is read off the discount that the schedule holds, so that a resumed run does not reset
    where there was no jump. Source: Hsu et al. 2022 (ISAACS), training details.

    Args:
        schedule: the discount.
        loss: holds the parameter `log_alpha` and the buffer `alpha_init`, as TorchRL's SAC losses do.
        optimizer: the one that moves `log_alpha`, alone or among other parameters.

    Raises:
        ValueError: for another schedule, or if the loss learns no temperature, or the optimiser does not move it.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torchrl_safety.trainers import StepGamma, TemperatureReset
        >>> loss = nn.Module()
        >>> loss.register_buffer("alpha_init", torch.tensor(1.0))
        >>> loss.log_alpha = nn.Parameter(torch.tensor(-3.0))
        >>> schedule = TemperatureReset(StepGamma(1000), loss, torch.optim.Adam([loss.log_alpha]))
        >>> schedule.step(199), loss.log_alpha.item()
        (0.99, -3.0)
        >>> schedule.step(200), loss.log_alpha.item()
        (0.999, 0.0)
    """

    def __init__(self, schedule: StepGamma, loss: nn.Module, optimizer: Optimizer) -> None:
        if not isinstance(schedule, StepGamma):
            raise ValueError(
                f"schedule is a {type(schedule).__name__}; only the jumps of a StepGamma start the temperature over, "
                "which a discount that rises all the time would do at every step"
            )
        log_alpha, initial = getattr(loss, "log_alpha", None), getattr(loss, "alpha_init", None)
        if not isinstance(log_alpha, nn.Parameter) or not isinstance(initial, Tensor):
            raise ValueError(
                f"{type(loss).__name__} learns no temperature: it needs the parameter log_alpha and the buffer "
                "alpha_init, as SAC losses have with fixed_alpha=False; step the schedule itself otherwise"
            )
        known = [log_alpha, getattr(loss, "log_alpha_disturbance", log_alpha)]
        moved = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not {id(each) for each in known} <= moved:
            raise ValueError(
                "the optimizer does not move log_alpha of the loss, in a game that of both players: pass the one that "
                "was built with it, e.g. from parameter_groups(loss, ...)"
            )
        self.schedule, self.optimizer = schedule, optimizer
        self._log_alphas, self._alpha_init = known, initial

    def step(self, frames: int) -> float:
        """The discount after `frames` frames; the temperature is reset if it is a new one."""
        before = self.schedule.gamma
        gamma = self.schedule.step(frames)
        if gamma > before:
            for log_alpha in self._log_alphas:
                with torch.no_grad():
                    log_alpha.fill_(math.log(self._alpha_init.item()))
                self.optimizer.state.pop(log_alpha, None)
        return gamma

    def state_dict(self) -> dict[str, Any]:
        """The state of the schedule."""
        return self.schedule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved schedule."""
        self.schedule.load_state_dict(state_dict)


def parameter_groups(loss: nn.Module, learning_rates: Mapping[str, float]) -> list[dict[str, Any]]:
    """The parameter groups of one optimiser, each network of a loss with its own learning rate.

    A network is called as in the loss: `"actor_network"`, `"qvalue_network"`, `"critic_network"`, `"value_network"`,
    `"log_alpha"` for the temperature, and `"disturbance_network"`, `"log_alpha_disturbance"` (SAC) or
    `"disturbance_loss"` (PPO) for the second player of a game. Parameters that two networks share belong to the first.

    Args:
        loss: a TorchRL loss.
        learning_rates: name -> learning rate > 0, for every name that the loss has.

    Returns:
        Groups with `"params"`, `"lr"` and `"name"`.

    Raises:
        ValueError: for a name that the loss does not have or that was left out, or a rate that is not positive.

    Example:
        >>> import torch
        >>> from torchrl_safety.modules import RainbowNetwork
        >>> from torchrl_safety.objectives import CategoricalDQNLoss
        >>> from torchrl_safety.trainers import parameter_groups
        >>> loss = CategoricalDQNLoss(RainbowNetwork(2, 3, support=(-1.0, 1.0)))
        >>> optimizer = torch.optim.Adam(parameter_groups(loss, {"value_network": 1e-3}))
        >>> [(group["name"], group["lr"]) for group in optimizer.param_groups]
        [('value_network', 0.001)]
    """
    networks: dict[str, list[nn.Parameter]] = {}
    for name, parameter in loss.named_parameters():
        networks.setdefault(name.split(".")[0].removesuffix("_params"), []).append(parameter)
    _check_names("learning_rates", learning_rates, networks, f"the parameters of {type(loss).__name__}")
    if missing := [name for name in networks if name not in learning_rates]:
        raise ValueError(f"learning_rates leaves out {missing}, which would not be trained; give each of them a rate")
    for name, rate in learning_rates.items():
        if not 0 < rate < math.inf:
            raise ValueError(f"learning_rates[{name!r}] is {rate}; it must be positive and finite")
    return [{"params": networks[name], "lr": rate, "name": name} for name, rate in learning_rates.items()]


class StepDecay:
    r"""Learning rates in steps, each with its own ratio: :math:`\eta(f) = \eta_0 r^{\lfloor f / p \rfloor}`.

    :math:`f` is the fraction of the training budget that is used, :math:`\eta_0` the rate that the group was built
    with. A rate never rises again, also when a run is resumed with a longer budget. Groups that are not named keep
    theirs, so that groups with other periods take a second object.

    Args:
        optimizer: with named groups, see :func:`parameter_groups`.
        ratio: name of a group -> :math:`r` in (0, 1].
        total_frames: the training budget, in frames.
        period: :math:`p > 0`, the length of a step as a fraction of the budget.

    Raises:
        ValueError: for a name that no group has, or a setting out of range.

    Example:
        >>> import torch
        >>> from torchrl_safety.trainers import StepDecay
        >>> groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.5, "name": name} for name in "ab"]
        >>> schedule = StepDecay(torch.optim.SGD(groups), {"a": 0.5}, total_frames=1000, period=0.25)
        >>> [schedule.step(frames) for frames in (249, 250, 500)]
        [{'a': 0.5}, {'a': 0.25}, {'a': 0.125}]
    """

    def __init__(
        self, optimizer: Optimizer, ratio: Mapping[str, float], *, total_frames: int, period: float = 0.2
    ) -> None:
        _check_budget(total_frames)
        _check_period(period)
        self._groups = {group["name"]: group for group in optimizer.param_groups if "name" in group}
        _check_names("ratio", ratio, self._groups, "the named groups of the optimizer")
        for name, factor in ratio.items():
            if not 0 < factor <= 1:
                raise ValueError(f"ratio[{name!r}] is {factor}; it must lie in (0, 1]")
            # Where PyTorch's own schedulers keep it: it is saved with the optimiser.
            self._groups[name].setdefault("initial_lr", float(self._groups[name]["lr"]))
        self.optimizer, self.ratio, self.total_frames, self.period = optimizer, dict(ratio), total_frames, period
        self.steps = 0

    def step(self, frames: int) -> dict[str, float]:
        """Set the learning rates for `frames` frames and return them by name."""
        self.steps = max(self.steps, _steps_passed(frames, self.total_frames, self.period))
        rates = {}
        for group in self.optimizer.param_groups:  # loading a state replaces the groups
            if (name := group.get("name")) in self.ratio:
                rates[name] = group["initial_lr"] * self.ratio[name] ** self.steps
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rates[name])
                else:
                    group["lr"] = rates[name]
        return rates

    def state_dict(self) -> dict[str, Any]:
        """The number of steps so far; the rates are in the state of the optimiser."""
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved number of steps."""
        self.steps = int(state_dict["steps"])


def _geometric(start: float, end: float, share: float) -> float:
    return end if share == 1 else start * (end / start) ** share


def _share(frames: int, total_frames: int, fraction: float) -> float:
    """How much of the first `fraction` of the budget is used, at most 1."""
    if not frames >= 0:
        raise ValueError(f"frames is {frames}; it must be a number of at least 0")
    return min(1.0, frames / total_frames / fraction)


def _steps_passed(frames: int, total_frames: int, period: float) -> int:
    # A tiny excess keeps a fraction that is an exact multiple of the period from rounding below it.
    return int(frames / total_frames / period + 1e-9)


def _check_budget(total_frames: int) -> None:
    if not total_frames >= 1:
        raise ValueError(f"total_frames is {total_frames}; it must be at least 1")


def _check_period(period: float) -> None:
    if not 1e-9 <= period < math.inf:
        raise ValueError(f"period is {period}; it must be positive, a share of the budget such as 0.2")


def _check_fraction(fraction: float) -> None:
    if not fraction > 0:
        raise ValueError(f"fraction is {fraction}; it must be positive")


def _check_names(what: str, given: Iterable[str], known: Iterable[str], those: str) -> None:
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{what} names {unknown}; {those} are {list(known)}")
