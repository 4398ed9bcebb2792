"""Networks and policies as TensorDict modules."""

from torchrl_safety.modules.dueling import DuelingHead
from torchrl_safety.modules.noisy import NoisyLinear, reset_noise
from torchrl_safety.modules.rainbow import RainbowNetwork, greedy_policy

__all__ = ["DuelingHead", "NoisyLinear", "RainbowNetwork", "greedy_policy", "reset_noise"]
