"""The two hindsight buffers, filled with frames of the line."""

from __future__ import annotations

import pytest
import torch
from line_goals import line_frames, reached, reward
from torchrl.data import Composite, Unbounded

from torchrl_safety.data import HindsightPrioritizedReplayBuffer, HindsightReplayBuffer

KINDS = [HindsightReplayBuffer, HindsightPrioritizedReplayBuffer]
EACH = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
STATE = Composite(
    frame=Unbounded((1,), dtype=torch.int64),
    achieved_goal=Unbounded((1,)),
    desired_goal=Unbounded((1,)),
)


def make(kind, capacity=1000, *, num_envs=None, seed=0, **settings):
    generator = torch.Generator().manual_seed(seed)
    return kind(
        STATE, Composite(), reward, reached, capacity=capacity, num_envs=num_envs, generator=generator, **settings
    )


def frames_of(num_envs, length, **settings):
    """Frames `[N, T]` with every entry of the specs."""
    batch = line_frames(num_envs, length, **settings)
    batch["next", "frame"] = batch["frame"] + 1
    return batch


def trajectories(batch):
    """For each frame number of frames `[N, T]`, those that follow it in its episode, itself first."""
    following = {}
    for env in batch:
        episode = []
        for frame in env:
            episode.append(int(frame["frame"]))
            if frame["next", "done"]:
                following |= {number: episode[i:] for i, number in enumerate(episode)}
                episode = []
        following |= {number: episode[i:] for i, number in enumerate(episode)}
    return following
