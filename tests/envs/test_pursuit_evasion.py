"""The pursuit in relative coordinates against two cars in the plane, and against a grid solution and its barrier."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from pursuit_grid import HORIZON, PursuitGrid, barrier
from torch import Tensor

from torchrl_safety.envs import PursuitEvasionEnv
from torchrl_safety.envs.motion import arc_step

Strategy = Callable[[Tensor, Tensor], Tensor]
"""A turn rate `[*B, 1]` of the state `[*B, 3]` and of the optimal turn rate there."""


def make(num_envs: int = 1, **settings) -> PursuitEvasionEnv:
    return PursuitEvasionEnv(num_envs, **{"seed": 0, "discrete": False, "dtype": torch.float64, **settings})


@pytest.fixture(scope="module")
def grid() -> PursuitGrid:
    return PursuitGrid()


def states_of(grid: PursuitGrid, n: int, seed: int = 0) -> Tensor:
    unit = torch.rand(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return grid.low + unit * (grid.high - grid.low)


def optimal(state: Tensor, turn_rate: Tensor) -> Tensor:
    return turn_rate


def worst_margin(
    env: PursuitEvasionEnv, grid: PursuitGrid, state: Tensor, evader: Strategy = optimal, pursuer: Strategy = optimal
) -> Tensor:
    """The least safety margin `[*B]` within the horizon of the grid."""
    worst = env.safety_margin(state)
    for _ in range(round(HORIZON / env.dt)):
        best, harshest = grid.controls(state)
        state = env.dynamics(state, evader(state, best), pursuer(state, harshest))
        worst = torch.minimum(worst, env.safety_margin(state))
    return worst[..., 0]


def aim(state: Tensor, turn_rate: Tensor) -> Tensor:
    """The pursuer turns to where the evader is."""
    x, y, heading = state.split(1, dim=-1)
    bearing = torch.atan2(-y, -x) - heading
    return (10 * torch.atan2(bearing.sin(), bearing.cos())).clamp(-1, 1)


def at_random(state: Tensor, turn_rate: Tensor) -> Tensor:
    return 2 * torch.rand(turn_rate.shape, generator=torch.Generator().manual_seed(1), dtype=state.dtype) - 1


STRATEGIES: dict[str, Strategy] = {
    "left": lambda state, turn_rate: torch.ones_like(turn_rate),
    "right": lambda state, turn_rate: -torch.ones_like(turn_rate),
    "straight": lambda state, turn_rate: torch.zeros_like(turn_rate),
    "random": at_random,
    "the opposite of the best": lambda state, turn_rate: -turn_rate,
}


def test_what_the_evader_sees_is_the_relative_pose_of_two_cars():
    env = make(dt=0.2, speed=3.0, max_turn_rate=1.5)
    generator = torch.Generator().manual_seed(0)
    evader, pursuer = (4 * torch.rand(2, 50, 3, generator=generator, dtype=torch.float64) - 2).unbind(0)

    def seen(evader: Tensor, pursuer: Tensor) -> Tensor:
        away, angle = torch.view_as_complex((pursuer - evader)[:, :2].contiguous()), evader[:, 2]
        turned = away * torch.polar(torch.ones_like(angle), -angle)
        return torch.stack((turned.real, turned.imag, pursuer[:, 2] - evader[:, 2]), -1)

    state = seen(evader, pursuer)
    for _ in range(30):
        u, d = (3 * torch.rand(2, 50, 1, generator=generator, dtype=torch.float64) - 1.5).unbind(0)
        evader, pursuer = (arc_step(car, rate, speed=3.0, dt=0.2) for car, rate in ((evader, u), (pursuer, d)))
        state = env.dynamics(state, u, d)
        expected = seen(evader, pursuer)
        torch.testing.assert_close(state[:, :2], expected[:, :2], atol=1e-9, rtol=0)
        torch.testing.assert_close((state - expected)[:, 2].cos(), torch.ones(50).double(), atol=1e-12, rtol=0)
        assert ((state[:, 2] >= -math.pi) & (state[:, 2] < math.pi)).all()
        apart = (evader - pursuer)[:, :2].norm(dim=-1)
        torch.testing.assert_close(env.safety_margin(state)[:, 0], apart - 5)
        torch.testing.assert_close(env.target_margin(state)[:, 0], apart - 10)


def test_lengths_scale_with_the_radius_and_times_with_the_turn_rate():
    large, small = make(), make(speed=0.75, max_turn_rate=3.0, capture_radius=0.25, dt=0.05 / 3)
    scale = torch.tensor([0.05, 0.05, 1.0], dtype=torch.float64)
    states = large.sample_states(200, torch.Generator().manual_seed(0))
    torch.testing.assert_close(small._start_low, large._start_low * scale)
    u, d = (2 * torch.rand(2, 200, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 1).unbind(0)
    moved = small.dynamics(states * scale, 3 * u, 3 * d)
    torch.testing.assert_close(moved, large.dynamics(states, u, d) * scale, atol=1e-12, rtol=0)
    torch.testing.assert_close(small.safety_margin(moved), 0.05 * large.safety_margin(large.dynamics(states, u, d)))


def test_the_sign_of_the_grid_is_the_outcome_of_optimal_play(grid):
    states = states_of(grid, 3000)
    value, outcome = grid(states)[:, 0], worst_margin(make(), grid, states)
    wrong = (outcome >= 0) != (value >= 0)
    assert 0.2 < (value < 0).double().mean() < 0.4
    assert wrong.double().mean() < 0.004
    assert value[wrong].abs().max() < 0.5  # the grid's spacing is .43 in x


@pytest.mark.parametrize("name", [*STRATEGIES, "aim"])
def test_no_pursuer_captures_whom_the_grid_calls_safe(grid, name):
    states = states_of(grid, 2000, seed=1)
    states = states[grid(states)[:, 0] > 0.3]
    outcome = worst_margin(make(), grid, states, pursuer={**STRATEGIES, "aim": aim}[name])
    assert len(states) > 1000
    assert (outcome >= 0).all()


@pytest.mark.parametrize("name", STRATEGIES)
def test_hardly_an_evader_escapes_where_the_grid_says_captured(grid, name):
    states = states_of(grid, 2000, seed=2)
    states = states[grid(states)[:, 0] < -0.3]
    outcome = worst_margin(make(), grid, states, evader=STRATEGIES[name])
    assert len(states) > 300
    assert (outcome >= 0).double().mean() < 0.01  # a gradient read off a grid has kinks smoothed away


def test_points_of_the_barrier_separate_the_captured_from_the_safe(grid):
    points = barrier()
    assert len(points) > 1000
    normal = torch.nn.functional.normalize(grid(points)[:, 1:], dim=-1)
    env = make(dt=0.02)
    assert (worst_margin(env, grid, points + 0.1 * normal) >= 0).all()
    assert (worst_margin(env, grid, points - 0.1 * normal) < 0).all()


def test_discrete_turns_play_the_same_game(grid):
    env = make(500, discrete=True, end_criterion="timeout", dtype=torch.float32, dt=0.1)
    states = states_of(grid, 500, seed=3)
    tensordict = env.reset(env.reset().select("observation").set("observation", states.float()))
    worst = tensordict["safety_margin"]
    for _ in range(28):
        turns = [rate.sign().long().squeeze(-1) + 1 for rate in grid.controls(tensordict["observation"].double())]
        _, tensordict = env.step_and_maybe_reset(tensordict.update({"action": turns[0], "disturbance": turns[1]}))
        worst = torch.minimum(worst, tensordict["safety_margin"])
    clear = grid(states)[:, 0].abs() > 0.4
    assert torch.equal((worst[:, 0] >= 0)[clear], (grid(states)[:, 0] >= 0)[clear])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dt": 0.0}, "dt=0.0 must be positive and finite"),
        ({"speed": -1.0}, "speed=-1.0 must be positive"),
        ({"max_turn_rate": math.inf}, "max_turn_rate=inf must be positive and finite"),
        ({"capture_radius": 0.0}, "capture_radius=0.0 must be positive"),
        ({"escape_radius": 5.0}, "escape_radius=5.0 must be finite and above capture_radius=5.0"),
        ({"start_low": (0.0, 0.0)}, r"must be finite \(x, y, ψ\) with low <= high"),
        ({"problem": "reach"}, "problem='reach' is unknown"),
    ],
)
def test_wrong_settings_are_named_with_their_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)
