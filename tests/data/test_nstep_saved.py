"""NStepTransform in a buffer that is emptied, saved, loaded, copied, and beside other transforms."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from nstep_frames import SIGNALS, assert_same, buffer_with, expected_rows, frames, one_stream, stored, written
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs.transforms import CatTensors, Compose, DoubleToFloat, Transform

from torchrl_safety.data.nstep import NStepTransform


def test_sampling_changes_nothing():
    rb = buffer_with(NStepTransform(3, num_envs=2))
    rb.extend(frames(2, 20))
    sample = rb.sample()
    assert_same(sample.exclude("index"), rb[sample["index"]].exclude("index"))


def attach_appended(transform):
    return buffer_with(transform)


def attach_inserted(transform):
    return buffer_with().insert_transform(0, transform)


def attach_constructed(transform):
    return TensorDictReplayBuffer(storage=LazyTensorStorage(1000), transform=transform)


def attach_composed(transform):
    return TensorDictReplayBuffer(storage=LazyTensorStorage(1000), transform=Compose(Compose(transform)))


def attach_late(transform):
    return TensorDictReplayBuffer(storage=LazyTensorStorage(1000), transform_factory=lambda: transform)


def attach_behind_the_buffers_back(transform):
    rb = buffer_with()
    rb.transform.append(transform)
    return rb


ATTACHMENTS = (
    attach_appended,
    attach_inserted,
    attach_constructed,
    attach_composed,
    attach_late,
    attach_behind_the_buffers_back,
)


@pytest.mark.parametrize("attach", ATTACHMENTS)
@pytest.mark.parametrize("before", [1, 2, 10])
def test_nothing_stale_survives_empty(attach, before):
    batch = frames(2, 20, seed=4, end=0.1)
    rb = attach(NStepTransform(3, signals=SIGNALS, num_envs=2))
    rb.extend(batch[:, :before])
    rb.empty()
    rb.extend(batch[:, 10:])
    assert_same(stored(rb), expected_rows(batch[:, 10:], 3))
    rb.empty(empty_write_count=False)
    assert rb.write_count > 0
    rb.extend(batch[:, 5:])
    assert_same(stored(rb), expected_rows(batch[:, 5:], 3))


@pytest.mark.parametrize("attach", ATTACHMENTS)
def test_add_works_however_the_transform_was_attached(attach):
    batch = one_stream(7, terminated=[0, 4], truncated=[6])
    rb = attach(NStepTransform(3, signals=SIGNALS))
    for frame in batch.unbind(0):
        rb.add(frame)
    assert_same(stored(rb), expected_rows(batch.unsqueeze(0), 3))


def test_clear_forgets_the_frames_before_a_reset():
    batch = frames(2, 12, seed=4)
    transform = NStepTransform(3, signals=SIGNALS, num_envs=2)
    transform.inv(batch[:, :5])
    transform.clear()
    assert_same(written(transform, [batch[:, 5:]]), expected_rows(batch[:, 5:], 3))


def restored_by_state_dict(rb, fresh, tmp_path):
    torch.save(rb.state_dict(), tmp_path / "rb.pt")
    fresh.load_state_dict(torch.load(tmp_path / "rb.pt", weights_only=True))


def restored_by_dumps(rb, fresh, tmp_path):
    rb.dumps(tmp_path / "rb")
    fresh.loads(tmp_path / "rb")


@pytest.mark.parametrize("restore", [restored_by_state_dict, restored_by_dumps])
@pytest.mark.parametrize("cut", [1, 2, 9])
def test_a_checkpoint_in_the_middle_of_an_episode_continues_identically(restore, cut, tmp_path):
    batch = frames(2, 20, seed=6, end=0.05)
    make = functools.partial(NStepTransform, 4, signals=SIGNALS, num_envs=2)
    rb, fresh = buffer_with(make()), buffer_with(make())
    if restore is restored_by_dumps:
        rb.extend(frames(2, 6, seed=7, end=0.9))
        rb.transform[0].clear()
    before = len(rb)
    rb.extend(batch[:, :cut])
    restore(rb, fresh, tmp_path)
    rb.extend(batch[:, cut : cut + 1])
    for step in batch[:, cut:].unbind(1):
        fresh.extend(step)
    assert_same(stored(fresh)[before:], expected_rows(batch, 4))


def test_add_after_a_resume_may_end_the_episode(tmp_path):
    batch = one_stream(3, terminated=[2])
    rb, fresh = buffer_with(NStepTransform(5, signals=SIGNALS)), buffer_with(NStepTransform(5, signals=SIGNALS))
    rb.extend(batch[:2])
    restored_by_state_dict(rb, fresh, tmp_path)
    assert len(fresh.add(batch[2])) == 3
    assert_same(stored(fresh), expected_rows(batch.unsqueeze(0), 5))


def test_a_checkpoint_is_not_changed_by_later_writes():
    batch = frames(2, 8, seed=8)
    transform = NStepTransform(3, num_envs=2)
    transform.inv(batch[:, :4])
    state = transform.state_dict()
    kept = copy.deepcopy(state)
    transform.inv(batch[:, 4:])
    pending, expected = state["_extra_state"]["pending"], kept["_extra_state"]["pending"]
    assert all(torch.equal(pending["root"][key], value) for key, value in expected["root"].items())


@pytest.mark.parametrize(
    "other", [NStepTransform(2), NStepTransform(3, signals=("cost",)), NStepTransform(3, num_envs=2)]
)
def test_a_checkpoint_of_other_settings_is_refused(other):
    with pytest.raises(ValueError, match=r"The checkpoint was written with (n_steps|signals|num_envs)=.*build it with"):
        other.load_state_dict(NStepTransform(3).state_dict())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_a_copy_of_the_buffer_has_pending_frames_of_its_own(duplicate):
    batch = frames(2, 12, seed=11, end=0.1)
    rb = buffer_with(NStepTransform(3, signals=SIGNALS, num_envs=2))
    rb.extend(batch[:, :5])
    twin = duplicate(rb)
    twin.empty()
    twin.extend(batch[:, 3:])
    rb.extend(batch[:, 5:])
    assert_same(stored(rb), expected_rows(batch, 3))
    assert_same(stored(twin), expected_rows(batch[:, 3:], 3))


def test_other_transforms_see_frames_before_it_and_rows_when_sampling():
    class Doubled(Transform):
        def _inv_call(self, tensordict):
            return tensordict.set(("next", "reward"), tensordict["next", "reward"] * 2)

    batch = frames(2, 15, seed=12)
    joint = CatTensors(["observation", ("next", "observation")], "both", del_keys=False, sort=False)
    rb = buffer_with(NStepTransform(3, signals=SIGNALS, num_envs=2), Doubled(), joint)
    for step in batch.unbind(1):
        rb.extend(step)
    batch["next", "reward"] = batch["next", "reward"] * 2
    assert_same(rb[:].exclude("index", "both"), expected_rows(batch, 3))
    sample = rb.sample()
    assert torch.equal(sample["both"], torch.cat([sample["observation"], sample["next", "observation"]], -1))


def test_a_transform_that_would_invert_missing_rows_is_refused():
    rb = buffer_with(DoubleToFloat(in_keys_inv=["action"]), NStepTransform(3, num_envs=2))
    with pytest.raises(ValueError, match=r"DoubleToFloat stands before NStepTransform.*insert_transform\(0"):
        rb.extend(frames(2, 1, end=0.0))


def test_a_buffer_without_it_is_as_before_once_it_is_taken_out():
    rb = buffer_with(NStepTransform(3))
    rb.transform.pop()
    frame = frames(1, 1)[0, 0]
    assert int(rb.add(frame)) == 0
    assert_same(rb[:].exclude("index")[0], frame)
    rb.empty()
    assert len(rb) == 0
