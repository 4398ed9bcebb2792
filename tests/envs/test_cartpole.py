"""CartPole with a margin that is negative exactly where Gymnasium terminates."""

from __future__ import annotations

import math

import pytest
import torch

from torchrl_safety.envs import CartPoleEnv
from torchrl_safety.envs.cartpole import cartpole_safety_margin


def test_the_margin_is_negative_exactly_where_gymnasium_terminates():
    # With "env", the margin has no part in the end.
    env = CartPoleEnv(8, problem="avoid", end_criterion="env", seed=0)
    data = env.rollout(400, break_when_any_done=False)["next"]
    assert torch.equal(data["safety_margin"] < 0, data["terminated"])
    assert data["terminated"].sum() > 50
    assert data["safety_margin"].max() <= 1


@pytest.mark.parametrize(
    ("x", "degrees", "margin"),
    [(0.0, 0.0, 1.0), (2.4, 0.0, 0.0), (-1.2, 0.0, 0.5), (0.0, -12.0, 0.0), (1.2, 9.0, 0.25), (-3.6, 0.0, -0.5)],
)
def test_the_margin_is_the_smaller_share_left(x, degrees, margin):
    state = [x, 5.0, math.radians(degrees), -5.0]
    assert cartpole_safety_margin(None, state, {}) == pytest.approx(margin, abs=1e-12)


def test_a_problem_brings_its_margin():
    assert set(CartPoleEnv().observation_spec.keys()) == {"observation"}
    assert set(CartPoleEnv(problem="avoid").observation_spec.keys()) == {"observation", "safety_margin"}
    with pytest.raises(ValueError, match="problem='reach_avoid' is unknown"):
        CartPoleEnv(problem="reach_avoid")
