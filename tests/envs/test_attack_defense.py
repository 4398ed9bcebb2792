"""The two cars of attack and defence: independence, margins by plain geometry, and play with known outcomes."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_safety.envs import AttackDefenseEnv, DubinsCarEnv


def make(num_envs: int = 1, **settings) -> AttackDefenseEnv:
    return AttackDefenseEnv(num_envs, **{"seed": 0, "dtype": torch.float64, **settings})


def play(env: AttackDefenseEnv, state: Tensor, attacker, defender, steps: int = 200) -> tuple[Tensor, Tensor]:
    """Whether the attacker failed, and whether it reached the target before, bool `[*B]`; both turn by functions."""
    failed, reached = env.safety_margin(state) < 0, torch.zeros(*state.shape[:-1], 1, dtype=torch.bool)
    for _ in range(steps):
        reached |= (env.target_margin(state) >= 0) & ~failed
        state = env.dynamics(state, attacker(state), defender(state))
        failed |= (env.safety_margin(state) < 0) & ~reached
    return failed[..., 0], reached[..., 0]


def straight(state: Tensor) -> Tensor:
    return torch.zeros_like(state[..., :1])


def around(state: Tensor) -> Tensor:
    """Clockwise about the origin, at a distance of .75."""
    return torch.full_like(state[..., :1], -1.0)


def test_each_car_moves_as_if_it_were_alone():
    env = make(discrete=False)
    alone = DubinsCarEnv(speed=0.75, turning_radius=0.25, dtype=torch.float64, discrete=False)
    states = env.sample_states(100, torch.Generator().manual_seed(0))
    u, d = (6 * torch.rand(2, 100, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 3).unbind(0)
    moved = env.dynamics(states, u, d)
    torch.testing.assert_close(moved[:, :3], alone.dynamics(states[:, :3], u))
    torch.testing.assert_close(moved[:, 3:], alone.dynamics(states[:, 3:], d))
    assert env.full_action_spec["action"].space.high.max() == pytest.approx(3.0)


@pytest.mark.parametrize("defender_stays", [False, True])
def test_margins_are_distances_between_points_and_circles(defender_stays):
    env = make(defender_stays=defender_stays)
    states = env.sample_states(500, torch.Generator().manual_seed(0))
    for row, g, l in zip(states.tolist(), env.safety_margin(states), env.target_margin(states)):  # noqa: E741
        attacker, defender = row[:2], row[3:5]
        centre, between = math.hypot(*attacker), math.dist(attacker, defender)
        assert g.item() == pytest.approx(min(1 - centre, between - 0.25))
        outside = math.hypot(*defender) - 1
        assert l.item() == pytest.approx(max(0.5 - centre, outside) if defender_stays else 0.5 - centre)


def test_a_rotation_of_the_plane_changes_nothing():
    env = make(discrete=False)
    states = env.sample_states(100, torch.Generator().manual_seed(0))
    u, d = (6 * torch.rand(2, 100, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 3).unbind(0)

    def rotate(state: Tensor) -> Tensor:
        cosine, sine = math.cos(0.7), math.sin(0.7)
        x, y, angle, *defender = state.unbind(-1)
        cars = [(x, y, angle), tuple(defender)]
        return torch.stack([e for x, y, a in cars for e in (cosine * x - sine * y, sine * x + cosine * y, a + 0.7)], -1)

    turned, expected = env.dynamics(rotate(states), u, d), rotate(env.dynamics(states, u, d))
    places = [0, 1, 3, 4]
    torch.testing.assert_close(turned[:, places], expected[:, places], atol=1e-12, rtol=0)
    for margin in (env.safety_margin, env.target_margin):
        torch.testing.assert_close(margin(turned), margin(expected), atol=1e-12, rtol=0)


def test_straight_drives_end_as_geometry_says():
    env = make(dt=0.01)
    states = torch.tensor(
        [
            [-0.9, 0.0, 0.0, 0.9, 0.9, 0.0],  # a free way to the target
            [-0.9, 0.0, math.pi, 0.9, 0.9, 0.0],  # out of the disc
            [-0.9, 0.0, 0.0, -0.2, 0.0, math.pi],  # head-on: they meet at -.55, closer than .25 already at -.675
            [-0.9, 0.3, 0.0, -0.2, 0.9, math.pi],  # passing at a distance of .6, entering at x = -.4
        ],
        dtype=torch.float64,
    )
    failed, reached = play(env, states, straight, straight, steps=100)
    assert failed.tolist() == [False, True, True, False]
    assert reached.tolist() == [True, False, False, True]


def test_a_defender_that_leaves_has_lost_only_if_it_has_to_stay():
    state = torch.tensor([[-0.75, 0.0, math.pi / 2, 0.9, 0.0, 0.0]], dtype=torch.float64)
    outcomes = [play(make(defender_stays=stays), state, around, straight)[1].item() for stays in (False, True)]
    assert outcomes == [False, True]
    failed, _ = play(make(), state, around, straight)
    assert not failed


def test_an_episode_ends_at_capture_and_at_the_target():
    env = make(2, end_criterion="reach_avoid", max_steps=100)
    states = torch.tensor([[-0.51, 0, 0, 0.9, 0.9, 0], [-0.9, 0, 0, -0.64, 0, math.pi]], dtype=torch.float64)
    state = env.reset(TensorDict({"observation": states}, [2]))
    straight_on = {player: env.zero_action(player) for player in ("action", "disturbance")}
    following = env.step(state.update(straight_on))["next"]
    assert following["terminated"].flatten().tolist() == [True, True]
    assert (following["target_margin"] >= 0).flatten().tolist() == [True, False]
    assert following["reward"].flatten().tolist() == [0, -1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dt": 0.0}, "dt=0.0 must be positive and finite"),
        ({"capture_radius": -0.1}, "capture_radius=-0.1 must be positive"),
        ({"turning_radius": 0.0}, "turning_radius=0.0 must be positive"),
        ({"target_radius": 1.0}, r"target_radius=1.0 must lie in \(0, constraint_radius=1.0\)"),
        ({"start_high": (0.0, 0.0, 0.0)}, r"must be finite \(x, y, θ, x, y, θ\) with low <= high"),
    ],
)
def test_wrong_settings_are_named_with_their_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)
