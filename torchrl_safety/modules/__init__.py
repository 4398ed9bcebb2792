"""Networks and policies as TensorDict modules."""

from torchrl_safety.modules.distributional import categorical_cvar, categorical_quantile, distribution_statistics
from torchrl_safety.modules.dueling import DuelingHead
from torchrl_safety.modules.encoding import AngleEncoding
from torchrl_safety.modules.export import export_policy
from torchrl_safety.modules.greedy import greedy_policy
from torchrl_safety.modules.greedy_game import greedy_game_policy
from torchrl_safety.modules.noisy import NoisyLinear, reset_noise
from torchrl_safety.modules.pixels import NatureCNN
from torchrl_safety.modules.players import RandomDisturbance, TwoPlayerPolicy, ZeroDisturbance
from torchrl_safety.modules.policy_std import CappedNormalParams
from torchrl_safety.modules.rainbow import RainbowNetwork

__all__ = [
    "AngleEncoding",
    "CappedNormalParams",
    "DuelingHead",
    "NatureCNN",
    "NoisyLinear",
    "RainbowNetwork",
    "RandomDisturbance",
    "TwoPlayerPolicy",
    "ZeroDisturbance",
    "categorical_cvar",
    "categorical_quantile",
    "distribution_statistics",
    "export_policy",
    "greedy_game_policy",
    "greedy_policy",
    "reset_noise",
]
