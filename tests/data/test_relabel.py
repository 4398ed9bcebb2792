"""Hindsight at sample time: which goals a row can get, what changes with the goal, and what must not."""

from __future__ import annotations

import pytest
import torch
from numbered_envs import LAYOUTS, NUM_ENVS, STRATEGIES, Envs, buffer_with, distance, reached, relabel, reward, rows_of
from scipy import stats
from tensordict import TensorDict
from torchrl.envs.transforms import CatTensors

from torchrl_safety.data import GoalCondition, HindsightRelabel
from torchrl_safety.data.goals import GoalRelabel


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_goals_of_each_row_are_those_of_the_states_that_are_there_before_and_after_every_wrap(layout, strategy):
    capacity = 12 if layout == "columns" else 11  # 11 is no multiple of 3 envs
    envs = Envs(NUM_ENVS[layout], longest=5)
    rb = buffer_with(relabel(layout, strategy=strategy), capacity, batch_size=1500, layout=layout)
    seen_wraps = 0
    for turn in range(14):
        rb.extend(envs.steps(2 + turn % 2))
        kept = envs.kept(capacity)
        expected = {(frame, goal) for frame in kept for goal in envs.goals(frame, strategy, kept)}
        found = set()
        for frame, goal, is_relabelled in rows_of(rb.sample()):
            assert frame in kept
            assert is_relabelled == ((frame[0], frame[1]) in envs.length)
            assert goal[:2] == frame[:2] if is_relabelled else goal == (-1, -1, -1)
            if is_relabelled:
                found.add((frame, goal[2]))
        assert found == expected
        seen_wraps += len(envs.written) > capacity
    assert seen_wraps > 8


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_goal_is_of_another_episode_in_a_million_draws(layout, strategy):
    envs = Envs(NUM_ENVS[layout], longest=40)
    rb = buffer_with(relabel(layout, strategy=strategy), 1000 + 2 * (layout != "columns"), 14_000, layout)
    for _ in range(2):
        rb.extend(envs.steps(200))
    for _ in range(8):  # 9 cases of 112,000 rows
        rb.extend(envs.steps(37))
        batch = rb.sample()
        state, goal = batch["achieved_goal"], batch["desired_goal"]
        chosen = batch["relabelled"].squeeze(-1)
        length = torch.full((envs.num_envs, len(envs.written)), -1)
        for (env, episode), steps in envs.length.items():
            length[env, episode] = steps
        length = length[state[:, 0].long(), state[:, 1].long()]
        assert torch.equal(chosen, length >= 0)
        assert torch.equal(goal[chosen, :2], state[chosen, :2])
        assert torch.equal(batch["next", "desired_goal"][chosen], goal[chosen])
        assert (goal[~chosen] == -1).all()
        low = {"future": state[:, 2] + 1, "final": length, "episode": torch.zeros(len(state))}[strategy]
        assert ((goal[:, 2] >= low) & (goal[:, 2] <= length))[chosen].all()


def test_each_later_state_is_as_likely_as_any_other():
    envs = Envs(1)
    envs.left = [9]
    rb = buffer_with(relabel(), 9, batch_size=90_000)
    rb.extend(envs.steps(9))
    batch = rb.sample()
    for step in (0, 3, 7):
        goals = batch["desired_goal"][batch["achieved_goal"][:, 2] == step, 2].long() - step - 1
        counts = torch.bincount(goals, minlength=9 - step)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-4
        assert len(counts) == 9 - step


@pytest.mark.parametrize("batch_size", [1, 2, 50])
def test_the_share_is_met_on_average_and_at_every_place_of_a_batch(batch_size):
    envs = Envs(1)
    rb = buffer_with(relabel(share=0.3), 60, batch_size)
    rb.extend(envs.steps(60))
    draws = 300 if batch_size > 2 else 800
    counts, eligible = torch.zeros(batch_size), torch.zeros(batch_size)
    for _ in range(draws):
        batch = rb.sample()
        counts += batch["relabelled"].squeeze(-1)
        eligible += torch.tensor([frame[:2] in envs.length for frame, _, _ in rows_of(batch)])
    for count, total in zip(counts.tolist(), eligible.tolist()):
        assert stats.binomtest(int(count), int(total), 0.3).pvalue > 1e-4 / batch_size


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_of_nothing_or_all_is_exact(share):
    envs = Envs(1)
    rb = buffer_with(relabel(share=share), 40, 500)
    rb.extend(envs.steps(40))
    assert all(
        is_relabelled == (share == 1 and frame[:2] in envs.length) for frame, _, is_relabelled in rows_of(rb.sample())
    )


def test_what_depends_on_the_goal_is_recomputed_and_originals_stay_as_they_were():
    envs = Envs(1)
    rb = buffer_with(relabel(share=0.5), 40, 300)
    frames = envs.steps(40)
    rb.extend(frames)
    original = dict(zip(envs.written, frames))
    kinds = set()
    batch = rb.sample()
    assert "hindsight" not in batch.keys()  # noqa: SIM118
    for row, (frame, goal, is_relabelled) in zip(batch, rows_of(batch)):
        before = original[frame]
        following, was = row["next"], before["next"]
        assert torch.equal(row["achieved_goal"], before["achieved_goal"])
        assert torch.equal(following["truncated"], was["truncated"])
        if not is_relabelled:
            assert (following.select(*was.keys()) == was).all()
            assert torch.equal(row["desired_goal"], before["desired_goal"])
            continue
        gap = goal[2] - (frame[2] + 1)
        assert following["reward"].item() == -gap
        assert following["desired_goal"].tolist() == row["desired_goal"].tolist() == [float(x) for x in goal]
        failed = was["terminated"].item()
        assert following["terminated"].item() == (failed or gap == 0)
        assert following["done"].item() == (failed or gap == 0 or was["truncated"].item())
        kinds.add((failed, gap == 0))
    assert kinds >= {(False, False), (False, True), (True, True)}


def test_the_stored_frames_are_never_changed():
    envs = Envs(1)
    rb = buffer_with(relabel(), 20, 300)
    frames = envs.steps(20)
    written = frames.clone()
    rb.extend(frames)
    for _ in range(3):
        rb.sample()
    assert (frames == written).all()
    assert set(frames.keys()) == set(written.keys())
    stored = rb[:]
    assert (stored.select(*written.keys()) == written).all()
    assert "relabelled" not in stored.keys()  # noqa: SIM118


def test_float64_goals_keep_their_precision():
    envs = Envs(1, dtype=torch.float64)
    rb = buffer_with(relabel(), 30, 100)
    frames = envs.steps(30)
    for state in (frames, frames["next"]):
        state["achieved_goal"][:, 2] += 1e-12
    rb.extend(frames)
    batch = rb.sample()
    goal = batch["desired_goal"][batch["relabelled"].squeeze(-1)]
    assert goal.dtype == batch["next", "reward"].dtype == torch.float64
    assert (goal[:, 2] != goal[:, 2].round()).all()


def test_measurement_and_goal_may_be_elements_of_one_observation():
    condition = GoalCondition("observation", [1], "observation", [0])
    transform = HindsightRelabel(
        lambda row: (row["next", "observation"][..., 1:] - row["observation"][..., :1]).abs(),
        goal_conditions=condition,
        share=1.0,
    )
    rb = buffer_with(transform, 8, 200)
    state = torch.stack((torch.full((5,), -9.0), torch.arange(5.0)), -1)
    ends = torch.arange(4).unsqueeze(-1) == 3
    following = {"observation": state[1:], "reward": torch.zeros(4, 1), "terminated": ends, "done": ends}
    rb.extend(TensorDict({"observation": state[:-1], "next": following}, [4]))
    batch = rb.sample()
    assert (batch["observation"][:, 0] > batch["observation"][:, 1]).all()
    assert torch.equal(batch["next", "observation"][:, 0], batch["observation"][:, 0])
    expected = (batch["next", "observation"][:, 1] - batch["observation"][:, 0]).abs()
    assert torch.equal(batch["next", "reward"].squeeze(-1), expected)


def test_transforms_of_the_user_see_the_new_goal():
    envs = Envs(1)
    rb = buffer_with(relabel(), 30, 100)
    rb.append_transform(CatTensors(["achieved_goal", "desired_goal"], "observation", del_keys=False))
    rb.extend(envs.steps(30))
    batch = rb.sample()
    assert torch.equal(batch["observation"][:, 3:], batch["desired_goal"])
    assert (batch["desired_goal"][batch["relabelled"].squeeze(-1)] >= 0).all()


def windows(envs: Envs, kept: list, frame: tuple, goal: tuple | None, n_steps: int) -> tuple[list[float], bool, int]:
    """Rewards of a row's window, whether its last step terminated, and which step that is, in a plain loop."""
    rewards, terminated = [], False
    env, episode, step = frame
    for now in range(step, step + n_steps):
        if (env, episode, now) not in kept:
            break
        is_end = envs.length.get((env, episode)) == now + 1
        failed = is_end and now % 2 == 0
        rewards.append(-7.0 if goal is None else -abs(goal[2] - (now + 1)))
        terminated = failed or (goal is not None and goal[2] == now + 1)
        if terminated:
            break
    return rewards, terminated, step + len(rewards) - 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_are_those_of_a_plain_loop(layout, strategy):
    """MATH §5: sampled windows never cross the end of an episode, a write cursor or another environment's data."""
    capacity = 24 if layout == "columns" else 23
    envs = Envs(NUM_ENVS[layout], longest=7)
    rb = buffer_with(relabel(layout, strategy=strategy, share=0.7, n_steps=3), capacity, 120, layout)
    for _ in range(9):
        rb.extend(envs.steps(4))
        kept = envs.kept(capacity)
        batch = rb.sample()
        assert batch["steps", "reward"].shape == (120, 3, 1)
        for row, (frame, goal, is_relabelled) in zip(batch, rows_of(batch)):
            rewards, terminated, last = windows(envs, kept, frame, goal if is_relabelled else None, 3)
            valid = [True] * len(rewards) + [False] * (3 - len(rewards))
            assert row["steps", "valid"].flatten().tolist() == valid
            assert row["steps", "reward"].flatten().tolist() == rewards + [0.0] * (3 - len(rewards))
            expected = [False] * (len(rewards) - 1) + [terminated] + [False] * (3 - len(rewards))
            assert row["steps", "terminated"].flatten().tolist() == expected
            following = row["next"]
            assert following["achieved_goal"].tolist() == [frame[0], frame[1], last + 1]
            assert following["desired_goal"].tolist() == list(goal)
            assert following["terminated"].item() == terminated
            assert following["reward"].item() == rewards[-1]


def test_a_reset_in_the_middle_ends_the_open_episodes():
    envs = Envs(3, longest=9)
    transform = relabel("interleaved", n_steps=2)
    rb = buffer_with(transform, 60, 2000, "interleaved")
    for _ in range(4):
        rb.extend(envs.steps(4))
        envs.cut()
        transform.end_episodes()
    batch = rb.sample()
    assert batch["relabelled"].all()
    assert torch.equal(batch["next", "achieved_goal"][:, :2], batch["achieved_goal"][:, :2])
    found = {(frame, goal[2]) for frame, goal, _ in rows_of(batch)}
    assert found == {(frame, goal) for frame in envs.written for goal in envs.goals(frame, "future", envs.written)}


def test_a_batch_longer_than_the_buffer_leaves_its_newest_frames():
    envs = Envs(1, longest=4)
    rb = buffer_with(relabel(), 10, 500)
    rb.extend(envs.steps(25))
    kept = envs.kept(10)
    found = {(frame, goal[2]) for frame, goal, is_relabelled in rows_of(rb.sample()) if is_relabelled}
    assert found == {(frame, goal) for frame in kept for goal in envs.goals(frame, "future", kept)}


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"share": 1.5}, "share"),
        ({"share": True}, "share"),
        ({"strategy": "random"}, "strategy"),
        ({"num_envs": 0}, "num_envs"),
        ({"n_steps": 0}, "n_steps"),
        ({"signals": "reward"}, "signals"),
        ({"generator": 3}, "generator"),
        ({"goal_conditions": []}, "goal_conditions"),
    ],
)
def test_a_wrong_setting_is_named(settings, name):
    with pytest.raises(ValueError, match=name):
        HindsightRelabel(reward, **settings)


def test_a_missing_signal_is_named():
    rb = buffer_with(relabel(n_steps=2, signals=("cost",)), 10, 4)
    with pytest.raises(KeyError, match="cost"):
        rb.extend(Envs(1).steps(10))


def goal_frames(num_rows: int) -> TensorDict:
    """Places on a line with a margin at either state; of three terminations in a row two are failures."""
    place = torch.arange(num_rows, dtype=torch.float32).unsqueeze(-1)
    states = [torch.cat([place + ahead, torch.full_like(place, -9.0)], -1) for ahead in (0, 1)]
    states[1][::3, 1] = states[1][::3, 0]
    terminated = place.long() % 9 < 3
    following = {
        "observation": states[1],
        "target_margin": torch.full_like(place, 5.0),
        "reward": torch.full_like(place, 7.0),
        "terminated": terminated,
        "truncated": place.long() % 5 == 0,
        "done": terminated | (place.long() % 5 == 0),
    }
    margins = {"target_margin": torch.full_like(place, 6.0)}
    return TensorDict({"observation": states[0], **margins, "next": following}, [num_rows])


@pytest.mark.parametrize("keep_failures", [True, False])
@pytest.mark.parametrize("shape", [(36,), (4, 9)])
def test_rows_that_are_chosen_become_those_of_a_new_transition_and_the_rest_stay(shape, keep_failures):
    def gap(transition):
        observation = transition["next", "observation"]
        return (observation[..., :1] - observation[..., 1:]).abs()

    relabel_rows = GoalRelabel(
        lambda transition: -gap(transition) - transition["next", "terminated"].float(),
        terminated_fn=lambda transition: gap(transition) == 0,
        target_margin_fn=lambda transition: 1 - gap(transition),
        goal_conditions=GoalCondition("observation", [0], "observation", [1]),
        keep_failures=keep_failures,
    )
    frames = goal_frames(36).reshape(shape)
    generator = torch.Generator().manual_seed(0)
    goals = [frames["next", "observation"][..., :1] + torch.randint(0, 2, (*shape, 1), generator=generator)]
    where = torch.rand(*shape, 1, generator=generator) < 0.5
    before, new = frames.clone(), relabel_rows(frames, goals)
    assert (frames == before).all()
    memory = {key: value.data_ptr() for key, value in frames.items(True, True)}
    relabel_rows.relabel_(frames, goals, where)
    for key, value in frames.items(True, True):
        assert torch.equal(value, torch.where(where, new[key], before[key])), key
        assert value.data_ptr() == memory[key]
    ended = {}
    for was, now in zip(before.reshape(-1)["next"], new.reshape(-1)["next"]):
        place, own, goal = *was["observation"].tolist(), now["observation"][1].item()
        failed = keep_failures and was["terminated"].item() and place != own
        assert now["terminated"].item() == (failed or place == goal)
        assert now["done"].item() == (failed or place == goal or was["truncated"].item())
        assert now["target_margin"].item() == 1 - abs(place - goal)
        assert now["reward"].item() == -abs(place - goal) - now["terminated"].item()
        ended[was["terminated"].item(), place == own, now["terminated"].item()] = True
    assert (True, False, keep_failures) in ended
    assert (True, True, False) in ended


@pytest.mark.parametrize(("terminates", "num_calls"), [(False, 1), (True, 2)])
def test_the_original_is_judged_only_where_a_termination_may_have_to_be_kept(terminates, num_calls):
    calls = []
    frames = Envs(1).steps(8)
    frames["next", "terminated"].fill_(terminates)
    goals = [frames["next", "achieved_goal"]]
    for keep_failures, expected in ((True, num_calls), (False, 1)):
        calls.clear()
        judge = GoalRelabel(
            reward, terminated_fn=lambda row: calls.append(row) or reached(row), keep_failures=keep_failures
        )
        judge(frames, goals)
        assert len(calls) == expected


@pytest.mark.parametrize(
    ("value", "is_finite"), [(3e38, True), (-3e38, True), (float("inf"), False), (float("nan"), False)]
)
def test_large_rewards_are_finite_also_where_their_sum_is_not(value, is_finite):
    frames = Envs(1).steps(8)
    judge = GoalRelabel(lambda row: torch.full_like(distance(row), value))
    goals = [frames["next", "achieved_goal"]]
    if is_finite:
        assert (judge(frames, goals)["next", "reward"] == torch.tensor(value)).all()
    else:
        with pytest.raises(ValueError, match="reward_fn returned NaN or infinite values"):
            judge(frames, goals)


def test_an_entry_without_a_trailing_dimension_is_named():
    frames = Envs(1).steps(8)
    frames["next", "reward"] = torch.zeros(8)
    with pytest.raises(ValueError, match=r"\('next', 'reward'\) has shape \[8\], expected \[8, 1\]"):
        GoalRelabel(reward)(frames, [frames["next", "achieved_goal"]])


@pytest.mark.parametrize("n_steps", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_goals_that_are_images_are_those_of_whole_states(strategy, n_steps):
    image = torch.arange(5.0).reshape(5, 1, 1).expand(5, 6, 6) + torch.rand(6, 6, generator=torch.Generator())
    ends = torch.arange(4).unsqueeze(-1) == 3
    following = {"achieved_goal": image[1:], "desired_goal": torch.full((4, 6, 6), -1.0), "reward": torch.zeros(4, 1)}
    following |= {"terminated": torch.zeros_like(ends), "truncated": ends}
    state = {"achieved_goal": image[:4], "desired_goal": torch.full((4, 6, 6), -1.0)}
    transform = HindsightRelabel(
        lambda transition: transition["next", "reward"],
        share=0.5,
        strategy=strategy,
        n_steps=n_steps,
        generator=torch.Generator().manual_seed(0),
    )
    rb = buffer_with(transform, 4, batch_size=6)  # as many rows as an image has lines
    rb.extend(TensorDict({**state, "next": following}, [4]))
    seen = set()
    for _ in range(30):
        for row in rb.sample():
            goal = row["desired_goal"]
            number = int(goal[0, 0])
            assert torch.equal(goal, image[number] if row["relabelled"] else torch.full((6, 6), -1.0))
            assert torch.equal(row["next", "desired_goal"], goal)
            seen.add(number)
    assert seen == {"final": {-1, 4}, "future": {-1, 1, 2, 3, 4}, "episode": {-1, 0, 1, 2, 3, 4}}[strategy]
