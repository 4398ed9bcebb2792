import copy
import io
import math
import pickle
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from torchrl_safety.data import priority_kernels, priority_tree
from torchrl_safety.data.priority_tree import PriorityTree, _never_empty, last_row_of_each_slot


def filled(leaves):
    tree = PriorityTree(len(leaves))
    tree.set(torch.arange(len(leaves)), torch.as_tensor(leaves, dtype=torch.float64))
    return tree


@st.composite
def writes(draw):
    capacity = draw(st.integers(1, 300))
    leaf = st.one_of(st.just(0.0), st.floats(1e-3, 1e3))
    rows = st.lists(st.tuples(st.integers(0, capacity - 1), leaf, st.booleans()), min_size=1, max_size=20)
    return capacity, draw(st.lists(rows, min_size=1, max_size=4))


@given(writes(), st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_the_tree_agrees_with_an_array_searched_by_brute_force(case, seed):
    capacity, batches = case
    tree, array = PriorityTree(capacity), np.zeros(capacity)
    for rows in batches:
        index, leaf, where = zip(*rows)
        tree.set(torch.tensor(index), torch.tensor(leaf, dtype=torch.float64), where=torch.tensor(where))
        for i, value, applies in rows:
            if applies:
                array[i] = value
        positive = array[array > 0]
        assert tree.get(torch.arange(capacity)).numpy().tolist() == array.tolist()
        assert tree.total.item() == pytest.approx(math.fsum(array), rel=1e-12)
        assert tree.min.item() == (positive.min() if positive.size else math.inf)
        assert tree.max.item() == array.max()
    if not array.any():
        return
    u = np.random.default_rng(seed).random(50)
    slot, leaf = tree.find(torch.from_numpy(u))
    for share, found, value in zip(u, slot.tolist(), leaf.tolist()):
        below, upto = math.fsum(array[:found]), math.fsum(array[: found + 1])
        slack = 1e-9 * math.fsum(array)
        assert below - slack <= share * math.fsum(array) <= upto + slack
        assert value == array[found] > 0


@pytest.mark.parametrize("capacity", [1, 3, 1000])
def test_draws_follow_the_leaves_within_four_standard_errors(capacity):
    leaves = torch.rand(capacity, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.1
    draws = filled(leaves).sample(100_000, generator=torch.Generator().manual_seed(2))
    share = leaves / leaves.sum()
    sigma = (100_000 * share * (1 - share)).sqrt()
    error = (torch.bincount(draws, minlength=capacity) - 100_000 * share).abs()
    # Of 1000 slots one in 16 sets of draws has an entry beyond 4 sigma; this seed has none.
    assert (error <= 4 * sigma + 1e-9).all()


@pytest.mark.parametrize("capacity", [1_000_000, 1_100_000])
def test_draws_from_a_million_slots_follow_the_leaves_bucket_by_bucket(capacity):
    leaves = torch.rand(capacity, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) ** 4
    draws = filled(leaves).sample(100_000, generator=torch.Generator().manual_seed(4))
    for bucket in (torch.arange(capacity) % 64, torch.arange(capacity) // 64 % 64, torch.arange(capacity) // 20_000):
        share = torch.bincount(bucket, weights=leaves) / leaves.sum()
        sigma = (100_000 * share * (1 - share)).sqrt()
        seen = torch.bincount(bucket[draws], minlength=share.numel())
        assert ((seen - 100_000 * share).abs() <= 4 * sigma).all()


@pytest.mark.parametrize("capacity", [1000, 16_384 * 64 - 1, 16_384 * 64, 2_000_000])
def test_a_large_tree_finds_the_slot_that_a_running_sum_of_all_leaves_finds(capacity):
    generator = torch.Generator().manual_seed(capacity)
    leaves = torch.rand(capacity, dtype=torch.float64, generator=generator) ** 4
    leaves[torch.rand(capacity, generator=generator) < 0.3] = 0
    u = torch.rand(20_000, dtype=torch.float64, generator=generator)
    slot, leaf = filled(leaves).find(u)
    upto = leaves.cumsum(0)
    slack = 1e-9 * upto[-1]
    assert (upto[slot] + slack >= u * upto[-1]).all()
    assert (upto[slot] - leaves[slot] - slack <= u * upto[-1]).all()
    assert torch.equal(leaf, leaves[slot])
    assert (leaf > 0).all()


@pytest.mark.parametrize("capacity", [1, 2, 64, 128, 2**17, 2**21])
def test_the_share_at_which_a_slot_begins_finds_that_slot(capacity):
    begins = torch.arange(0, capacity, max(1, capacity // 4096))
    slot, _ = filled(torch.ones(capacity)).find(begins.double() / capacity)  # whole numbers, so nothing is rounded
    assert torch.equal(slot, begins)


def test_of_equal_slots_in_one_write_the_last_wins():
    tree = PriorityTree(5)
    index = torch.randint(5, (200_000,), generator=torch.Generator().manual_seed(0))
    leaf = torch.rand(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tree.set(index, leaf)
    last = dict(zip(index.tolist(), leaf.tolist()))
    assert tree.get(torch.arange(5)).tolist() == [last[slot] for slot in range(5)]
    settled = leaf[last_row_of_each_slot(index)]
    assert settled.tolist() == [last[slot] for slot in index.tolist()]


def test_the_root_equals_the_sum_of_the_leaves_after_a_hundred_thousand_updates():
    """MATH §5: to 1e-6 relative."""
    capacity, generator = 5000, torch.Generator().manual_seed(0)
    tree = PriorityTree(capacity)
    for _ in range(2000):
        index = torch.randint(capacity, (50,), generator=generator)
        # Leaves over 24 orders of magnitude: adding differences would leave the large ones' rounding errors behind.
        tree.set(index, 10.0 ** (24 * torch.rand(50, dtype=torch.float64, generator=generator) - 12))
    tree.set(torch.nonzero(tree.get(torch.arange(capacity)) > 1e-6).squeeze(1), 0.0)
    assert tree.total.item() == pytest.approx(math.fsum(tree.get(torch.arange(capacity)).tolist()), rel=1e-6)


@pytest.mark.parametrize("capacity", [1, 7, 64, 65, 1000, 1_100_000])
def test_an_empty_slot_is_never_drawn_not_even_at_the_ends_of_the_range(capacity):
    generator = torch.Generator().manual_seed(capacity)
    u = torch.cat([torch.rand(2000, dtype=torch.float64, generator=generator), torch.linspace(0, 1, 2001).double()])
    u = torch.cat([u, torch.tensor([0.0, 5e-324, 1 - 2**-53, 1.0], dtype=torch.float64)])
    for _ in range(5 if capacity < 10_000 else 1):
        leaves = torch.zeros(capacity, dtype=torch.float64)
        chosen = torch.randint(capacity, (max(1, capacity // 3),), generator=generator)
        leaves[chosen] = 10.0 ** (16 * torch.rand(chosen.numel(), dtype=torch.float64, generator=generator) - 8)
        slot, leaf = filled(leaves).find(u)
        assert (leaves[slot] > 0).all()
        assert torch.equal(leaves[slot], leaf)


def test_leaves_so_small_that_their_neighbours_underflow_are_still_drawn():
    slot = filled([0.0, 5e-324, 0.0]).sample(torch.tensor([0.0, 0.5, 1.0]))
    assert slot.tolist() == [1, 1, 1]


def test_a_child_found_empty_by_a_parallel_running_sum_is_replaced_by_the_largest():
    row = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
    assert _never_empty(row, torch.tensor([[0], [2]])).tolist() == [[1], [2]]


def test_masked_rows_write_nothing():
    tree = filled([1.0, 2.0])
    tree.set(torch.tensor([0, 1, 0]), torch.tensor([5.0, 6.0, 7.0]), where=torch.tensor([True, False, False]))
    assert tree.get(torch.tensor([0, 1])).tolist() == [5.0, 2.0]
    assert (tree.total.item(), tree.min.item(), tree.max.item()) == (7.0, 2.0, 5.0)
    full = filled([1.0] * 64)
    full.set(torch.arange(64), 3.0, where=torch.arange(64) < 2)
    assert full.total.item() == 68.0


def test_a_cleared_tree_is_empty():
    tree = filled([1.0, 2.0])
    tree.clear()
    assert (tree.total.item(), tree.min.item(), tree.max.item()) == (0.0, math.inf, 0.0)
    with pytest.raises(RuntimeError, match="all leaves are 0"):
        tree.sample(1)


def test_a_loaded_tree_has_the_very_same_sums():
    generator = torch.Generator().manual_seed(0)
    tree = PriorityTree(3000)
    for _ in range(50):
        tree.set(torch.randint(3000, (40,), generator=generator), torch.rand(40, generator=generator))
    buffer = io.BytesIO()
    torch.save(tree.state_dict(), buffer)
    buffer.seek(0)
    other = PriorityTree(3000)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    u = torch.rand(1000, dtype=torch.float64, generator=generator)
    assert torch.equal(other.sample(u), tree.sample(u))
    assert all(torch.equal(getattr(other, name), getattr(tree, name)) for name in ("total", "min", "max"))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda tree: pickle.loads(pickle.dumps(tree))])
def test_a_copied_tree_is_whole_and_its_own(clone):
    tree = filled([1.0, 2.0, 3.0])
    other = clone(tree)
    other.set(torch.tensor([1]), 6.0)
    assert (other.total.item(), other.max.item(), tree.total.item()) == (10.0, 6.0, 6.0)
    assert other.sample(torch.tensor([0.5])).tolist() == [1]


def test_nothing_waits_for_an_accelerator():
    # A fake device has no values: reading one back on the host raises.
    with FakeTensorMode():
        tree = PriorityTree(1_100_000, device="cuda")
        index = torch.zeros(8, dtype=torch.long, device="cuda")
        tree.set(index, torch.ones(8, device="cuda"), where=index >= 0)
        slot, leaf = tree.find(torch.rand(8, device="cuda"))
        assert slot.device.type == leaf.device.type == "cuda"
        assert {t.device.type for t in (tree.total, tree.min, tree.max, tree.get(slot))} == {"cuda"}


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True])
def test_a_capacity_that_is_no_size_is_refused(capacity):
    with pytest.raises(ValueError, match="capacity must be a positive integer, got"):
        PriorityTree(capacity)


@pytest.mark.parametrize("slot", [-1, 3])
def test_a_slot_outside_the_tree_is_refused_with_nothing_changed(slot):
    tree = filled([1.0, 2.0, 3.0])
    with pytest.raises(IndexError, match=f"slot {slot} is outside the tree"):
        tree.set(torch.tensor([0, slot]), 9.0)
    with pytest.raises(IndexError, match=f"slot {slot} is outside the tree"):
        tree.get(torch.tensor([slot]))
    assert tree.total.item() == 6.0


def test_a_state_of_another_capacity_is_refused():
    with pytest.raises(ValueError, match="capacity 2, this one has capacity 3"):
        PriorityTree(3).load_state_dict(PriorityTree(2).state_dict())


# Not compiled here, so that they are compared also where numba is absent.
LOOPS = priority_kernels.make_kernels(lambda loop, **options: loop)


def use(monkeypatch, kernels):
    monkeypatch.setattr(priority_tree, "compiled_kernels", lambda: kernels)


@pytest.mark.parametrize("capacity", [1, 63, 64, 1000, 16_384 * 64 + 5])
def test_the_compiled_search_finds_the_very_slots_that_the_tensors_find(capacity, monkeypatch):
    generator = torch.Generator().manual_seed(capacity)
    leaves = 10.0 ** (12 * torch.rand(capacity, dtype=torch.float64, generator=generator) - 6)
    leaves[1:][torch.rand(capacity - 1, generator=generator) < 0.3] = 0
    u = torch.rand(300, dtype=torch.float64, generator=generator)
    u = torch.cat([u, torch.linspace(0, 1, 101).double(), torch.tensor([5e-324, 1 - 2**-53], dtype=torch.float64)])
    tree = filled(leaves)
    use(monkeypatch, LOOPS)
    slot, leaf = tree.find(u)
    use(monkeypatch, None)
    expected_slot, expected_leaf = tree.find(u)
    assert torch.equal(slot, expected_slot)
    assert torch.equal(leaf, expected_leaf)


def test_a_row_with_less_mass_than_its_node_gives_its_last_child_in_both_forms(monkeypatch):
    for form in (LOOPS, None):
        use(monkeypatch, form)
        tree = filled([1.0, 2.0, 3.0, 0.0])
        tree._top[0] = 6.5  # as if rounding had made the sum larger than its parts
        assert tree.sample(torch.tensor([0.99])).tolist() == [2]


@pytest.mark.parametrize("capacity", [1, 64, 1000, 200_000])
def test_compiled_writes_leave_the_sums_that_tensors_leave(capacity, monkeypatch):
    generator = torch.Generator().manual_seed(capacity)
    use(monkeypatch, LOOPS)
    trees = [PriorityTree(capacity), PriorityTree(capacity)]
    for _ in range(5):
        slot = torch.randint(capacity, (40,), generator=generator)  # some of them twice
        leaf = torch.rand(40, dtype=torch.float64, generator=generator)
        for form, tree in zip((LOOPS, None), trees):
            use(monkeypatch, form)
            tree.set(slot, leaf)
    looped, by_tensors = trees
    assert torch.equal(looped.get(torch.arange(capacity)), by_tensors.get(torch.arange(capacity)))
    for key, sums in by_tensors.state_dict().items():
        torch.testing.assert_close(looped.state_dict()[key], sums, rtol=1e-14, atol=0)
    assert looped.min == by_tensors.min


@pytest.mark.parametrize("ways", [(LOOPS, None), (None, LOOPS)])
def test_a_state_goes_from_tensors_to_compiled_loops_and_back(ways, monkeypatch):
    leaves = torch.rand(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    use(monkeypatch, ways[0])
    tree = filled(leaves)
    state = tree.state_dict()
    use(monkeypatch, ways[1])
    other = PriorityTree(len(leaves))
    assert len(other.state_dict()) != len(state)  # another number of levels
    other.load_state_dict(state)
    u = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    assert torch.equal(other.sample(u), tree.sample(u))
    torch.testing.assert_close(other.total, leaves.sum(), rtol=1e-13, atol=0)


def test_loops_are_left_to_tensors_where_numba_is_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert priority_kernels.compiled_kernels.__wrapped__() is None


@pytest.mark.parametrize("capacity", [5, 1000, 1_100_000])
def test_a_run_of_slots_and_all_slots_at_once_are_written_like_single_ones(capacity):
    generator = torch.Generator().manual_seed(0)
    leaves = torch.rand(capacity, dtype=torch.float64, generator=generator)
    expected, filled_at_once = filled(leaves), PriorityTree(capacity)
    filled_at_once.set(torch.tensor([capacity - 1]), 9.0)
    filled_at_once.fill(leaves)
    for run in (slice(0, 1), slice(capacity // 3, capacity // 2), slice(capacity - 2, capacity)):
        expected.set(torch.arange(run.start, run.stop), 0.25)
        filled_at_once.write_run(run, 0.25)
        every = torch.arange(capacity)
        assert torch.equal(filled_at_once.get(every), expected.get(every))
        assert filled_at_once.total.item() == pytest.approx(expected.total.item(), rel=1e-12)
        assert (filled_at_once.min, filled_at_once.max) == (expected.min, expected.max)


def test_many_rows_of_neighbours_leave_the_sums_that_brute_force_gives():
    tree, generator = PriorityTree(10_000), torch.Generator().manual_seed(0)
    for start in (0, 5000, 9000, 4700):
        index = torch.arange(start, start + 1000)
        tree.set(index[torch.randperm(1000, generator=generator)], torch.rand(1000, generator=generator))
        tree.set(index, torch.rand(1000, generator=generator))
        array = tree.get(torch.arange(10_000)).tolist()
        assert tree.total.item() == pytest.approx(math.fsum(array), rel=1e-12)
        assert tree.min.item() == min(leaf for leaf in array if leaf > 0)
