"""What every native environment does, shown on the double integrator: keys, resets, ends, random numbers, errors."""

import io
import itertools
import math
import pickle
import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, ObservationNorm, TransformedEnv
from torchrl.envs.utils import check_env_specs

from torchrl_safety.envs import DoubleIntegratorEnv


def make(num_envs: int = 4, **settings) -> DoubleIntegratorEnv:
    return DoubleIntegratorEnv(num_envs, **{"seed": 0, **settings})


def start(env: DoubleIntegratorEnv, states) -> TensorDict:
    states = torch.as_tensor(states, dtype=env.dtype)
    return env.reset(TensorDict({"observation": states}, [len(states)]))


def act(env: DoubleIntegratorEnv, tensordict: TensorDict, action) -> TensorDict:
    tensordict["action"] = torch.as_tensor(action)
    return env.step(tensordict)["next"]


def box(n: int) -> Tensor:
    unit = torch.rand(n, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (2 * unit - 1) * torch.tensor([1.0, 2.2], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_envs", [1, 7])
@pytest.mark.parametrize("max_steps", [None, 2])
@pytest.mark.parametrize("max_disturbance", [0.0, 0.5])
def test_every_combination_of_settings_fulfils_its_specs(max_disturbance, max_steps, num_envs, dtype):
    for problem, discrete in itertools.product(["avoid", "reach_avoid"], [True, False]):
        env = make(
            num_envs,
            problem=problem,
            discrete=discrete,
            max_disturbance=max_disturbance,
            max_steps=max_steps,
            dtype=dtype,
        )
        check_env_specs(env, break_when_any_done="both")
        data = env.rollout(4, break_when_any_done=False)
        margins = {"safety_margin"} | ({"target_margin"} if problem == "reach_avoid" else set())
        counted = set() if max_steps is None else {"step_count"}
        ends = {"done", "terminated", "truncated"}
        players = {"action"} | ({"disturbance"} if max_disturbance else set())
        assert set(data.keys()) == {"observation", "next"} | margins | counted | ends | players
        assert set(data["next"].keys()) == {"observation", "reward"} | margins | counted | ends
        for part in (data, data["next"]):
            assert all(part[key].shape == (num_envs, 4, 1) for key in margins | counted | ends)
            assert all(part[key].dtype == dtype for key in margins | {"observation"})
        for player in players:
            assert data[player].shape == ((num_envs, 4) if discrete else (num_envs, 4, 1))
        assert set(env.fake_tensordict().keys(True, True)) == set(data.keys(True, True))


def test_margins_describe_the_state_beside_them():
    env = make(64, problem="reach_avoid", max_steps=5)
    data = env.rollout(12, break_when_any_done=False)
    for part in (data, data["next"]):
        position, velocity = part["observation"].unbind(-1)
        torch.testing.assert_close(part["safety_margin"][..., 0], 1 - position.abs())
        torch.testing.assert_close(part["target_margin"][..., 0], 0.2 - torch.maximum(position.abs(), velocity.abs()))
    failed = data["next", "safety_margin"] < 0
    assert failed.any()
    assert torch.equal(data["next", "reward"], -failed.float())
    assert torch.equal(data["next", "terminated"], failed)


def test_the_quick_step_and_maybe_reset_equals_torchrls_own():
    for settings in ({}, {"max_steps": 3, "problem": "reach_avoid"}, {"discrete": False, "state_key": "state"}):
        quick, slow = make(32, **settings), make(32, **settings)
        now, then = quick.reset(), slow.reset()
        for step in range(12):
            extra = TensorDict({"hidden": torch.full((32, 3, 2), step + 1.0), "tag": torch.ones(32) > 0}, [32])
            action = quick.full_action_spec.rand()
            before, now = quick.step_and_maybe_reset(now.update(action).update(extra))
            expected, then = EnvBase._step_and_maybe_reset(slow, then.update(action).update(extra))
            for got, want in ((before, expected), (now, then)):
                assert set(got.keys(True, True)) == set(want.keys(True, True))
                assert all(torch.equal(got[key], want[key]) for key in want.keys(True, True))
        assert torch.equal(quick._generator.get_state(), slow._generator.get_state())


def test_an_ended_step_holds_the_true_final_state_and_the_next_root_a_fresh_one():
    env = make(256, max_steps=7)
    data = env.rollout(40, break_when_any_done=False)
    step = make(256 * 40)
    push = step.control(data["action"].reshape(-1))
    following = step.dynamics(data["observation"].reshape(-1, 2), push).reshape(256, 40, 2)
    torch.testing.assert_close(data["next", "observation"], following)
    done = data["next", "done"][:, :-1, 0]
    assert torch.equal(data["observation"][:, 1:][~done], data["next", "observation"][:, :-1][~done])
    assert (data["observation"][:, 1:][done, 0].abs() <= 1).all()
    assert (data["next", "observation"][:, :-1][done] != data["observation"][:, 1:][done]).any(-1).all()
    for end in ("terminated", "truncated"):
        assert data["next", end].any()
        assert not data[end].any()


def test_a_collector_gathers_whole_episodes():
    env = make(8, max_steps=5)
    collector = Collector(env, None, frames_per_batch=80, total_frames=160)
    batches = [batch.clone() for batch in collector]
    collector.shutdown()
    assert [batch.numel() for batch in batches] == [80, 80]
    for batch in batches:
        assert torch.equal(batch["next", "terminated"], batch["next", "safety_margin"] < 0)
        assert torch.equal(batch["next", "step_count"], batch["step_count"] + 1)
        assert torch.equal(
            batch["next", "truncated"], (batch["next", "step_count"] == 5) & ~batch["next", "terminated"]
        )


def test_a_row_that_is_not_stepped_keeps_its_state():
    env = make(2)
    tensordict = start(env, [[0.0, 0.5], [0.0, 0.5]])
    tensordict["_step"] = torch.tensor([True, False])
    following = act(env, tensordict, [1, 1])
    torch.testing.assert_close(following["observation"], torch.tensor([[0.025, 0.5], [0.0, 0.5]]))
    whole = env.rollout(30, break_when_any_done=False, break_when_all_done=True)
    assert whole["next", "done"][:, -1].all() or whole.shape[1] == 30


def test_normalised_observations_leave_a_state_under_its_own_key_alone():
    plain = make(16, max_steps=4)
    norm = ObservationNorm(loc=3.0, scale=10.0, in_keys=["observation"])
    normed = TransformedEnv(make(16, max_steps=4, state_key="state"), norm)
    check_env_specs(normed)
    plain.set_seed(1)
    normed.set_seed(1)
    torch.manual_seed(0)
    expected = plain.rollout(12, break_when_any_done=False)
    torch.manual_seed(0)
    got = normed.rollout(12, break_when_any_done=False)
    assert torch.equal(got["next", "state"], expected["next", "observation"])
    torch.testing.assert_close(got["observation"], expected["observation"] * 10 + 3)
    root = make(2, state_key="state").reset()
    root["observation"].add_(1)  # nor may an in-place transform reach it
    assert not torch.equal(root["state"], root["observation"])


def test_the_package_imports_without_simulators_or_plotting():
    program = (
        "import sys, torchrl_safety, torchrl_safety.envs\n"
        "heavy = {'gymnasium', 'mujoco', 'hydra', 'matplotlib', 'torchrl'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert 'DoubleIntegratorEnv' in dir(torchrl_safety.envs)\n"
        "torchrl_safety.envs.DoubleIntegratorEnv\n"
        "heavy = {'gymnasium', 'hydra', 'matplotlib'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_reset_to_given_states_starts_there_also_through_a_transform():
    states = box(4).float()
    env = make(4, max_steps=9, problem="reach_avoid")
    given = TensorDict({"observation": states}, [4])
    tensordict = env.reset(given.clone())
    assert torch.equal(tensordict["observation"], states)
    assert torch.equal(tensordict["safety_margin"], env.safety_margin(states))
    assert not tensordict["step_count"].any()
    assert torch.equal(env.reset(given.clone(), set_state=True)["observation"], states)
    assert not torch.equal(env.reset(given.clone(), set_state=False)["observation"], states)
    wrapped = TransformedEnv(make(4, state_key="state"))
    placed = wrapped.reset(TensorDict({"state": states}, [4]), set_state=True)
    assert torch.equal(placed["observation"], states)


def test_given_states_are_copied_not_shared():
    env = make(2)
    states = torch.zeros(2, 2)
    tensordict = start(env, states)
    tensordict["observation"].add_(1)
    assert not states.any()


def test_a_partial_reset_touches_only_its_rows():
    env = make(6, max_steps=50, problem="reach_avoid")
    tensordict = env.rollout(3, break_when_any_done=False)[:, -1]["next"].exclude("reward")
    tensordict["done"][:] = False
    before = tensordict.clone()
    mask = torch.tensor([[True], [False], [False], [True], [False], [True]])
    after = env.reset(tensordict.set("_reset", mask))
    rows = mask[:, 0]
    for key in ("observation", "safety_margin", "target_margin", "step_count"):
        assert torch.equal(after[key][~rows], before[key][~rows]), key
    assert not after["step_count"][rows].any()
    assert (after["observation"][rows] != before["observation"][rows]).all()
    torch.testing.assert_close(after["safety_margin"], env.safety_margin(after["observation"]))


def test_starts_are_uniform_in_the_box():
    env = make(20_000, start_low=(-0.5, 0.0), start_high=(0.5, 2.0))
    states = env.reset()["observation"]
    assert (states[:, 0].abs() <= 0.5).all()
    assert ((states[:, 1] >= 0) & (states[:, 1] <= 2)).all()
    counts = torch.histogramdd(states, bins=[4, 4]).hist.flatten()
    # 16 equal cells of 1250 expected each, standard deviation 34
    assert (counts - 1250).abs().max() < 5 * 34.2


def test_a_seed_fixes_the_starts_and_a_generator_can_be_passed():
    first = make(8, seed=3).reset()["observation"]
    torch.manual_seed(99)
    assert torch.equal(make(8, seed=3).reset()["observation"], first)
    env = make(8, seed=4)
    assert not torch.equal(env.reset()["observation"], first)
    env.set_seed(3)
    assert torch.equal(env.reset()["observation"], first)
    passed = DoubleIntegratorEnv(8, generator=torch.Generator().manual_seed(3))
    assert torch.equal(passed.reset()["observation"], first)
    torch.manual_seed(7)
    unseeded = DoubleIntegratorEnv(8).reset()["observation"]
    torch.manual_seed(7)
    assert torch.equal(DoubleIntegratorEnv(8).reset()["observation"], unseeded)


def test_a_saved_generator_continues_the_very_same_resets():
    env = make(8)
    env.reset()
    file = io.BytesIO()
    torch.save(env.state_dict(), file)
    expected = [env.reset()["observation"] for _ in range(3)]
    file.seek(0)
    other = make(8, seed=123)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert all(torch.equal(other.reset()["observation"], state) for state in expected)


def test_continuous_actions_are_clamped_and_nan_stays_visible():
    env = make(5, discrete=False)
    states = torch.zeros(5, 2)
    wild = act(env, start(env, states), [[9.0], [-9.0], [math.inf], [-math.inf], [math.nan]])
    tame = act(env, start(env, states), [[1.0], [-1.0], [1.0], [-1.0], [0.0]])
    assert torch.equal(wild["observation"][:4], tame["observation"][:4])
    assert wild["safety_margin"].isnan().flatten().tolist() == [False] * 4 + [True]


@pytest.mark.parametrize(
    ("end_criterion", "terminated"),
    [("failure", [True, False, False]), ("reach_avoid", [True, True, False]), ("timeout", [False, False, False])],
)
def test_each_end_criterion_ends_what_it_names(end_criterion, terminated):
    env = make(3, problem="reach_avoid", end_criterion=end_criterion, max_steps=2)
    tensordict = start(env, [[0.99, 2.0], [0.0, 0.0], [0.5, 0.0]])  # will fail, is in the target, neither
    following = act(env, tensordict, [1, 1, 1])
    assert following["terminated"].flatten().tolist() == terminated
    assert not following["truncated"].any()
    tensordict = start(env, [[0.99, 0.0], [0.0, 0.0], [0.5, 0.0]])
    tensordict["step_count"][:] = 1
    tensordict["observation"][0, 1] = 2.0
    following = act(env, tensordict, [1, 1, 1])
    assert following["terminated"].flatten().tolist() == terminated
    assert following["truncated"].flatten().tolist() == [not ended for ended in terminated]
    assert following["done"].all()


def test_without_max_steps_nothing_is_truncated_or_counted():
    env = make(4, end_criterion="timeout")
    data = env.rollout(60, break_when_any_done=False)
    assert data.shape == (4, 60)
    assert not data["next", "done"].any()
    assert "step_count" not in data.keys()  # noqa: SIM118


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"problem": "return"}, "problem='return' is unknown: choose one of 'avoid', 'reach_avoid'"),
        ({"end_criterion": "never"}, "end_criterion='never' is unknown: choose one of 'failure'"),
        ({"end_criterion": "reach_avoid"}, "end_criterion='reach_avoid' needs a target"),
        ({"max_steps": 0}, "max_steps=0 must be a whole number of at least 1, or None"),
        ({"max_steps": 2.5}, "max_steps=2.5 must be a whole number"),
        ({"num_envs": 0}, "num_envs=0 must be a whole number of at least 1"),
        ({"num_envs": 2.5}, "num_envs=2.5 must be a whole number"),
        ({"num_envs": (2, 3)}, r"num_envs=\(2, 3\) must be a whole number"),
        ({"num_envs": True}, "num_envs=True must be a whole number"),
        ({"dt": 0.0}, "dt=0.0 must be positive"),
        ({"dt": math.inf}, "dt=inf must be positive and finite"),
        ({"max_control": math.inf}, "max_control=inf must be positive and finite"),
        ({"start_high": (math.inf, 0.0)}, "must be finite"),
        ({"dtype": "float64"}, "dtype=float64 must be a floating-point type"),
        ({"generator": 3, "seed": None}, "generator=3 must be a torch.Generator"),
        ({"max_control": -1.0}, "max_control=-1.0 must be positive"),
        ({"max_disturbance": 1.0}, "max_disturbance=1.0 must lie in"),
        ({"max_disturbance": -0.1}, "max_disturbance=-0.1 must lie in"),
        ({"target_radius": 0.0}, "target_radius=0.0 must lie in"),
        ({"start_low": (1.0, 0.0), "start_high": (0.0, 0.0)}, "low <= high"),
        ({"dtype": torch.int64}, "dtype=torch.int64 must be a floating-point type"),
        ({"generator": torch.Generator()}, "exclude each other"),
    ],
)
def test_wrong_settings_are_named_with_their_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**{"num_envs": 2, **settings})


@pytest.mark.parametrize(
    ("discrete", "action", "message"),
    [
        (True, torch.zeros(2, 1, dtype=torch.int64), r"action has shape \(2, 1\).*expected integer indices"),
        (True, torch.zeros(2), "torch.float32, expected integer indices"),
        (True, torch.tensor([0, 3]), r"action has an index outside 0\.\.2"),
        (True, torch.tensor([0, -1]), r"action has an index outside 0\.\.2"),
        (False, torch.zeros(2), r"action has shape \(2,\).*expected numbers of shape \(2, 1\)"),
        (False, torch.zeros(2, 3), r"expected numbers of shape \(2, 1\)"),
    ],
)
def test_actions_of_the_wrong_shape_or_kind_are_refused(discrete, action, message):
    env = make(2, discrete=discrete)
    with pytest.raises(ValueError, match=message):
        env.step(env.reset().set("action", action))


def test_missing_keys_are_named_with_their_remedy():
    env = make(2, max_disturbance=0.5, max_steps=3)
    tensordict = env.reset().set("action", torch.zeros(2, dtype=torch.int64))
    with pytest.raises(KeyError, match=r"'disturbance' is missing, present are .*let both players act"):
        env.step(tensordict)
    tensordict["disturbance"] = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(KeyError, match="'step_count' is missing"):
        env.step(tensordict.exclude("step_count"))
    with pytest.raises(KeyError, match=r"'observation' is missing.*env.reset\(\)"):
        env.step(tensordict.exclude("observation"))
    with pytest.raises(KeyError, match=r"'action' is missing.*let a policy act"):
        env.step(env.reset())


def test_wrong_states_at_reset_are_refused():
    env = make(2)
    for states, message in ((torch.zeros(2, 3), r"shape \(2, 3\) at reset"), (torch.full((2, 2), math.nan), "NaN")):
        with pytest.raises(ValueError, match=message):
            env.reset(TensorDict({"observation": states}, [2]))
    masked = env.reset().set("_reset", torch.ones(2, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="ambiguous"):
        env.reset(masked, set_state=True)


@pytest.mark.parametrize("end_criterion", ["failure", "reach_avoid", "timeout"])
def test_a_pickled_environment_goes_on_as_the_one_it_was_made_of(end_criterion):
    env = make(32, problem="reach_avoid", end_criterion=end_criterion, max_steps=5)
    tensordict = env.reset()
    twin = pickle.loads(pickle.dumps(env))
    for _ in range(12):
        tensordict["action"] = env.action_spec.rand()
        same, following = twin.step_and_maybe_reset(tensordict.clone())
        data, tensordict = env.step_and_maybe_reset(tensordict)
        for got, want in ((same, data), (following, tensordict)):
            assert all(torch.equal(got[key], want[key]) for key in want.keys(True, True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_states_and_actions_of_another_precision_are_taken_in_that_of_the_environment(dtype):
    env = make(2, discrete=False)
    tensordict = start(env, [[0.5, 0.25], [-0.5, 1.0]]).set("action", torch.tensor([[0.5], [-2.0]]))
    expected = env.step(tensordict.clone())["next"]
    for key in ("observation", "action"):
        tensordict[key] = tensordict[key].to(dtype)
    following = env.step(tensordict)["next"]
    assert all(torch.equal(following[key], expected[key]) for key in expected.keys())  # noqa: SIM118
    assert following["observation"].dtype == torch.float32


def test_without_a_dtype_it_is_torchs_default():
    torch.set_default_dtype(torch.float64)
    try:
        env = make(2)
        assert env.rollout(2)["next", "safety_margin"].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert make(2).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_any_integer_is_an_index_of_the_table(dtype):
    env, action = make(3), torch.tensor([0, 1, 2])
    assert torch.equal(env.control(action.to(dtype)), env.control(action))


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_actions_are_no_controls(shape):
    env = make(3)
    width = env.control(torch.tensor([0])).shape[-1]
    assert env.control(torch.zeros(shape, dtype=torch.long)).shape == (*shape, width)


def test_an_environment_built_for_a_device_does_not_touch_the_default_one():
    with torch.device("meta"):  # which holds no numbers
        env = make(2, device="cpu", max_disturbance=0.5, max_steps=3)
    assert env.rollout(2)["next", "observation"].isfinite().all()
