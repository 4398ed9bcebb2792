"""Laws of goals: where they stand, and what relabelling recomputes."""

from __future__ import annotations

import itertools

import pytest
import torch
from line_goals import RADIUS, distance, line_frames, reached, relabelled, reward
from tensordict import TensorDict

from torchrl_safety.data.goals import GoalCondition, GoalRelabel

BY_INDEX = GoalCondition("observation", [1, 2], "observation", [4, 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_elements_of_the_goal_are_set_one_by_one_and_in_memory_of_their_own(dtype):
    observation = torch.arange(12, dtype=dtype).reshape(2, 6)
    state = TensorDict({"observation": observation}, [2])
    before = observation.clone()
    measurement = BY_INDEX.measurement(state)
    assert measurement.tolist() == [[1, 2], [7, 8]]
    BY_INDEX.set_goal(state, measurement)
    assert state["observation"].tolist() == [[0, 1, 2, 2, 1, 5], [6, 7, 8, 8, 7, 11]]
    assert BY_INDEX.goal(state).tolist() == measurement.tolist()
    assert torch.equal(observation, before)
    assert state["observation"].dtype == dtype


def test_a_whole_entry_is_set_from_elements_of_another_and_not_shared_with_the_caller():
    condition = GoalCondition("position", [0, 2], ("task", "goal"), None)
    state = TensorDict({"position": torch.tensor([1.0, 2, 3]).double(), "task": {"goal": torch.zeros(2)}}, [])
    goal = condition.measurement(state)
    condition.set_goal(state, goal)
    assert state["task", "goal"].tolist() == [1, 3]
    assert state["task", "goal"].dtype == torch.float32
    whole = GoalCondition.gymnasium()
    state = TensorDict({"achieved_goal": torch.ones(2), "desired_goal": torch.zeros(2)}, [])
    goal = torch.ones(2)
    whole.set_goal(state, goal)
    goal.zero_()
    assert state["desired_goal"].tolist() == [1, 1]


@pytest.mark.parametrize("prefix", ["observation", ("a", "b")])
def test_the_short_form_names_the_entries_of_gymnasium_under_a_prefix(prefix):
    start = (prefix,) if isinstance(prefix, str) else prefix
    condition = GoalCondition.gymnasium(prefix)
    assert (condition.measurement_key, condition.goal_key) == ((*start, "achieved_goal"), (*start, "desired_goal"))
    assert GoalCondition.gymnasium() == GoalCondition("achieved_goal", None, "desired_goal", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", [0], "b", [1, 2]), r"\[0\] and goal_index \[1, 2\] differ in length"),
        (("a", [], "b", None), r"measurement_index must hold distinct integers from 0, got \[\]"),
        (("a", None, "b", [1, 1]), r"goal_index must hold distinct .* got \[1, 1\]"),
        (("a", [-1], "b", [1]), r"measurement_index must .* got \[-1\]"),
        (("a", 1, "b", [1]), r"measurement_index must be a sequence of integers or None, got 1"),
        ((7, None, "b", None), r"measurement_key must be a string or a tuple of strings, got 7"),
        (("a", None, (), None), r"goal_key must be .* got \(\)"),
    ],
)
def test_a_condition_is_checked_when_it_is_built(arguments, message):
    with pytest.raises(ValueError, match=message):
        GoalCondition(*arguments)


def test_a_state_that_does_not_fit_is_named():
    state = TensorDict({"observation": torch.zeros(3, 4), "flat": torch.zeros(3)}, [3])
    with pytest.raises(KeyError, match=r"Entry 'position' is missing: the state holds \['flat', 'observation'\]"):
        GoalCondition("position", None, "observation", None).measurement(state)
    with pytest.raises(IndexError, match=r"Index 4 is outside entry 'observation', .* has 4 elements"):
        BY_INDEX.goal(state)
    with pytest.raises(ValueError, match=r"Entry 'flat' has shape \[3\].*unsqueeze"):
        GoalCondition("flat", None, "observation", [0]).measurement(state)
    with pytest.raises(ValueError, match=r"goal of shape \[3, 1\] does not fit the goal 'observation', .* \[3, 2\]"):
        GoalCondition("observation", None, "observation", [1, 2]).set_goal(state, torch.zeros(3, 1))


@pytest.mark.parametrize("keep_failures", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_relabelled_transition_is_the_one_worked_out_by_hand(keep_failures, dtype):
    """MATH §5: the goal changes in both states, reward and end are recomputed."""
    frames = line_frames(2, 30, end=0.6, dtype=dtype)
    frames["next", "desired_goal"][0, ::3] = frames["next", "achieved_goal"][0, ::3]
    goals = frames["next", "achieved_goal"] + torch.randint(
        -1, 2, (2, 30, 1), generator=torch.Generator().manual_seed(0)
    )
    before = frames.clone()
    relabel = GoalRelabel(reward, terminated_fn=reached, keep_failures=keep_failures)
    rows = relabel(frames, [goals])
    for env, t in itertools.product(range(2), range(30)):
        expected = relabelled(frames[env, t], goals[env, t], keep_failures=keep_failures)
        for key, value in expected.items(True, True):
            assert torch.equal(rows[env, t][key], value), (key, env, t)
            assert rows[key].dtype == value.dtype
    assert all(torch.equal(frames[key], value) for key, value in before.items(True, True))


def test_without_a_terminated_function_the_end_flags_stay():
    frames = line_frames(1, 30, end=0.5)
    rows = GoalRelabel(reward)(frames, [frames["next", "achieved_goal"]])
    for name in ("terminated", "truncated", "done"):
        assert torch.equal(rows["next", name], frames["next", name])
    assert (rows["next", "reward"] == 0).all()


def test_truncation_outlives_a_success_that_the_new_goal_takes_away():
    frames = line_frames(1, 1, end=0.0)[0, 0]
    frames["desired_goal"] = frames["next", "desired_goal"] = frames["next", "achieved_goal"].clone()
    elsewhere = [frames["next", "achieved_goal"] + 5]
    for truncated in (False, True):
        flags = torch.tensor([True]), torch.tensor([truncated])
        frames["next", "terminated"], frames["next", "truncated"] = flags
        frames["next", "done"] = flags[0]
        following = GoalRelabel(reward, terminated_fn=reached)(frames, elsewhere)["next"]
        assert not following["terminated"]
        assert following["truncated"] == following["done"] == truncated


def test_without_a_truncated_entry_done_still_tells_a_truncation():
    frames = line_frames(1, 40, end=0.6)
    goals = [frames["next", "achieved_goal"] + 9]
    expected = GoalRelabel(reward, terminated_fn=reached)(frames, goals)
    rows = GoalRelabel(reward, terminated_fn=reached)(frames.exclude(("next", "truncated")), goals)
    assert torch.equal(rows["next", "done"], expected["next", "done"])
    assert expected["next", "done"].any()


def margin(transition):
    return RADIUS - distance(transition)


def test_target_margins_are_recomputed_at_both_states_and_seen_by_the_functions_after():
    """MATH §5: margins too."""
    frames = line_frames(1, 12, end=0.0)
    frames["target_margin"] = frames["next", "target_margin"] = torch.full((1, 12, 1), -9.0)
    goals = [frames["next", "achieved_goal"][:, 5:6].expand(1, 12, 1)]

    def in_target(transition):
        return transition["next", "target_margin"] > 0

    rows = GoalRelabel(
        lambda transition: transition["next", "terminated"].float(), terminated_fn=in_target, target_margin_fn=margin
    )(frames, goals)
    for t in range(12):
        before, after = (
            float(RADIUS - (state[0, t] - goals[0][0, t]).abs())
            for state in (frames["achieved_goal"], frames["next", "achieved_goal"])
        )
        assert float(rows["target_margin"][0, t]) == before
        assert float(rows["next", "target_margin"][0, t]) == after
        assert bool(rows["next", "terminated"][0, t]) == (after > 0) == bool(rows["next", "reward"][0, t])
    assert (frames["target_margin"] == -9).all()


def test_a_margin_alone_needs_no_reward():
    frames = line_frames(1, 4).exclude(("next", "reward"))
    frames["next", "target_margin"] = torch.zeros(1, 4, 1)
    rows = GoalRelabel(None, target_margin_fn=margin)(frames, [frames["next", "achieved_goal"]])
    assert (rows["next", "target_margin"] == RADIUS).all()
    assert ("next", "reward") not in rows.keys(True)


def test_several_conditions_are_set_together_from_what_was_measured_before():
    swapped = [GoalCondition("observation", [0], "observation", [1]), GoalCondition("observation", [1], "goal", None)]
    state = {"observation": torch.tensor([[1.0, 2.0]]), "goal": torch.zeros(1, 1)}
    following = {"observation": torch.tensor([[3.0, 4.0]]), "goal": torch.zeros(1, 1), "reward": torch.zeros(1, 1)}
    relabel = GoalRelabel(lambda transition: transition["next", "goal"], goal_conditions=swapped)
    frames = TensorDict({**state, "next": following}, [1])
    assert [m.tolist() for m in relabel.start_measurements(frames)] == [[[1]], [[2]]]
    rows = relabel(frames, relabel.measurements(frames))
    assert rows["observation"].tolist() == [[1, 3]]
    assert rows["next", "observation"].tolist() == [[3, 3]]
    assert rows["goal"].tolist() == rows["next", "goal"].tolist() == rows["next", "reward"].tolist() == [[4]]
    with pytest.raises(ValueError, match="got 1 goals for 2 goal conditions"):
        relabel(frames, [torch.zeros(1, 1)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_fn": None}, "reward_fn and target_margin_fn are both None"),
        ({"reward_fn": 3}, "reward_fn must be callable or None, got 3"),
        ({"terminated_fn": "x"}, "terminated_fn must be callable or None, got 'x'"),
        ({"keep_failures": 1}, "keep_failures must be True or False, got 1"),
        ({"goal_conditions": []}, r"goal_conditions must be a GoalCondition or a sequence of them, got \[\]"),
        ({"goal_conditions": ["a"]}, r"goal_conditions must be .* got \['a'\]"),
        ({"goal_conditions": [BY_INDEX, BY_INDEX]}, "write the same elements of the goal"),
    ],
)
def test_settings_are_checked_when_it_is_built(settings, message):
    with pytest.raises(ValueError, match=message):
        GoalRelabel(**{"reward_fn": reward, **settings})


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("reward_fn", lambda td: distance(td).squeeze(-1), r"reward_fn must return .* \[1, 4, 1\], got \[1, 4\]"),
        ("reward_fn", lambda td: 0.0, r"reward_fn must return .* got a float"),
        ("reward_fn", reached, r"reward_fn must return torch.float32, .* got torch.bool"),
        ("reward_fn", lambda td: distance(td) / 0, "reward_fn returned NaN or infinite values"),
        ("terminated_fn", distance, r"terminated_fn must return torch.bool, .* got torch.float32"),
    ],
)
def test_a_result_that_does_not_fit_is_refused(name, function, message):
    frames = line_frames(1, 4)
    with pytest.raises(ValueError, match=message):
        GoalRelabel(**{"reward_fn": reward, name: function})(frames, [frames["achieved_goal"]])


def test_entries_that_would_be_recomputed_must_be_there():
    frames = line_frames(1, 4)
    with pytest.raises(KeyError, match="'target_margin' is missing: the state holds"):
        GoalRelabel(reward, target_margin_fn=margin)(frames, [frames["achieved_goal"]])
    with pytest.raises(KeyError, match="'next' is missing"):
        GoalRelabel(reward).measurements(frames.exclude("next"))


@pytest.mark.parametrize("index", [None, [2, 0]])
@pytest.mark.parametrize("shape", [(3, 3), (3, 3, 3)])
def test_goals_with_several_feature_dimensions_stay_in_their_rows(shape, index):
    rng = torch.Generator().manual_seed(0)
    state, goal = ({"image": torch.rand(3, *shape, generator=rng), "goal": torch.zeros(3, *shape)} for _ in range(2))
    frames = TensorDict({**state, "next": {**goal, "reward": torch.zeros(3, 1)}}, [3])
    relabel = GoalRelabel(
        lambda transition: transition["next", "reward"], goal_conditions=GoalCondition("image", index, "goal", index)
    )
    before, chosen = frames.clone(), [True, False, True]
    relabel.relabel_(frames, relabel.measurements(frames), torch.tensor(chosen).unsqueeze(-1))
    for row, was, is_chosen in zip(frames, before, chosen):
        expected = torch.zeros(shape)
        for column in (range(3) if index is None else index) if is_chosen else ():
            expected[..., column] = was["next", "image"][..., column]
        assert torch.equal(row["goal"], expected)
        assert torch.equal(row["next", "goal"], expected)
        assert torch.equal(row["next", "image"], was["next", "image"])


@pytest.mark.parametrize("index", [None, [0]])
def test_a_measurement_is_never_cut_to_fit_a_goal_of_integers(index):
    condition = GoalCondition("position", index, "cell", index)
    state = TensorDict({"position": torch.tensor([1.5]), "cell": torch.tensor([7])}, [])
    with pytest.raises(ValueError, match=r"type torch.float32, as 'position' .* cut .* 'cell' of type torch.int64"):
        condition.set_goal(state, condition.measurement(state))
    assert state["cell"].tolist() == [7]
    state = TensorDict({"position": torch.tensor([3]), "cell": torch.tensor([7.0])}, [])
    condition.set_goal(state, condition.measurement(state))
    assert state["cell"].tolist() == [3.0]


def without(*key):
    return lambda frames: frames.exclude(key if len(key) > 1 else key[0])


def replaced(key, change):
    return lambda frames: frames.clone().set(key, change(frames[key]))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (without("next", "achieved_goal"), KeyError, "'achieved_goal' is missing"),
        (without("desired_goal"), KeyError, "desired_goal.* is missing"),
        (without("next", "desired_goal"), KeyError, "desired_goal.* is missing"),
        (without("next", "reward"), KeyError, "'reward' is missing"),
        (without("next", "terminated"), KeyError, "'terminated' is missing"),
        (without("next", "target_margin"), KeyError, "'target_margin' is missing"),
        (replaced("desired_goal", torch.Tensor.long), ValueError, "would be cut to fit the goal"),
        (replaced("desired_goal", lambda value: value.repeat(1, 1, 2)), ValueError, "does not fit the goal"),
        (
            replaced(("next", "reward"), lambda value: value[..., 0]),
            ValueError,
            r"shape \[2, 4\], expected \[2, 4, 1\]",
        ),
        (replaced(("next", "terminated"), torch.Tensor.float), ValueError, "expected torch.bool"),
    ],
)
def test_frames_that_could_not_be_relabelled_are_found_without_a_call(change, error, message):
    def fail(transition):
        raise AssertionError("called")

    relabel = GoalRelabel(fail, terminated_fn=fail, target_margin_fn=fail)
    frames = line_frames(2, 4)
    frames["next", "target_margin"] = torch.zeros(2, 4, 1)
    relabel.check(frames)
    with pytest.raises(error, match=message):
        relabel.check(change(frames))


def test_the_measurement_at_the_root_counts_where_it_may_be_a_goal():
    relabel, frames = GoalRelabel(reward), line_frames(2, 4).exclude("achieved_goal")
    relabel.check(frames)
    with pytest.raises(KeyError, match=r"achieved_goal.* is missing"):
        relabel.check(frames, at_start=True)
