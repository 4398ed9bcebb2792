"""What a prioritized sampler refuses: priorities and alphas whose leaves overflow, storages larger than itself."""

import math
import sys

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, TensorDictReplayBuffer

from torchrl_safety.data.prioritized import PrioritizedSampler
from torchrl_safety.data.priority_rows import largest_priority


def items(n):
    return TensorDict({"x": torch.arange(n).float()}, [n])


def make(capacity, *, storage=None, **settings):
    settings.setdefault("generator", torch.Generator().manual_seed(0))
    storage = LazyTensorStorage(capacity) if storage is None else storage
    return TensorDictReplayBuffer(storage=storage, sampler=PrioritizedSampler(capacity, **settings), batch_size=16)


def flat(state):
    """The tensors and values of a state, as text that tells all of them apart."""
    if isinstance(state, dict):
        return {name: flat(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, torch.Tensor) else state


@pytest.mark.parametrize("alpha", [0.0, 1e-3, 0.3, 0.6, 0.999, 1.0, 1.002, 1.5, 3.0, 50.0])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5])
@pytest.mark.parametrize("capacity", [1, 7, 1_000_000])
def test_the_largest_priority_that_is_taken_has_a_finite_sum_and_one_some_times_larger_has_not(alpha, eps, capacity):
    largest = largest_priority(alpha=alpha, eps=eps, capacity=capacity)
    leaf = torch.tensor(largest + eps, dtype=torch.float64) ** alpha
    assert math.isfinite(float(leaf) * capacity)
    if largest < sys.float_info.max / 2:
        beyond = torch.tensor((largest + eps) * 2.1 ** (1 / alpha), dtype=torch.float64) ** alpha
        assert not math.isfinite(float(beyond) * capacity)


@pytest.mark.parametrize("max_priority", ["ever", "buffer"])
@pytest.mark.parametrize(
    ("alpha", "priority"),
    [(2.0, 1e200), (1.0, 1e308), (1.0, sys.float_info.max), (3.0, 1e103)],  # the sum overflows in the second and last
)
def test_a_priority_whose_leaves_overflow_is_refused_with_nothing_changed(alpha, priority, max_priority):
    buffer = make(10, alpha=alpha, max_priority=max_priority)
    buffer.extend(items(10))
    buffer.update_priority(torch.arange(10), torch.arange(10.0))
    before = flat(buffer.sampler.state_dict())
    bad = torch.tensor([1.0, priority], dtype=torch.float64)
    with pytest.raises(ValueError, match=rf"priority is 1.*alpha={alpha:g}: scale or clip the errors to at most"):
        buffer.update_priority(torch.tensor([0, 1]), bad)
    with pytest.raises(ValueError, match="priority is 1"):
        buffer.update_priority(torch.tensor([3]), bad[1:])
    assert flat(buffer.sampler.state_dict()) == before
    assert torch.isfinite(buffer.sample()["priority_weight"]).all()


def test_the_largest_priorities_in_every_slot_are_still_drawn():
    for alpha in (0.6, 1.0, 2.0):
        buffer = make(100, alpha=alpha, eps=0.0)
        buffer.extend(items(100))
        largest = largest_priority(alpha=alpha, eps=0.0, capacity=100)
        buffer.update_priority(torch.arange(100), torch.full((100,), largest, dtype=torch.float64))
        buffer.extend(items(50))
        batch = buffer.sample()
        assert math.isfinite(buffer.sampler._tree.total.item())
        assert torch.equal(batch["priority_weight"], torch.ones(16))
        assert len(batch["index"].unique()) > 4


@pytest.mark.parametrize("max_priority", ["ever", "buffer"])
def test_an_alpha_with_which_leaves_overflow_is_refused_with_nothing_changed(max_priority):
    buffer = make(10, alpha=1.0, max_priority=max_priority)
    buffer.extend(items(10))
    buffer.update_priority(torch.arange(10), torch.full((10,), 1e200, dtype=torch.float64))
    before = flat(buffer.sampler.state_dict())
    with pytest.raises(ValueError, match=r"alpha=2 is too large for the priority 1e\+200.*choose a smaller alpha"):
        buffer.sampler.alpha = 2.0
    assert flat(buffer.sampler.state_dict()) == before
    buffer.sampler.alpha = 1.5
    assert math.isfinite(buffer.sampler._tree.total.item())


def test_an_alpha_is_measured_against_the_largest_priority_ever_seen_which_the_next_item_gets():
    buffer = make(2, alpha=1.0)
    buffer.extend(items(2))
    buffer.update_priority(torch.arange(2), torch.full((2,), 1e200, dtype=torch.float64))
    buffer.update_priority(torch.arange(2), 1.0)
    with pytest.raises(ValueError, match="alpha=2 is too large"):
        buffer.sampler.alpha = 2.0


def test_an_alpha_with_which_the_first_items_would_overflow_is_refused_at_construction():
    with pytest.raises(ValueError, match=r"alpha=2000 is too large for the priority 1: .* with eps=1 can overflow"):
        PrioritizedSampler(4, alpha=2000.0, eps=1.0)


def test_more_capacity_than_the_sum_can_bear_is_refused():
    buffer = make(10, alpha=1.0)
    buffer.extend(items(10))
    buffer.update_priority(torch.arange(10), torch.full((10,), 8e306, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"over 1000 items .* can overflow"):
        buffer.sampler.resized(torch.arange(10), 1000)


def test_ranks_have_no_leaf_that_could_overflow():
    buffer = make(10, alpha=3.0, variant="rank", sort_interval=1)
    buffer.extend(items(10))
    buffer.update_priority(torch.arange(10), torch.full((10,), 1e300, dtype=torch.float64))
    buffer.sampler.alpha = 50.0
    assert torch.equal(buffer.sample()["priority_weight"], torch.ones(16))


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_a_storage_larger_than_the_sampler_is_refused_at_the_first_write(storage):
    message = "max_capacity=5 of the sampler is less than the 20 items.*build the sampler with max_capacity=20"
    for write in ("extend", "add"):
        buffer = TensorDictReplayBuffer(storage=storage(20), sampler=PrioritizedSampler(5), batch_size=2)
        with pytest.raises(ValueError, match=message):
            _ = buffer.extend(items(3)) if write == "extend" else buffer.add(items(1)[0])
        with pytest.raises(ValueError, match=message):
            buffer.sample()


def test_a_storage_whose_last_row_has_more_items_than_its_max_size_wants_as_many_slots():
    # Thirteen items do not make whole rows of three environments: the storage takes fifteen.
    def filled(capacity):
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(13, ndim=2),
            sampler=PrioritizedSampler(capacity, generator=torch.Generator().manual_seed(0)),
            batch_size=500,
        )
        for start in (0, 4, 8):
            x = torch.arange(start, start + 4).float()
            buffer.extend(TensorDict({"x": torch.stack([x, x + 100, x + 200])}, [3, 4]))
        return buffer

    with pytest.raises(ValueError, match="less than the 15 items"):
        filled(13)
    buffer = filled(15)
    expected = sorted(float(100 * env + t) for env in range(3) for t in range(7, 12))
    assert sorted(set(buffer.sample()["x"].tolist())) == expected
    assert buffer.sampler.priority_of(torch.arange(15)).tolist() == [1.0] * 15


def test_a_sampler_may_have_more_slots_than_its_storage():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=PrioritizedSampler(9), batch_size=100)
    for _ in range(3):
        buffer.extend(items(3))
    assert set(buffer.sample()["index"].tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("write", ["extend", "add"])
def test_a_buffer_that_has_seen_only_errors_of_zero_gives_zero_to_new_items_whatever_the_rule(write):
    for max_priority in ("ever", "buffer"):
        buffer = make(8, max_priority=max_priority)
        buffer.extend(items(4))
        buffer.update_priority(torch.arange(4), 0.0)
        for _ in range(2):
            _ = buffer.extend(items(1)) if write == "extend" else buffer.add(items(1)[0])
        assert buffer.sampler.default_priority == 0.0
        assert buffer.sampler.priority_of(torch.arange(7)).tolist() == [0.0] * 6 + [-1.0]
        leaves = buffer.sampler._tree.get(torch.arange(6)).tolist()
        assert leaves == pytest.approx([1e-6**0.6] * 6)
        buffer.sampler.alpha = 1.0
        assert buffer.sampler._tree.get(torch.arange(7)).tolist() == pytest.approx([1e-6] * 6 + [0.0])
