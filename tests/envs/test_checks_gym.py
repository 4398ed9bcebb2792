"""Each way of wiring a Gymnasium environment wrongly has its own sentence."""

from __future__ import annotations

import warnings

import gymnasium
import numpy as np
import pytest
from checked_envs import AutoReset, Flags, Margins, gym_faults, the_fault
from gym_envs import MARGINS, GymDoubleIntegrator, wrap
from torchrl.data import Unbounded
from torchrl.envs import (
    ClipTransform,
    FrameSkipTransform,
    GymWrapper,
    RenameTransform,
    RewardClipping,
    RewardScaling,
    RewardSum,
    TransformedEnv,
    UnsqueezeTransform,
    VecNormV2,
    default_info_dict_reader,
)

from torchrl_safety.envs.checks import safety_env_faults

ENTRIES = [
    (float, "env.reset() raises AttributeError, 'float' object has no attribute 'dtype': an info entry is a plain"),
    (np.float32, "'l_x' has shape [], its spec [1], at reset and after a step: emit np.array([value], np.float32)"),
    (
        lambda value: np.array([value]),
        "'l_x' has dtype torch.float64, its spec torch.float32, at reset and after a step: emit np.array([value]",
    ),
    (
        lambda value: np.array([np.nan], np.float32),
        "'l_x' is NaN or infinite in 3 of 3 entries at reset: make it finite",
    ),
    (lambda value: np.zeros(1, np.float32), "'l_x' is exactly 0 at reset and after a step, as what info lacks is"),
]


@pytest.mark.parametrize(("entry", "sentence"), ENTRIES)
def test_a_margin_that_info_holds_in_the_wrong_form_is_named_with_its_remedy(entry, sentence):
    faults = gym_faults(Margins(entry))
    if "NaN" in sentence:
        assert faults.pop().startswith("'l_x' is NaN or infinite in 100 of 100 entries after a step")
    assert the_fault(faults).startswith(sentence)


def test_a_margin_missing_at_reset_is_named_with_or_without_a_spec_for_it():
    late = {"entry": lambda value: np.array([value], np.float32), "at_reset": False}
    sentence = "'l_x' is exactly 0 at reset, as what info lacks is: emit it there under this name"
    assert the_fault(gym_faults(Margins(**late))) == sentence
    env = GymWrapper(Margins(**late), categorical_action_encoding=True).auto_register_info_dict()
    assert the_fault(safety_env_faults(env, **MARGINS)) == sentence


def test_an_indicator_that_is_0_at_the_start_and_mostly_later_is_a_margin():
    class Indicator(GymDoubleIntegrator):
        def info(self):
            return {"l_x": np.array([-float(self.steps % 3 == 2)], np.float32)}

    assert gym_faults(Indicator()) == []


def test_a_margin_without_a_trailing_dimension_is_named_once_though_spec_and_data_agree():
    env = GymWrapper(Margins(np.float32), categorical_action_encoding=True)
    env.set_info_dict_reader(default_info_dict_reader(["l_x"]))
    fault = the_fault(safety_env_faults(env, **MARGINS))
    assert fault.startswith("the spec of 'l_x' has shape [], not [1]: give the margin a trailing dimension")
    fixed = TransformedEnv(env, UnsqueezeTransform(-1, in_keys=["l_x"], out_keys=["l_x"]))
    assert safety_env_faults(fixed, **MARGINS) == []


class AutoResetToOneStart(AutoReset):
    def reset(self, **settings):
        super().reset(**settings)
        self.state = np.array([0.3, 0.2])
        return self.observation(), self.info()


def test_the_observation_of_a_reset_in_place_of_the_last_one_is_named():
    assert the_fault(gym_faults(AutoReset(max_steps=10))).startswith("the next observation leaps at truncations, ")
    fault = the_fault(gym_faults(AutoResetToOneStart(max_steps=10)))
    assert fault.startswith("the next observation is that of the following reset at all 10 ends of episodes: hand back")


def test_an_environment_that_goes_on_after_a_failure_is_named_unless_it_is_meant_to():
    core = Flags(lambda terminated, truncated: (False, truncated))
    fault = the_fault(gym_faults(core))
    assert fault.startswith("('next', 'terminated') is False in ")
    assert "steps with 'reward' < 0: terminate there, or pass end_criterion='timeout'" in fault
    assert gym_faults(core, end_criterion="timeout") == []
    fault = the_fault(gym_faults(GymDoubleIntegrator(), end_criterion="timeout"))
    assert fault.startswith("('next', 'terminated') is True in ")


def test_an_environment_that_goes_on_after_its_target_is_named_under_the_reach_avoid_criterion():
    fault = the_fault(gym_faults(GymDoubleIntegrator(target_radius=1.0), end_criterion="reach_avoid"))
    assert "steps with 'reward' < 0 or 'l_x' >= 0: terminate there" in fault


def test_terminations_reported_as_truncations_too_are_named():
    fault = the_fault(gym_faults(Flags(lambda terminated, truncated: (terminated or truncated,) * 2)))
    assert fault.startswith("('next', 'truncated') equals ('next', 'terminated') in all ")


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        (lambda: RewardScaling(0.0, 0.5), "RewardScaling"),
        (lambda: RewardClipping(-0.5, 0.5), "RewardClipping"),
        (lambda: RewardSum(in_keys=["reward"], out_keys=["reward"]), "RewardSum"),
        (lambda: VecNormV2(in_keys=["reward"]), "VecNormV2"),
    ],
)
def test_a_normaliser_of_a_reward_that_is_a_margin_is_named(transform, name):
    env = TransformedEnv(wrap(GymDoubleIntegrator()), transform())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        faults = safety_env_faults(env, **MARGINS, end_criterion="timeout")
    assert [fault for fault in faults if "criterion" not in fault] == [
        f"{name} changes 'reward': take the key out of its in_keys, a margin must keep its zero and scale"
    ]


def test_a_normaliser_is_found_within_other_transforms_and_under_another_name():
    env = TransformedEnv(wrap(GymDoubleIntegrator()), RewardScaling(0.0, 0.5))
    env = TransformedEnv(env, RenameTransform(["reward"], ["g"]), auto_unwrap=False)
    env.append_transform(ClipTransform(in_keys=["l_x"], low=-0.1, high=0.1))
    faults = safety_env_faults(env, safety_margin="g", target_margin="l_x")
    assert [fault.split(":")[0] for fault in faults] == ["RewardScaling changes 'g'", "ClipTransform changes 'l_x'"]


def test_what_gymnasium_itself_does_to_a_reward_that_is_a_margin_is_named():
    core = gymnasium.wrappers.NormalizeReward(GymDoubleIntegrator())
    fault = the_fault(gym_faults(core))
    assert fault.startswith("NormalizeReward changes 'reward', which is the reward")
    sentence = "frame_skip=3 adds up 'reward', which is the reward, over frames"
    assert the_fault(safety_env_faults(wrap(GymDoubleIntegrator(), frame_skip=3), **MARGINS)).startswith(sentence)
    skipping = TransformedEnv(wrap(GymDoubleIntegrator()), FrameSkipTransform(3))
    assert any(fault.startswith(sentence) for fault in safety_env_faults(skipping, **MARGINS))


def test_one_hot_actions_are_named():
    env = GymWrapper(GymDoubleIntegrator(), categorical_action_encoding=False)
    env.set_info_dict_reader(default_info_dict_reader(["l_x"], spec=[Unbounded((1,))]))
    assert the_fault(safety_env_faults(env, **MARGINS)).startswith("the spec of 'action' is OneHot, in which tied")


def test_a_margin_that_no_spec_has_is_named_with_what_there_is():
    env = wrap(GymDoubleIntegrator())
    fault = the_fault(safety_env_faults(env, target_margin="l_x"))
    assert fault.startswith(
        "safety_margin='safety_margin' is in no observation or reward spec, which hold ['l_x', 'observation', 'reward']"
    )
