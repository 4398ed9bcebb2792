"""Prioritized replay: one batch sampled and its priorities updated.

Run on one thread, `OMP_NUM_THREADS=1 python -m pytest benchmarks/bench_replay.py`, and compare the rows of one run with
each other: machines differ, ratios less so.
"""

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from torchrl_safety.data.prioritized import PrioritizedSampler
from torchrl_safety.data.priority_tree import PriorityTree

SIZES = [(100_000, 32), (100_000, 256), (1_000_000, 32), (1_000_000, 256)]


def filled_buffer(capacity: int, batch_size: int) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity), sampler=PrioritizedSampler(capacity), batch_size=batch_size
    )
    buffer.extend(TensorDict({"observation": torch.zeros(capacity, 1)}, [capacity]))
    buffer.update_priority(torch.arange(capacity), torch.rand(capacity))
    return buffer


@pytest.mark.parametrize(("capacity", "batch_size"), SIZES)
@pytest.mark.benchmark(group="tree")
def test_tree_sample_and_set(benchmark, capacity, batch_size):
    tree = PriorityTree(capacity)
    tree.set(torch.arange(capacity), torch.rand(capacity) + 0.01)
    leaf = torch.rand(batch_size, dtype=torch.float64)

    benchmark(lambda: tree.set(tree.sample(batch_size), leaf))


@pytest.mark.parametrize(("capacity", "batch_size"), SIZES)
@pytest.mark.benchmark(group="sampler")
def test_sampler_sample_and_update(benchmark, capacity, batch_size):
    buffer = filled_buffer(capacity, batch_size)
    sampler, storage = buffer.sampler, buffer.storage
    error = torch.rand(batch_size)

    def step():
        index, _ = sampler.sample(storage, batch_size)
        sampler.update_priority(index, error, storage=storage)

    benchmark(step)


@pytest.mark.parametrize(("capacity", "batch_size"), SIZES)
@pytest.mark.benchmark(group="buffer")
def test_buffer_sample_and_update(benchmark, capacity, batch_size):
    buffer = filled_buffer(capacity, batch_size)
    error = torch.rand(batch_size)

    def step():
        batch = buffer.sample()
        batch.set("td_error", error)
        buffer.update_tensordict_priority(batch)

    benchmark(step)
