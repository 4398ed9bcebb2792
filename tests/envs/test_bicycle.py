"""The car among boxes: gaps of rectangles by convex hulls, stops, the track, and drives with known outcomes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.spatial import ConvexHull
from torch import Tensor

from torchrl_safety.envs import BicycleEnv


def make(num_envs: int = 1, **settings) -> BicycleEnv:
    return BicycleEnv(num_envs, **{"seed": 0, "discrete": False, "dtype": torch.float64, **settings})


def body(state: np.ndarray) -> np.ndarray:
    """The corners `[4, 2]` of the car, from its rear axle .5 ahead and .1 to either side."""
    x, y, _, heading, _ = state
    ahead, aside = np.array([math.cos(heading), math.sin(heading)]), np.array([-math.sin(heading), math.cos(heading)])
    return np.array([(x, y) + far * ahead + side * aside for far in (0, 0.5) for side in (-0.1, 0.1)])


def hull_gap(first: np.ndarray, second: np.ndarray) -> float:
    """The largest gap along a normal of a side: that from the origin to a facet of the Minkowski difference."""
    differences = (first[:, None] - second[None]).reshape(-1, 2)
    return float(ConvexHull(differences).equations[:, -1].max())


def rectangle(box) -> np.ndarray:
    x, y, half_length, half_width = box
    return np.array([(x + i * half_length, y + j * half_width) for i in (-1, 1) for j in (-1, 1)])


BOXES = ((2, -0.4), (5, 0.4), (8, 0.1), (11, -0.1), (14, -0.4), (14, 0.4))


def test_the_margin_is_the_least_gap_to_walls_and_boxes():
    env = make()
    states = env.sample_states(400, torch.Generator().manual_seed(0))
    for state, g in zip(states.numpy(), env.safety_margin(states).numpy()[:, 0]):
        corners = body(state)
        walls = 0.6 - np.abs(corners[:, 1]).max()
        boxes = min(hull_gap(corners, rectangle((x, y, 0.25, 0.1))) for x, y in BOXES)
        assert g == pytest.approx(min(walls, boxes), abs=1e-9)
    signs = env.safety_margin(states) >= 0
    assert 0.3 < signs.double().mean() < 0.8


def test_a_car_touches_a_box_exactly_where_the_margin_is_negative():
    env = make(half_width=100.0, boxes=[(1.0, 0.3, 0.25, 0.1)])
    unit = torch.rand(300, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    states = unit * torch.tensor([2.0, 1.6, 1, math.tau, 0]) - torch.tensor([0.0, 0.5, 0, math.pi, 0])
    fraction = torch.linspace(0, 1, 41, dtype=torch.float64)
    far, side = (part.flatten() for part in torch.meshgrid(0.5 * fraction, 0.2 * fraction - 0.1, indexing="ij"))
    touching = []
    for x, y, _, heading, _ in states.tolist():
        px, py = (
            x + far * math.cos(heading) - side * math.sin(heading),
            y + far * math.sin(heading) + side * math.cos(heading),
        )
        touching.append(bool((((px - 1).abs() <= 0.25) & ((py - 0.3).abs() <= 0.1)).any()))
    g = env.safety_margin(states)[:, 0]
    clear = g.abs() > 0.01  # the points of the body are .0125 apart
    assert torch.equal((g < 0)[clear], torch.tensor(touching)[clear])
    assert 20 < sum(touching) < 280


def test_margins_change_no_faster_than_the_car_moves():
    env = make()
    states = env.sample_states(2000, torch.Generator().manual_seed(0))
    shift = 0.01 * torch.randn(2000, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    moved = torch.cat((states[:, :2] + shift, states[:, 2:]), -1)
    change = (env.safety_margin(moved) - env.safety_margin(states))[:, 0].abs()
    assert (change <= shift.norm(dim=-1) + 1e-12).all()


def test_speed_and_steering_meet_their_stops_at_the_end_of_the_step():
    env = make()
    state = torch.tensor([[0.0, 0.0, 1.9, 0.1, 0.3]], dtype=torch.float64)
    control = torch.tensor([[3.5, 5.0]], dtype=torch.float64)
    push = torch.tensor([[0.02, -0.03, 0.1, 0.05, 0.1]], dtype=torch.float64)

    def slope(_, s):  # .1 m/s and .05 rad are left in .1 s
        _, _, v, heading, steering = s
        turn = v * math.tan(steering) / 0.257 + 0.05
        return [v * math.cos(heading) + 0.02, v * math.sin(heading) - 0.03, 1.0, turn, 0.5]

    expected = solve_ivp(slope, (0, 0.1), state[0].numpy(), rtol=1e-10, atol=1e-12).y[:, -1]
    got = env.dynamics(state, control, push)[0]
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-5)
    assert got[2] == 2.0
    assert got[4] == 0.35
    for _ in range(20):
        state = env.dynamics(state, -control, -push)
    assert state[0, 2] == 0.4
    assert state[0, 4] == -0.35


def test_a_held_steering_angle_drives_a_circle_of_the_bicycles_radius():
    env = make(dt=0.02)
    state = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.2]], dtype=torch.float64)
    radius = 0.257 / math.tan(0.2)
    for _ in range(150):
        state = env.dynamics(state, torch.zeros(1, 2, dtype=torch.float64))
        assert math.hypot(state[0, 0].item(), state[0, 1].item() - radius) == pytest.approx(radius, abs=1e-6)
    assert state[0, 3].item() == pytest.approx(math.remainder(3.0 / radius, math.tau), abs=1e-6)


def steer_along(env: BicycleEnv, lane: list[tuple[float, float]], state: Tensor) -> Tensor:
    """Keeps the speed at 1 m/s and turns towards the line through these points, .4 m ahead of the car."""
    x, y, v, heading, steering = state.unbind(-1)
    ahead = np.interp((x + 0.4).numpy(), *zip(*lane))
    bearing = torch.atan2(torch.as_tensor(ahead) - y, torch.full_like(x, 0.4)) - heading
    wanted = torch.atan(2 * 0.257 * bearing.sin() / 0.4).clamp(-0.35, 0.35)
    return torch.stack(((1.0 - v) / env.dt, (wanted - steering) / env.dt), -1).clamp(
        torch.tensor([-3.5, -5.0]), torch.tensor([3.5, 5.0])
    )


LANE = [
    (0, 0),
    (1.4, 0.1),
    (2.6, 0.1),
    (4.2, 0),
    (5.8, 0),
    (7.2, -0.25),
    (9, -0.25),
    (10.2, 0.25),
    (12, 0.25),
    (13.2, 0),
]


def test_the_track_can_be_driven_to_its_end_and_not_with_the_hands_off():
    env = make(problem="reach_avoid")
    state = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    worst, straight = env.safety_margin(state), state
    worst_straight = worst
    for _ in range(210):
        state = env.dynamics(state, steer_along(env, LANE, state))
        straight = env.dynamics(straight, torch.zeros(1, 2, dtype=torch.float64))
        worst = torch.minimum(worst, env.safety_margin(state))
        worst_straight = torch.minimum(worst_straight, env.safety_margin(straight))
    assert worst > 0.03
    assert env.target_margin(state) >= 0
    assert worst_straight < 0  # the third box lies across the middle


def test_a_car_that_drives_along_the_road_cannot_turn_round():
    env = make(boxes=[])
    # On the way from heading 0 to ψ it moves R (1 - cos ψ) to the side at least, R = L / tan δ.
    limit = math.acos(1 - 1.2 * math.tan(0.35) / 0.257)
    state, alive = torch.zeros(2000, 5, dtype=torch.float64), torch.ones(2000, dtype=torch.bool)
    state[:, 1], state[:, 2] = torch.linspace(-0.5, 0.5, 2000), 0.4
    switch, farthest = torch.arange(2000) % 40, 0.0
    for step in range(80):  # to the right until some time, then to the left
        rate = torch.where(step < switch, -5.0, 5.0).double()
        state = env.dynamics(state, torch.stack((torch.zeros_like(rate), rate), -1))
        alive &= env.safety_margin(state)[:, 0] >= 0
        farthest = max([farthest, *state[alive, 3].abs().tolist()])
    assert 1.3 < farthest < limit < 2.4


def test_a_disturbance_of_none_leaves_its_key_out():
    env = make(max_disturbance=0.0)
    assert set(env.full_action_spec.keys()) == {"action"}
    assert "disturbance" not in env.rollout(2).keys()  # noqa: SIM118


def test_discrete_disturbances_are_none_and_the_corners_of_the_cube():
    env = make(discrete=True, max_disturbance=0.4)
    assert (env.full_action_spec["action"].n, env.full_action_spec["disturbance"].n) == (9, 33)
    table = env.control(torch.arange(33), "disturbance")
    assert not table[0].any()
    assert torch.equal(table[1:].abs(), torch.full((32, 5), 0.4, dtype=torch.float64))
    assert len(table.unique(dim=0)) == 33


def test_a_road_without_boxes_has_only_walls():
    env = make(boxes=())
    states = torch.tensor([[50.0, 0.2, 1.0, 0.0, 0.0], [3.0, 0.0, 1.0, math.pi / 2, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(env.safety_margin(states)[:, 0], torch.tensor([0.3, 0.1]).double())
    assert env._start_high[0] == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dt": 0.0}, "dt=0.0 must be positive and finite"),
        ({"wheelbase": -1.0}, "wheelbase=-1.0 must be positive"),
        ({"max_disturbance": -0.1}, "max_disturbance=-0.1 must be finite and at least 0"),
        ({"min_speed": 2.0}, "min_speed=2.0 and max_speed=2.0 must be finite with 0 <= min_speed < max_speed"),
        ({"max_steering": 1.6}, r"max_steering=1.6 must lie in \(0, π/2\)"),
        ({"finish": math.nan}, "finish=nan must be finite"),
        ({"boxes": [(1.0, 0.0, 0.2)]}, r"boxes=.* must be finite rows \(x, y, half length, half width\)"),
        ({"boxes": [(1.0, 0.0, 0.2, 0.0)]}, "with positive halves"),
        ({"start_low": (0.0,) * 4}, r"must be finite \(x, y, v, ψ, δ\) with low <= high"),
    ],
)
def test_wrong_settings_are_named_with_their_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)
