"""Replay: priority trees, samplers and transforms."""

from torchrl_safety.data.nstep import NStepTransform
from torchrl_safety.data.prioritized import PrioritizedSampler
from torchrl_safety.data.priority_tree import PriorityTree

__all__ = ["NStepTransform", "PrioritizedSampler", "PriorityTree"]
