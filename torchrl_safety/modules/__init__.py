"""Networks and policies as TensorDict modules."""

from torchrl_safety.modules.dueling import DuelingHead
from torchrl_safety.modules.encoding import AngleEncoding
from torchrl_safety.modules.noisy import NoisyLinear, reset_noise
from torchrl_safety.modules.players import RandomDisturbance, TwoPlayerPolicy, ZeroDisturbance
from torchrl_safety.modules.policy_std import CappedNormalParams
from torchrl_safety.modules.rainbow import RainbowNetwork, greedy_policy

__all__ = [
    "AngleEncoding",
    "CappedNormalParams",
    "DuelingHead",
    "NoisyLinear",
    "RainbowNetwork",
    "RandomDisturbance",
    "TwoPlayerPolicy",
    "ZeroDisturbance",
    "greedy_policy",
    "reset_noise",
]
