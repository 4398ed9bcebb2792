"""The hindsight buffers: sequences, n-step returns, priorities, resizing and validation, against plain lists."""

from __future__ import annotations

import threading

import pytest
import torch
from hindsight_buffers import EACH, STATE, frames_of, make, trajectories
from line_goals import all_copies, assert_same, episodes_of, in_order, marked, reached, reward
from torchrl.data import Categorical
from torchrl.envs import CatTensors, RewardScaling

from torchrl_safety.data import HindsightPrioritizedReplayBuffer, HindsightReplayBuffer, PrioritizedSampler
from torchrl_safety.data.successors import Successors


@EACH
@pytest.mark.parametrize("strategy", ["final", "episode", "future"])
def test_a_buffer_holds_the_originals_and_every_copy_of_the_episodes_that_ended(kind, strategy):
    buffer, batch = make(kind, num_envs=2, strategy=strategy, num_goal_samples=20), frames_of(2, 9)
    index = buffer.extend(batch)
    originals = [marked(frame, False) for env in batch for frame in env]
    expected = torch.stack([*originals, *all_copies(batch, strategy)])
    assert len(buffer) == len(expected) == len(index)
    found = buffer.all_experiences()
    expected["next", "frame"] = expected["frame"] + 1
    assert_same(in_order(found), in_order(expected))


@EACH
def test_single_frames_are_stored_as_a_batch_is(kind):
    batch = frames_of(1, 12)[0]
    whole, single = make(kind), make(kind)
    whole.extend(batch)
    for frame in batch:
        single.add(frame)
    assert_same(in_order(single.all_experiences()), in_order(whole.all_experiences()))


@EACH
def test_the_oldest_items_make_room_and_the_rest_keep_their_order(kind):
    buffer, batch = make(kind, capacity=7), frames_of(1, 20, end=0.0)[0]
    for piece in batch.split(3):
        buffer.extend(piece)
    assert (len(buffer), buffer.capacity) == (7, 7)
    assert buffer.all_experiences()["frame"].flatten().tolist() == list(range(13, 20))


@EACH
def test_an_empty_buffer_has_forgotten_its_open_episodes_and_may_be_filled_again(kind):
    buffer, batch = make(kind), frames_of(1, 10)[0]
    buffer.extend(batch)
    buffer.empty()
    assert len(buffer) == 0
    assert len(buffer.all_experiences()) == 0
    with pytest.raises(RuntimeError, match=r"empty|stored"):
        buffer.sample(1)
    fresh = make(kind)
    for each in (buffer, fresh):
        each.extend(batch)
    assert_same(buffer.all_experiences(), fresh.all_experiences())


@EACH
@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("capacity", [1000, 40])
@pytest.mark.parametrize("strategy", ["final", "future"])
def test_a_sequence_follows_its_trajectory_with_one_goal_and_never_leaves_it(kind, num_envs, capacity, strategy):
    batch = frames_of(num_envs or 1, 40, end=0.1)
    buffer = make(kind, capacity, num_envs=num_envs, strategy=strategy)
    for piece in (batch if num_envs else batch[0]).split(7, dim=-1):
        buffer.extend(piece)
    follows, newest = trajectories(batch), buffer.all_experiences()
    held = {(int(row["frame"]), float(row["desired_goal"]), bool(row["relabelled"])) for row in newest}
    sample = buffer.sample(300, sequence_length=4)
    assert sample.batch_size == torch.Size([300, 4])
    lengths = set()
    for row in sample:
        length = int(row["valid"].sum())
        lengths.add(length)
        assert row["valid"].flatten().tolist() == [i < length for i in range(4)]
        steps = row[:length]
        goal, copied = float(steps["desired_goal"][0]), bool(steps["relabelled"][0])
        assert (steps["desired_goal"] == goal).all()
        assert (steps["relabelled"] == copied).all()
        numbers = steps["frame"].flatten().tolist()
        assert numbers == follows[numbers[0]][:length]
        if length < 4 and not steps["next", "done"][-1]:
            rest = follows[numbers[0]][length:]
            assert not rest or (rest[0], goal, copied) not in held, "a step that is there was left out"
        assert not steps["next", "done"][:-1].any()
        rest = row[length:].exclude("valid", "index")
        assert_same(rest, row[length - 1 :][:1].expand(4 - length).exclude("valid", "index"))
        assert row["index"].flatten().tolist()[length:] == [-1] * (4 - length)
    assert {1, 4} <= lengths


@EACH
def test_an_n_step_row_sums_discounted_rewards_up_to_the_end_of_its_trajectory(kind):
    batch, gamma, n = frames_of(2, 30, end=0.2), 0.7, 3
    buffer = make(kind, num_envs=2)
    buffer.extend(batch)
    items = buffer.all_experiences()
    known = {(int(i["frame"]), float(i["desired_goal"]), bool(i["relabelled"])): i for i in items}
    follows = trajectories(batch)
    for row in buffer.sample(200, n_steps=n, gamma=gamma):
        goal, copied = float(row["desired_goal"]), bool(row["relabelled"])
        window = []
        for number in follows[int(row["frame"])][:n]:
            window.append(known[number, goal, copied])
            if window[-1]["next", "done"]:
                break
        total = sum(gamma**i * float(item["next", "reward"]) for i, item in enumerate(window))
        assert float(row["next", "reward"]) == pytest.approx(total)
        assert float(row["next", "discount"]) == pytest.approx(gamma ** len(window))
        last = window[-1].exclude("index")
        for key in ("achieved_goal", "desired_goal", "terminated", "done"):
            assert torch.equal(row["next", key], last["next", key])
        assert row["steps", "valid"].flatten().tolist() == [i < len(window) for i in range(n)]
        rewards = [float(item["next", "reward"]) for item in window]
        assert row["steps", "reward"].flatten().tolist() == rewards + [0.0] * (n - len(window))


def test_a_sequence_of_n_step_rows_is_each_of_its_steps_n_step_row():
    buffer = make(HindsightReplayBuffer, num_envs=2)
    buffer.extend(frames_of(2, 30, end=0.15))
    sample = buffer.sample(50, sequence_length=3, n_steps=2, gamma=0.5)
    assert sample["next", "reward"].shape == (50, 3, 1)
    once = {}
    for row in buffer.sample(5000, n_steps=2, gamma=0.5):
        once[int(row["index"])] = row
    for row in sample.reshape(-1):
        if row["valid"]:
            same = once[int(row["index"])]
            assert torch.equal(row["next", "reward"], same["next", "reward"])
            assert torch.equal(row["next", "achieved_goal"], same["next", "achieved_goal"])


@EACH
def test_single_steps_are_the_first_ones_of_sequences(kind):
    """The two are read from the storage in different ways."""
    single, sequences = (make(kind, capacity=60, num_envs=2, strategy="future") for _ in range(2))
    for buffer in (single, sequences):
        buffer.extend(frames_of(2, 20))
    for _ in range(3):
        batch, info = single.sample(32, return_info=True)
        expected, expected_info = sequences.sample(32, return_info=True, sequence_length=2)
        assert set(batch.keys(True, True)) == set(expected.keys(True, True))
        assert (batch == expected[:, 0]).all()
        assert batch["valid"].all()
        assert all(torch.equal(info[name], value[:, 0]) for name, value in expected_info.items())
        for buffer, drawn in ((single, batch), (sequences, expected[:, 0])):
            drawn = drawn.set("td_error", torch.arange(32.0).unsqueeze(-1))
            if kind is HindsightPrioritizedReplayBuffer:
                buffer.update_tensordict_priority(drawn)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 0}, "sequence_length must be an integer of at least 1, got 0"),
        ({"n_steps": 1.5}, "n_steps must be an integer of at least 1, got 1.5"),
        ({"n_steps": 2, "gamma": 1.5}, r"gamma must lie in \[0, 1\], got 1.5"),
    ],
)
def test_a_sample_that_makes_no_sense_is_refused(options, message):
    buffer = make(HindsightReplayBuffer)
    buffer.extend(frames_of(1, 5)[0])
    with pytest.raises(ValueError, match=message):
        buffer.sample(2, **options)


def test_a_link_to_a_slot_that_was_rewritten_leads_nowhere():
    links = Successors(4)
    links.write(torch.arange(4), torch.zeros(4, dtype=torch.long), torch.arange(4))
    assert links.follow(torch.tensor([1]), 3)[0].tolist() == [[1, 2, 3]]
    links.write(torch.tensor([2]), torch.tensor([5]), torch.tensor([0]))
    slots, exists = links.follow(torch.tensor([1]), 3)
    assert (slots.tolist(), exists.tolist()) == ([[1, 1, 1]], [[True, False, False]])


def test_a_write_over_the_end_of_another_trajectory_keeps_its_own_together():
    links = Successors(4)
    links.write(torch.tensor([0, 1]), torch.tensor([8, 7]), torch.tensor([5, 0]))
    links.write(torch.tensor([2, 3, 0]), torch.full((3,), 7), torch.arange(1, 4))
    slots, exists = links.follow(torch.tensor([1]), 4)
    assert (slots.tolist(), exists.tolist()) == ([[1, 2, 3, 0]], [[True] * 4])


@EACH
def test_transforms_of_the_user_see_n_step_rows_and_sequences(kind):
    buffer, plain = make(kind), make(kind)
    buffer.append_transform(RewardScaling(0.0, 10.0, in_keys=[("next", "reward")], out_keys=[("next", "reward")]))
    buffer.append_transform(CatTensors(["achieved_goal", "desired_goal"], "both", del_keys=False))
    batch = frames_of(1, 20)[0]
    for each in (buffer, plain):
        each.extend(batch)
    for options in ({"n_steps": 3, "gamma": 0.9}, {"sequence_length": 3}, {"n_steps": 2, "sequence_length": 2}):
        scaled, raw = buffer.sample(50, **options), plain.sample(50, **options)
        torch.testing.assert_close(scaled["next", "reward"], 10 * raw["next", "reward"])
        assert torch.equal(scaled["both"], torch.cat([scaled["achieved_goal"], scaled["desired_goal"]], -1))


@EACH
def test_samples_beside_a_thread_that_writes_are_of_one_trajectory(kind):
    buffer, batch = make(kind, 60, num_envs=2), frames_of(2, 1000, end=0.1)
    buffer.extend(batch[:, :20])
    follows = trajectories(batch)

    def write():
        for t in range(20, 1000, 2):
            buffer.extend(batch[:, t : t + 2])

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        sample = buffer.sample(32, sequence_length=3)
        for row in sample:
            numbers = row["frame"][row["valid"]].tolist()
            assert numbers == follows[numbers[0]][: len(numbers)]
            assert len(set(row["desired_goal"].flatten().tolist())) == 1
    writer.join()


@pytest.mark.parametrize("by", ["index", "batch"])
def test_steps_beyond_the_end_of_a_sequence_leave_the_priority_of_the_last_one_alone(by):
    buffer = make(HindsightPrioritizedReplayBuffer)
    buffer.extend(frames_of(1, 8, end=0.3)[0])
    sample = buffer.sample(300, sequence_length=3)
    priority = torch.where(sample["valid"], sample["frame"] + 1.0, 0.0)
    if by == "index":
        buffer.update_priority(sample["index"], priority)
    else:
        buffer.update_tensordict_priority(sample.set("td_error", priority))
    drawn = sample["index"][sample["valid"].squeeze(-1)].unique()
    expected = buffer._storage.get(drawn)["frame"].flatten() + 1.0
    assert torch.equal(buffer.sampler.priority_of(drawn).float(), expected)


@pytest.mark.parametrize("options", [{}, {"n_steps": 2}, {"sequence_length": 2}])
@pytest.mark.parametrize("resized", [False, True])
def test_updates_of_items_that_were_rewritten_since_are_dropped(options, resized):
    buffer, batch = make(HindsightPrioritizedReplayBuffer, 4), frames_of(1, 12, end=0.0)[0]
    buffer.extend(batch[:4])
    sample = buffer.sample(64, **options)
    if resized:
        buffer.resize(3)
    else:
        buffer.extend(batch[4:8])
    buffer.update_priority(sample["index"], torch.full(sample["index"].shape, 7.0))
    buffer.update_tensordict_priority(sample.set("td_error", torch.full((*sample.shape, 1), 7.0)))
    assert set(buffer.sampler.priority_of(torch.arange(len(buffer))).tolist()) == {1.0}


def test_each_copy_has_a_priority_of_its_own_and_beta_grows():
    buffer = make(HindsightPrioritizedReplayBuffer, beta=0.5, beta_annealing_steps=10, batch_size=8)
    buffer.extend(frames_of(1, 8, end=1.0)[0])
    buffer.update_priority(torch.arange(16), torch.arange(16.0))
    assert isinstance(buffer.sampler, PrioritizedSampler)
    assert buffer.sampler.priority_of(torch.arange(16)).tolist() == list(range(16))
    buffer.sample()
    assert buffer.beta == pytest.approx(0.55)
    with pytest.raises(AttributeError):
        buffer.beta = 1.0
    buffer.alpha = 0.0
    assert buffer.alpha == 0.0
    assert (buffer.sample(16)["priority_weight"] == 1).all()


@EACH
@pytest.mark.parametrize("capacity", [5, 11, 40])
def test_resizing_keeps_the_newest_items_with_their_priorities_and_trajectories(kind, capacity):
    """MATH §5: resize(n)."""
    buffer, batch = make(kind, 14), frames_of(1, 30, end=0.2)[0]
    for piece in batch[:24].split(5):
        buffer.extend(piece)
    prioritized = kind is HindsightPrioritizedReplayBuffer
    before = buffer.all_experiences()
    if prioritized:
        buffer.update_priority(torch.arange(14), torch.rand(14))
        order = buffer._by_age()
        priorities = buffer.sampler.priority_of(order)
    count = buffer.write_count
    buffer.resize(capacity)
    kept = min(capacity, 14)
    assert (len(buffer), buffer.capacity, buffer.write_count) == (kept, capacity, count)
    assert_same(buffer.all_experiences(), before[-kept:])
    if prioritized:
        assert torch.equal(buffer.sampler.priority_of(torch.arange(kept)), priorities[-kept:])
    for piece in batch[24:].split(3):
        buffer.extend(piece)
    follows = trajectories(batch.unsqueeze(0))
    for row in buffer.sample(100, sequence_length=3):
        numbers = row["frame"][row["valid"]].tolist()
        assert numbers == follows[numbers[0]][: len(numbers)]
    grown = buffer.all_experiences()
    assert len(grown) == min(capacity, kept + len(grown) - kept)


@pytest.mark.parametrize("strategy", ["final", "random"])
def test_frames_written_in_inference_mode_are_gone_on_from_outside_of_it(strategy):
    (frames,) = frames_of(1, 40, end=0.1)
    buffers = [make(HindsightReplayBuffer, 300, strategy=strategy) for _ in range(2)]
    for buffer, mode in zip(buffers, (True, False)):
        for start in (0, 5, 13, 20, 30):
            with torch.inference_mode(mode and start in (5, 20)):
                buffer.extend(frames[start : start + 5])
    assert_same(*(buffer.all_experiences() for buffer in buffers))


def test_every_mismatch_is_one_sentence():
    buffer, batch = make(HindsightReplayBuffer), frames_of(1, 4)[0]
    buffer.validate(batch)
    wrong = batch.exclude("achieved_goal", ("next", "reward"))
    wrong["desired_goal"] = torch.zeros(4, 2)
    wrong["next", "achieved_goal"] = torch.zeros(4, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match="achieved_goal") as caught:
        buffer.validate(wrong)
    assert str(caught.value).splitlines() == [
        "Entry 'achieved_goal' is missing; write what the spec UnboundedContinuous describes.",
        "Entry 'desired_goal' has shape [4, 2], expected [4, 1]: the batch and the spec's shape.",
        "Entry ('next', 'achieved_goal') has type torch.float64, expected torch.float32; convert it.",
        "Entry ('next', 'reward') is missing; write what the env gave.",
    ]


def test_values_outside_a_spec_are_named():
    buffer = HindsightReplayBuffer(STATE, Categorical(3), reward, reached)
    batch = frames_of(1, 4)[0].set("action", torch.tensor([0, 1, 2, 3]))
    with pytest.raises(ValueError, match="Entry 'action' has values outside Categorical"):
        buffer.validate(batch)


@EACH
def test_a_recurrent_policy_is_refused(kind):
    buffer, batch = make(kind), frames_of(1, 4)[0]
    batch["recurrent_state_h"] = torch.zeros(4, 1, 8)
    with pytest.raises(ValueError, match="'recurrent_state_h', the hidden state of a recurrent policy"):
        buffer.extend(batch)
    assert len(buffer) == 0


@pytest.mark.parametrize("capacity", [0, -3, 2.5, True])
def test_a_capacity_that_is_none_is_refused(capacity):
    with pytest.raises(ValueError, match="capacity must be an integer of at least 1"):
        make(HindsightReplayBuffer, capacity)
    buffer = make(HindsightReplayBuffer, 3)
    with pytest.raises(ValueError, match="capacity must be an integer of at least 1"):
        buffer.resize(capacity)


@pytest.mark.parametrize("num_envs", [None, 2])
def test_hindsight_on_demand_is_made_of_the_newest_frames_and_not_stored(num_envs):
    buffer, batch = make(HindsightReplayBuffer, num_envs=num_envs), frames_of(num_envs or 1, 12, end=0.0)
    batch["next", "truncated"][:, 8] = batch["next", "done"][:, 8] = True
    buffer.extend(batch if num_envs else batch[0])
    size = len(buffer)
    found = buffer.generate_hindsight(6)
    newest = batch[:, -6:].clone()
    newest["next", "truncated"][:, -1] = newest["next", "done"][:, -1] = True
    assert len(episodes_of(newest)) == 2 * (num_envs or 1)
    goals = {int(copy["frame"]): float(copy["desired_goal"]) for copy in all_copies(newest, "final")}
    assert {int(row["frame"]): float(row["desired_goal"]) for row in found} == goals
    assert len(found) == len(goals)
    assert len(buffer) == size
    with pytest.raises(ValueError, match="trajectory_length=13 needs"):
        buffer.generate_hindsight(13)
