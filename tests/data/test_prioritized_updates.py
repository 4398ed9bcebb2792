"""Priorities that a prioritized sampler is given: what is new, read, refused, or aimed at what is gone."""

import copy
import math

import pytest
import torch
from prioritized_buffers import items, leaf_of, leaves, make
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, TensorDictReplayBuffer

from torchrl_safety.data import PrioritizedSampler, priority_kernels, priority_tree


@pytest.mark.parametrize("normalization", ["batch", "buffer"])
def test_a_normalised_weight_is_at_most_one_also_beside_new_items_and_after_an_eviction(normalization):
    buffer = make(20, 12, weight_normalization=normalization, batch_size=64, beta=1.0)
    largest = []
    for i in range(30):
        batch = buffer.sample()
        assert ((batch["priority_weight"] > 0) & (batch["priority_weight"] <= 1)).all()
        largest.append(batch["priority_weight"].max().item())
        batch["td_error"] = (batch["x"] + i).cos().square()
        buffer.update_tensordict_priority(batch)
        buffer.extend(items(3, i))
    if normalization == "batch":
        assert largest == [1.0] * 30


@pytest.mark.parametrize("write", ["extend", "add"])
def test_a_new_item_gets_the_largest_priority_with_alpha_applied_once(write):
    """MATH §5: a new item gets (p_max + ε)^α."""
    buffer = make(10, 0)

    def put(n):
        if write == "extend":
            buffer.extend(items(n))
        else:
            for i in range(n):
                buffer.add(items(1, i)[0])

    put(3)
    torch.testing.assert_close(leaves(buffer), torch.full((3,), leaf_of(1.0)).double())
    buffer.update_priority(torch.arange(3), torch.tensor([0.1, 0.7, 0.3]))
    put(2)
    torch.testing.assert_close(leaves(buffer)[3:], torch.full((2,), leaf_of(0.7)).double())
    buffer.update_priority(torch.tensor([0, 1]), torch.tensor([5.0, 0.2]))
    put(1)
    torch.testing.assert_close(leaves(buffer)[5:], torch.full((1,), leaf_of(5.0)).double())
    assert buffer.sampler.default_priority == pytest.approx(5.0)


@pytest.mark.parametrize("write", ["extend", "add"])
def test_an_evicted_outlier_is_forgotten_only_where_the_maximum_is_that_of_the_buffer(write):
    for max_priority, expected in (("buffer", 3.0), ("ever", 100.0)):
        buffer = make(4, max_priority=max_priority)
        buffer.update_priority(torch.arange(4), torch.tensor([1.0, 100.0, 2.0, 3.0]))
        for i in range(3):
            _ = buffer.extend(items(1)) if write == "extend" else buffer.add(items(1, i)[0])
        # The first was written while the outlier was there, the second took its place, the third came after.
        torch.testing.assert_close(
            leaves(buffer), torch.tensor([leaf_of(100.0), leaf_of(expected), leaf_of(expected), leaf_of(3.0)]).double()
        )


def test_a_buffer_whose_updated_items_are_all_gone_starts_again_from_one():
    buffer = make(2, max_priority="buffer")
    buffer.update_priority(torch.arange(2), torch.tensor([50.0, 60.0]))
    buffer.extend(items(2))
    assert buffer.sampler.default_priority == 1.0
    torch.testing.assert_close(leaves(buffer), torch.full((2,), leaf_of(1.0)).double())


@pytest.mark.parametrize("max_priority", ["ever", "buffer"])
def test_an_emptied_buffer_starts_again_from_one(max_priority):
    buffer = make(4, max_priority=max_priority)
    buffer.update_priority(torch.arange(4), 50.0)
    buffer.empty()
    assert buffer.sampler.default_priority == 1.0
    buffer.extend(items(2))
    torch.testing.assert_close(leaves(buffer), torch.full((2,), leaf_of(1.0)).double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_priorities_of_any_dtype_and_column_shape_are_read_alike(dtype, shape):
    buffer = make(3)
    buffer.update_priority(torch.arange(3), torch.tensor([1, 2, 3], dtype=dtype).view(shape))
    torch.testing.assert_close(leaves(buffer), torch.tensor([leaf_of(p) for p in (1, 2, 3)]).double())
    batch = buffer.sample()
    batch["td_error"] = batch["index"].to(dtype).unsqueeze(-1) + 4
    buffer.update_tensordict_priority(batch)
    seen = batch["index"].unique()
    torch.testing.assert_close(leaves(buffer)[seen], leaf_of(seen.double() + 4))


def test_one_priority_serves_all_indices_and_an_int_is_an_index():
    buffer = make(3)
    buffer.update_priority(torch.arange(3), 2.0)
    buffer.update_priority(1, 9.0)
    torch.testing.assert_close(leaves(buffer), torch.tensor([leaf_of(p) for p in (2, 9, 2)]).double())


def test_of_equal_indices_in_one_update_the_last_wins():
    buffer = make(3)
    buffer.update_priority(torch.tensor([1, 0, 1, 1]), torch.tensor([7.0, 8.0, 9.0, 4.0]))
    torch.testing.assert_close(leaves(buffer), torch.tensor([leaf_of(p) for p in (8, 4, 1)]).double())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bad_priority_is_refused_with_nothing_changed(bad, dtype):
    """MATH §5: NaN, infinite and negative priorities change nothing."""
    for max_priority in ("ever", "buffer"):
        buffer = make(4, max_priority=max_priority)
        buffer.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
        before = copy.deepcopy(buffer.sampler.state_dict())
        with pytest.raises(ValueError, match=r"priority is -?(nan|inf|0\.001).*: pass finite errors"):
            buffer.update_priority(torch.arange(4), torch.tensor([9.0, bad, 9.0, 9.0], dtype=dtype))
        batch = buffer.sample()
        batch["td_error"] = torch.full((8,), bad, dtype=dtype)
        with pytest.raises(ValueError, match="priority is"):
            buffer.update_tensordict_priority(batch)
        after = buffer.sampler.state_dict()
        for name in ("tree", "records"):
            assert str(before[name]) == str(after[name])


def test_priorities_that_do_not_match_the_indices_are_refused():
    with pytest.raises(ValueError, match=r"priority has shape \[3\] for 2 indices"):
        make(4).sampler.update_priority(torch.tensor([0, 1]), torch.ones(3))


@pytest.mark.parametrize("index", [torch.tensor([True, False]), torch.tensor([0.0, 1.7])])
def test_indices_that_are_no_integers_are_refused(index):
    buffer = make(4)
    with pytest.raises(ValueError, match=f"index has dtype {index.dtype}: pass integers"):
        buffer.sampler.update_priority(index, 9.0)
    torch.testing.assert_close(leaves(buffer), torch.full((4,), leaf_of(1.0)).double())


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_updates_aimed_at_a_slot_rewritten_since_it_was_sampled_are_dropped(storage):
    """MATH §5: what was learned of one item says nothing of the next."""
    buffer = make(4, storage=storage, batch_size=200)
    batch = buffer.sample()
    buffer.extend(items(2))
    batch["td_error"] = torch.full((200,), 9.0)
    buffer.update_tensordict_priority(batch)
    torch.testing.assert_close(leaves(buffer), torch.tensor([leaf_of(p) for p in (1, 1, 9, 9)]).double())
    # The next batch sees the new items, so its updates apply.
    batch = buffer.sample()
    batch["td_error"] = torch.full((200, 1), 2.0)
    buffer.update_tensordict_priority(batch)
    torch.testing.assert_close(leaves(buffer), torch.full((4,), leaf_of(2.0)).double())


def test_a_dropped_update_does_not_raise_the_largest_priority():
    for max_priority in ("ever", "buffer"):
        buffer = make(2, max_priority=max_priority)
        batch = buffer.sample()
        buffer.extend(items(2))
        batch["td_error"] = torch.full((8,), 9.0)
        buffer.update_tensordict_priority(batch)
        assert buffer.sampler.default_priority == 1.0


def test_a_batch_that_was_copied_still_knows_when_it_was_drawn():
    buffer = make(4, batch_size=200)
    batch = buffer.sample().clone()[20:]
    buffer.extend(items(2))
    buffer.sampler.update_priority(batch["index"], 9.0, generation=batch["priority_stamp"], storage=buffer.storage)
    torch.testing.assert_close(leaves(buffer), torch.tensor([leaf_of(p) for p in (1, 1, 9, 9)]).double())


def test_an_update_without_a_stamp_applies_to_what_is_there_now():
    buffer = make(4)
    buffer.sample()
    index = buffer.extend(items(2))
    buffer.update_priority(index, torch.tensor([5.0, 6.0]))
    torch.testing.assert_close(leaves(buffer), torch.tensor([leaf_of(p) for p in (5, 6, 1, 1)]).double())


def test_a_batch_drawn_before_the_buffer_was_emptied_is_stale():
    buffer = make(4, batch_size=100)
    batch = buffer.sample()
    batch["td_error"] = torch.full((100,), 9.0)
    buffer.empty()
    for n in range(4):
        buffer.update_tensordict_priority(batch)
        torch.testing.assert_close(leaves(buffer), torch.full((n,), leaf_of(1.0)).double())
        buffer.extend(items(1))
    assert buffer.sampler.default_priority == 1.0


def test_a_stamped_update_of_an_emptied_buffer_fills_no_slot():
    for stamped in (True, False):
        buffer = make(4, batch_size=100)
        batch = buffer.sample()
        buffer.empty()
        if stamped:
            buffer.sampler.update_priority(batch["index"].clone(), 9.0, generation=batch["priority_stamp"])
        else:
            buffer.sampler.update_priority(batch["index"], 9.0)
        buffer.extend(items(1))
        assert set(buffer.sample()["index"].tolist()) == {0}


def test_an_update_of_a_slot_that_was_never_written_is_refused_also_without_the_storage():
    buffer = make(8, 3, batch_size=200)
    for index in (3, torch.tensor([0, 7])):
        with pytest.raises(IndexError, match="names an empty slot, the buffer holds 3 items"):
            buffer.sampler.update_priority(index, 9.0)
    assert set(buffer.sample()["index"].tolist()) == {0, 1, 2}
    buffer.empty()
    with pytest.raises(IndexError, match="the buffer holds 0 items"):
        buffer.sampler.update_priority(0, 9.0)


@pytest.mark.parametrize("max_priority", ["ever", "buffer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_updated_in_loops_is_one_updated_by_tensors(max_priority, dtype, monkeypatch):
    loops = priority_kernels.make_kernels(lambda loop, **options: loop)
    buffers = []
    for form in (loops, None):
        monkeypatch.setattr(priority_tree, "compiled_kernels", lambda form=form: form)
        generator = torch.Generator().manual_seed(0)
        sampler = PrioritizedSampler(300, max_priority=max_priority, generator=generator)
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(300), sampler=sampler, batch_size=40)
        buffer.extend(TensorDict({"x": torch.arange(250.0)}, [250]))
        for step in range(6):
            index = buffer.sample()["index"]
            assert sampler._update_drawn(index, torch.full((40,), torch.nan, dtype=dtype)) is False
            buffer.update_priority(index, torch.linspace(0, 5 - step, 40, dtype=dtype))
            buffer.extend(TensorDict({"x": torch.arange(30.0)}, [30]))
        buffers.append(buffer)
    looped, by_tensors = (buffer.sampler for buffer in buffers)
    every = torch.arange(300)
    assert torch.equal(looped.priority_of(every), by_tensors.priority_of(every))
    assert looped.default_priority == by_tensors.default_priority
    torch.testing.assert_close(looped._tree.get(every), by_tensors._tree.get(every), rtol=1e-14, atol=0)
    torch.testing.assert_close(looped._tree.total, by_tensors._tree.total, rtol=1e-13, atol=0)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -1.0, 1e308])
def test_a_loop_refuses_what_tensors_refuse_and_changes_nothing(wrong, monkeypatch):
    loops = priority_kernels.make_kernels(lambda loop, **options: loop)
    monkeypatch.setattr(priority_tree, "compiled_kernels", lambda: loops)
    sampler = PrioritizedSampler(20, alpha=2.0)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=4)
    buffer.extend(TensorDict({"x": torch.arange(20.0)}, [20]))
    before = sampler.state_dict()
    index = buffer.sample()["index"]
    with pytest.raises(ValueError, match="nothing was changed"):
        buffer.update_priority(index, torch.tensor([1.0, wrong, 2.0, 3.0], dtype=torch.float64))
    for name in ("level_0", "top"):
        assert torch.equal(sampler.state_dict()["tree"][name], before["tree"][name])
    assert torch.equal(sampler.state_dict()["records"]["signed_priority"], before["records"]["signed_priority"])


@pytest.mark.parametrize("batch_size", [1, 2])
def test_an_error_that_equals_the_default_priority_counts_as_one(batch_size):
    buffer = make(4, batch_size=batch_size)
    for error in (1.0, 0.25):
        buffer.update_tensordict_priority(buffer.sample().set("td_error", torch.full((batch_size,), error)))
    assert buffer.sampler.default_priority == 1.0


@pytest.mark.parametrize(
    "settings", [{"max_priority": "ever"}, {"max_priority": "buffer", "weight_normalization": "buffer"}]
)
def test_a_buffer_used_in_inference_mode_can_be_used_outside_of_it(settings):
    buffer = make(1000, **settings)  # so many slots that a read visits only those written since

    def use():
        batch = buffer.sample()
        buffer.update_tensordict_priority(batch.set("td_error", torch.rand(8)))
        buffer.update_priority(900, 7.0)
        buffer.extend(items(2))

    with torch.inference_mode():
        use()
    use()
    assert buffer.sampler.default_priority == 7.0


@pytest.mark.parametrize("slot", [-1, 10**9])
def test_a_loop_writes_to_no_slot_that_does_not_exist(slot, monkeypatch):
    loops = priority_kernels.make_kernels(lambda loop, **options: loop)
    monkeypatch.setattr(priority_tree, "compiled_kernels", lambda: loops)
    buffer = make(20, 20, batch_size=4)
    index = buffer.sample()["index"]
    before = leaves(buffer).clone()
    index.numpy()[1] = slot  # which torch does not count as a change
    assert buffer.sampler._update_drawn(index, torch.ones(4)) is False
    assert torch.equal(leaves(buffer), before)
