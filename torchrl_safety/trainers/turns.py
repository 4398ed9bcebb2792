"""Which player of a game learns at which update."""

from __future__ import annotations

from typing import Any

from torch import nn


class UpdatePeriods:
    r"""Updates at which each player of a game learns: every :math:`k`-th, or in phases of many at a time.

    Call :meth:`step` before each update; it sets the `active_players` of the loss. Player :math:`p` learns at the
    updates :math:`k_p - 1, 2 k_p - 1, \dots` (counted from 0), once in :math:`k_p`. In between its losses are not
    computed; give the optimiser ``zero_grad(set_to_none=True)``, the default, so that its parameters stay.
    The slower player sees an opponent that has answered it. Source: Hsu et al. 2022 (ISAACS), algorithm 1.

    Args:
        loss: a game with `active_players`, e.g. an :class:`IsaacsSACLoss`.
        controller: the period of the controller, in updates.
        disturbance: the period of the disturbance.
        alternating: read the numbers as lengths of phases instead: the controller alone learns for `controller`
            updates, then the disturbance alone for `disturbance`, in turn.

    Raises:
        ValueError: for a loss without players that take turns, or a period below 1.

    Example:
        >>> from torch import nn
        >>> from torchrl_safety.trainers import UpdatePeriods
        >>> loss = nn.Module()
        >>> loss.active_players = ("controller", "disturbance")
        >>> periods = UpdatePeriods(loss, controller=3)
        >>> [len(periods.step()) for _ in range(6)]
        [1, 1, 2, 1, 1, 2]
    """

    def __init__(
        self, loss: nn.Module, *, controller: int = 1, disturbance: int = 1, alternating: bool = False
    ) -> None:
        if not hasattr(loss, "active_players"):
            raise ValueError(
                f"{type(loss).__name__} has no players that take turns (active_players); give the SAC or PPO loss of a "
                "game"
            )
        self.periods = {"controller": controller, "disturbance": disturbance}
        for name, period in self.periods.items():
            if not isinstance(period, int) or period < 1:
                raise ValueError(f"{name} is {period!r}; give its period in updates, a whole number of at least 1")
        self.loss: Any = loss
        self.alternating, self.updates = alternating, 0

    def step(self) -> tuple[str, ...]:
        """The players that learn at the next update, which the loss is told."""
        if self.alternating:
            place = self.updates % sum(self.periods.values())
            active: tuple[str, ...] = ("controller",) if place < self.periods["controller"] else ("disturbance",)
        else:
            active = tuple(name for name, period in self.periods.items() if (self.updates + 1) % period == 0)
        self.updates += 1
        self.loss.active_players = active
        return active

    def state_dict(self) -> dict[str, Any]:
        """The number of updates so far."""
        return {"updates": self.updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved number of updates."""
        self.updates = int(state_dict["updates"])
