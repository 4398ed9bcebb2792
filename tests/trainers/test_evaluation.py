"""Laws of episodes: what counts as safe and as success, and where an episode ends."""

from __future__ import annotations

import itertools

import gymnasium
import numpy as np
import pytest
import torch
from script_env import RUNNING, ScriptEnv, constant_control, starts_of, still
from torchrl.envs import GymWrapper, RenameTransform, SerialEnv, TransformedEnv

from torchrl_safety.envs import DoubleIntegratorEnv
from torchrl_safety.trainers import evaluate


def every_script(steps):
    """Every episode of so many steps: the signs of both margins at all times, and every end at every place."""
    signs = list(itertools.product([-1.0, 0.0], repeat=steps + 1))
    rows = list(itertools.product(signs, signs, itertools.product(range(3), repeat=steps)))
    return tuple(torch.tensor(column) for column in zip(*rows))


def by_hand(g, l, ends, max_steps):  # noqa: E741
    """One episode in plain Python: (safe, success, length)."""
    safe, success, step = g[0] >= 0, g[0] >= 0 and l[0] >= 0, 0
    while step < max_steps:
        step += 1
        safe = safe and g[step] >= 0
        success = success or (safe and l[step] >= 0)
        if ends[step - 1] != RUNNING:
            break
    return safe, success, step


@pytest.mark.parametrize("max_steps", [1, 2])
def test_each_episode_is_judged_as_by_hand_with_every_end_at_every_place(max_steps):
    g, l, ends = every_script(2)  # noqa: E741
    env = ScriptEnv(g, l, ends)
    starts = starts_of(len(g))
    for row, script in enumerate(zip(g.tolist(), l.tolist(), ends.tolist())):
        found = evaluate(env, still, starts=starts[row : row + 1], max_steps=max_steps)
        assert (bool(found.safe_episodes), bool(found.success_episodes), found.mean_length) == by_hand(
            *script, max_steps
        )


@pytest.mark.parametrize("batch", [(), (1,), (64,), (2, 5), (3000,)])
def test_the_batch_of_the_environment_changes_nothing(batch):
    g, l, ends = every_script(3)  # noqa: E741
    chosen = torch.randperm(len(g), generator=torch.Generator().manual_seed(0))[: 200 if len(batch) < 2 else 201]
    g, l, ends = g[chosen], l[chosen], ends[chosen]  # noqa: E741
    env = ScriptEnv(g, l, ends, batch=batch)
    judged = [by_hand(*script, 3) for script in zip(g.tolist(), l.tolist(), ends.tolist())]
    safe, success, length = (sum(column) for column in zip(*judged))
    by_starts = evaluate(env, still, starts=starts_of(len(g)), max_steps=3)
    assert (by_starts.safe_episodes, by_starts.success_episodes) == (safe, success)
    assert by_starts.safe_rate == safe / len(g)
    assert by_starts.success_rate == success / len(g)
    assert by_starts.mean_length == pytest.approx(length / len(g))
    assert by_starts.episodes == len(g)
    for row, (_, _, steps) in enumerate(judged):
        assert by_starts.states[row].tolist() == [[row, min(time, steps)] for time in range(4)]


@pytest.mark.parametrize("batch", [(), (7,)])
def test_without_starts_the_resets_of_the_environment_begin_the_episodes(batch):
    g, l = torch.zeros(20, 4), -torch.ones(20, 4)  # noqa: E741
    g[3, 2] = -1
    env = ScriptEnv(g, l, torch.zeros(20, 3, dtype=torch.int64), batch=batch)  # no episode ends early
    found = evaluate(env, still, episodes=15, max_steps=3)
    assert found.states[:, 0, 0].tolist() == list(range(15))
    assert (found.safe_episodes, found.episodes, found.mean_length) == (14, 15, 3.0)


def test_without_a_target_margin_there_is_no_success():
    g = torch.zeros(4, 3)
    found = evaluate(ScriptEnv(g, g, torch.zeros(4, 2).long(), target=False), still, episodes=4, max_steps=2)
    assert (found.success_rate, found.success_interval, found.success_episodes) == (None, None, None)
    assert found.scores["success_rate"] is None


def test_a_target_margin_that_is_named_or_declared_is_never_passed_over():
    g = torch.zeros(4, 3)
    ends = torch.zeros(4, 2).long()
    with pytest.raises(KeyError, match=r"the key .l_x. is missing.*target_margin=\.\.\."):
        evaluate(ScriptEnv(g, g, ends), still, episodes=4, max_steps=2, target_margin="l_x")

    class AtStepsOnly(ScriptEnv):
        def reset(self, *args, **settings):
            return super().reset(*args, **settings).exclude("target_margin")

    with pytest.raises(KeyError, match="the key 'target_margin' is missing"):
        evaluate(AtStepsOnly(g, g, ends), still, episodes=4, max_steps=2)


def test_a_margin_that_is_no_number_is_not_safe():
    g = torch.tensor([[0.0, float("nan"), 0.0], [0.0, 0.0, 0.0]])
    env = ScriptEnv(g, g, torch.zeros(2, 2).long(), batch=(2,))
    found = evaluate(env, still, starts=starts_of(2), max_steps=2)
    assert (found.safe_episodes, found.success_episodes) == (1, 2)


class Strict(gymnasium.Env):
    """Fails at its third step, with the margin on the reward and in the info; refuses a step beyond the end."""

    observation_space = gymnasium.spaces.Box(-1, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    running = False

    def reset(self, *, seed=None, options=None):
        self.time, self.running = 0, True
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.running
        self.time += 1
        self.running = self.time < 3
        return np.full(1, self.time, np.float32), 2.5 - self.time, not self.running, False, {}


def gym_env():
    return GymWrapper(Strict(), categorical_action_encoding=True)


@pytest.mark.parametrize("make", [gym_env, lambda: SerialEnv(3, gym_env)], ids=["one", "batch"])
def test_a_gymnasium_environment_with_the_margin_on_its_reward_is_evaluated_and_never_stepped_beyond_an_end(make):
    env = make()
    found = evaluate(env, still, episodes=5, max_steps=10, safety_margin="reward")
    assert (found.episodes, found.safe_rate, found.mean_length) == (5, 0.0, 3.0)
    assert found.states.shape == (5, 11, 1)
    assert found.states[0].squeeze(-1).tolist() == [0, 1, 2, *[3] * 8]
    assert evaluate(env, still, episodes=5, max_steps=2, safety_margin="reward").safe_rate == 1.0
    assert evaluate(
        env, still, episodes=1, max_steps=2, safety_margin="reward", target_margin="reward"
    ).success_rate == (1.0)


def test_an_environment_that_cannot_be_put_into_a_state_refuses_starts():
    with pytest.raises(ValueError, match=r"cannot be reset to given starts.*episodes=\.\.\."):
        evaluate(gym_env(), still, starts=torch.zeros(1, 1), max_steps=1, safety_margin="reward")


@pytest.mark.parametrize("num_envs", [1, 3, 4])
def test_safe_means_that_no_margin_on_the_way_is_negative(num_envs):
    starts = torch.tensor([[0.0, 0.0], [0.0, 1.5], [0.5, 0.1], [-0.9, -0.01]])
    env = DoubleIntegratorEnv(num_envs)
    # Without control the mass drifts: x(T) = x + v T.
    after = starts[:, 0] + starts[:, 1] * 0.05 * 100
    result = evaluate(env, constant_control(1), starts=starts, max_steps=100)
    assert result.safe_rate == (after.abs() <= 1).float().mean().item() == 0.75
    assert result.success_rate is None


def test_a_failure_before_the_target_is_no_success_and_one_after_it_is():
    # The first passes the target at rest and then hits the wall; the second never gets there; the third starts inside.
    starts = torch.tensor([[-0.1, 0.0], [0.9, 0.0], [0.0, 0.0]])
    env = DoubleIntegratorEnv(3, problem="reach_avoid")
    result = evaluate(env, constant_control(2), starts=starts, max_steps=200)
    assert result.safe_rate == 0.0
    assert result.success_rate == pytest.approx(2 / 3)


@pytest.mark.parametrize("end_criterion", ["failure", "timeout"])
def test_coming_back_to_the_target_after_a_failure_is_no_success(end_criterion):
    def go_home(tensordict):
        return tensordict.set("action", 1 - tensordict["observation"].sum(-1).sign().long())

    starts = torch.tensor([[-0.9, -1.2], [-0.5, 0.0]])  # the first leaves the walls before it can turn
    env = DoubleIntegratorEnv(2, problem="reach_avoid", end_criterion=end_criterion)
    result = evaluate(env, go_home, starts=starts, max_steps=400)
    assert (result.safe_rate, result.success_rate) == (0.5, 0.5)


@pytest.mark.parametrize("max_steps", [None, 5])
def test_an_ended_episode_stays_where_it_ended(max_steps):
    env = DoubleIntegratorEnv(2, max_steps=max_steps)
    result = evaluate(env, constant_control(2), starts=torch.tensor([[0.9, 0.5], [-0.5, 0.0]]), max_steps=50)
    states = result.states
    assert states.shape == (2, 51, 2)
    outside = (states[0, :, 0].abs() > 1).nonzero()[0].item()
    assert torch.equal(states[0, outside:], states[0, outside].expand(51 - outside, 2))
    if max_steps is not None:
        assert torch.equal(states[1, 5:], states[1, 5].expand(46, 2))
        assert result.mean_length == (outside + 5) / 2


def test_a_state_under_a_key_of_its_own_takes_the_starts_and_is_recorded():
    starts = torch.tensor([[0.0, 0.0], [0.0, 1.5]])
    env = DoubleIntegratorEnv(2, state_key="state")
    plain = evaluate(DoubleIntegratorEnv(2), constant_control(1), starts=starts, max_steps=20)
    named = evaluate(env, constant_control(1), starts=starts, max_steps=20, state_key="state")
    assert torch.equal(named.states, plain.states)
    assert named.safe_rate == plain.safe_rate


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"max_steps": 1}, "either starts .* or episodes"),
        ({"max_steps": 1, "episodes": 2, "starts": torch.zeros(2, 2)}, "either starts .* or episodes"),
        ({"max_steps": 1, "episodes": 0}, "episodes is 0"),
        ({"max_steps": 0, "episodes": 1}, "max_steps is 0"),
        ({"max_steps": 1, "episodes": 1, "confidence": 1.0}, "confidence is 1.0"),
        ({"max_steps": 1, "starts": torch.zeros(0, 2)}, r"starts has shape \[0, 2\]"),
        ({"max_steps": 1, "starts": torch.zeros(4, 3)}, r"observation has shape \(4, 3\)"),
    ],
)
def test_settings_that_make_no_evaluation_are_refused(settings, fault):
    with pytest.raises(ValueError, match=fault):
        evaluate(DoubleIntegratorEnv(4), constant_control(1), **settings)


def test_margins_may_stand_under_other_keys_and_a_missing_one_is_named():
    starts = torch.tensor([[0.0, 0.0], [0.0, 1.5]])
    env = DoubleIntegratorEnv(2)
    expected = evaluate(env, constant_control(1), starts=starts, max_steps=50).safe_rate
    renamed = TransformedEnv(env, RenameTransform(["safety_margin"], ["margin"]))
    assert (
        evaluate(renamed, constant_control(1), starts=starts, max_steps=50, safety_margin="margin").safe_rate
        == expected
    )
    with pytest.raises(KeyError, match=r"safety_margin.*_reset and in _step"):
        evaluate(renamed, constant_control(1), starts=starts, max_steps=1)


def test_an_evaluation_prints_its_rates_and_not_its_states():
    env = DoubleIntegratorEnv(3, seed=0)
    found = evaluate(env, env.rand_action, episodes=3, max_steps=4)
    assert "states=[3, 5, 2]" in repr(found)
    assert f"safe_rate={found.safe_rate!r}" in repr(found)
    assert "tensor" not in repr(found)
