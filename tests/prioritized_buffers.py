"""Buffers with a prioritized sampler, and the leaves of its tree."""

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from torchrl_safety.data.prioritized import PrioritizedSampler

ALPHA, BETA, EPS = 0.6, 0.4, 1e-6


def items(n, start=0):
    return TensorDict({"x": torch.arange(start, start + n).float()}, [n])


def make(capacity, n=None, *, storage=LazyTensorStorage, batch_size=8, **settings):
    settings.setdefault("generator", torch.Generator().manual_seed(0))
    buffer = TensorDictReplayBuffer(
        storage=storage(capacity), sampler=PrioritizedSampler(capacity, **settings), batch_size=batch_size
    )
    if n != 0:
        buffer.extend(items(capacity if n is None else n))
    return buffer


def leaves(buffer):
    """Leaf of each item, `[N]` float64."""
    return buffer.sampler._tree.get(torch.arange(len(buffer)))


def leaf_of(priority, alpha=ALPHA, eps=EPS):
    return (priority + eps) ** alpha
