"""Laws of HindsightTransform, against loops over the frames of each episode."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import pytest
import torch
from line_goals import (
    RADIUS,
    all_copies,
    assert_same,
    distance,
    episodes_of,
    in_order,
    line_episodes,
    line_frames,
    marked,
    not_by_chance,
    reached,
    reward,
    state_of,
    states,
    written,
)
from tensordict import TensorDict

from torchrl_safety.data import GoalCondition, HindsightTransform, NStepTransform


def hindsight(num_envs=None, *, seed=0, **settings):
    settings = {"terminated_fn": reached, "generator": torch.Generator().manual_seed(seed), **settings}
    return HindsightTransform(reward, num_envs=num_envs, **settings)


def ends_every(length, num_episodes, num_envs=1):
    """Frames `[N, T]` of episodes that are truncated after `length` steps."""
    time = torch.arange(length * num_episodes).expand(num_envs, -1).unsqueeze(-1)
    ends = time % length == length - 1
    return line_episodes(torch.zeros_like(ends), ends)


def originals(batch):
    """Frames `[N, T]` as they should be stored, by time and then env."""
    return torch.stack([marked(frame, False) for step in batch.unbind(1) for frame in step.unbind(0)])


def expected_rows(batch, strategy, **rules):
    """All rows of frames written at once, with as many goals as the strategy allows."""
    return torch.cat([originals(batch), *(row.unsqueeze(0) for row in all_copies(batch, strategy, **rules))])


def goals_by_frame(rows):
    """The goals that the copies of each frame were given, in the order of the rows."""
    goals = defaultdict(list)
    for frame, goal, copied in zip(*(rows[key].flatten().tolist() for key in ("frame", "desired_goal", "relabelled"))):
        if copied:
            goals[frame].append(goal)
    return goals


@pytest.mark.parametrize("num_goals", range(1, 8))
@pytest.mark.parametrize("strategy", ["final", "episode", "future"])
def test_the_goals_of_each_step_are_those_of_the_strategy(strategy, num_goals):
    """MATH §5: final, episode and future, with the number of copies that each step has."""
    for length in range(1, 7):
        batch = ends_every(length, 30)
        goals = goals_by_frame(hindsight(strategy=strategy, num_goal_samples=num_goals).inv(batch[0]))
        for t in range(length):
            seen = set()
            for number, episode in enumerate(episodes_of(batch)):
                offered = {float(state_of(episode, k)): k for k in states(strategy, t, length)}
                drawn = goals[number * length + t]
                assert len(drawn) == len(set(drawn)) == min(len(offered), num_goals)
                seen.update(offered[goal] for goal in drawn)
            assert seen == set(states(strategy, t, length))


@pytest.mark.parametrize("strategy", ["episode", "future"])
def test_the_goals_of_copies_are_drawn_uniformly(strategy):
    length, num_episodes = 5, 12_000
    rows = hindsight(strategy=strategy, num_goal_samples=2).inv(ends_every(length, num_episodes)[0])
    rows = rows[rows["relabelled"].squeeze(-1)]
    episode, t = (rows["frame"] // length).flatten(), (rows["frame"] % length).flatten()
    # State k > 0 measures k - 1/2 from the start of its episode, state 0 measures 0.
    state = (rows["desired_goal"].flatten() - episode * length).ceil().long()
    assert len(rows) >= 100_000
    for step in range(length):
        counts = Counter(state[t == step].tolist())
        assert not not_by_chance(counts, len(states(strategy, step, length)))


@pytest.mark.parametrize("strategy", ["final", "episode", "future"])
@pytest.mark.parametrize("keep_failures", [True, False])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_copies_are_the_relabelled_frames_of_complete_episodes(strategy, keep_failures, num_envs):
    batch = line_frames(num_envs, 25, seed=num_envs)
    settings = {"strategy": strategy, "num_goal_samples": 50, "keep_failures": keep_failures}
    rows = hindsight(num_envs, **settings).inv(batch)
    expected = expected_rows(batch, strategy, keep_failures=keep_failures)
    if strategy == "final":
        assert_same(rows, expected)
    assert_same(rows[: batch.numel()], expected[: batch.numel()])
    assert_same(in_order(rows), in_order(expected))


def test_failures_end_the_copies_unless_asked_otherwise():
    """MATH §5: terminations by failure are kept."""
    fell = torch.tensor([[[False], [False], [True]]])
    batch = line_episodes(fell, torch.zeros_like(fell))
    batch["next", "achieved_goal"][0, 2] = 50.0
    goal = batch["next", "achieved_goal"][0, 2].clone()
    for keep_failures in (True, False):
        rows = hindsight(strategy="episode", num_goal_samples=9, keep_failures=keep_failures).inv(batch[0])[3:]
        last = rows[(rows["frame"] == 2).flatten()]
        elsewhere = (last["desired_goal"] != goal).flatten()
        assert elsewhere.sum() == 3
        assert (last["next", "terminated"][elsewhere] == keep_failures).all()
        assert last["next", "terminated"][~elsewhere].all()


def signals(*measured):
    """States `[a, xm, ym, xg, yg, c]` with the goal (1, 1)."""
    return [[i / 10, x, y, 1.0, 1.0, 7.0] for i, (x, y) in enumerate(measured)]


def is_done(transition):
    following = transition["next", "observation"]
    return (following[..., 1:3] - following[..., 3:5]).norm(dim=-1, keepdim=True) < 0.1


def reward_of(transition):
    return torch.where(is_done(transition), 1.0, -0.01)


# Step, goal, reward and done of the copies; the third state lies within .1 of the last.
FINAL = [(0, [0.9, 0.4], -0.01, False), (1, [0.9, 0.4], 1.0, True), (2, [0.9, 0.4], 1.0, True)]
FUTURE = [
    (0, [0.3, 0.0], 1.0, True),
    (0, [0.85, 0.4], -0.01, False),
    (0, [0.9, 0.4], -0.01, False),
    (1, [0.85, 0.4], 1.0, True),
    (1, [0.9, 0.4], 1.0, True),
    (2, [0.9, 0.4], 1.0, True),
]
EPISODE = [
    (0, [0.0, 0.0], -0.01, False),
    (0, [0.3, 0.0], 1.0, True),
    (0, [0.85, 0.4], -0.01, False),
    (0, [0.9, 0.4], -0.01, False),
    (1, [0.0, 0.0], -0.01, False),
    (1, [0.3, 0.0], -0.01, False),
    (1, [0.85, 0.4], 1.0, True),
    (1, [0.9, 0.4], 1.0, True),
    (2, [0.0, 0.0], -0.01, False),
    (2, [0.3, 0.0], -0.01, False),
    (2, [0.85, 0.4], 1.0, True),
    (2, [0.9, 0.4], 1.0, True),
]
COUNTS = {("future", 1): [1, 1, 1], ("future", 2): [2, 2, 1], ("episode", 1): [1, 1, 1], ("episode", 3): [3, 3, 3]}


@pytest.mark.parametrize(
    ("strategy", "num_goals", "table"),
    [("final", 1, FINAL), ("final", 4, FINAL), ("future", 3, FUTURE), ("future", 4, FUTURE), ("episode", 4, EPISODE)]
    + [(strategy, num_goals, {"future": FUTURE, "episode": EPISODE}[strategy]) for strategy, num_goals in COUNTS],
)
def test_the_worked_example_of_six_signals(strategy, num_goals, table):
    path = torch.tensor(signals((0.0, 0.0), (0.3, 0.0), (0.85, 0.4), (0.9, 0.4)))
    clock = torch.tensor([[False], [False], [True]])
    following = {"observation": path[1:], "reward": torch.full((3, 1), -0.01), "terminated": torch.zeros_like(clock)}
    following |= {"truncated": clock, "done": clock}
    frames = TensorDict(
        {"observation": path[:3], "action": torch.tensor([[0.0], [1.0], [2.0]]), "next": following}, [3]
    )
    transform = HindsightTransform(
        reward_of,
        terminated_fn=is_done,
        goal_conditions=GoalCondition("observation", [1, 2], "observation", [3, 4]),
        strategy=strategy,
        num_goal_samples=num_goals,
        generator=torch.Generator().manual_seed(0),
    )
    rows = transform.inv(frames)
    assert_same(rows[:3].exclude("relabelled"), frames)
    copies = sorted(rows[3:].unbind(0), key=lambda row: int(row["action"]))
    steps = [int(row["action"]) for row in copies]
    if (strategy, num_goals) in COUNTS:
        assert [steps.count(t) for t in range(3)] == COUNTS[strategy, num_goals]
    else:
        assert len(copies) == len(table)
    wanted = {(t, tuple(torch.tensor(goal).tolist())): (value, done) for t, goal, value, done in table}
    for row, t in zip(copies, steps):
        value, done = wanted.pop((t, tuple(row["observation"][3:5].tolist())))
        for state, was in ((row["observation"], path[t]), (row["next", "observation"], path[t + 1])):
            assert torch.equal(state[[0, 1, 2, 5]], was[[0, 1, 2, 5]])
        assert torch.equal(row["next", "observation"][3:5], row["observation"][3:5])
        assert float(row["next", "reward"]) == pytest.approx(value)
        assert bool(row["next", "terminated"]) == done
        assert bool(row["next", "done"]) == (done or t == 2)
        assert bool(row["next", "truncated"]) == (t == 2)


def pieces_of(batch, num_envs):
    """The same frames as single steps, as batches and as whole trajectories."""
    if num_envs is None:
        return [batch[0].unbind(0), batch[0].split(7), [batch[0]]]
    return [batch.unbind(1), batch.split(7, 1), [batch]]


@pytest.mark.parametrize("num_envs", [None, 1, 4])
@pytest.mark.parametrize("strategy", ["final", "episode", "future"])
def test_rows_do_not_depend_on_how_the_frames_are_written(strategy, num_envs):
    batch = line_frames(num_envs or 1, 40, seed=3)
    rows = [written(hindsight(num_envs, strategy=strategy), pieces) for pieces in pieces_of(batch, num_envs)]
    copies = [each[each["relabelled"].squeeze(-1)] for each in rows]
    kept = [each[~each["relabelled"].squeeze(-1)] for each in rows]
    assert len(copies[0]) > 0
    for others in (copies, kept):
        assert_same(others[1], others[0])
        assert_same(others[2], others[0])
    assert_same(kept[0], originals(batch))


@pytest.mark.parametrize("strategy", ["final", "future"])
def test_copies_follow_the_frames_of_the_write_that_ends_their_episode(strategy):
    batch = line_frames(2, 30, seed=5)
    transform = hindsight(2, strategy=strategy)
    for step in batch.unbind(1):
        rows = transform.inv(step)
        assert_same(rows[:2], originals(step.unsqueeze(1)))
        assert bool(step["next", "done"].any()) == (len(rows) > 2)
        assert rows["relabelled"][2:].all()


def test_no_goal_comes_from_another_episode_or_env():
    batch = line_frames(6, 400, seed=2, end=0.05)
    own = {
        int(frame["frame"]): {float(state_of(e, k)) for k in range(len(e) + 1)}
        for e in episodes_of(batch)
        for frame in e
    }
    transform = hindsight(6, strategy="episode", num_goal_samples=3)
    goals = goals_by_frame(written(transform, batch.split(11, 1)))
    assert set(goals) == set(own)
    assert all(set(drawn) <= own[frame] for frame, drawn in goals.items())


def test_random_goals_are_any_that_were_achieved_lately():
    """MATH §5: the strategy random."""
    batch = line_frames(3, 100, seed=2, end=0.1)
    transform = hindsight(3, strategy="random", num_goal_samples=5, goal_memory=30)
    copied = set()
    for t, step in enumerate(batch.unbind(1)):
        lately = batch["next", "achieved_goal"][:, max(0, t - 9) : t + 1].flatten().tolist()
        goals = goals_by_frame(transform.inv(step))
        assert not copied & set(goals)
        copied |= set(goals)
        for drawn in goals.values():
            assert len(drawn) == len(set(drawn)) == min(5, len(lately))
            assert set(drawn) <= set(lately)
    assert copied == {int(frame["frame"]) for episode in episodes_of(batch) for frame in episode}


def test_frames_of_a_chunk_count_as_achieved_before_its_episodes_get_random_goals():
    batch = line_frames(3, 100, seed=2, end=0.1)
    for memory in (30, 1000):
        rows = hindsight(3, strategy="random", num_goal_samples=20, goal_memory=memory).inv(batch)
        seen = {goal for goals in goals_by_frame(rows).values() for goal in goals}
        assert seen == set(batch["next", "achieved_goal"][:, -(memory // 3) :].flatten().tolist())


def test_random_goals_are_drawn_uniformly():
    transform = hindsight(strategy="random", num_goal_samples=2, goal_memory=7)
    rows = transform.inv(ends_every(5, 12_000)[0])
    counts = Counter(rows["desired_goal"][rows["relabelled"]].tolist())
    assert sum(counts.values()) == 120_000
    assert not not_by_chance(counts, 7)


def test_float64_and_nested_keys_pass_through_unchanged():
    batch = line_frames(2, 20, seed=8, dtype=torch.float64)
    plain = hindsight(2).inv(batch)
    assert plain["next", "reward"].dtype == plain["desired_goal"].dtype == torch.float64
    for name in ("achieved_goal", "desired_goal"):
        batch.rename_key_(name, ("observation", name))
        batch.rename_key_(("next", name), ("next", "observation", name))

    def flat(transition):
        copy = transition.copy()
        copy["next"] = transition["next"].copy().update(transition["next", "observation"])
        return copy

    nested = HindsightTransform(
        lambda transition: reward(flat(transition)),
        terminated_fn=lambda transition: reached(flat(transition)),
        goal_conditions=GoalCondition.gymnasium("observation"),
        num_envs=2,
    ).inv(batch)
    for name in ("achieved_goal", "desired_goal"):
        nested.rename_key_(("observation", name), name)
        nested.rename_key_(("next", "observation", name), ("next", name))
    del nested["observation"], nested["next", "observation"]
    assert_same(nested, plain)


def test_several_goals_come_from_one_state():
    batch = line_frames(1, 40, seed=4)
    for state in (batch, batch["next"]):
        state["joint"] = torch.cat([state["achieved_goal"] + 1000, torch.zeros(1, 40, 1)], -1)
    conditions = [GoalCondition.gymnasium(), GoalCondition("joint", [0], "joint", [1])]
    rows = hindsight(strategy="future", goal_conditions=conditions).inv(batch[0])
    copies = rows[rows["relabelled"].squeeze(-1)]
    assert len(copies)
    for state in (copies, copies["next"]):
        assert torch.equal(state["joint"][:, 1:], copies["desired_goal"] + 1000)
        assert torch.equal(state["joint"][:, :1], state["achieved_goal"] + 1000)


def test_target_margins_of_copies_are_those_of_their_goal():
    batch = line_frames(2, 30, seed=6)
    batch["target_margin"] = batch["next", "target_margin"] = torch.full((2, 30, 1), -5.0)
    batch["next", "safety_margin"] = torch.randn(2, 30, 1, generator=torch.Generator().manual_seed(0))
    rows = HindsightTransform(
        None,
        target_margin_fn=lambda transition: RADIUS - distance(transition),
        terminated_fn=lambda transition: transition["next", "target_margin"] > 0,
        strategy="future",
        num_goal_samples=50,
        num_envs=2,
    ).inv(batch)
    copies = all_copies(batch, "future")
    for row, wanted in itertools.zip_longest(in_order(rows[60:]), in_order(torch.stack(copies))):
        for state, key in ((row, "target_margin"), (row["next"], "target_margin")):
            assert float(state[key]) == RADIUS - abs(float(state["achieved_goal"]) - float(wanted["desired_goal"]))
        for key in (("next", "terminated"), ("next", "done"), ("next", "safety_margin")):
            assert torch.equal(row[key], wanted[key])
    assert (rows["next", "target_margin"][:60] == -5).all()


def test_a_caller_may_overwrite_what_it_wrote_and_what_came_out():
    batch = line_frames(2, 25, seed=7)
    transform, scratch, rows = hindsight(2), batch[:, 0].clone(), []
    for step in batch.unbind(1):
        scratch.update_(step)
        out = transform.inv(scratch)
        rows.append(out.clone())
        out.apply_(lambda value: value.zero_())
    assert_same(torch.cat(rows), written(hindsight(2), batch.unbind(1)))


def test_frames_that_come_in_are_not_changed():
    batch = line_frames(2, 10, seed=7)
    before = batch.clone()
    hindsight(2).inv(batch)
    assert_same(batch, before)


@pytest.mark.parametrize("n_steps", [None, 2])
def test_goals_that_are_images_are_those_of_whole_states(n_steps):
    # Two steps with three goals each are six copies, as many as an image has lines.
    image = torch.arange(3.0).reshape(3, 1, 1).expand(3, 6, 6) + torch.rand(6, 6, generator=torch.Generator())
    ended = torch.tensor([[False], [True]])
    following = {"achieved_goal": image[1:], "desired_goal": torch.zeros(2, 6, 6), "reward": torch.zeros(2, 1)}
    following |= {"terminated": torch.zeros_like(ended), "truncated": ended}
    frames = TensorDict({"achieved_goal": image[:2], "desired_goal": torch.zeros(2, 6, 6), "next": following}, [2])
    transform = HindsightTransform(
        lambda transition: transition["next", "reward"],
        strategy="episode",
        n_step=None if n_steps is None else NStepTransform(n_steps),
    )
    copies = transform.inv(frames)[2:]
    assert len(copies) == 6
    for row in copies:
        assert torch.equal(row["next", "desired_goal"], row["desired_goal"])
    found = Counter(int(row["desired_goal"][0, 0]) for row in copies)
    assert found == {0: 2, 1: 2, 2: 2}
    assert all(torch.equal(row["desired_goal"], image[int(row["desired_goal"][0, 0])]) for row in copies)
