"""Sound environments have no fault; faults have their own sentences, come at once, and leave nothing behind."""

from __future__ import annotations

import inspect
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from checked_envs import AutoReset, Flags, Margins, gym_faults, the_fault
from gym_envs import MARGINS, GymDoubleIntegrator, wrap
from tensordict import TensorDict
from torchrl.data import Unbounded
from torchrl.envs import (
    DoubleToFloat,
    GymWrapper,
    ObservationNorm,
    RewardScaling,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VecNormV2,
    default_info_dict_reader,
)

from torchrl_safety import envs
from torchrl_safety.envs import DoubleIntegratorEnv, NativeEnv, check_safety_env
from torchrl_safety.envs.checks import safety_env_faults

NATIVE = [
    kind
    for kind in (getattr(envs, name) for name in envs.__all__)
    if isinstance(kind, type) and issubclass(kind, NativeEnv) and not inspect.isabstract(kind)
]


@pytest.mark.parametrize("num_envs", [1, 5])
@pytest.mark.parametrize("max_steps", [None, 1, 10])
@pytest.mark.parametrize(
    ("problem", "end_criterion"),
    [
        ("avoid", "failure"),
        ("avoid", "timeout"),
        ("reach_avoid", "failure"),
        ("reach_avoid", "reach_avoid"),
        ("reach_avoid", "timeout"),
    ],
)
def test_a_double_integrator_of_any_setting_has_no_fault(problem, end_criterion, max_steps, num_envs):
    for discrete, max_disturbance, dtype in ((True, 0.0, torch.float32), (False, 0.5, torch.float64)):
        env = DoubleIntegratorEnv(
            num_envs,
            problem=problem,
            end_criterion=end_criterion,
            max_steps=max_steps,
            discrete=discrete,
            max_disturbance=max_disturbance,
            dtype=dtype,
        )
        assert safety_env_faults(env, steps=40) == []


@pytest.mark.parametrize("kind", NATIVE)
@pytest.mark.parametrize("max_steps", [None, 10])
def test_a_native_environment_as_it_comes_has_no_fault(kind, max_steps):
    assert safety_env_faults(kind(8, max_steps=max_steps), steps=100) == []


@pytest.mark.parametrize("max_steps", [5, 20, 1000])
def test_a_gymnasium_environment_with_its_margins_in_reward_and_info_has_no_fault(max_steps):
    check_safety_env(wrap(GymDoubleIntegrator(max_steps=max_steps)), **MARGINS)


def test_an_info_reader_that_finds_its_specs_by_itself_has_no_fault():
    env = GymWrapper(GymDoubleIntegrator(), categorical_action_encoding=True).auto_register_info_dict()
    check_safety_env(env, **MARGINS)


def test_clocks_of_gymnasium_and_torchrl_are_truncations_also_where_they_meet_a_failure():
    core = gymnasium.wrappers.TimeLimit(GymDoubleIntegrator(max_steps=1000), 3)
    env = TransformedEnv(wrap(core), StepCounter(max_steps=2))
    env.set_seed(0)
    data = env.rollout(200, break_when_any_done=False)["next"]
    assert (data["terminated"] & data["truncated"]).any()
    check_safety_env(env, **MARGINS)


@pytest.mark.parametrize(
    "transform",
    [
        lambda: ObservationNorm(0.0, 0.5, in_keys=["observation"], out_keys=["scaled"]),
        lambda: VecNormV2(in_keys=["observation"], out_keys=["scaled"]),
        lambda: ObservationNorm(0.0, 0.5, in_keys=["safety_margin"], out_keys=["scaled"]),
        lambda: StepCounter(max_steps=15),
        lambda: RewardSum(),
        lambda: DoubleToFloat(),
    ],
)
def test_transforms_that_leave_margins_and_state_alone_are_no_fault(transform):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in (torch.float32, torch.float64):
            env = TransformedEnv(DoubleIntegratorEnv(4, problem="reach_avoid", dtype=dtype), transform())
            assert safety_env_faults(env, steps=50) == []


def test_environments_side_by_side_are_checked_as_a_batch():
    check_safety_env(SerialEnv(3, lambda: wrap(GymDoubleIntegrator())), **MARGINS, steps=50)
    faults = safety_env_faults(SerialEnv(3, lambda: wrap(AutoReset(max_steps=10))), **MARGINS, steps=50)
    assert "leaps at truncations" in the_fault(faults)


class Broken(DoubleIntegratorEnv):
    """Its entries rewritten after every step, and its observations after a reset, by functions."""

    def __init__(self, num_envs=4, *, after=lambda env, entries: None, at_reset=lambda env, entries: None, **settings):
        super().__init__(num_envs, **{"max_steps": 10, **settings})
        self.after, self.at_reset = after, at_reset

    def _step_entries(self, tensordict):
        entries = super()._step_entries(tensordict)
        self.after(self, entries)
        return entries

    def _reset_entries(self, state):
        entries = super()._reset_entries(state)
        self.at_reset(self, entries)
        return entries


def _margin_of_another_state(env, entries):
    entries["safety_margin"] = entries["safety_margin"] - 0.25


def _first_of_the_next(env, entries):
    fresh = env.sample_states(env.numel(), env._generator)
    entries["observation"] = torch.where(entries["done"], fresh, entries["observation"])


def _lost(env, entries):
    entries["observation"] = entries["observation"].masked_fill(entries["done"], torch.nan)


def _not_done_at_the_clock(env, entries):
    entries["done"] = entries["terminated"].clone()


def _squeezed(env, entries):
    entries["safety_margin"] = entries["safety_margin"].squeeze(-1)


def _absent(env, entries):
    del entries["safety_margin"]


@pytest.mark.parametrize(
    ("after", "sentence"),
    [
        (_margin_of_another_state, "'safety_margin' is not env.safety_margin('observation') after a step, up to 0.25 "),
        (_lost, "the next observation is NaN or infinite at "),
        (_not_done_at_the_clock, "('next', 'done') is not terminated | truncated in "),
        (_squeezed, "'safety_margin' has shape [4], its spec [4, 1], after a step: emit"),
        (_absent, "'safety_margin' is missing after a step: write it there too"),
    ],
)
def test_a_fault_after_a_step_is_named(after, sentence):
    # No walls are met, so that the margin decides no end.
    faults = safety_env_faults(Broken(after=after, start_low=(-0.1, -0.1), start_high=(0.1, 0.1)), steps=20)
    assert the_fault(faults).startswith(sentence)


def test_the_margin_of_a_final_state_that_is_not_handed_back_is_named_too():
    faults = safety_env_faults(Broken(after=_first_of_the_next))
    assert len(faults) == 2
    assert faults[0].startswith("'safety_margin' is not env.safety_margin('observation') after a step")
    assert faults[1].startswith("the next observation leaps at truncations")


@pytest.mark.parametrize(
    ("at_reset", "sentence"),
    [
        (
            _margin_of_another_state,
            "'safety_margin' is not env.safety_margin('observation') at reset, up to 0.25 apart",
        ),
        (_absent, "'safety_margin' is missing at reset: write it there too"),
    ],
)
def test_a_fault_at_reset_is_named(at_reset, sentence):
    faults = safety_env_faults(Broken(at_reset=at_reset, max_steps=None), steps=5)
    assert faults[0].startswith(sentence) or sentence in faults[-1], faults


def test_a_transform_that_rewrites_the_state_is_named_and_a_state_key_is_the_remedy():
    def scaled(**settings):
        return TransformedEnv(DoubleIntegratorEnv(4, **settings), ObservationNorm(0.0, 0.5, in_keys=["observation"]))

    faults = safety_env_faults(scaled(), steps=20)
    assert any(fault.startswith("'safety_margin' is not env.safety_margin('observation')") for fault in faults)
    assert safety_env_faults(scaled(state_key="state"), steps=20) == []


def test_what_torchrl_finds_wrong_with_the_specs_is_one_sentence():
    def surplus(env, entries):
        entries["speed"] = entries["observation"][:, 1:]

    fault = the_fault(safety_env_faults(Broken(after=surplus), steps=20))
    assert fault.startswith("check_env_specs of TorchRL raises AssertionError, ")
    assert "speed" in fault
    assert "\n" not in fault


def test_all_faults_come_at_once_in_one_error():
    env = GymWrapper(
        Margins(lambda value: np.array([value], np.float64), at_reset=False), categorical_action_encoding=False
    )
    env.set_info_dict_reader(default_info_dict_reader(["l_x"], spec=[Unbounded((1,))]))
    env = TransformedEnv(env, RewardScaling(0.0, 0.5))
    with pytest.raises(ValueError, match=r"^TransformedEnv has 4 faults:\n- ") as caught:
        check_safety_env(env, **MARGINS)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        "- 'l_x' has dtype torch.float64, its spec torch.float32, after a step",
        "- the spec of 'action' is OneHot, in which tied actions add up to several at once",
        "- RewardScaling changes 'reward'",
        "- 'l_x' is exactly 0 at reset, as what info lacks is",
    ]
    with pytest.raises(ValueError, match=r"^GymWrapper has a fault:\n- 'l_x' is exactly 0 at reset"):
        check_safety_env(wrap(Margins(lambda value: np.array([value], np.float32), at_reset=False)), **MARGINS)


def test_an_environment_that_raises_at_some_step_is_told_where_and_what():
    class Fails(GymDoubleIntegrator):
        def step(self, action):
            if self.steps == 3:
                raise ValueError("the simulator\nlost contact")
            return super().step(action)

    fault = the_fault(gym_faults(Fails()))
    assert fault.startswith("env.step_and_maybe_reset(...) of step 3 raises ValueError, the simulator lost contact: ")


def test_a_seed_that_an_environment_does_not_take_is_named_and_the_rest_is_checked():
    class Unseeded(Broken):
        def _set_seed(self, seed):
            raise NotImplementedError("no seeds here")

    faults = safety_env_faults(Unseeded(after=_not_done_at_the_clock))
    assert [fault.split(",")[0] for fault in faults[:1]] == ["env.set_seed(0) raises NotImplementedError"]
    assert "('next', 'done') is not terminated | truncated" in faults[1]


def test_an_error_that_no_wiring_causes_keeps_its_traceback():
    class Interrupted(GymDoubleIntegrator):
        def step(self, action):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        gym_faults(Interrupted())


def test_random_states_are_put_back_though_the_check_seeds():
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    for make in (lambda: DoubleIntegratorEnv(3, seed=5), lambda: TransformedEnv(DoubleIntegratorEnv(3, seed=5))):
        used, untouched = make(), make()
        safety_env_faults(used, steps=5)
        assert torch.equal(used.reset()["observation"], untouched.reset()["observation"])
    core, other = GymDoubleIntegrator(), GymDoubleIntegrator()
    for env in (core, other):
        env.reset(seed=3)
    gym_faults(core, steps=50)
    np.testing.assert_array_equal(core.reset()[0], other.reset()[0])
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()  # noqa: NPY002


def test_random_states_are_put_back_after_an_error_too():
    class Interrupted(Broken):
        def _step_entries(self, tensordict):
            raise ZeroDivisionError

    env, untouched = Interrupted(seed=5), DoubleIntegratorEnv(4, seed=5)
    with pytest.raises(ZeroDivisionError):
        safety_env_faults(env)
    assert torch.equal(env.reset()["observation"], untouched.reset()["observation"])


def test_the_same_seed_finds_the_same_and_a_fresh_gymnasium_environment_is_not_left_with_it():
    core = Flags(lambda terminated, truncated: (False, truncated))
    assert gym_faults(core, seed=1) == gym_faults(core, seed=1)
    one, two = GymDoubleIntegrator(), GymDoubleIntegrator()
    gym_faults(one)
    gym_faults(two)
    assert not np.array_equal(one.reset()[0], two.reset()[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps=0 must be a whole number of at least 1"),
        ({"steps": True}, "steps=True must be a whole number"),
        ({"end_criterion": "never"}, "end_criterion='never' is unknown: choose one of failure, reach_avoid, timeout"),
        ({"end_criterion": "reach_avoid"}, "end_criterion='reach_avoid' needs a target"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        check_safety_env(DoubleIntegratorEnv(), **settings)


def test_the_wrapped_environment_writes_what_its_dynamics_say():
    env = wrap(GymDoubleIntegrator())
    data = env.rollout(100, break_when_any_done=False)
    position, velocity = data["observation"].unbind(-1)
    push = data["action"] - 1.0
    torch.testing.assert_close(data["next", "observation"][:, 0], position + 0.05 * velocity + 0.00125 * push)
    torch.testing.assert_close(data["next", "reward"], 1 - data["next", "observation"][:, :1].abs())
    for place in (data, data["next"]):
        torch.testing.assert_close(place["l_x"], 0.2 - place["observation"].abs().amax(-1, keepdim=True))
    assert isinstance(data, TensorDict)
