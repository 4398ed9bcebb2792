"""Prioritized sampling beyond the plain proportional draw: alpha that moves, ranks, processes, memory."""

import copy
import io
import math
import multiprocessing

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers import Sequence

from torchrl_safety.data.prioritized import PrioritizedSampler

EPS = 1e-6


def items(n, start=0):
    return TensorDict({"x": torch.arange(start, start + n).float()}, [n])


def make(capacity, n=None, *, batch_size=8, **settings):
    settings.setdefault("generator", torch.Generator().manual_seed(0))
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity), sampler=PrioritizedSampler(capacity, **settings), batch_size=batch_size
    )
    if n != 0:
        buffer.extend(items(capacity if n is None else n))
    return buffer


def leaves(sampler, n):
    return sampler._tree.get(torch.arange(n)).tolist()


def rank_leaves(priorities, alpha):
    return [(1 + sum(other > p for other in priorities)) ** -alpha for p in priorities]


def chi_square_is_small(seen, share, draws):
    """Whether the statistic lies within four standard deviations of its mean."""
    statistic = sum((s - draws * p) ** 2 / (draws * p) for s, p in zip(seen, share))
    degrees = len(share) - 1
    return statistic < degrees + 4 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("max_priority", ["ever", "buffer"])
@pytest.mark.parametrize("variant", ["proportional", "rank"])
@pytest.mark.parametrize("alphas", [(0.2,), (0.0,), (0.0, 0.6), (3.0, 0.0, 1.0)])
def test_setting_alpha_gives_every_item_the_leaf_it_would_have_had_from_the_start(max_priority, variant, alphas):
    settings = {"max_priority": max_priority, "variant": variant, "sort_interval": 1}
    moved, born = make(20, 0, alpha=0.6, **settings), make(20, 0, alpha=alphas[-1], **settings)
    for buffer in (moved, born):
        buffer.extend(items(15))
        buffer.update_priority(torch.arange(12), torch.arange(12).double() / 7)
        buffer.extend(items(9))  # wraps around
        buffer.update_priority(torch.tensor([3, 3, 5]), torch.tensor([0.0, 2.5, 0.25]))
        buffer.sample()
    for alpha in alphas:
        moved.sampler.alpha = alpha
    assert moved.sampler.alpha == alphas[-1]
    torch.testing.assert_close(torch.tensor(leaves(moved.sampler, 20)), torch.tensor(leaves(born.sampler, 20)))
    torch.testing.assert_close(moved.sampler._tree.total, born.sampler._tree.total)
    # What is written from now on gets its leaf with the new alpha.
    for buffer in (moved, born):
        buffer.update_priority(torch.tensor([7]), torch.tensor([0.5]))
        buffer.extend(items(1))
    torch.testing.assert_close(torch.tensor(leaves(moved.sampler, 20)), torch.tensor(leaves(born.sampler, 20)))


@pytest.mark.parametrize("variant", ["proportional", "rank"])
def test_an_empty_slot_stays_empty_whatever_alpha_becomes(variant):
    buffer = make(100, 3, eps=0.0, variant=variant, batch_size=3000)
    buffer.update_priority(torch.arange(3), torch.tensor([0.0, 1.0, 2.0]))
    buffer.sampler.alpha = 0.0
    assert torch.bincount(buffer.sample()["index"], minlength=100).nonzero().flatten().tolist() == [0, 1, 2]
    assert leaves(buffer.sampler, 5) == [1.0, 1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
def test_an_alpha_out_of_range_is_refused_with_nothing_changed(bad):
    sampler = make(4).sampler
    before = leaves(sampler, 4)
    with pytest.raises(ValueError, match=r"alpha must lie in \[0, inf\]"):
        sampler.alpha = bad
    assert (sampler.alpha, leaves(sampler, 4)) == (0.6, before)


def test_a_loaded_sampler_has_the_alpha_of_the_state():
    buffer, other = make(10), make(10, alpha=0.1)
    buffer.sampler.alpha = 0.9
    buffer.update_priority(torch.arange(10), torch.arange(10).double())
    other.sampler.load_state_dict(buffer.sampler.state_dict())
    assert other.sampler.alpha == 0.9
    for sampler in (buffer.sampler, other.sampler):
        sampler.update_priority(3, 4.0)
        sampler.alpha = 0.5
    assert leaves(other.sampler, 10) == leaves(buffer.sampler, 10)


def test_the_priorities_of_items_can_be_read():
    buffer = make(8, 5)
    buffer.update_priority(torch.tensor([1, 4]), torch.tensor([0.25, 7.0]))
    assert buffer.sampler.priority_of(torch.arange(6)).tolist() == [1.0, 0.25, 1.0, 1.0, 7.0, -1.0]
    buffer.extend(items(1))
    assert buffer.sampler.priority_of(torch.tensor([5])).tolist() == [7.0]


@pytest.mark.parametrize("alpha", [0.5, 0.7, 1.0])
def test_ranked_draws_follow_the_inverse_power_of_the_rank(alpha):
    """MATH §5: P(j) ∝ (1 / rank(j))^α."""
    buffer = make(50, alpha=alpha, variant="rank", sort_interval=1)
    priority = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) ** 5
    buffer.update_priority(torch.arange(50), priority)
    index, _ = buffer.sampler.sample(buffer.storage, 100_000)
    order = sorted(range(50), key=lambda j: -priority[j])
    weight = [1 / (1 + order.index(j)) ** alpha for j in range(50)]
    share = [w / sum(weight) for w in weight]
    seen = torch.bincount(index, minlength=50).tolist()
    assert chi_square_is_small(seen, share, 100_000)
    # The statistic tells the variants apart.
    proportional = (priority + EPS) ** alpha
    assert not chi_square_is_small(seen, (proportional / proportional.sum()).tolist(), 100_000)


def test_ranked_weights_are_the_inverse_powers_of_the_probability():
    buffer = make(20, variant="rank", sort_interval=1, weight_normalization=None, beta=0.7)
    buffer.update_priority(torch.arange(20), torch.rand(20, generator=torch.Generator().manual_seed(1)))
    batch = buffer.sample()
    leaf = rank_leaves(buffer.sampler.priority_of(torch.arange(20)).tolist(), 0.6)
    expected = [(20 * leaf[i] / sum(leaf)) ** -0.7 for i in batch["index"].tolist()]
    torch.testing.assert_close(batch["priority_weight"], torch.tensor(expected))


@pytest.mark.parametrize("max_priority", ["ever", "buffer"])
def test_ranks_that_are_sorted_at_every_draw_are_exact(max_priority):
    buffer = make(30, 0, variant="rank", sort_interval=1, max_priority=max_priority, batch_size=10)
    generator = torch.Generator().manual_seed(3)
    for i in range(40):
        buffer.extend(items(7, i))
        batch = buffer.sample()
        n = len(buffer)
        priorities = buffer.sampler.priority_of(torch.arange(n)).tolist()
        assert leaves(buffer.sampler, n) == pytest.approx(rank_leaves(priorities, 0.6))
        batch["td_error"] = torch.randint(5, (10,), generator=generator).float()
        buffer.update_tensordict_priority(batch)


def test_items_of_equal_priority_share_their_rank():
    buffer = make(1000, variant="rank", sort_interval=1)
    index, _ = buffer.sampler.sample(buffer.storage, 100_000)
    assert chi_square_is_small(torch.bincount(index, minlength=1000).tolist(), [1 / 1000] * 1000, 100_000)


def test_between_two_sorts_an_updated_item_takes_its_rank_among_the_last_sort():
    buffer = make(5, alpha=1.0, variant="rank", sort_interval=3)
    buffer.update_priority(torch.arange(5), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    buffer.sample()
    assert leaves(buffer.sampler, 5) == pytest.approx([1 / 5, 1 / 4, 1 / 3, 1 / 2, 1])
    buffer.update_priority(torch.tensor([0]), torch.tensor([3.5]))
    buffer.sample()
    # Three are not larger than 3.5 in [1, 2, 3, 4, 5]; the items that it passed keep their ranks for now.
    assert leaves(buffer.sampler, 5) == pytest.approx([1 / 3, 1 / 4, 1 / 3, 1 / 2, 1])
    buffer.extend(items(1))  # slot 0 again: a new item comes first
    buffer.sample()
    assert leaves(buffer.sampler, 5) == pytest.approx([1, 1 / 4, 1 / 3, 1 / 2, 1])
    buffer.sample()  # the third draw since the sort is behind us
    assert leaves(buffer.sampler, 5) == pytest.approx([1, 1 / 5, 1 / 4, 1 / 3, 1])


def test_a_buffer_that_grew_past_its_last_sort_is_sorted_before_the_interval_is_over():
    buffer = make(100, 4, variant="rank", sort_interval=10**6)
    buffer.sample()
    buffer.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    buffer.extend(items(1))
    buffer.sample()
    assert leaves(buffer.sampler, 5) == pytest.approx(rank_leaves([1, 2, 3, 4, 4], 0.6))


def test_an_unchanged_buffer_is_not_sorted_again(monkeypatch):
    buffer = make(10, variant="rank", sort_interval=1)
    buffer.sample()
    sorts, sort = [], buffer.sampler._ranks.sort
    monkeypatch.setattr(buffer.sampler._ranks, "sort", lambda *args, **kwargs: sorts.append(1) or sort(*args, **kwargs))
    buffer.sample()
    assert not sorts
    buffer.extend(items(1, 10))
    buffer.sample()
    assert sorts


def continue_with(buffer, rounds):
    record = []
    for i in range(rounds):
        buffer.extend(items(7, 7 * i))
        batch = buffer.sample()
        batch["td_error"] = (batch["x"] * 0.37).sin().abs()
        record.append(torch.cat([batch["index"].float(), batch["priority_weight"]]))
        buffer.update_tensordict_priority(batch)
    return torch.stack(record)


def test_a_loaded_ranked_sampler_continues_the_very_same_draws():
    buffer = make(50, 0, variant="rank", sort_interval=4)
    continue_with(buffer, 10)
    other = make(50, 0, variant="rank", sort_interval=4, generator=torch.Generator().manual_seed(9))
    stream = io.BytesIO()
    torch.save(buffer.state_dict(), stream)
    stream.seek(0)
    other.load_state_dict(torch.load(stream, weights_only=True))
    copied = copy.deepcopy(buffer)
    expected = continue_with(buffer, 10)
    assert torch.equal(continue_with(other, 10), expected)
    assert torch.equal(continue_with(copied, 10), expected)


def test_an_emptied_ranked_buffer_starts_again():
    buffer = make(10, variant="rank", sort_interval=100)
    buffer.update_priority(torch.arange(10), torch.arange(10).double())
    buffer.sample()
    buffer.empty()
    buffer.extend(items(2))
    assert set(buffer.sample()["index"].tolist()) == {0, 1}
    assert leaves(buffer.sampler, 3) == [1.0, 1.0, 0.0]


def tensors_of(thing, seen):
    """Bytes of the storages of all tensors that hang on an object of this package."""
    if isinstance(thing, torch.Tensor):
        seen[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    elif isinstance(thing, list | tuple):
        for part in thing:
            tensors_of(part, seen)
    elif type(thing).__module__.startswith("torchrl_safety"):
        for part in vars(thing).values():
            tensors_of(part, seen)
    return sum(seen.values())


@pytest.mark.parametrize("max_priority", ["ever", "buffer"])
@pytest.mark.parametrize("normalization", ["batch", "buffer"])
def test_a_slot_takes_at_most_24_bytes(max_priority, normalization):
    capacity = 300_000
    buffer = make(capacity, max_priority=max_priority, weight_normalization=normalization)
    for _ in range(3):
        batch = buffer.sample()
        batch["td_error"] = torch.rand(8)
        buffer.update_tensordict_priority(batch)
        buffer.extend(items(1000))
    assert 12 < tensors_of(buffer.sampler, {}) / capacity <= 24


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_items_of_time_and_environments_keep_their_priorities_through_a_wrap_around(storage):
    buffer = TensorDictReplayBuffer(
        storage=storage(12, ndim=2), sampler=PrioritizedSampler(12), batch_size=500, priority_key="error"
    )
    for start in range(0, 40, 4):
        x = torch.arange(start, start + 4).float()
        buffer.extend(TensorDict({"x": torch.stack([x, x + 100, x + 200])}, [3, 4]))  # three envs, four steps
        old, batch = buffer.sample(), buffer.sample()
        batch["error"] = batch["x"] % 100 + 0.5
        buffer.update_tensordict_priority(batch)
        content = buffer.storage[:]["x"].flatten()
        torch.testing.assert_close(buffer.sampler.priority_of(torch.arange(len(buffer))), content.double() % 100 + 0.5)
    buffer.extend(TensorDict({"x": torch.full((3, 2), 50.0)}, [3, 2]))
    before = buffer.sampler.priority_of(torch.arange(12))
    stale = torch.stack(old["index"].unbind(-1), -1) if old["index"].ndim > 1 else old["index"]
    buffer.sampler.update_priority(stale, 9.0, storage=buffer.storage, generation=old["priority_stamp"])
    after = buffer.sampler.priority_of(torch.arange(12))
    is_new = buffer.storage[:]["x"].flatten() == 50.0
    assert torch.equal(after[is_new], before[is_new])
    assert (after[~is_new] == 9.0).all()


def test_an_index_that_was_changed_after_the_draw_is_looked_at_again():
    buffer = make(100, 3, batch_size=4)
    index, _ = buffer.sampler.sample(buffer.storage, 4)
    index[:] = torch.tensor([0, 50, 1, -1])
    buffer.sampler.update_priority(index, torch.tensor([5.0, 6.0, 7.0, 8.0]))
    assert buffer.sampler.priority_of(torch.tensor([0, 1, 2, 50])).tolist() == [5.0, 7.0, 1.0, -1.0]
    assert set(buffer.sampler.sample(buffer.storage, 2000)[0].tolist()) == {0, 1, 2}


@pytest.mark.parametrize("index", [[0, 0, 2], [2, 1, 0], [4, 5, 0], [7], [0, 1, 2, 3]])
def test_items_written_in_a_run_and_in_any_other_order_get_the_same_leaves(index):
    for max_priority in ("ever", "buffer"):
        sampler = make(8, max_priority=max_priority).sampler
        sampler.update_priority(torch.arange(8), torch.arange(8).double())
        stamp = sampler._records.time
        sampler.mark_update(torch.tensor(index))
        rest = [j for j in range(8) if j not in index]
        highest = 7.0 if max_priority == "ever" else float(max(rest))
        expected = [highest if j in index else float(j) for j in range(8)]
        assert sampler.priority_of(torch.arange(8)).tolist() == expected
        assert leaves(sampler, 8) == pytest.approx([(p + EPS) ** 0.6 for p in expected])
        assert sampler._tree.total.item() == pytest.approx(sum(leaves(sampler, 8)))
        sampler.update_priority(torch.arange(8), 3.0, generation=stamp)
        expected = [p if j in index else 3.0 for j, p in enumerate(expected)]
        assert sampler.priority_of(torch.arange(8)).tolist() == expected


def test_a_batch_drawn_in_another_thread_ahead_of_time_is_guarded_like_any_other():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(50),
        sampler=PrioritizedSampler(50),
        batch_size=16,
        prefetch=3,
    )
    buffer.extend(items(50))
    for i in range(60):
        batch = buffer.sample()
        buffer.extend(items(5, i))
        batch["td_error"] = batch["x"] + 1
        buffer.update_tensordict_priority(batch)
    buffer.shutdown()
    priorities = buffer.sampler.priority_of(torch.arange(50))
    assert buffer.sampler._tree.total.item() == pytest.approx(((priorities + EPS) ** 0.6).sum().item())


def test_a_window_around_each_drawn_step_gives_its_priority_to_that_step():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20),
        sampler=PrioritizedSampler(20),
        batch_size=6,
        sample_unit=Sequence(length=3),
    )
    done = torch.arange(20).unsqueeze(1) % 7 == 6
    buffer.extend(items(20).set(("next", "done"), done))
    batch = buffer.sample()
    batch["td_error"] = torch.full(batch.shape, 4.0)
    buffer.update_tensordict_priority(batch)
    drawn = batch["anchor_index"].unique()
    expected = torch.ones(20, dtype=torch.float64).index_fill(0, drawn, 4.0)
    assert torch.equal(buffer.sampler.priority_of(torch.arange(20)), expected)


def write(buffer, start):
    for i in range(3):
        buffer.extend(items(2, start + 2 * i))


@pytest.mark.slow  # a new process imports TorchRL
def test_other_processes_write_while_the_one_that_built_the_buffer_samples_and_updates(tmp_path):
    sampler = PrioritizedSampler(8, generator=torch.Generator().manual_seed(0))
    buffer = PrioritizedReplayBuffer(
        alpha=0.6,
        beta=0.4,
        storage=LazyMemmapStorage(8, scratch_dir=tmp_path, shared_init=True),
        sampler=sampler,
        sync=False,
        batch_size=100,
    ).share()
    buffer.extend(items(4))
    batch, info = buffer.sample(return_info=True)
    buffer.update_priority(info["index"], batch["x"] + 2)
    assert sampler.priority_of(torch.arange(4)).tolist() == [2.0, 3.0, 4.0, 5.0]
    process = multiprocessing.get_context("spawn").Process(target=write, args=(buffer, 100))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    drawn = buffer.sample()
    # Six items came: slots 4 to 7, then 0 and 1. The rest keep what they had.
    assert sampler.priority_of(torch.arange(8)).tolist() == [5.0, 5.0, 4.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    assert set(drawn["x"].tolist()) == {104.0, 105.0, 2.0, 3.0, 100.0, 101.0, 102.0, 103.0}
    # A batch from before the writes reaches only what is still there.
    buffer.update_priority(info["index"], 9.0)
    assert sampler.priority_of(torch.arange(8)).tolist() == [5.0, 5.0, 9.0, 9.0, 5.0, 5.0, 5.0, 5.0]
