"""Schedules that move a hyperparameter with the number of frames."""

from __future__ import annotations

from typing import Any


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
        if not total_frames >= 1:
            raise ValueError(f"total_frames is {total_frames}; it must be at least 1")
        if not 0 <= gamma_start <= gamma_end <= 1:
            raise ValueError(
                f"gamma_start={gamma_start}, gamma_end={gamma_end}; need 0 <= gamma_start <= gamma_end <= 1"
            )
        if not 0 < ratio < 1:
            raise ValueError(f"ratio is {ratio}; it must lie in (0, 1)")
        if not period > 0:
            raise ValueError(f"period is {period}; it must be positive")
        self.total_frames, self.gamma_start, self.ratio = total_frames, gamma_start, ratio
        self.period, self.gamma_end = period, gamma_end
        self.gamma = gamma_start

    def step(self, frames: int) -> float:
        """The discount after `frames` frames; never below one returned before."""
        # A tiny excess keeps a fraction that is an exact multiple of the period from rounding below it.
        steps = int(frames / self.total_frames / self.period + 1e-9)
        scheduled = min(self.gamma_end, round(1 - (1 - self.gamma_start) * self.ratio**steps, 12))
        self.gamma = max(self.gamma, scheduled)
        return self.gamma

    def state_dict(self) -> dict[str, Any]:
        """The discount reached so far."""
        return {"gamma": self.gamma}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved discount."""
        self.gamma = float(state_dict["gamma"])
