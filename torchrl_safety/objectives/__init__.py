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
from torchrl_safety.objectives.dqn import CategoricalDQNLoss, ReachAvoidDQNLoss, SafetyDQNLoss
from torchrl_safety.objectives.estimators import (
    BackupEstimators,
    NStepBackupEstimator,
    TD0BackupEstimator,
    TDLambdaBackupEstimator,
)
from torchrl_safety.objectives.games_dqn import (
    GameplayCategoricalDQNLoss,
    GameplayDQNLoss,
    IsaacsCategoricalDQNLoss,
    IsaacsDQNLoss,
)
from torchrl_safety.objectives.games_ppo import GameplayPPOLoss, IsaacsPPOLoss
from torchrl_safety.objectives.games_sac import GameplaySACLoss, IsaacsSACLoss
from torchrl_safety.objectives.opponent import OpponentBackup
from torchrl_safety.objectives.ppo import ReachAvoidA2CLoss, ReachAvoidPPOLoss, SafetyA2CLoss, SafetyPPOLoss
from torchrl_safety.objectives.returns import lambda_return, n_step_return
from torchrl_safety.objectives.sac import (
    DiscreteReachAvoidSACLoss,
    DiscreteSafetySACLoss,
    ReachAvoidSACLoss,
    SafetySACLoss,
)

__all__ = [
    "AvoidBackup",
    "Backup",
    "BackupEstimators",
    "CategoricalDQNLoss",
    "ClampedAffine",
    "DiscountedReturnBackup",
    "DiscreteReachAvoidSACLoss",
    "DiscreteSafetySACLoss",
    "GameplayCategoricalDQNLoss",
    "GameplayDQNLoss",
    "GameplayPPOLoss",
    "GameplaySACLoss",
    "IsaacsCategoricalDQNLoss",
    "IsaacsDQNLoss",
    "IsaacsPPOLoss",
    "IsaacsSACLoss",
    "LipschitzReachAvoidBackup",
    "NStepBackupEstimator",
    "OpponentBackup",
    "ReachAvoidA2CLoss",
    "ReachAvoidBackup",
    "ReachAvoidDQNLoss",
    "ReachAvoidPPOLoss",
    "ReachAvoidSACLoss",
    "ReachBackup",
    "SafetyA2CLoss",
    "SafetyDQNLoss",
    "SafetyPPOLoss",
    "SafetySACLoss",
    "TD0BackupEstimator",
    "TDLambdaBackupEstimator",
    "backups",
    "lambda_return",
    "n_step_return",
    "project_categorical",
]
