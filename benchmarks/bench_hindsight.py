"""Hindsight at sample time: one batch drawn from a prioritized buffer, with and without relabelling.

Run on one thread, `OMP_NUM_THREADS=1 python -m pytest benchmarks/bench_hindsight.py`, and compare the rows of one run
with each other: a relabelled sample should take at most twice the plain one, at every size of the buffer.
"""

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from torchrl_safety.data import HindsightRelabel, LeanReplayBuffer, PrioritizedSampler

SIZES = [10_000, 100_000, 1_000_000]
EPISODE = 50


def distance(transition):
    following = transition["next"]
    return torch.linalg.vector_norm(following["achieved_goal"] - following["desired_goal"], dim=-1, keepdim=True)


def reward(transition):
    return -(distance(transition) > 0.05).float()


def reached(transition):
    return distance(transition) <= 0.05


def frames(length: int) -> TensorDict:
    """A robot arm's: 10 numbers observed, 4 actions, a goal in space."""
    state = {"observation": torch.randn(length, 10), "achieved_goal": torch.randn(length, 3)}
    state["desired_goal"] = torch.randn(length, 3)
    flags = {name: torch.zeros(length, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
    ended = (torch.arange(1, length + 1) % EPISODE == 0).unsqueeze(-1)
    following = {**state, **flags, "reward": torch.zeros(length, 1), "truncated": ended, "done": ended.clone()}
    return TensorDict({**state, **flags, "action": torch.randn(length, 4), "next": following}, [length])


def filled_buffer(
    capacity: int, batch_size: int, transform: HindsightRelabel | None, buffer_class: type = TensorDictReplayBuffer
) -> TensorDictReplayBuffer:
    buffer = buffer_class(
        storage=LazyTensorStorage(capacity), sampler=PrioritizedSampler(capacity), batch_size=batch_size
    )
    if transform is not None:
        buffer.append_transform(transform)
    for _ in range(capacity // 10_000):
        buffer.extend(frames(10_000))
    buffer.update_priority(torch.arange(capacity), torch.rand(capacity))
    return buffer


@pytest.mark.parametrize("batch_size", [32, 256])
@pytest.mark.parametrize("capacity", SIZES)
@pytest.mark.parametrize("kind", ["plain", "final", "future", "episode", "reward only"])
@pytest.mark.parametrize("buffer_class", [TensorDictReplayBuffer, LeanReplayBuffer])
@pytest.mark.benchmark(group="hindsight sample")
def test_sample(benchmark, buffer_class, kind, capacity, batch_size):
    if kind == "plain":
        transform = None
    elif kind == "reward only":  # where reaching the goal does not end an episode
        transform = HindsightRelabel(reward)
    else:
        transform = HindsightRelabel(reward, terminated_fn=reached, strategy=kind)
    buffer = filled_buffer(capacity, batch_size, transform, buffer_class)
    benchmark(buffer.sample)


@pytest.mark.parametrize("kind", ["plain", "future"])
@pytest.mark.benchmark(group="hindsight extend of 1000 frames")
def test_extend(benchmark, kind):
    buffer = filled_buffer(100_000, 32, None if kind == "plain" else HindsightRelabel(reward, terminated_fn=reached))
    step = frames(1_000)
    benchmark(lambda: buffer.extend(step))
