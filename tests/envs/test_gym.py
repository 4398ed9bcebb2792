"""Gymnasium environments as one batch: equal to stepping them by hand, with margins, true ends and saved draws."""

from __future__ import annotations

import itertools

import gymnasium
import numpy as np
import pytest
import torch
from gym_envs import GymDoubleIntegrator, Recorder, count_margin
from gymnasium import spaces
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.utils import check_env_specs

from torchrl_safety.envs import CartPoleEnv, SafetyGymEnv, check_safety_env

SHARED = Recorder()
MAKERS = itertools.cycle([2, 3])


def one_way(env: EnvBase, actions: torch.Tensor, lean: bool) -> tuple[TensorDict, TensorDict]:
    """Transitions and the roots that follow, by our own step or by TorchRL's."""
    tensordict, transitions, roots = env.reset(), [], []
    for action in actions:
        tensordict["action"], tensordict["kept"] = action, torch.ones(len(action), 2)
        step = env.step_and_maybe_reset if lean else lambda td: EnvBase._step_and_maybe_reset(env, td)
        transition, tensordict = step(tensordict)
        transitions.append(transition.clone())
        roots.append(tensordict.clone())
    return torch.stack(transitions), torch.stack(roots)


@pytest.mark.parametrize("name", ["CartPole-v1", "Acrobot-v1", "Pendulum-v1", "LunarLander-v3"])
def test_five_hundred_steps_equal_those_of_a_hand_written_loop(name):
    env = SafetyGymEnv(name, 3, seed=7, max_steps=40)
    cores = [gymnasium.make(name, max_episode_steps=40) for _ in range(3)]
    before = [core.reset(seed=7 + row)[0] for row, core in enumerate(cores)]
    torch.manual_seed(0)
    tensordict, ends = env.reset(), 0
    for _ in range(500):
        assert np.array_equal(tensordict["observation"].numpy(), np.stack(before))
        transition, tensordict = env.step_and_maybe_reset(env.rand_action(tensordict))
        for row, core in enumerate(cores):
            after, reward, terminated, truncated, _ = core.step(transition["action"][row].numpy())
            found = transition["next"][row]
            assert np.array_equal(found["observation"].numpy(), after)
            assert found["reward"].item() == np.float32(reward)
            assert (found["terminated"].item(), found["truncated"].item()) == (terminated, truncated and not terminated)
            assert found["done"].item() == (terminated or truncated)
            ends += terminated or truncated
            before[row] = core.reset()[0] if terminated or truncated else after
    assert ends > 30


def test_the_lean_step_gives_what_torchrls_own_gives():
    settings = {"safety_margin": count_margin, "end_criterion": "env", "max_steps": 7, "seed": 3}
    actions = torch.zeros(40, 4, dtype=torch.int64)

    def make() -> SafetyGymEnv:
        # Never do all end together, for then TorchRL leaves what a reset does not write as it is.
        lengths = iter([3, 4, 5, 9])
        return SafetyGymEnv(lambda: Recorder(terminates=next(lengths)), 4, **settings)

    lean, general = (one_way(make(), actions, lean) for lean in (True, False))
    for ours, theirs in zip(lean, general):
        assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
        for key in ours.keys(True, True):
            assert torch.equal(ours[key], theirs[key]), key
    assert lean[0]["next", "truncated"].any()
    assert not lean[1]["kept"][lean[0]["next", "done"].squeeze(-1)].any()


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_next_holds_the_true_final_observation_and_its_margin(end):
    limit = {"terminates": 5, "max_steps": None} if end == "terminated" else {"terminates": 99, "max_steps": 5}
    env = SafetyGymEnv(Recorder, 2, safety_margin=count_margin, end_criterion="env", **limit)
    data = env.rollout(12, break_when_any_done=False)
    count = data["next", "observation"][..., 0]
    assert count[0].tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
    assert torch.equal(data["next", end].squeeze(-1), count == 5)
    assert torch.equal(data["next", "done"].squeeze(-1), count == 5)
    assert torch.equal(data["next", "safety_margin"].squeeze(-1), 3.5 - count)
    assert torch.equal(data["safety_margin"].squeeze(-1), 3.5 - data["observation"][..., 0])
    assert torch.equal(data["observation"][..., 0], count - 1)
    assert torch.equal(data["next", "reward"].squeeze(-1), 0.5 * count)


def test_a_partial_reset_touches_its_rows_only():
    env = SafetyGymEnv(Recorder, 3, safety_margin=count_margin, seed=1)
    state = env.reset()
    state["action"] = torch.zeros(3, dtype=torch.int64)
    state = env.step(state)["next"].exclude("reward")
    before = state.clone()
    mask = torch.tensor([[False], [True], [False]])
    after = env.reset(state.clone().set("_reset", mask))
    assert after["observation"][:, 0].tolist() == [1, 0, 1]
    assert after["safety_margin"][:, 0].tolist() == [2.5, 3.5, 2.5]
    assert torch.equal(after["observation"][[0, 2]], before["observation"][[0, 2]])
    assert after["observation"][1, 1] != before["observation"][1, 1]
    after["action"] = torch.zeros(3, dtype=torch.int64)
    assert env.step(after)["next", "observation"][:, 0].tolist() == [2, 1, 2]


def test_a_partial_step_moves_its_rows_only():
    env = SafetyGymEnv(Recorder, 3, safety_margin=count_margin)
    state = env.reset()
    for expected in ([1, 0, 1], [2, 0, 2]):
        state["action"], state["_step"] = torch.zeros(3, dtype=torch.int64), torch.tensor([True, False, True])
        after = env.step(state)["next"]
        assert after["observation"][:, 0].tolist() == expected
        assert after["safety_margin"][:, 0].tolist() == [3.5 - count for count in expected]
        assert after["reward"][1].item() == 0
        state = after.exclude("reward")


def test_what_has_not_begun_stays_so_while_others_move():
    env = SafetyGymEnv(Recorder, 2)
    one = torch.tensor([True, False])
    state = env.reset(TensorDict({"_reset": one, "done": ~one.unsqueeze(-1)}, [2]))
    state["action"], state["_step"] = torch.zeros(2, dtype=torch.int64), one
    env.step(state)
    assert env.needs_reset
    with pytest.raises(RuntimeError, match=r"environments \[1\] have ended or not begun"):
        env.step(state.exclude("next", "_step"))


def test_the_end_criterion_adds_to_the_ends_of_gymnasium():
    def target(env, observation, info):
        return observation[0] - 1.5

    margins = {"safety_margin": count_margin, "target_margin": target}
    lengths = {}
    for criterion in (None, "env", "failure", "reach_avoid"):
        env = SafetyGymEnv(Recorder, **margins, end_criterion=criterion)
        data = env.rollout(20)
        lengths[criterion] = data.shape[-1]
        assert data["next", "terminated"][0, -1]
        assert not data["next", "truncated"].any()
    assert lengths == {None: 4, "env": 5, "failure": 4, "reach_avoid": 2}
    assert SafetyGymEnv(Recorder).rollout(20).shape[-1] == 5


def test_termination_wins_over_truncation():
    last = SafetyGymEnv(Recorder, max_steps=5).rollout(20)[0, -1]["next"]
    assert (last["terminated"].item(), last["truncated"].item(), last["done"].item()) == (True, False, True)


def test_margins_may_be_named_in_info():
    env = SafetyGymEnv(
        GymDoubleIntegrator,
        3,
        safety_margin=lambda env, observation, info: 1 - abs(observation[0]),
        target_margin="l_x",
        dtype=torch.float64,
    )
    data = env.rollout(60, break_when_any_done=False)
    for part in (data, data["next"]):
        expected = 0.2 - part["observation"].abs().amax(-1, keepdim=True)
        torch.testing.assert_close(part["target_margin"], expected, atol=1e-6, rtol=0)
    assert torch.equal(data["next", "terminated"], data["next", "safety_margin"] < 0)
    assert data["next", "terminated"].any()
    assert data["next", "truncated"].any()
    torch.testing.assert_close(data["next", "reward"], data["next", "safety_margin"], atol=1e-6, rtol=0)
    check_safety_env(env)


def test_a_missing_entry_of_info_is_an_error_that_names_it():
    env = SafetyGymEnv(GymDoubleIntegrator, safety_margin="g_x", end_criterion="env")
    with pytest.raises(KeyError, match=r"safety_margin='g_x' is not in info, which holds \['l_x'\]"):
        env.reset()


@pytest.mark.parametrize("margin", [None, "x", [1.0, 2.0], float("nan")])
def test_a_margin_that_is_no_number_is_an_error_that_names_it(margin):
    env = SafetyGymEnv(Recorder, safety_margin=lambda *_: margin)
    with pytest.raises(ValueError, match=r"safety_margin is .* in environment 0: give (one|a) number"):
        env.reset()


def test_dict_observations_keep_their_names_types_and_shapes():
    space = spaces.Dict(
        {
            "pixels": spaces.Box(0, 255, (4, 4, 3), np.uint8),
            "speed": spaces.Box(-1, 1, (2,), np.float64),
            "gear": spaces.Discrete(5, start=-1),
            "lamps": spaces.MultiBinary(3),
        }
    )
    env = SafetyGymEnv(lambda: Recorder(space), 2)
    check_env_specs(env)
    transition, _ = env.step_and_maybe_reset(env.rand_action(env.reset()))
    found = {key: (tuple(value.shape), value.dtype) for key, value in transition["next"].items() if key in space.spaces}
    assert found == {
        "pixels": ((2, 4, 4, 3), torch.uint8),
        "speed": ((2, 2), torch.float32),
        "gear": ((2, 1), torch.int64),
        "lamps": ((2, 3), torch.int8),
    }
    for row, core in enumerate(env.envs):
        for name, value in core.shown.items():
            torch.testing.assert_close(
                transition["next", name][row], torch.as_tensor(value).reshape(found[name][0][1:]).to(found[name][1])
            )


def test_discrete_actions_start_where_the_space_does():
    env = SafetyGymEnv(lambda: Recorder(action_space=spaces.Discrete(3, start=10)), 3, safety_margin=acted)
    state = env.reset()
    state["action"] = torch.tensor([0, 1, 2])
    assert env.step(state)["next", "safety_margin"][:, 0].tolist() == [10, 11, 12]


def acted(env, observation, info) -> float:
    return float(np.sum(info.get("action", 0)))


def test_box_actions_out_of_bounds_are_clamped():
    box = spaces.Box(np.array([-1, 0], np.float32), np.array([1, 4], np.float32))
    env = SafetyGymEnv(lambda: Recorder(action_space=box), 3, safety_margin=acted, end_criterion="env")
    assert torch.equal(env.action_spec.space.low[0], torch.tensor([-1.0, 0.0]))
    state = env.reset()
    state["action"] = torch.tensor([[0.5, 2.0], [-9.0, 9.0], [9.0, -9.0]])
    assert env.step(state)["next", "safety_margin"][:, 0].tolist() == [2.5, 3.0, 1.0]


@pytest.mark.parametrize(
    ("space", "action", "message"),
    [
        (spaces.Discrete(3), torch.tensor([0, 3]), r"action=\[0, 3\] has an index outside 0\.\.2"),
        (spaces.Discrete(3), torch.tensor([-1, 0]), r"action=\[-1, 0\] has an index outside 0\.\.2"),
        (spaces.Discrete(3), torch.eye(3)[:2].long(), r"shape \(2, 3\) .* expected integer indices of shape \(2,\)"),
        (spaces.Discrete(3), torch.zeros(2), r"dtype torch.float32, expected integer indices"),
        (spaces.Box(-1, 1, (1,)), torch.zeros(2), r"expected numbers of shape \(2, 1\)"),
        (spaces.Box(-1, 1, (1,)), torch.tensor([[0.0], [torch.nan]]), "NaN"),
    ],
)
def test_an_action_that_does_not_fit_is_an_error_and_moves_nothing(space, action, message):
    env = SafetyGymEnv(lambda: Recorder(action_space=space), 2)
    state = env.reset()
    with pytest.raises(ValueError, match=message):
        env.step_and_maybe_reset(state.clone().set("action", action))
    assert [core.count for core in env.envs] == [0, 0]


def test_a_step_without_an_action_is_an_error():
    env = SafetyGymEnv(Recorder)
    with pytest.raises(KeyError, match="'action' is missing"):
        env.step(env.reset())


def test_an_episode_that_has_ended_or_not_begun_cannot_be_stepped():
    env = SafetyGymEnv(Recorder, 2)
    assert env.needs_reset
    action = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"environments \[0, 1\] have ended or not begun"):
        env.step(TensorDict({"action": action}, [2]))
    state = env.rollout(20)[:, -1]["next"].exclude("reward").set("action", action)
    with pytest.raises(RuntimeError, match=r"call env.reset\(\)"):
        env.step(state)
    env.reset()
    assert not env.needs_reset


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"env": "NoSuchEnv-v0"}, ValueError, r"env='NoSuchEnv-v0' cannot be made"),
        ({"env": "CartPole-v1", "no_such_setting": 1}, TypeError, "no_such_setting"),
        ({"env": 3}, ValueError, "env=3 must be an id"),
        ({"env": lambda: "text"}, ValueError, "made a str"),
        ({"env": lambda: SHARED, "num_envs": 2}, ValueError, "the same environment twice"),
        (
            {"env": lambda: Recorder(action_space=spaces.Discrete(next(MAKERS))), "num_envs": 2},
            ValueError,
            "different action spaces",
        ),
        ({"num_envs": 0}, ValueError, "num_envs=0"),
        ({"max_steps": 0}, ValueError, "max_steps=0"),
        ({"safety_margin": 3}, ValueError, "safety_margin=3 must be a function"),
        ({"end_criterion": "timeout"}, ValueError, r"end_criterion='timeout' is unknown: choose one of 'env'"),
        ({"end_criterion": "failure"}, ValueError, "end_criterion='failure' needs safety_margin"),
        (
            {"end_criterion": "reach_avoid", "safety_margin": count_margin},
            ValueError,
            "end_criterion='reach_avoid' needs target_margin",
        ),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"dtype": torch.float16}, ValueError, "dtype=torch.float16"),
        (
            {"env": lambda: Recorder(action_space=spaces.MultiDiscrete([2, 3]))},
            ValueError,
            "action space MultiDiscrete",
        ),
        ({"env": lambda: Recorder(spaces.Tuple([spaces.Discrete(2)]))}, ValueError, "FlattenObservation"),
        ({"env": lambda: Recorder(spaces.Dict(reward=spaces.Discrete(2)))}, ValueError, "entry 'reward'"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it(settings, error, message):
    with pytest.raises(error, match=message):
        SafetyGymEnv(**{"env": Recorder, **settings})


def test_options_of_a_reset_reach_gymnasium():
    assert SafetyGymEnv(Recorder, 2).reset(options={"count": 2})["observation"][:, 0].tolist() == [2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_specs_and_margins_pass_the_checks(dtype):
    for env in (
        CartPoleEnv(3, problem="avoid", dtype=dtype),
        SafetyGymEnv("Pendulum-v1", 2, max_steps=9, dtype=dtype, safety_margin=lambda env, seen, info: seen[0]),
        SafetyGymEnv(Recorder, 3, safety_margin=count_margin, target_margin=lambda *_: -1.0, dtype=dtype),
    ):
        check_env_specs(env, break_when_any_done="both")
        check_safety_env(env)
        assert env.reset()["observation"].dtype == env.reset()["safety_margin"].dtype == dtype


def test_collector_and_transforms_see_whole_episodes():
    env = TransformedEnv(SafetyGymEnv(Recorder, 2, safety_margin=count_margin, end_criterion="env"))
    env.append_transform(StepCounter())
    env.append_transform(RewardSum())
    collector = Collector(env, frames_per_batch=24, total_frames=48)
    data = torch.cat([*collector], -1)
    collector.shutdown()
    done = data["next", "done"].squeeze(-1)
    assert torch.equal(data["next", "step_count"].squeeze(-1), data["next", "observation"][..., 0].long())
    assert torch.equal(done, data["next", "observation"][..., 0] == 5)
    assert (data["next", "episode_reward"][done] == 0.5 * 15).all()


def test_what_was_handed_out_does_not_change_later():
    env = SafetyGymEnv(Recorder, 2)
    state, seen, copies = env.reset(), [], []
    for _ in range(7):
        transition, state = env.step_and_maybe_reset(env.rand_action(state))
        seen.append(transition)
        copies.append(transition.clone())
    assert all((transition == copy).all() for transition, copy in zip(seen, copies))


def test_closing_closes_the_environments():
    closed = []

    class Closing(Recorder):
        def close(self):
            closed.append(self)

    SafetyGymEnv(Closing, 2).close()
    assert len(closed) == 2
