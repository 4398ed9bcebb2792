"""Which items a prioritized sampler draws, with what weights, from which storages."""

import math
import warnings

import numpy as np
import pytest
import torch
from prioritized_buffers import ALPHA, EPS, items, leaf_of, leaves, make
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

from torchrl_safety.data.prioritized import PrioritizedSampler


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


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_without_items_is_refused(batch_size):
    buffer = make(4)
    with pytest.raises(ValueError, match=f"batch_size must be at least 1, got {batch_size}"):
        buffer.sampler.sample(buffer.storage, batch_size)


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
