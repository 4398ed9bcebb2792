"""Returns of episodes, and episodes that are the same each time."""

from __future__ import annotations

import gymnasium
import pytest
import torch
from script_env import ScriptEnv, starts_of, still

from torchrl_safety.envs import DoubleIntegratorEnv, SafetyGymEnv
from torchrl_safety.trainers import EpisodeEvaluator, evaluate


def pushes(tensordict):
    """Right where the pole leans right."""
    return tensordict.set("action", (tensordict["observation"][..., 2] > 0).long())


def test_returns_are_the_sums_of_the_rewards_of_each_episode():
    found = evaluate(
        SafetyGymEnv("CartPole-v1", 3, seed=5),
        pushes,
        episodes=3,
        max_steps=40,
        safety_margin=None,
        reward="reward",
        state_key=None,
    )
    expected = []
    for seed in (5, 6, 7):
        env = gymnasium.make("CartPole-v1")
        observation, _ = env.reset(seed=seed)
        total, over, steps = 0.0, False, 0
        while not over and steps < 40:
            observation, reward, terminated, truncated, _ = env.step(int(observation[2] > 0))
            total, over, steps = total + reward, terminated or truncated, steps + 1
        expected.append(total)
    assert found.returns.tolist() == expected
    assert found.scores["mean_return"] == pytest.approx(sum(expected) / 3)
    assert (found.states, found.safe_rate, found.success_rate, found.safe_interval) == (None, None, None, None)
    assert "states=None, " in repr(found)


def test_what_follows_an_end_is_not_part_of_a_return():
    zeros = torch.zeros(2, 4)
    env = ScriptEnv(zeros, zeros, torch.tensor([[0, 1, 0], [0, 0, 1]]), batch=(2,))
    step = env._step
    env._step = lambda tensordict: step(tensordict).set("reward", torch.ones(2, 1))
    found = evaluate(env, still, starts=starts_of(2), max_steps=3, reward="reward")
    assert found.returns.tolist() == [2.0, 3.0]


def test_a_target_without_a_safety_margin_and_starts_without_a_key_are_refused():
    env = DoubleIntegratorEnv(2, problem="reach_avoid")
    with pytest.raises(ValueError, match="target_margin is 'target_margin', but safety_margin None"):
        evaluate(env, still, episodes=2, max_steps=3, safety_margin=None, target_margin="target_margin")
    with pytest.raises(ValueError, match="state_key is None, so that starts have no place"):
        evaluate(env, still, starts=torch.zeros(2, 2), max_steps=3, state_key=None)


def test_an_episode_evaluator_meets_the_same_episodes_each_time():
    env = SafetyGymEnv("CartPole-v1", 2)
    measure = EpisodeEvaluator(env, episodes=5, max_steps=50, seed=3, safety_margin=None, reward="reward")
    first = measure(pushes)
    env.rollout(7)
    assert measure(pushes).returns.tolist() == first.returns.tolist()
    other = EpisodeEvaluator(env, episodes=5, max_steps=50, seed=4, safety_margin=None, reward="reward")
    assert other(pushes).returns.tolist() != first.returns.tolist()


@pytest.mark.parametrize("name", ["safety_margin", "target_margin", "reward"])
def test_what_is_not_one_number_for_each_episode_is_refused(name):
    env = DoubleIntegratorEnv(3, problem="reach_avoid")
    with pytest.raises(ValueError, match=rf"the {name} 'observation' has shape \[3, 2\]; give one number"):
        evaluate(
            env,
            lambda td: td.set("action", torch.ones(3, dtype=torch.int64)),
            episodes=3,
            max_steps=2,
            **{name: "observation"},
        )
