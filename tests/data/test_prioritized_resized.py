"""A prioritized sampler of another capacity goes on as the one it came from."""

import copy

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from torchrl_safety.data.prioritized import PrioritizedSampler

ALPHA, EPS = 0.6, 1e-6
VARIANTS = pytest.mark.parametrize("variant", ["proportional", "rank"])


def items(n):
    return TensorDict({"x": torch.arange(n).float()}, [n])


def lived_in(variant, **settings):
    """A buffer of 20 with known priorities, three draws old, of 40 after which beta is 1."""
    sampler = PrioritizedSampler(
        20,
        beta_annealing_steps=40,
        variant=variant,
        sort_interval=1,
        generator=torch.Generator().manual_seed(5),
        **settings,
    )
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=64)
    buffer.extend(items(20))
    buffer.update_priority(torch.arange(20), (torch.arange(20.0) * 0.7).sin().abs())
    for _ in range(3):
        buffer.sample()
    return buffer


def full_storage(n):
    storage = LazyTensorStorage(n)
    storage.set(torch.arange(n), items(n))
    return storage


def leaves_by_hand(priorities, variant):
    if variant == "rank":
        return [(1 + sum(other > p for other in priorities)) ** -ALPHA for p in priorities]
    return [(p + EPS) ** ALPHA for p in priorities]


@VARIANTS
@pytest.mark.parametrize("capacity", [6, 8, 200])
@pytest.mark.parametrize("max_priority", ["ever", "buffer"])
def test_the_items_that_are_kept_keep_their_priorities(variant, capacity, max_priority):
    buffer = lived_in(variant, max_priority=max_priority)
    kept = torch.tensor([17, 18, 19, 0, 2, 1])
    priorities = buffer.sampler.priority_of(kept).tolist()
    everything = buffer.sampler.priority_of(torch.arange(20)).tolist()
    sampler = buffer.sampler.resized(kept, capacity)
    assert sampler.max_size == capacity
    assert sampler.priority_of(torch.arange(capacity)).tolist() == priorities + [-1.0] * (capacity - 6)
    leaves = sampler._tree.get(torch.arange(capacity)).tolist()
    assert leaves == pytest.approx(leaves_by_hand(priorities, variant) + [0.0] * (capacity - 6))
    assert sampler._tree.total.item() == pytest.approx(sum(leaves))
    assert sampler.default_priority == max(everything if max_priority == "ever" else priorities)
    drawn, _ = sampler.sample(full_storage(6), 2000)
    assert set(drawn.tolist()) == {j for j in range(6) if priorities[j] > 0 or variant == "rank"}


@VARIANTS
def test_updates_of_a_batch_from_before_are_dropped_and_those_of_one_from_after_apply(variant):
    buffer = lived_in(variant)
    old = buffer.sample()
    sampler = buffer.sampler.resized(torch.arange(10, 20), 30)
    before = sampler.priority_of(torch.arange(10))
    sampler.update_priority(old["index"], 9.0)
    sampler.update_priority(old["index"].clone(), 9.0, generation=old["priority_stamp"])
    assert torch.equal(sampler.priority_of(torch.arange(10)), before)
    assert sampler.default_priority < 9.0
    index, _ = sampler.sample(full_storage(10), 16)
    sampler.update_priority(index, 9.0)
    expected = before.index_fill(0, index, 9.0)
    assert torch.equal(sampler.priority_of(torch.arange(10)), expected)
    assert sampler.default_priority == 9.0


@VARIANTS
def test_random_numbers_and_annealing_go_on(variant):
    buffer = lived_in(variant)
    left_alone = copy.deepcopy(buffer.sampler)
    sampler = buffer.sampler.resized(torch.arange(20), 500)
    assert sampler.beta == left_alone.beta == pytest.approx(0.4 + 3 * 0.6 / 40)
    storage = full_storage(20)
    for _ in range(5):
        (ours, info), (theirs, expected) = sampler.sample(storage, 64), left_alone.sample(storage, 64)
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(info["priority_weight"], expected["priority_weight"])
    assert sampler.beta == pytest.approx(0.4 + 8 * 0.6 / 40)


@VARIANTS
def test_a_buffer_generator_goes_on_too(variant):
    buffer = lived_in(variant)
    buffer.set_rng(torch.Generator().manual_seed(11))
    sampler = buffer.sampler.resized(torch.arange(20), 20)
    drawn, _ = sampler.sample(full_storage(20), 64)
    buffer.set_rng(torch.Generator().manual_seed(11))
    assert torch.equal(drawn, buffer.sampler.sample(buffer.storage, 64)[0])


@VARIANTS
def test_alpha_and_the_other_settings_stay(variant):
    buffer = lived_in(variant)
    buffer.sampler.alpha = 0.25
    sampler = buffer.sampler.resized(torch.arange(5), 7)
    assert sampler.alpha == 0.25
    assert sampler._fixed_settings() == buffer.sampler._fixed_settings()
    loaded = PrioritizedSampler(7, variant=variant)
    loaded.load_state_dict(sampler.state_dict())
    ours, _ = sampler.sample(full_storage(5), 50)
    theirs, _ = loaded.sample(full_storage(5), 50)
    assert torch.equal(ours, theirs)


def test_more_items_than_the_new_capacity_are_refused():
    with pytest.raises(ValueError, match="max_capacity=3 is less than the 4 items to keep: keep fewer"):
        lived_in("proportional").sampler.resized(torch.arange(4), 3)
