"""What the losses of two-player games share: a controller that maximises the value, a disturbance that minimises it."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase

from torchrl_safety.objectives.backup_loss import BackupLoss
from torchrl_safety.objectives.backups import Backup
from torchrl_safety.objectives.signals import read

PLAYERS = ("controller", "disturbance")

STORED_REMEDY = (
    "A game's batch holds what both players did; collect it from a two-player environment with a policy that writes "
    "both, or name its key with loss.set_keys(...)"
)


class TwoPlayers(BackupLoss):
    """Stands before a loss of one player and gives it an opponent; not a loss by itself."""

    stored_keys: tuple[str, ...] = ("action", "disturbance")

    def _use_backup(
        self, backup: Backup | None, terminal_type: str | None, *, n_step: str = "last", **settings: Any
    ) -> None:
        if n_step == "best":
            raise ValueError(
                "n_step is 'best', a lower bound of the value for a single player only: in a game the disturbance of "
                "the window need not be the worst; use n_step='last'"
            )
        super()._use_backup(backup, terminal_type, n_step=n_step, **settings)

    def _check_stored(self, tensordict: TensorDictBase) -> None:
        """Refuse a batch that lacks what a player did."""
        for key in self._stored():
            read(tensordict, key, STORED_REMEDY)


class ActivePlayers:
    """A loss whose players take turns: which of them learn at a call."""

    _active_players: tuple[str, ...] = PLAYERS

    @property
    def active_players(self) -> tuple[str, ...]:
        """The players that learn, of ``("controller", "disturbance")``; assign others between calls.

        The losses of a player that rests are zeros without a gradient, and are not computed. The critic always learns.
        """
        return self._active_players

    @active_players.setter
    def active_players(self, players: tuple[str, ...]) -> None:
        if isinstance(players, str) or not set(players) <= {*PLAYERS}:
            raise ValueError(f"active_players is {players!r}; give a tuple with any of {list(PLAYERS)}")
        self._active_players = tuple(player for player in PLAYERS if player in players)
