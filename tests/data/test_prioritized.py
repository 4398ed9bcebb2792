import copy
import io
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.samplers import prioritized as torchrl_prioritized

from torchrl_safety.data import prioritized
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


@pytest.mark.parametrize("capacity", [1, 3, 1000, 1_000_000])
@pytest.mark.parametrize("stratified", [False, True])
def test_items_are_drawn_in_proportion_to_their_leaves(capacity, stratified):
    """MATH §5: leaf (p + ε)^α, P(j) = leaf_j / Σ leaf."""
    buffer = make(capacity, stratified=stratified)
    priority = torch.rand(capacity, generator=torch.Generator().manual_seed(1)) * 10
    buffer.update_priority(torch.arange(capacity), priority)
    index, _ = buffer.sampler.sample(buffer.storage, 100_000)
    share = (priority.double() + EPS) ** ALPHA
    share /= share.sum()
    bucket = torch.arange(capacity) if capacity <= 1000 else torch.arange(capacity) % 89
    share = torch.bincount(bucket, weights=share)
    sigma = (100_000 * share * (1 - share).clamp_min(0)).sqrt()
    seen = torch.bincount(bucket[index], minlength=share.numel())
    assert ((seen - 100_000 * share).abs() <= 4 * sigma + 1e-6).all()


def test_a_stratified_batch_makes_one_draw_in_each_equal_part_of_the_total():
    """MATH §5: one draw in each of B equal segments."""
    buffer = make(50, stratified=True)
    buffer.update_priority(torch.arange(50), torch.rand(50, generator=torch.Generator().manual_seed(1)))
    upto = leaves(buffer).cumsum(0)
    for _ in range(20):
        index, _ = buffer.sampler.sample(buffer.storage, 16)
        for part, drawn in enumerate(index.tolist()):
            assert upto[drawn] >= upto[-1] * part / 16 - 1e-9
            assert upto[drawn] - leaves(buffer)[drawn] <= upto[-1] * (part + 1) / 16 + 1e-9


@pytest.mark.parametrize("share", [0.0, 0.5, 1 - 2**-53])
def test_the_last_stratum_stays_below_the_total_whatever_the_total_is(share, monkeypatch):
    # The largest number that `rand` gives, plus B - 1, over B rounds to 1.
    monkeypatch.setattr(torch, "rand", lambda n, **kwargs: torch.full((n,), share, dtype=torch.float64))
    buffer, generator = make(7, 5, stratified=True), np.random.default_rng(0)
    for _ in range(200):
        buffer.update_priority(torch.arange(5), torch.from_numpy(generator.random(5) * 10.0 ** generator.integers(9)))
        index, info = buffer.sampler.sample(buffer.storage, 64)
        assert (index < 5).all()
        assert (info["priority_weight"] <= 1).all()


def test_alpha_zero_draws_uniformly_with_weights_of_one():
    """MATH §5: α = 0 is uniform."""
    buffer = make(4, alpha=0.0, weight_normalization=None, batch_size=10_000)
    buffer.update_priority(torch.arange(4), torch.tensor([0.0, 1.0, 100.0, 1e-3]))
    batch = buffer.sample()
    assert torch.equal(batch["priority_weight"], torch.ones(10_000))
    assert (torch.bincount(batch["index"]) - 2500).abs().max() < 4 * math.sqrt(10_000 * 0.25 * 0.75)


def test_an_empty_slot_is_never_drawn():
    """MATH §5: its leaf is 0."""
    buffer = make(1000, 3, batch_size=5000)
    assert set(buffer.sample()["index"].tolist()) == {0, 1, 2}
    with pytest.raises(IndexError, match="index 3 names an empty slot, the buffer holds 3 items"):
        buffer.update_priority(torch.tensor([0, 3]), 1.0)


def test_a_batch_may_be_larger_than_the_buffer_because_draws_are_with_replacement():
    assert make(2, batch_size=64).sample().shape == (64,)


def test_an_empty_buffer_says_that_it_is_empty():
    buffer = make(4, 0)
    with pytest.raises(RuntimeError, match="the replay buffer is empty"):
        buffer.sample()
    buffer.extend(items(4))
    buffer.empty()
    with pytest.raises(RuntimeError, match="the replay buffer is empty"):
        buffer.sample()


@pytest.mark.parametrize("normalization", ["batch", "buffer", None])
def test_weights_are_the_inverse_powers_of_the_probability(normalization):
    """MATH §5: w_j = (N P(j))^-β over the maximum of the batch, of the buffer, or nothing."""
    buffer = make(20, 15, weight_normalization=normalization, beta=0.7)
    priority = torch.rand(15, generator=torch.Generator().manual_seed(1))
    buffer.update_priority(torch.arange(15), priority)
    batch = buffer.sample()
    total = sum(leaf_of(p) for p in priority.tolist())
    all_weights = [(15 * leaf_of(p) / total) ** -0.7 for p in priority.tolist()]
    expected = [all_weights[i] for i in batch["index"].tolist()]
    largest = {"batch": max(expected), "buffer": max(all_weights), None: 1.0}[normalization]
    torch.testing.assert_close(batch["priority_weight"], torch.tensor(expected) / largest)
    assert batch["priority_weight"].dtype == torch.get_default_dtype()


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


def test_beta_rises_in_a_straight_line_with_each_sample_and_stays_at_one():
    """MATH §5: β_k = min(1, β0 + k (1 - β0) / N_S), k counted once per draw."""
    buffer = make(4, beta=0.4, beta_annealing_steps=10, weight_normalization=None)
    buffer.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    probability = leaves(buffer) / leaves(buffer).sum()
    for k in range(13):
        beta = min(1.0, 0.4 + k * 0.6 / 10)
        assert buffer.sampler.beta == pytest.approx(beta)
        batch = buffer.sample()
        expected = (4 * probability[batch["index"]]) ** -beta
        torch.testing.assert_close(batch["priority_weight"], expected.float())
    with pytest.raises(ValueError, match=r"beta cannot be set to 0\.5 while it is annealed"):
        buffer.sampler.beta = 0.5


def test_beta_without_annealing_is_the_users_to_move():
    sampler = make(4).sampler
    sampler.beta = 0.9
    assert sampler.beta == 0.9
    with pytest.raises(ValueError, match=r"beta must lie in \[0, 1\]"):
        sampler.beta = 1.1


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


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_without_items_is_refused(batch_size):
    buffer = make(4)
    with pytest.raises(ValueError, match=f"batch_size must be at least 1, got {batch_size}"):
        buffer.sampler.sample(buffer.storage, batch_size)


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


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_the_sampler_serves_every_storage_through_a_wrap_around(storage):
    buffer = TensorDictReplayBuffer(
        storage=storage(5), sampler=PrioritizedSampler(5), batch_size=300, priority_key="error"
    )
    for start in range(0, 12, 3):
        buffer.extend(items(3, start))
        batch = buffer.sample()
        batch["error"] = batch["x"] + 0.5
        buffer.update_tensordict_priority(batch)
    assert set(batch["x"].tolist()) == {7.0, 8.0, 9.0, 10.0, 11.0}
    assert torch.equal(batch["x"], buffer[:]["x"][batch["index"]])
    torch.testing.assert_close(leaves(buffer), leaf_of(buffer[:]["x"].double() + 0.5))


def test_a_priority_that_comes_with_the_data_is_taken():
    buffer = make(4, 0)
    buffer.extend(items(3).set("td_error", torch.tensor([2.0, 3.0, 4.0])))
    torch.testing.assert_close(leaves(buffer), torch.tensor([leaf_of(p) for p in (2, 3, 4)]).double())


def test_a_storage_that_was_filled_before_is_taken_over():
    storage = make(4, 3).storage
    buffer = TensorDictReplayBuffer(storage=storage, sampler=PrioritizedSampler(4), batch_size=100)
    assert set(buffer.sample()["index"].tolist()) == {0, 1, 2}


def test_rows_that_a_writer_rejected_are_passed_over():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(2),
        sampler=PrioritizedSampler(2),
        writer=TensorDictMaxValueWriter(rank_key="x"),
        batch_size=4,
    )
    buffer.extend(items(2, 10))
    buffer.extend(TensorDict({"x": torch.tensor([1.0, 20.0, 2.0])}, [3]))
    torch.testing.assert_close(leaves(buffer), torch.full((2,), leaf_of(1.0)).double())
    buffer.sampler.update_priority(torch.tensor([-1, 1, -1]), torch.tensor([7.0, 3.0, 8.0]))
    torch.testing.assert_close(leaves(buffer), torch.tensor([leaf_of(1.0), leaf_of(3.0)]).double())
    assert buffer.sampler.default_priority == 3.0


def test_a_storage_of_time_and_environments_is_sampled_step_by_step():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(12, ndim=2), sampler=PrioritizedSampler(12), batch_size=2000
    )
    buffer.extend(TensorDict({"x": torch.arange(6).view(3, 2).float()}, [3, 2]))
    batch = buffer.sample()
    assert set(batch["x"].tolist()) == {0.0, 1.0, 2.0, 3.0, 4.0, 5.0}
    batch["td_error"] = batch["x"] + 1
    buffer.update_tensordict_priority(batch)
    # A buffer of two dimensions turns the data it is given, so the order of the slots is that of the storage.
    content = buffer.storage[:]["x"].flatten().long()
    torch.testing.assert_close(leaves(buffer), leaf_of(content.double() + 1))
    probability = (leaves(buffer) / leaves(buffer).sum())[content.argsort()]
    seen = torch.bincount(buffer.sample()["x"].long(), minlength=6)
    assert ((seen - 2000 * probability).abs() <= 4 * (2000 * probability).sqrt()).all()
    with pytest.raises(ValueError, match=r"priority has shape \[4\] for 8 indices.*pass the storage"):
        buffer.sampler.update_priority(torch.zeros(4, 2, dtype=torch.long), torch.ones(4))


def refuse(*args, **kwargs):
    raise AssertionError("torchrl's extension was used")


@pytest.mark.parametrize("tree", [None, refuse], ids=["absent", "present"])
def test_the_extension_of_torchrl_is_not_used(tree, monkeypatch):
    # These are the only names that torchrl takes from its extension.
    for name in [name for name in vars(torchrl_prioritized) if "SegmentTree" in name]:
        monkeypatch.setattr(torchrl_prioritized, name, tree)
    buffer = make(4, alpha=1.0, batch_size=1000)
    batch = buffer.sample()
    batch["td_error"] = batch["x"] == 2
    buffer.update_tensordict_priority(batch)
    assert torch.bincount(buffer.sample()["index"], minlength=4).tolist() == [0, 0, 1000, 0]


def test_torchs_seed_decides_the_draws_and_numpys_generator_is_left_alone():
    state = np.random.get_state()[1].tolist()  # noqa: NPY002
    draws = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        buffer = make(100, generator=None, batch_size=50)
        torch.rand(seed)
        draws.append(buffer.sample()["index"])
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert np.random.get_state()[1].tolist() == state  # noqa: NPY002


def test_a_generator_given_to_the_buffer_is_used():
    def draw():
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(100),
            sampler=PrioritizedSampler(100),
            batch_size=50,
            generator=torch.Generator().manual_seed(7),
        )
        buffer.extend(items(100))
        return buffer.sample()["index"]

    assert torch.equal(draw(), draw())


def lived_in(**settings):
    settings = {"beta_annealing_steps": 40, "max_priority": "buffer", **settings}
    buffer = make(50, 0, storage=LazyTensorStorage, **settings)
    continue_with(buffer, 20)
    return buffer


def continue_with(buffer, rounds):
    record = []
    for i in range(rounds):
        buffer.extend(items(7, 7 * i))
        batch = buffer.sample()
        batch["td_error"] = (batch["x"] * 0.37).sin().abs()
        record.append(torch.cat([batch["index"].float(), batch["priority_weight"]]))
        buffer.update_tensordict_priority(batch)
    return torch.stack(record)


def through_the_sampler(buffer, other, path):
    torch.save({"sampler": buffer.sampler.state_dict(), "buffer": buffer.state_dict()}, path / "state.pt")
    loaded = torch.load(path / "state.pt", weights_only=True)
    other.load_state_dict(loaded["buffer"])
    other.sampler.load_state_dict(loaded["sampler"])


def through_the_buffer(buffer, other, path):
    stream = io.BytesIO()
    torch.save(buffer.state_dict(), stream)
    stream.seek(0)
    other.load_state_dict(torch.load(stream, weights_only=True))


def through_a_folder(buffer, other, path):
    buffer.dumps(path / "folder")
    other.loads(path / "folder")


@pytest.mark.parametrize("travel", [through_the_sampler, through_the_buffer, through_a_folder])
@pytest.mark.parametrize("max_priority", ["ever", "buffer"])
def test_a_loaded_sampler_continues_the_very_same_draws(travel, max_priority, tmp_path):
    """MATH §5: β, k and the generator are in the state."""
    buffer = lived_in(max_priority=max_priority)
    other = make(50, 0, beta_annealing_steps=40, max_priority=max_priority, generator=torch.Generator().manual_seed(99))
    travel(buffer, other, tmp_path)
    assert other.sampler.beta == buffer.sampler.beta == pytest.approx(0.4 + 20 * 0.6 / 40)
    assert torch.equal(continue_with(other, 30), continue_with(buffer, 30))


def test_a_loaded_sampler_knows_which_slots_were_rewritten_since_an_older_batch(tmp_path):
    buffer, other = make(4, batch_size=200), make(4, 0, batch_size=200)
    buffer.extend(items(1))
    older = buffer.sample()
    buffer.extend(items(1))  # slot 1, before the save
    through_the_buffer(buffer, other, tmp_path)
    newer = other.sample()
    other.extend(items(1))  # slot 2, after the load
    for batch, priority, expected in ((older, 9.0, (9, 1, 1, 9)), (newer, 7.0, (7, 7, 1, 7))):
        stamp = batch["priority_stamp"]
        other.sampler.update_priority(batch["index"].clone(), priority, generation=stamp, storage=other.storage)
        torch.testing.assert_close(leaves(other), torch.tensor([leaf_of(p) for p in expected]).double())


def test_a_loaded_sampler_has_the_beta_that_was_set_by_hand(tmp_path):
    buffer, other = make(4), make(4, 0)
    buffer.sampler.beta = 0.9
    through_the_buffer(buffer, other, tmp_path)
    assert other.sampler.beta == 0.9


def test_a_copied_sampler_continues_the_very_same_draws_on_its_own():
    buffer = lived_in()
    other = copy.deepcopy(buffer.sampler)
    ours, _ = buffer.sampler.sample(buffer.storage, 100)
    theirs, _ = other.sample(buffer.storage, 100)
    assert torch.equal(ours, theirs)
    other.update_priority(torch.arange(50), 0.0)
    assert not torch.equal(other._tree.total, buffer.sampler._tree.total)


def test_a_state_of_other_settings_is_refused():
    state = make(4).sampler.state_dict()
    with pytest.raises(ValueError, match=r"saved with eps=1e-06, this sampler has eps=0\.5"):
        PrioritizedSampler(4, eps=0.5).load_state_dict(state)
    with pytest.raises(ValueError, match="saved with max_priority=ever, this sampler has max_priority=buffer"):
        PrioritizedSampler(4, max_priority="buffer").load_state_dict(state)
    with pytest.raises(ValueError, match="saved with variant=proportional, this sampler has variant=rank"):
        PrioritizedSampler(4, variant="rank").load_state_dict(state)
    with pytest.raises(ValueError, match="capacity 4, this one has capacity 5"):
        PrioritizedSampler(5).load_state_dict(state)


def test_nothing_waits_for_an_accelerator():
    # A fake device has no values: reading one back on the host raises.
    storage = make(1000).storage
    for max_priority, normalization, variant in (
        ("ever", "batch", "proportional"),
        ("buffer", "buffer", "proportional"),
        ("buffer", None, "rank"),
    ):
        generator = torch.Generator()
        with FakeTensorMode():
            sampler = PrioritizedSampler(
                1000,
                device="cuda",
                max_priority=max_priority,
                weight_normalization=normalization,
                variant=variant,
                sort_interval=1,
                stratified=True,
                generator=generator,
            )
            sampler.mark_update(torch.arange(1000), storage=storage)
            index, info = sampler.sample(storage, 8)
            assert index.device.type == info["priority_weight"].device.type == "cuda"
            sampler.mark_update(torch.arange(5), storage=storage)
            sampler.update_priority(index, torch.rand(8, device="cuda"), storage=storage)
            sampler.update_priority(index, torch.rand(8, 1, device="cuda"), generation=info["priority_stamp"])
            sampler.update_priority(torch.zeros((), dtype=torch.long, device="cuda"), 1.0)
            sampler.alpha = 0.3
            sampler.sample(storage, 8)


@pytest.mark.parametrize("max_priority", ["ever", "buffer"])
def test_the_tree_follows_its_storage_to_another_device(max_priority):
    class Elsewhere:
        device, ndim = "meta", 1

        def __len__(self):
            return 10

    sampler = make(10, max_priority=max_priority).sampler
    nothing = torch.zeros(0)
    sampler.update_priority(nothing.long(), nothing, storage=Elsewhere())
    assert {sampler.device.type, sampler._records.default_priority().device.type} == {"meta"}
    kept = PrioritizedSampler(10, device="cpu")
    kept.update_priority(nothing.long(), nothing, storage=Elsewhere())
    assert kept.device.type == "cpu"


def test_a_sampler_is_not_handed_to_another_process(monkeypatch):
    sampler = make(4).sampler
    assert "alpha=0.6" in repr(pickle.loads(pickle.dumps(sampler)))
    monkeypatch.setattr(prioritized, "get_spawning_popen", lambda: object())
    with pytest.raises(RuntimeError, match="cannot be shared between processes"):
        pickle.dumps(sampler)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": -0.1}, r"alpha must lie in \[0, inf\] and be finite, got -0.1"),
        ({"alpha": math.nan}, "alpha must lie"),
        ({"beta": 1.5}, r"beta must lie in \[0, 1\] and be finite, got 1.5"),
        ({"eps": -1.0}, "eps must lie"),
        ({"beta_annealing_steps": 0}, "beta_annealing_steps must be at least 1 or None, got 0"),
        ({"beta_annealing_steps": math.nan}, "beta_annealing_steps must be at least 1 or None, got nan"),
        ({"generator": 3}, "generator must be a torch.Generator or None, got 3"),
        ({"weight_normalization": "max"}, "weight_normalization must be one of .*, got 'max'"),
        ({"max_priority": "always"}, "max_priority must be one of .*, got 'always'"),
        ({"variant": "ranked"}, "variant must be one of .*, got 'ranked'"),
        ({"sort_interval": 0}, "sort_interval must be at least 1, got 0"),
        ({"max_capacity": 0}, "capacity must be a positive integer, got 0"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PrioritizedSampler(**{"max_capacity": 4, **settings})


def test_no_warning_is_given_in_ordinary_use():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer = make(4)
        batch = buffer.sample()
        batch["td_error"] = torch.ones(8)
        buffer.update_tensordict_priority(batch)
