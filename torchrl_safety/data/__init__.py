"""Replay: priority trees, samplers and transforms."""

from torchrl_safety.data.buffers import HindsightReplayBuffer
from torchrl_safety.data.buffers_prioritized import HindsightPrioritizedReplayBuffer
from torchrl_safety.data.goals import GoalCondition
from torchrl_safety.data.hindsight import HindsightTransform
from torchrl_safety.data.lean import LeanReplayBuffer
from torchrl_safety.data.nstep import NStepTransform
from torchrl_safety.data.prioritized import PrioritizedSampler
from torchrl_safety.data.priority_tree import PriorityTree
from torchrl_safety.data.relabel import HindsightRelabel

__all__ = [
    "GoalCondition",
    "HindsightPrioritizedReplayBuffer",
    "HindsightRelabel",
    "HindsightReplayBuffer",
    "HindsightTransform",
    "LeanReplayBuffer",
    "NStepTransform",
    "PrioritizedSampler",
    "PriorityTree",
]
