"""Gymnasium environments: seeds, saved draws, copies, and what an error in the midst of a batch leaves behind."""

from __future__ import annotations

import copy
import pickle

import gymnasium
import numpy as np
import pytest
import torch
from gym_envs import GymDoubleIntegrator, Recorder, count_margin
from tensordict import TensorDict

from torchrl_safety.envs import CartPoleEnv, LunarLanderEnv, SafetyGymEnv, check_safety_env
from torchrl_safety.trainers import make_checkpoint

COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])


def acting(state: TensorDict) -> TensorDict:
    return state.clone().set("action", torch.ones(state.shape, dtype=torch.int64))


def test_seeds_are_those_of_gymnasiums_vector_environments():
    def starts(env):
        return torch.stack([env.reset()["observation"] for _ in range(3)])

    env = SafetyGymEnv("CartPole-v1", 3, seed=4)
    first = starts(env)
    vector = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync")
    assert np.array_equal(first[0].numpy(), vector.reset(seed=4)[0])
    assert len({tuple(row) for row in first.flatten(0, 1).tolist()}) == 9
    assert not torch.equal(starts(env), first)
    env.set_seed(4)
    assert torch.equal(starts(env), first)
    torch.manual_seed(0)
    drawn = starts(SafetyGymEnv("CartPole-v1", 3, seed=None))
    torch.manual_seed(0)
    assert torch.equal(starts(SafetyGymEnv("CartPole-v1", 3, seed=None)), drawn)


def test_a_checkpoint_continues_the_draws_and_asks_for_a_reset(tmp_path):
    env, other = (SafetyGymEnv("CartPole-v1", 2, seed=seed) for seed in (0, 9))
    env.rollout(30, break_when_any_done=False)
    path = make_checkpoint(env=env).save(tmp_path / "saved")
    following = [env.reset()["observation"] for _ in range(2)]
    state = other.reset()
    make_checkpoint(env=other).load(path)
    assert other.needs_reset
    with pytest.raises(RuntimeError, match=r"call env.reset\(\)"):
        other.step_and_maybe_reset(other.rand_action(state))
    assert all(torch.equal(other.reset()["observation"], expected) for expected in following)
    assert not other.needs_reset


def test_seeds_that_no_reset_has_used_are_saved():
    env, other = (SafetyGymEnv("CartPole-v1", 2, seed=seed) for seed in (0, 9))
    other.load_state_dict(env.state_dict())
    assert torch.equal(other.reset()["observation"], env.reset()["observation"])


def test_a_state_of_another_number_of_environments_is_refused():
    with pytest.raises(ValueError, match="num_envs=2, this environment has 3"):
        SafetyGymEnv(Recorder, 3).load_state_dict(SafetyGymEnv(Recorder, 2).state_dict())


def test_a_check_leaves_the_draws_where_they_were():
    env, other = (CartPoleEnv(2, problem="avoid", seed=0) for _ in range(2))
    env.reset(), other.reset()
    check_safety_env(env)
    assert torch.equal(env.reset()["observation"], other.reset()["observation"])


@COPIES
def test_a_copy_goes_on_as_the_original_would(copied):
    env = SafetyGymEnv(GymDoubleIntegrator, 3, safety_margin=count_margin, target_margin="l_x", end_criterion="env")
    state = env.step_and_maybe_reset(acting(env.reset()))[1]
    other = copied(env)
    ends = 0
    for _ in range(30):
        found = other.step_and_maybe_reset(acting(state))
        transition, state = env.step_and_maybe_reset(acting(state))
        assert (found[0] == transition).all()
        assert (found[1] == state).all()
        ends += transition["next", "done"].sum().item()
    assert ends > 3


@COPIES
def test_a_copy_whose_world_is_made_anew_continues_the_draws_and_asks_for_a_reset(copied):
    env = LunarLanderEnv(2, problem="reach_avoid")
    unused = copied(env)
    state = env.reset()
    assert torch.equal(unused.reset()["observation"], state["observation"]), "a seed that no reset has used"
    state = env.step_and_maybe_reset(acting(state))[1]
    other = copied(env)
    assert other.needs_reset
    with pytest.raises(RuntimeError, match=r"environments \[0, 1\] have ended or not begun: call env.reset\(\)"):
        other.step(acting(state))
    assert not env.needs_reset
    for _ in range(2):
        assert (other.reset() == env.reset()).all()


def faulty(env, observation, info) -> float:
    if observation[0] == env.unwrapped.fault:
        raise ArithmeticError("no margin here")
    return count_margin(env, observation, info)


def broken_second(fault: int) -> SafetyGymEnv:
    env = SafetyGymEnv(Recorder, 3, safety_margin=faulty)
    for row, core in enumerate(env.envs):
        core.unwrapped.fault = fault if row == 1 else None
    return env


@pytest.mark.parametrize("name", ["step", "step_and_maybe_reset"])
def test_a_step_that_raises_asks_for_a_reset_of_every_environment_that_it_was_to_move(name):
    env = broken_second(fault=2)
    state = env.step_and_maybe_reset(acting(env.reset()))[1]
    with pytest.raises(ArithmeticError, match="no margin here"):
        getattr(env, name)(acting(state))
    assert env.needs_reset
    with pytest.raises(RuntimeError, match=r"environments \[0, 1, 2\] have ended or not begun: call env.reset\(\)"):
        getattr(env, name)(acting(state))
    state = env.reset()
    assert state["observation"][:, 0].tolist() == [0, 0, 0]
    assert env.step(acting(state))["next", "observation"][:, 0].tolist() == [1, 1, 1]


def test_a_partial_step_that_raises_leaves_the_others_as_they_are():
    env = broken_second(fault=1)
    state = env.reset()
    one = torch.tensor([False, True, False])
    with pytest.raises(ArithmeticError):
        env.step(acting(state).set("_step", one))
    assert env.step(acting(state).set("_step", ~one))["next", "observation"][:, 0].tolist() == [1, 0, 1]
    with pytest.raises(RuntimeError, match=r"environments \[1\] have ended"):
        env.step(acting(state))


def test_a_reset_that_raises_asks_for_another():
    env = broken_second(fault=0)
    with pytest.raises(ArithmeticError):
        env.reset()
    for core in env.envs:
        core.unwrapped.fault = None
    with pytest.raises(RuntimeError, match=r"environments \[0, 1, 2\] have ended or not begun"):
        env.step(TensorDict({"action": torch.zeros(3, dtype=torch.int64)}, [3]))
    env.reset()
    assert not env.needs_reset
