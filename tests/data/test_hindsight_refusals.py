"""Writes that HindsightTransform refuses: early, in plain words, and without any trace."""

from __future__ import annotations

import pytest
import torch
from line_goals import assert_same, line_frames, reached, reward
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from torchrl_safety.data import HindsightTransform, NStepTransform, PrioritizedSampler
from torchrl_safety.data.successors import TrajectoryNumbers

STRATEGIES = ("final", "episode", "future", "random")


class Faulty:
    """A reward that fails as long as it is told to."""

    def __init__(self, fault=None):
        self.fault = fault

    def __call__(self, transition):
        if self.fault == "raises":
            raise OSError("no reward today")
        if self.fault == "NaN":
            return reward(transition) * float("nan")
        return reward(transition)


def hindsight(num_envs=None, *, function=reward, n_steps=None, **settings):
    settings = {"terminated_fn": reached, "generator": torch.Generator().manual_seed(0), **settings}
    n_step = None if n_steps is None else NStepTransform(n_steps, num_envs=num_envs)
    transform = HindsightTransform(function, num_envs=num_envs, n_step=n_step, **settings)
    transform.numbers = TrajectoryNumbers()
    return transform


def assert_same_state(left, right):
    """The same tensors and plain values all the way down."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert_same_state(value, right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right):
            assert_same_state(one, other)
    else:
        assert left == right


def state_of(transform):
    """The state, without what lies behind the frames of an env that has fewer than others."""
    state = transform.get_extra_state()
    held = state["open"]
    if held is not None:
        counts = held["count"].tolist()
        for key, value in held["entries"].items():
            held["entries"][key] = [of_env[:count] for of_env, count in zip(value, counts)]
    return state, None if transform.n_step is None else transform.n_step.get_extra_state()


def wrong(batch, fault):
    """The frames with something that cannot be written."""
    if fault == "measurement":
        batch = batch.clone()
        batch["next", "achieved_goal"][0, -1] = float("nan")
    return batch.exclude("frame") if fault == "keys" else batch


@pytest.mark.parametrize("fault", ["raises", "NaN", "measurement", "keys"])
@pytest.mark.parametrize("n_steps", [None, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_write_that_fails_leaves_no_trace_and_can_be_made_again(strategy, n_steps, fault):
    batch = line_frames(2, 60, seed=4, end=0.2)
    function = Faulty()
    settings = {"strategy": strategy, "n_steps": n_steps, "goal_memory": 30}
    transform, spotless = hindsight(2, function=function, **settings), hindsight(2, **settings)
    num_failed = 0
    for number, piece in enumerate(batch.split(6, 1)):
        if number and piece["next", "done"].any():  # of a first write any kind of frames is right
            num_failed += 1
            function.fault = fault
            before = state_of(transform)
            with pytest.raises((OSError, ValueError, KeyError)):
                transform.inv(wrong(piece, fault))
            assert_same_state(state_of(transform), before)
            function.fault = None
        assert_same(transform.inv(piece), spotless.inv(piece))
        assert_same_state(transform.numbers.take(), spotless.numbers.take())
        assert_same_state(state_of(transform), state_of(spotless))
    assert num_failed > 5


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_a_first_write_that_failed_frames_of_any_kind_may_come(strategy):
    function = Faulty("raises")
    transform, spotless = (hindsight(2, function=each, strategy=strategy) for each in (function, reward))
    with pytest.raises(OSError, match="no reward"):
        transform.inv(line_frames(2, 9, end=1.0))
    function.fault = None
    batch = line_frames(2, 70, seed=2, dtype=torch.float64).exclude("frame")
    for piece in batch.split(30, 1):
        assert_same(transform.inv(piece), spotless.inv(piece))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (("next", "achieved_goal"), "'achieved_goal' is missing"),
        ("desired_goal", "desired_goal.* is missing"),
        (("next", "reward"), "'reward' is missing"),
    ],
)
def test_what_is_missing_is_told_at_the_first_write_and_not_at_the_end_of_an_episode(key, message):
    frames = line_frames(2, 4, end=0.0)
    with pytest.raises(KeyError, match=message):
        hindsight(2).inv(frames.exclude(key))
    frames["desired_goal"] = frames["desired_goal"].long()
    with pytest.raises(ValueError, match="would be cut to fit the goal 'desired_goal'"):
        hindsight(2).inv(frames)


def test_measurements_must_be_finite_when_they_are_written():
    frames = line_frames(2, 4, end=0.0)
    frames["achieved_goal"][1, 2] = float("inf")
    hindsight(2).inv(frames)
    for strategy, state in (("episode", frames), ("final", frames["next"])):
        state["achieved_goal"][1, 2] = float("inf")
        with pytest.raises(ValueError, match="Measurement 'achieved_goal' holds NaN or infinite"):
            hindsight(2, strategy=strategy).inv(frames)


@pytest.mark.parametrize("transform", [hindsight(), NStepTransform(1), NStepTransform(3)])
def test_frames_are_not_written_to_chosen_slots(transform):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=transform)
    batch = line_frames(1, 8, end=0.0)[0]
    rb.extend(batch)
    before, stored = rb.transform.state_dict(), rb[:].clone()
    with pytest.raises(RuntimeError, match=r"write them with rb.extend or rb.add, not with rb\[index\]"):
        rb[0:3] = batch[:3]
    assert_same_state(rb.transform.state_dict(), before)
    assert_same(rb[:], stored)


@pytest.mark.parametrize("n_steps", [None, 3])
@pytest.mark.parametrize("key", ["td_error", "surprise"])
def test_the_error_of_a_frame_is_not_taken_for_that_of_its_copies(key, n_steps):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(1000),
        sampler=PrioritizedSampler(1000, alpha=1.0, eps=0.0),
        transform=hindsight(n_steps=n_steps),
        priority_key=key,
    )
    frames = line_frames(1, 20)[0]
    with pytest.raises(ValueError, match=f"hold '{key}', the priority key .* exclude it"):
        rb.extend(frames.clone().set(key, torch.ones(20)))
    index = rb.extend(frames)
    rb.update_priority(index, torch.full((len(index),), 3.0))
    index = rb.extend(frames)
    assert rb[index]["relabelled"].any()
    assert torch.equal(rb.sampler._tree.get(index), torch.full((len(index),), 3.0, dtype=torch.float64))


def test_rows_of_n_steps_alone_may_bring_their_priority():
    sampler = PrioritizedSampler(100, alpha=1.0, eps=0.0)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, transform=NStepTransform(1))
    errors = torch.arange(1.0, 9.0)
    index = rb.extend(line_frames(1, 8)[0].set("td_error", errors))
    assert torch.equal(sampler._tree.get(index), errors.double())


def test_random_goals_that_are_not_there_are_told():
    transform = hindsight(strategy="random")
    frames = line_frames(1, 8)[0]
    transform.inv(frames)
    assert len(transform.copies_of(frames))
    transform.clear()
    with pytest.raises(ValueError, match="strategy 'random' has no goals to draw from"):
        transform.copies_of(frames)
