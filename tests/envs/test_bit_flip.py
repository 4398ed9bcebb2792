"""The bits: motion, reward, ends and draws against plain Python, and what every environment keeps to."""

from __future__ import annotations

import io
import itertools

import pytest
import torch
from torchrl.collectors import Collector
from torchrl.envs.utils import check_env_specs

from torchrl_safety.envs import BitFlipEnv


def make(num_envs: int = 4, bits: int = 5, **settings) -> BitFlipEnv:
    return BitFlipEnv(num_envs, bits, **{"seed": 0, **settings})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num_envs", "bits"), [(1, 1), (1, 6), (7, 2), (3, 15)])
def test_every_combination_of_settings_fulfils_its_specs(num_envs, bits, dtype):
    env = make(num_envs, bits, dtype=dtype)
    check_env_specs(env, break_when_any_done="both")
    data = env.rollout(2 * bits + 1, break_when_any_done=False)
    states, ends = {"observation", "achieved_goal", "desired_goal"}, {"done", "terminated", "truncated"}
    assert set(data["next"].keys()) == states | ends | {"reward", "step_count"}
    for part in (data, data["next"]):
        assert all(part[key].shape == (num_envs, 2 * bits + 1, bits) for key in states)
        assert all(part[key].dtype == dtype for key in states)
        assert all(part[key].shape == (num_envs, 2 * bits + 1, 1) for key in ends)


def test_steps_rewards_and_ends_are_those_of_a_loop_over_bits():
    env = make(6, 3)
    ended = {"terminated": 0, "truncated": 0}
    data = env.rollout(200, break_when_any_done=False)
    for row in data.unbind(0):
        taken, fresh = 0, None
        for frame in row.unbind(0):
            state, goal = frame["observation"].int().tolist(), frame["desired_goal"].int().tolist()
            assert fresh in (None, (state, goal))
            state[frame["action"].item()] = 1 - state[frame["action"].item()]
            taken += 1
            after, success = frame["next"], state == goal
            assert after["observation"].int().tolist() == after["achieved_goal"].int().tolist() == state
            assert after["desired_goal"].int().tolist() == goal
            assert after["reward"].item() == (0 if success else -1)
            assert after["terminated"].item() == success
            assert after["truncated"].item() == (taken == 3 and not success)
            assert after["done"].item() == (taken == 3 or success)
            assert after["step_count"].item() == taken
            fresh = (state, goal)
            if after["done"]:
                ended["terminated" if success else "truncated"] += 1
                taken, fresh = 0, None
    assert min(ended.values()) > 20


def test_flipping_the_wrong_bits_one_after_the_other_always_succeeds_in_as_many_steps():
    env = make(500, 7)
    state = env.reset()
    distance = (state["observation"] != state["desired_goal"]).sum(-1)
    expected = torch.where(distance > 0, distance, 2)  # a start that is its own goal leaves it and comes back
    over = torch.zeros(500, dtype=torch.bool)
    for step in range(1, 8):
        wrong = (state["observation"] != state["desired_goal"]).int()
        following, state = env.step_and_maybe_reset(state.set("action", wrong.argmax(-1)))
        arrived = following["next", "terminated"].squeeze(-1) & ~over
        assert torch.equal(arrived, expected == step)
        over |= arrived
    assert over.all()


def test_starts_and_goals_are_uniform_and_independent():
    state = make(64_000, 3).reset()
    powers = torch.tensor([1.0, 2.0, 4.0])
    codes = (state["observation"] @ powers + 8 * (state["desired_goal"] @ powers)).long()
    counts = torch.bincount(codes, minlength=64)
    assert (counts - 1000).abs().max() < 5 * 31.4  # 1,000 expected in each of 64 cells, standard deviation 31.4


def test_memory_is_shared_neither_between_keys_nor_between_steps():
    env = make()
    before = env.reset()
    kept = before.clone()
    after = env.step(before.set("action", torch.zeros(4, dtype=torch.int64)))["next"]
    for number, key in enumerate(("observation", "achieved_goal", "desired_goal")):
        after[key].fill_(number + 2)
        assert torch.equal(before[key], kept[key])
    assert [after[key].unique().item() for key in ("observation", "achieved_goal", "desired_goal")] == [2, 3, 4]


def test_a_partial_reset_and_a_row_that_is_not_stepped_touch_only_their_rows():
    env = make(6, 12)
    state = env.rollout(3, break_when_any_done=False)[:, -1]["next"].exclude("reward")
    mask = torch.tensor([[True], [False], [False], [True], [False], [True]])
    fresh = env.reset(state.clone().set("_reset", mask))
    rows = mask[:, 0]
    for key in ("observation", "desired_goal", "step_count"):
        assert torch.equal(fresh[key][~rows], state[key][~rows]), key
        assert not torch.equal(fresh[key][rows], state[key][rows]), key
    state["action"] = torch.zeros(6, dtype=torch.int64)
    after = env.step(state.clone().set("_step", rows))["next"]
    assert torch.equal(after["observation"][~rows], state["observation"][~rows])
    assert (after["observation"][rows, 0] != state["observation"][rows, 0]).all()


def test_a_seed_or_a_generator_fixes_the_draws_and_a_saved_state_continues_them():
    first = make(8, seed=3).reset()
    torch.manual_seed(99)
    passed = BitFlipEnv(8, 5, generator=torch.Generator().manual_seed(3))
    again = make(8, seed=4)
    assert not torch.equal(again.reset()["desired_goal"], first["desired_goal"])
    again.set_seed(3)
    for env in (make(8, seed=3), passed, again):
        assert torch.equal(env.reset()["desired_goal"], first["desired_goal"])
    file = io.BytesIO()
    torch.save(again.state_dict(), file)
    expected = [again.reset()["observation"] for _ in range(3)]
    file.seek(0)
    other = make(8, seed=123)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert all(torch.equal(other.reset()["observation"], state) for state in expected)
    other.load_state_dict({})


def test_a_collector_keeps_the_true_final_states():
    collector = Collector(make(3, 4), frames_per_batch=60, total_frames=60)
    for data in collector:
        flips = (data["next", "observation"] != data["observation"]).sum(-1)
        assert (flips == 1).all()
        assert data["next", "done"].sum() >= 12
    collector.shutdown()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_envs": 0}, "num_envs=0 must be a whole number of at least 1"),
        ({"bits": 0}, "bits=0 must be a whole number of at least 1"),
        ({"bits": 2.5}, "bits=2.5 must be a whole number"),
        ({"dtype": torch.int64}, "dtype=torch.int64 must be a floating-point type"),
        ({"generator": 3, "seed": None}, "generator=3 must be a torch.Generator"),
        ({"generator": torch.Generator()}, "seed=0 and generator=... exclude each other"),
    ],
)
def test_wrong_settings_are_named_with_their_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


@pytest.mark.parametrize("action", [torch.zeros(4), torch.zeros(4, 5).long(), torch.zeros(4, 1).long()])
def test_an_action_that_is_no_index_is_refused(action):
    env = make()
    with pytest.raises(ValueError, match="expected integer indices of shape"):
        env.step(env.reset().set("action", action))


@pytest.mark.parametrize("key", ["observation", "desired_goal", "step_count", "action"])
def test_a_missing_key_is_named_with_those_present(key):
    env = make()
    state = env.reset().set("action", torch.zeros(4, dtype=torch.int64)).exclude(key)
    with pytest.raises(KeyError, match=f"key '{key}' is missing, present are"):
        env._step(state)


def test_all_bits_can_be_reached_from_all_others():
    goals = list(itertools.product((0.0, 1.0), repeat=2))
    env = make(16, 2)
    state = env.reset()
    state["observation"], state["desired_goal"] = (
        torch.tensor(goals).repeat_interleave(4, 0) if key == "observation" else torch.tensor(goals).repeat(4, 1)
        for key in ("observation", "desired_goal")
    )
    following = [env.step(state.clone().set("action", torch.full((16,), bit)))["next", "reward"] for bit in (0, 1)]
    near = (state["observation"] != state["desired_goal"]).sum(-1) == 1
    assert torch.equal(torch.cat(following, -1).amax(-1) == 0, near)
