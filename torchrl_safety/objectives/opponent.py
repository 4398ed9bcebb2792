"""A problem as the player sees it who wants the opposite."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from torchrl_safety.objectives.backups import Backup
from torchrl_safety.objectives.clamped_affine import ClampedAffine


class OpponentBackup(Backup):
    r"""The problem of the minimising player as one of maximisation: :math:`v \mapsto -F(-v)`, :math:`F` the backup's.

    Where :math:`V = \min_d F(V')` is what a disturbance leaves of a value, :math:`W = -V` obeys
    :math:`W = \max_d -F(-W')`, so that every loss that learns a greatest value learns the disturbance of this one. A
    clamped affine map stays one, with offset and bounds negated. The opponent of :class:`AvoidBackup` is
    :class:`ReachBackup` on the target margin :math:`-g`: it reaches the failure set.

    Args:
        backup: the problem of the maximising player.

    Example:
        >>> import torch
        >>> from torchrl_safety.objectives import AvoidBackup, OpponentBackup
        >>> step = OpponentBackup(AvoidBackup()).step_map(
        ...     {"safety_margin": torch.tensor([0.5])}, gamma=0.9, terminated=torch.tensor([False])
        ... )
        >>> step(torch.tensor([1.0]))
        tensor([0.8500])
    """

    def __init__(self, backup: Backup) -> None:
        self.backup, self.signals = backup, backup.signals

    def running(self, signals: Mapping[str, Tensor], gamma: float | Tensor) -> ClampedAffine:
        slope, offset, low, high = self.backup.running(signals, gamma).parts
        return ClampedAffine.of((slope, -offset, -high, -low))

    def terminal(self, signals: Mapping[str, Tensor]) -> Tensor:
        return -self.backup.terminal(signals)

    def __repr__(self) -> str:
        return f"OpponentBackup({self.backup!r})"
