"""Backups, returns and losses."""

from torchrl_safety.objectives import backups
from torchrl_safety.objectives.backups import (
    AvoidBackup,
    Backup,
    DiscountedReturnBackup,
    LipschitzReachAvoidBackup,
    ReachAvoidBackup,
    ReachBackup,
)
from torchrl_safety.objectives.categorical import project_categorical
from torchrl_safety.objectives.clamped_affine import ClampedAffine
from torchrl_safety.objectives.dqn import CategoricalDQNLoss
from torchrl_safety.objectives.returns import lambda_return, n_step_return

__all__ = [
    "AvoidBackup",
    "Backup",
    "CategoricalDQNLoss",
    "ClampedAffine",
    "DiscountedReturnBackup",
    "LipschitzReachAvoidBackup",
    "ReachAvoidBackup",
    "ReachBackup",
    "backups",
    "lambda_return",
    "n_step_return",
    "project_categorical",
]
