"""HindsightTransform in replay buffers: adding, emptying, checkpoints, priorities, and its settings."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from line_goals import assert_same, line_frames, reached, reward, written
from torchrl.data import LazyTensorStorage, ListStorage, TensorDictReplayBuffer
from torchrl.envs.transforms import Compose, DoubleToFloat

from torchrl_safety.data import GoalCondition, HindsightTransform, NStepTransform, PrioritizedSampler
from torchrl_safety.data.episodes import OpenEpisodes

STRATEGIES = ("final", "episode", "future", "random")


def hindsight(num_envs=None, *, seed=0, **settings):
    settings = {"terminated_fn": reached, "generator": torch.Generator().manual_seed(seed), **settings}
    return HindsightTransform(reward, num_envs=num_envs, **settings)


def buffer_with(*transforms, storage=None, **settings):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10_000) if storage is None else storage, batch_size=8, **settings
    )
    for transform in transforms:
        rb.append_transform(transform)
    return rb


def stored(rb):
    return rb[:].exclude("index")


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_add_and_extend_store_the_same_rows(storage):
    batch = line_frames(1, 40, seed=3)
    rb = buffer_with(hindsight(strategy="future"), storage=storage(1000))
    counts = [len(rb.add(frame)) for frame in batch[0].unbind(0)]
    assert min(counts) == 1 < max(counts)
    assert_same(stored(rb), written(hindsight(strategy="future"), batch[0].unbind(0)))
    envs = line_frames(3, 20, seed=3)
    rb = buffer_with(hindsight(3), storage=storage(1000))
    for step in envs.unbind(1):
        rb.add(step)
    assert_same(stored(rb), written(hindsight(3), envs.unbind(1)))


def test_every_row_of_a_buffer_has_the_same_entries_and_sampling_changes_nothing():
    rb = buffer_with(Compose(hindsight(2)))
    rb.extend(line_frames(2, 30, seed=3))
    sample = rb.sample()
    assert sample["relabelled"].shape == (8, 1)
    assert sample["relabelled"].dtype == torch.bool
    assert_same(sample.exclude("index"), rb[sample["index"]].exclude("index"))


def test_each_copy_has_a_priority_of_its_own():
    """MATH §5: a copy is an item like any other."""
    sampler = PrioritizedSampler(10_000, alpha=1.0, eps=0.0, generator=torch.Generator().manual_seed(0))
    rb = buffer_with(hindsight(2, strategy="future"), sampler=sampler)
    index = rb.extend(line_frames(2, 30, seed=3))
    assert len(index) == len(rb)
    copies = rb[:]["relabelled"].flatten().nonzero().flatten()
    priorities = torch.zeros(len(rb))
    priorities[copies[3]], priorities[copies[4]] = 1.0, 3.0
    rb.update_priority(index, priorities)
    drawn = torch.cat([rb.sample()["index"] for _ in range(100)])
    assert set(drawn.tolist()) == {int(copies[3]), int(copies[4])}
    assert 0.65 < (drawn == copies[4]).float().mean() < 0.85
    new = rb.extend(line_frames(2, 5, seed=4, end=1.0))
    assert torch.equal(sampler._tree.get(new), torch.full((len(new),), 3.0, dtype=torch.float64))


def test_goals_stay_within_their_episode_when_the_buffer_wraps():
    batch = line_frames(3, 200, seed=1, end=0.1)
    rb = buffer_with(hindsight(3, strategy="future"), storage=LazyTensorStorage(101))
    for step in batch.unbind(1):
        rb.extend(step)
    expected = written(hindsight(3, strategy="future"), batch.unbind(1))[-101:]
    order, other = (
        rows["frame"].flatten() * 10_000 + rows["desired_goal"].flatten() * 2 for rows in (stored(rb), expected)
    )
    assert torch.equal(order.sort().values, other.sort().values)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("n_steps", [None, 3])
@pytest.mark.parametrize("cut", [1, 9, 17])
def test_open_episodes_survive_a_checkpoint_bit_for_bit(strategy, n_steps, cut, tmp_path):
    batch = line_frames(2, 40, seed=6, end=0.1)

    def make(seed):
        n_step = None if n_steps is None else NStepTransform(n_steps, num_envs=2)
        return buffer_with(hindsight(2, seed=seed, strategy=strategy, n_step=n_step))

    rb, fresh = make(0), make(1)
    for step in batch[:, :cut].unbind(1):
        rb.extend(step)
    before = len(rb)
    torch.save(rb.state_dict(), tmp_path / "rb.pt")
    rb.extend(batch[:, cut : cut + 5])
    rb.extend(batch[:, cut + 5 :])
    fresh.load_state_dict(torch.load(tmp_path / "rb.pt", weights_only=True))
    assert len(fresh) == before
    fresh.extend(batch[:, cut : cut + 5])
    fresh.extend(batch[:, cut + 5 :])
    assert len(fresh) > before
    assert_same(stored(fresh), stored(rb))


def test_a_checkpoint_on_disk_continues_an_episode(tmp_path):
    batch = line_frames(1, 30, seed=6, end=0.2)[0]
    rb, fresh = buffer_with(hindsight()), buffer_with(hindsight(seed=4))
    rb.extend(batch[:17])
    rb.dumps(tmp_path / "rb")
    fresh.loads(tmp_path / "rb")
    for buffer in (rb, fresh):
        buffer.extend(batch[17:])
    assert_same(stored(fresh), stored(rb))


@pytest.mark.parametrize(
    "other",
    [
        {"strategy": "future"},
        {"num_goal_samples": 2},
        {"keep_failures": False},
        {"num_envs": 2},
        {"goal_memory": 5},
        {"goal_conditions": GoalCondition.gymnasium("observation")},
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(other):
    name = next(iter(other))
    with pytest.raises(ValueError, match=rf"The checkpoint was written with {name}=.*build it with the former"):
        hindsight(**other).load_state_dict(hindsight().state_dict())


@pytest.mark.parametrize("forget", [lambda rb: rb.empty(), lambda rb: rb.transform[0].clear()])
@pytest.mark.parametrize("n_steps", [None, 3])
def test_open_episodes_and_goals_are_dropped_by_empty_and_clear(forget, n_steps):
    batch = line_frames(2, 30, seed=9, end=0.1)
    for strategy in ("final", "random"):
        n_step = None if n_steps is None else NStepTransform(n_steps, num_envs=2)
        generator = torch.Generator().manual_seed(0)
        rb = buffer_with(hindsight(2, strategy=strategy, n_step=n_step, generator=generator))
        rb.extend(batch[:, :10])
        forget(rb)
        start = len(rb)
        generator.manual_seed(0)
        rb.extend(batch[:, 10:])
        n_step = None if n_steps is None else NStepTransform(n_steps, num_envs=2)
        expected = hindsight(2, strategy=strategy, n_step=n_step).inv(batch[:, 10:])
        assert_same(stored(rb)[start:], expected)


def test_a_copy_of_the_buffer_has_open_episodes_and_random_numbers_of_its_own():
    batch = line_frames(2, 40, seed=11, end=0.1)
    rb = buffer_with(hindsight(2, strategy="future"))
    rb.extend(batch[:, :15])
    for twin in (copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))):
        twin.extend(batch[:, 15:])
        fresh = hindsight(2, strategy="future")
        assert_same(stored(twin), written(fresh, batch.split([15, 25], 1)))
    rb.extend(batch[:, 15:])
    assert_same(stored(rb), stored(twin))


@pytest.mark.parametrize("first", [True, False])
def test_a_separate_n_step_transform_is_refused_at_the_first_write(first):
    transforms = [hindsight(2), NStepTransform(3, num_envs=2)]
    rb = buffer_with(*(transforms if first else transforms[::-1]))
    with pytest.raises(ValueError, match=r"stand in one buffer.*HindsightTransform\(\.\.\., n_step=NStepTransform"):
        rb.extend(line_frames(2, 1))


def test_a_transform_that_would_invert_missing_rows_is_refused():
    transform = hindsight(2, n_step=NStepTransform(3, num_envs=2))
    rb = buffer_with(DoubleToFloat(in_keys_inv=["achieved_goal"]), transform)
    with pytest.raises(ValueError, match=r"DoubleToFloat stands before HindsightTransform.*insert_transform\(0"):
        rb.extend(line_frames(2, 1, end=0.0))


def test_frames_that_are_no_originals_are_refused():
    rows = hindsight(2).inv(line_frames(2, 10))
    with pytest.raises(ValueError, match="hold 'relabelled' already"):
        hindsight().inv(rows)
    rows = NStepTransform(3, num_envs=2).inv(line_frames(2, 10))
    with pytest.raises(ValueError, match=r'hold "steps" entries.*n_step=NStepTransform'):
        hindsight().inv(rows)


def test_frames_of_another_kind_are_refused_and_named():
    transform = hindsight(2)
    batch = line_frames(2, 10, end=0.0)
    transform.inv(batch)
    with pytest.raises(KeyError, match=r"differ from those before them in the keys \['frame'\]"):
        transform.inv(batch.exclude("frame"))
    with pytest.raises(ValueError, match=r"'frame' changed from .*int64 to .*float32"):
        transform.inv(batch.clone().set("frame", batch["frame"].float()))
    with pytest.raises(ValueError, match=r"batch shape \[3\], but HindsightTransform\(num_envs=2\) takes \[2\]"):
        transform.inv(line_frames(3, 1)[:, 0])
    with pytest.raises(KeyError, match=r"HindsightTransform needs .*'terminated'"):
        hindsight(2).inv(batch.exclude(("next", "terminated")))
    with pytest.raises(KeyError, match="'achieved_goal' is missing"):
        hindsight(2).inv(line_frames(2, 10).exclude(("next", "achieved_goal")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "last"}, "strategy must be one of .* got 'last'"),
        ({"num_goal_samples": 0}, "num_goal_samples must be an integer of at least 1, got 0"),
        ({"num_envs": 0}, "num_envs must be .* got 0; None means one stream"),
        ({"goal_memory": 0}, "goal_memory must be .* got 0"),
        ({"n_step": 3}, r"n_step must be an NStepTransform or None, got 3"),
        ({"n_step": NStepTransform(3), "num_envs": 2}, "n_step has num_envs=None, HindsightTransform has num_envs=2"),
        ({"generator": 0}, "generator must be a torch.Generator or None, got 0"),
        ({"terminated_fn": 1}, "terminated_fn must be callable"),
    ],
)
def test_settings_are_checked_when_it_is_built(settings, message):
    with pytest.raises(ValueError, match=message):
        hindsight(**settings)


def test_a_storage_of_two_batch_dimensions_is_refused():
    rb = buffer_with(hindsight(2), storage=LazyTensorStorage(100, ndim=2))
    with pytest.raises(ValueError, match=r"HindsightTransform emits rows .* 2 batch dimensions; use .* ndim=1"):
        rb.extend(line_frames(2, 5))


def test_memory_follows_the_open_episodes_and_not_the_frames_written():
    open_episodes = OpenEpisodes()
    ended = torch.zeros(5000, 1, dtype=torch.bool)
    ended[-3] = True
    staged = open_episodes.stage({("x",): torch.arange(5000.0).reshape(5000, 1, 1)}, ended)
    open_episodes.commit(staged)
    assert staged.steps.entries["x",].flatten().tolist() == list(range(4998))
    assert sum(value.nbytes for value in open_episodes._entries.values()) <= 64 * 4
    assert open_episodes.state()["entries"]["x",].flatten().tolist() == [4998, 4999]
