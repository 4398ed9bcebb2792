"""Hindsight at sample time beside what else a replay buffer does: storages, priorities, saving, other writers."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from numbered_envs import LAYOUTS, NUM_ENVS, Envs, buffer_with, relabel, rows_of
from torchrl.data import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from torchrl.envs.transforms import CatTensors, Compose

from torchrl_safety.data import NStepTransform, PrioritizedSampler


@pytest.mark.parametrize("layout", LAYOUTS)
def test_errors_of_relabelled_rows_leave_the_priorities_of_originals_alone(layout):
    envs = Envs(NUM_ENVS[layout])
    sampler = PrioritizedSampler(12, alpha=1.0, eps=0.0)
    rb = buffer_with(relabel(layout, share=0.5), 12, 16, layout, sampler=sampler)
    rb.extend(envs.steps(12 // NUM_ENVS[layout]))
    expected = [1.0] * 12
    is_seen = set()
    for turn in range(20):
        batch = rb.sample()
        batch["td_error"] = torch.full((16,), 2.0 + turn)
        index = batch["index"] if layout != "columns" else batch["index"][:, 0] * 3 + batch["index"][:, 1]
        before = batch["index"].clone()
        rb.update_tensordict_priority(batch)
        assert torch.equal(batch["index"], before)
        for slot, is_relabelled in zip(index.tolist(), batch["relabelled"].flatten().tolist()):
            is_seen.add(is_relabelled)
            if not is_relabelled:
                expected[slot] = 2.0 + turn
        assert sampler._tree.get(torch.arange(12)).tolist() == expected
    assert is_seen == {True, False}


def test_a_slot_that_was_rewritten_since_the_draw_keeps_its_new_priority():
    envs = Envs(1)
    sampler = PrioritizedSampler(12, alpha=1.0, eps=0.0)
    rb = buffer_with(relabel(share=0.5), 12, 64, sampler=sampler)
    rb.extend(envs.steps(12))
    batch = rb.sample()
    rb.extend(envs.steps(12))
    batch["td_error"] = torch.full((64,), 5.0)
    rb.update_tensordict_priority(batch)
    assert sampler._tree.get(torch.arange(12)).tolist() == [1.0] * 12


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage, LazyMemmapStorage])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_other_storages_give_the_same_samples(storage, n_steps):
    batches = []
    for kind in (LazyTensorStorage, storage):
        envs = Envs(1)
        rb = buffer_with(relabel(n_steps=n_steps, strategy="episode"), 15, 64, storage=kind)
        for length in (9, 8, 4):
            rb.extend(envs.steps(length))
            batch = rb.sample()
        batches.append(batch)
    first, second = batches
    assert first["relabelled"].any()
    assert set(first.keys(True, True)) == set(second.keys(True, True))
    for key in first.keys(True, True):
        assert torch.equal(first[key], second[key]), key


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_transform_in_front_is_refused_with_the_right_order(is_nested):
    cat = CatTensors(["achieved_goal", "desired_goal"], "observation", del_keys=False)
    chain = Compose(Compose(cat), relabel()) if is_nested else Compose(cat, relabel())
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, transform=chain)
    with pytest.raises(ValueError, match=r"CatTensors stands before HindsightRelabel.*insert_transform\(0"):
        rb.extend(Envs(1).steps(10))
    rb = buffer_with(relabel(), 10, 4)
    rb.extend(Envs(1).steps(10))
    rb.insert_transform(0, cat.clone())
    with pytest.raises(ValueError, match="CatTensors stands before HindsightRelabel"):
        rb.sample()


@pytest.mark.parametrize("is_first", [False, True])
def test_windows_made_at_write_time_are_refused(is_first):
    rb = buffer_with(relabel(), 10, 4)
    rb.insert_transform(0 if is_first else 1, NStepTransform(3))
    with pytest.raises(ValueError, match=r"NStepTransform and HindsightRelabel.*n_steps=n"):
        rb.extend(Envs(1).steps(2))


def test_a_saved_buffer_goes_on_with_the_same_goals_and_its_open_episodes():
    envs = Envs(3)
    rb = buffer_with(relabel("interleaved", strategy="episode", share=0.6), 31, 64, "interleaved")
    rb.extend(envs.steps(14))
    rb.sample()
    file = io.BytesIO()
    torch.save(rb.state_dict(), file)
    file.seek(0)
    other = buffer_with(relabel("interleaved", seed=9, strategy="episode", share=0.6), 31, 64, "interleaved")
    other.load_state_dict(torch.load(file, weights_only=True))
    more = envs.steps(5)
    for _ in range(3):
        one, two = rb.sample(), other.sample()
        assert (one == two).all()
        rb.extend(more)
        other.extend(more)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_a_copy_of_a_buffer_relabels_by_itself(duplicate):
    envs = Envs(1)
    rb = buffer_with(relabel(share=0.5), 20, 64, sampler=PrioritizedSampler(20))
    rb.extend(envs.steps(20))
    twin = duplicate(rb)
    assert torch.equal(rb.sample()["relabelled"], twin.sample()["relabelled"])
    twin.empty()
    twin.extend(Envs(1).steps(3))
    assert len(twin) == 3
    assert len(rb) == 20
    rb.sample()
    twin.sample()


def test_an_emptied_buffer_starts_anew():
    envs = Envs(1, longest=9)
    rb = buffer_with(relabel(), 12, 400)
    rb.extend(envs.steps(17))
    rb.empty()
    fresh = Envs(1, seed=3)
    rb.extend(fresh.steps(7))
    for frame, goal, is_relabelled in rows_of(rb.sample()):
        assert is_relabelled == (frame[:2] in fresh.length)
        assert goal[2] in (fresh.goals(frame, "future", fresh.written) or {-1})


@pytest.mark.filterwarnings("ignore:Using `add:UserWarning")
@pytest.mark.parametrize(
    ("kind", "layout"), [(ReplayBuffer, "stream"), (ReplayBuffer, "columns"), (TensorDictReplayBuffer, "stream")]
)
def test_single_steps_can_be_added(kind, layout):
    envs = Envs(NUM_ENVS[layout])
    ndim = {"ndim": 2} if layout == "columns" else {}
    rb = kind(storage=LazyTensorStorage(30, **ndim), batch_size=300)
    rb.append_transform(relabel(layout))
    for _ in range(13):
        step = envs.steps(1)
        rb.add(step[..., 0])
    assert any(is_relabelled for _, _, is_relabelled in rows_of(rb.sample()))
    for frame, goal, is_relabelled in rows_of(rb.sample()):
        goals = envs.goals(frame, "future", envs.kept(30))
        assert goal[2] in goals if is_relabelled else not goals


def test_one_step_of_each_env_is_added_to_interleaved_streams():
    envs = Envs(3)
    rb = buffer_with(relabel("interleaved"), 31, 300, "interleaved")
    for _ in range(14):
        rb.add(envs.steps(1)[:, 0])
    assert len(rb) == 31
    for frame, goal, is_relabelled in rows_of(rb.sample()):
        goals = envs.goals(frame, "future", envs.kept(31))
        assert goal[2] in goals if is_relabelled else not goals


def test_batches_drawn_ahead_by_another_thread_have_goals_of_their_episodes():
    envs = Envs(1, longest=4)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(15), batch_size=64, prefetch=2, transform=relabel(n_steps=2))
    rb.extend(envs.steps(10))
    for _ in range(40):
        rb.extend(envs.steps(3))
        for frame, goal, is_relabelled in rows_of(rb.sample()):
            if is_relabelled:
                assert goal[:2] == frame[:2]
                assert frame[2] < goal[2] <= envs.length[frame[:2]]


def test_writes_that_pass_the_transform_by_are_noticed():
    rb = buffer_with(relabel(), 10, 4)
    rb.extend(Envs(1).steps(4))
    with pytest.raises(RuntimeError, match="stores in turn"):
        rb[0:2] = rb[2:4]
    rb.writer.extend(rb[:].clone())
    with pytest.raises(RuntimeError, match="numbered 4 frames, the buffer wrote 8"):
        rb.extend(Envs(1).steps(2))


def test_slots_that_hold_other_frames_are_noticed():
    rb = buffer_with(relabel(), 10, 200)
    rb.extend(Envs(1).steps(10))
    rb.storage._storage["hindsight"][:] += 1
    with pytest.raises(RuntimeError, match="not written in turn"):
        rb.sample()


def test_a_buffer_that_is_not_empty_or_not_written_in_turn_is_refused():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    rb.extend(Envs(1).steps(4))
    rb.append_transform(relabel())
    with pytest.raises(RuntimeError, match="empty buffer"):
        rb.sample()
    with pytest.raises(RuntimeError, match="empty buffer"):
        rb.extend(Envs(1).steps(4))
    writer = TensorDictMaxValueWriter(rank_key="rank")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), writer=writer, transform=relabel())
    with pytest.raises(ValueError, match="TensorDictMaxValueWriter"):
        rb.extend(Envs(1).steps(4))
    rb = TensorDictReplayBuffer(storage=ListStorage(), transform=relabel())
    with pytest.raises(ValueError, match="size that is set"):
        rb.extend(Envs(1).steps(4))


def test_frames_of_another_layout_are_refused():
    rb = buffer_with(relabel("interleaved"), 10, 4)
    with pytest.raises(ValueError, match="num_envs=3"):
        rb.extend(Envs(1).steps(4))
    with pytest.raises(KeyError, match="terminated"):
        rb.extend(Envs(3).steps(4).exclude(("next", "terminated")))
    rb = buffer_with(relabel(), 12, 4, "columns")
    rb.extend(Envs(3).steps(2))
    with pytest.raises(ValueError, match="4 envs, those before them of 3"):
        rb.extend(Envs(4).steps(2))


def test_a_call_outside_a_buffer_is_refused():
    with pytest.raises(RuntimeError, match="outside a replay buffer"):
        relabel()(Envs(1).steps(4))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("capacity", [9, 30])
def test_a_state_of_a_buffer_of_another_size_is_refused(layout, capacity):
    rb, other = (buffer_with(relabel(layout), size, 4, layout) for size in (15, capacity))
    envs = Envs(NUM_ENVS[layout])
    rb.extend(envs.steps(3))
    with pytest.raises(ValueError, match=rf"a buffer of 15 slots, this one has {capacity}"):
        other.load_state_dict(rb.state_dict())
    other = buffer_with(relabel(layout), capacity, 4, layout)
    other.transform.load_state_dict(rb.transform.state_dict())
    with pytest.raises(ValueError, match=rf"a buffer of 15 slots, this one has {capacity}"):
        other.extend(envs.steps(1))
    other.empty()
    other.extend(envs.steps(3))


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("write", ["extend", "add"])
def test_after_a_write_that_failed_in_the_storage_nothing_is_sampled_until_the_buffer_is_emptied(write, n_steps):
    envs = Envs(1)
    rb = buffer_with(relabel(n_steps=n_steps), 30, 64)
    rb.extend(envs.steps(8))
    wrong = envs.steps(3)
    wrong["achieved_goal"] = torch.zeros(3, 7)
    with pytest.raises(RuntimeError, match=r"shape|size"):
        rb.extend(wrong) if write == "extend" else rb.add(wrong[0])
    saved = rb.state_dict()
    twin = buffer_with(relabel(n_steps=n_steps), 30, 64)
    twin.load_state_dict(saved)
    for buffer in (rb, twin):
        with pytest.raises(RuntimeError, match=r"A write of the buffer failed .* call rb.empty\(\)"):
            buffer.sample()
        with pytest.raises(RuntimeError, match=r"A write of the buffer failed .* call rb.empty\(\)"):
            buffer.extend(envs.steps(1))
        buffer.empty()
        fresh = Envs(1)
        buffer.extend(fresh.steps(8))
        assert {frame for frame, _, _ in rows_of(buffer.sample())} <= set(fresh.written)


def test_a_write_that_is_refused_before_it_reaches_the_storage_does_no_harm():
    envs = Envs(1)
    rb = buffer_with(relabel(), 30, 64)
    rb.extend(envs.steps(8))
    with pytest.raises(KeyError, match="terminated"):
        rb.extend(Envs(1).steps(3).exclude(("next", "terminated")))
    rb.extend(envs.steps(3))
    assert {frame for frame, _, _ in rows_of(rb.sample())} <= set(envs.written)


@pytest.mark.parametrize(
    ("key", "strategy"),
    [
        ("desired_goal", "future"),
        (("next", "desired_goal"), "future"),
        (("next", "achieved_goal"), "final"),
        ("achieved_goal", "episode"),
        (("next", "reward"), "future"),
    ],
)
def test_what_relabelling_needs_must_be_there_at_the_first_write(key, strategy):
    rb = buffer_with(relabel(strategy=strategy), 30, 64)
    name = key if isinstance(key, str) else key[-1]
    with pytest.raises(KeyError, match=f"{name}.* is missing"):
        rb.extend(Envs(1).steps(4).exclude(key))
    rb.extend(Envs(1).steps(4))
    rb.sample()
