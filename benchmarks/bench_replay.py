"""Prioritized replay: one batch sampled and its priorities updated, and frames written, beside other libraries.

Run on one thread, `OMP_NUM_THREADS=1 python -m pytest benchmarks/bench_replay.py`, and compare the rows of one run with
each other: machines differ, ratios less so. Rows of cpprb, Tianshou and TorchRL's own sampler need these installed (and
TorchRL's compiled extension); where numba is installed the tree uses it, and the rows `without numba` do not.
"""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import PrioritizedSampler as TorchRLPrioritizedSampler
from torchrl.data.replay_buffers.samplers import RandomSampler

from torchrl_safety.data import LeanReplayBuffer, priority_tree
from torchrl_safety.data.prioritized import PrioritizedSampler
from torchrl_safety.data.priority_tree import PriorityTree
from torchrl_safety.data.sequences import sequence_index

SIZES = [(100_000, 32), (100_000, 256), (1_000_000, 32), (1_000_000, 256)]
sizes = pytest.mark.parametrize(("capacity", "batch_size"), SIZES)
ALPHA, BETA = 0.6, 0.4


def frames(n: int) -> TensorDict:
    following = {"observation": torch.zeros(n, 8), "reward": torch.zeros(n, 1), "done": torch.zeros(n, 1).bool()}
    return TensorDict({"observation": torch.zeros(n, 8), "action": torch.zeros(n, 1), "next": following}, [n])


def filled_buffer(
    capacity: int, batch_size: int, sampler, prioritized: bool = True, kind: type = TensorDictReplayBuffer
) -> TensorDictReplayBuffer:
    buffer = kind(storage=LazyTensorStorage(capacity), sampler=sampler, batch_size=batch_size)
    buffer.extend(frames(capacity))
    if prioritized:
        buffer.update_priority(torch.arange(capacity), torch.rand(capacity))
    return buffer


@pytest.fixture(params=["as installed", "without numba"])
def search(request, monkeypatch):
    if request.param == "without numba":
        monkeypatch.setattr(priority_tree, "compiled_kernels", lambda: None)


@sizes
@pytest.mark.benchmark(group="tree")
def test_tree_sample_and_set(benchmark, capacity, batch_size, search):
    tree = PriorityTree(capacity)
    tree.set(torch.arange(capacity), torch.rand(capacity) + 0.01)
    leaf = torch.rand(batch_size, dtype=torch.float64)

    benchmark(lambda: tree.set(tree.sample(batch_size), leaf))


@sizes
@pytest.mark.parametrize("variant", ["proportional", "rank"])
@pytest.mark.benchmark(group="sampler")
def test_sampler_sample_and_update(benchmark, capacity, batch_size, variant, search):
    buffer = filled_buffer(capacity, batch_size, PrioritizedSampler(capacity, variant=variant))
    sampler, storage = buffer.sampler, buffer.storage
    error = torch.rand(batch_size)

    def step():
        index, _ = sampler.sample(storage, batch_size)
        sampler.update_priority(index, error, storage=storage)

    benchmark(step)


def sample_and_update(benchmark, buffer, batch_size):
    error = torch.rand(batch_size)

    def step():
        batch = buffer.sample()
        batch.set("td_error", error)
        buffer.update_tensordict_priority(batch)

    benchmark(step)


@sizes
@pytest.mark.parametrize("kind", [TensorDictReplayBuffer, LeanReplayBuffer])
@pytest.mark.benchmark(group="buffer")
def test_buffer_sample_and_update(benchmark, capacity, batch_size, kind, search):
    buffer = filled_buffer(capacity, batch_size, PrioritizedSampler(capacity), kind=kind)
    sample_and_update(benchmark, buffer, batch_size)


@sizes
@pytest.mark.benchmark(group="buffer")
def test_torchrl_buffer_sample_and_update(benchmark, capacity, batch_size):
    pytest.importorskip("torchrl._torchrl", exc_type=ImportError)
    sampler = TorchRLPrioritizedSampler(capacity, ALPHA, BETA)
    sample_and_update(benchmark, filled_buffer(capacity, batch_size, sampler), batch_size)


@sizes
@pytest.mark.benchmark(group="buffer")
def test_cpprb_sample_and_update(benchmark, capacity, batch_size):
    cpprb = pytest.importorskip("cpprb")
    shapes = {"obs": {"shape": 8}, "act": {"shape": 1}, "rew": {}, "next_obs": {"shape": 8}, "done": {}}
    buffer = cpprb.PrioritizedReplayBuffer(capacity, shapes, alpha=ALPHA)
    content = {name: np.zeros((capacity, shape.get("shape", 1))) for name, shape in shapes.items()}
    buffer.add(**content, priorities=np.random.default_rng(0).random(capacity))
    error = np.random.default_rng(1).random(batch_size)

    benchmark(lambda: buffer.update_priorities(buffer.sample(batch_size, BETA)["indexes"], error))


def filled_tianshou(capacity):
    data = pytest.importorskip("tianshou.data")
    buffer = data.PrioritizedReplayBuffer(capacity, ALPHA, BETA)
    step = data.Batch(
        obs=np.zeros(8, np.float32), act=np.zeros(1), rew=0.0, terminated=False, truncated=False, obs_next=np.zeros(8)
    )
    buffer.add(step)
    # One frame allocates the arrays; adding the others one by one would take minutes.
    buffer._size = capacity
    buffer.weight[np.arange(capacity)] = np.random.default_rng(0).random(capacity)
    return buffer


@sizes
@pytest.mark.benchmark(group="buffer")
def test_tianshou_sample_and_update(benchmark, capacity, batch_size):
    buffer = filled_tianshou(capacity)
    error = np.random.default_rng(1).random(batch_size)

    benchmark(lambda: buffer.update_weight(buffer.sample(batch_size)[1], error))


@sizes
@pytest.mark.benchmark(group="sampler")
def test_tianshou_sampler_sample_and_update(benchmark, capacity, batch_size):
    buffer = filled_tianshou(capacity)
    error = np.random.default_rng(1).random(batch_size)

    def step():
        index = buffer.sample_indices(batch_size)
        buffer.get_weight(index)
        buffer.update_weight(index, error)

    benchmark(step)


@pytest.mark.parametrize("sampler", ["uniform", "ever", "buffer"])
@pytest.mark.parametrize("kind", [TensorDictReplayBuffer, LeanReplayBuffer])
@pytest.mark.benchmark(group="extend by 1,000 frames")
def test_extend(benchmark, kind, sampler):
    chosen = RandomSampler() if sampler == "uniform" else PrioritizedSampler(100_000, max_priority=sampler)
    buffer, written = filled_buffer(100_000, 256, chosen, sampler != "uniform", kind), frames(1000)

    benchmark(lambda: buffer.extend(written))


@pytest.mark.parametrize("capacity", [10_000, 1_000_000])
@pytest.mark.benchmark(group="256 sequences of 8 steps")
def test_sequence_index(benchmark, capacity):
    storage = filled_buffer(capacity, 256, RandomSampler(), prioritized=False).storage
    first = torch.randint(capacity, (256,))

    benchmark(lambda: sequence_index(storage, first, 8, cursor=0))
