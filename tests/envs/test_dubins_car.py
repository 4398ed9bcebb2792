"""The Dubins car's arcs, and its exact values against roll-outs, open-loop search and value iteration."""

import itertools
import math

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.envs.utils import check_env_specs

from torchrl_safety.envs import DoubleIntegratorEnv, DubinsCarEnv, NativeEnv

# Type I: a car that comes back along the wall reaches the target. Type II: it circles around the target.
TYPE_I = {"problem": "reach_avoid"}
AGILE = {"problem": "reach_avoid", "turning_radius": 0.3, "target_radius": 0.2}
TYPE_II = {"problem": "reach_avoid", "turning_radius": 0.8}
CLUMSY = {"problem": "reach_avoid", "turning_radius": 1.3, "target_radius": 0.4}
REACH_AVOID = [TYPE_I, AGILE, TYPE_II, CLUMSY]
AVOID = [{}, {"turning_radius": 0.3}, {"turning_radius": 1.5, "obstacle_radius": 0.3}]


def make(num_envs: int = 4, **settings) -> DubinsCarEnv:
    return DubinsCarEnv(num_envs, **{"seed": 0, "dtype": torch.float64, **settings})


def start(env: DubinsCarEnv, states) -> TensorDict:
    states = torch.as_tensor(states, dtype=env.dtype)
    return env.reset(TensorDict({"observation": states}, [len(states)]))


def box(n: int, reach: float = 1.2) -> Tensor:
    unit = torch.rand(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (2 * unit - 1) * torch.tensor([reach, reach, math.pi], dtype=torch.float64)


def body_frame(state: Tensor) -> tuple[Tensor, Tensor]:
    """How far the car is ahead of the origin, and to the left of it, as the driver sees it."""
    x, y, heading = state.unbind(-1)
    return x * heading.cos() + y * heading.sin(), y * heading.cos() - x * heading.sin()


def turn_from_the_obstacle(env: DubinsCarEnv, state: Tensor) -> Tensor:
    ahead, left = body_frame(state)
    away = torch.where(left >= 0, 1.0, -1.0)
    return torch.where(ahead >= 0, 0.0, away)[..., None].double() * env.speed / env.turning_radius


def drive_to_the_target(env: DubinsCarEnv, state: Tensor) -> Tensor:
    """Straight at a target ahead; else a tight turn to its side, as soon as that does not circle around it."""
    ahead, left = body_frame(state)
    radius, target = env.turning_radius, env.target_radius
    hits_by_turning = torch.hypot(ahead, left.abs() - radius) >= radius - target
    straight = torch.where(ahead < 0, left.abs() < 0.98 * target, False) | ~hits_by_turning
    towards = torch.where(left >= 0, -1.0, 1.0)
    return torch.where(straight, 0.0, towards)[..., None].double() * env.speed / radius


def open_loop_plans(env: DubinsCarEnv, steps: int, every: int) -> Tensor:
    """`[plans, steps, 1]`: every sequence of three held turn rates with switches at multiples of `every`, and noise."""
    rates = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    time, plans = torch.arange(steps), []
    for first, second in itertools.combinations(range(0, steps, every), 2):
        for values in itertools.product(rates, repeat=3):
            plans.append(torch.where(time < first, values[0], torch.where(time < second, values[1], values[2])))
    noise = 2 * torch.rand(200, steps, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 1
    return torch.cat((torch.stack(plans), noise, noise.sign())).unsqueeze(-1) * env.speed / env.turning_radius


@pytest.mark.parametrize("discrete", [True, False])
def test_one_step_equals_a_fine_integration(discrete):
    env = make(9, dt=0.7, speed=0.8, turning_radius=0.4, discrete=discrete)  # turns by 1.4 rad
    states, choice = box(9), torch.arange(3).repeat(3)
    rate = (choice - 1.0).double() * 2
    got = env.step(start(env, states).set("action", choice if discrete else rate[:, None]))["next", "observation"]
    x, y, heading = states.unbind(-1)
    for k in range(20_000):  # midpoint rule
        direction = heading + rate * 0.7 * (k + 0.5) / 20_000
        x, y = x + 0.8 * 0.7 / 20_000 * direction.cos(), y + 0.8 * 0.7 / 20_000 * direction.sin()
    torch.testing.assert_close(got[:, :2], torch.stack((x, y), -1), atol=1e-9, rtol=0)
    error = got[:, 2] - (heading + 0.7 * rate)
    torch.testing.assert_close(error, math.tau * (error / math.tau).round(), atol=1e-12, rtol=0)
    assert ((got[:, 2] >= -math.pi) & (got[:, 2] < math.pi)).all()


def test_a_full_circle_of_any_number_of_steps_returns():
    states = box(50)
    for steps, side in itertools.product((1, 2, 7, 100), (-1, 1)):
        env = make(dt=math.tau * 0.6 / 0.5 / steps)
        state = states
        for _ in range(steps):
            state = env.dynamics(state, torch.full((50, 1), side * 0.5 / 0.6, dtype=torch.float64))
        torch.testing.assert_close(state, states, atol=1e-12, rtol=0)


def test_tiny_turn_rates_join_the_straight_line():
    env = make(dt=0.5)
    straight = env.dynamics(box(20), torch.zeros(20, 1, dtype=torch.float64))
    assert straight.isfinite().all()
    torch.testing.assert_close((straight - box(20))[:, :2].norm(dim=-1), torch.full((20,), 0.25).double())
    for rate in (1e-300, 1e-12, -1e-9):
        torch.testing.assert_close(env.dynamics(box(20), torch.tensor([[rate]]).double()), straight, atol=1e-8, rtol=0)


def test_headings_within_range_pass_unrounded_and_others_are_wrapped():
    for dtype in (torch.float32, torch.float64):
        env = make(dtype=dtype)
        states = box(100).to(dtype)
        assert torch.equal(env.dynamics(states, torch.zeros(100, 1, dtype=dtype))[:, 2], states[:, 2])
        many = states + torch.tensor([0, 0, 5 * math.tau], dtype=dtype)
        wrapped = env.dynamics(many, torch.zeros(100, 1, dtype=dtype))[:, 2]
        torch.testing.assert_close(wrapped, states[:, 2], atol=1e-5, rtol=0)
    border = torch.tensor([[0.0, 0.0, math.pi]], dtype=torch.float64)
    assert env.dynamics(border, torch.zeros(1, 1, dtype=torch.float64))[0, 2] == -math.pi
    assert env.angles == (2,)
    assert DoubleIntegratorEnv.angles == NativeEnv.angles == ()


@pytest.mark.parametrize("settings", [*AVOID, *REACH_AVOID], ids=str)
def test_rotations_and_reflections_change_neither_motion_nor_value(settings):
    env = make(**settings)
    states, rate = box(500), torch.linspace(-0.6, 0.6, 500, dtype=torch.float64)[:, None]
    moved = env.dynamics(states, rate)
    for angle in (0.3, 2.0, -1.1):
        cosine, sine = math.cos(angle), math.sin(angle)
        turn = torch.tensor([[cosine, -sine], [sine, cosine]], dtype=torch.float64)

        def rotate(state, angle=angle, turn=turn):
            return torch.cat((state[:, :2] @ turn.T, state[:, 2:] + angle), -1)

        torch.testing.assert_close(env.exact_value(rotate(states)), env.exact_value(states), atol=1e-12, rtol=0)
        there = env.dynamics(rotate(states), rate)
        torch.testing.assert_close(there[:, :2], rotate(moved)[:, :2], atol=1e-12, rtol=0)
        torch.testing.assert_close(env.exact_value(there), env.exact_value(moved), atol=1e-12, rtol=0)
    mirror = torch.tensor([1.0, -1.0, -1.0]).double()
    torch.testing.assert_close(env.exact_value(states * mirror), env.exact_value(states))
    torch.testing.assert_close(env.exact_value(env.dynamics(states * mirror, -rate)), env.exact_value(moved))


@pytest.mark.parametrize("settings", AVOID, ids=str)
def test_the_avoid_value_is_the_worst_margin_of_turning_away(settings):
    env = make(dt=0.01, **settings)
    state = states = box(2000)
    worst_margin = env.safety_margin(states)
    for _ in range(600):
        state = env.dynamics(state, turn_from_the_obstacle(env, state))
        worst_margin = torch.minimum(worst_margin, env.safety_margin(state))
    gap = worst_margin[:, 0] - env.exact_value(states)
    # Held turns are paths of the continuous car: never below its value, and above it only between two samples.
    assert gap.min() > -1e-9
    assert gap.max() < 0.01 * 0.5


@pytest.mark.parametrize("settings", AVOID, ids=str)
def test_states_in_the_avoid_set_never_fail_when_turning_away(settings):
    env = make(400, end_criterion="timeout", discrete=False, **settings)
    states = box(4000)
    tensordict = start(env, states[env.exact_value(states) > 1e-9][:400])
    for _ in range(120):
        tensordict["action"] = turn_from_the_obstacle(env, tensordict["observation"])
        _, tensordict = env.step_and_maybe_reset(tensordict)
        assert (tensordict["safety_margin"] >= 0).all()


@pytest.mark.parametrize("settings", REACH_AVOID, ids=str)
def test_states_in_the_reach_avoid_set_reach_the_target_within_the_wall(settings):
    env = make(dt=0.02, **settings)
    states = box(20_000)
    states = states[env.exact_value(states) > 0.01]
    assert (env.target_margin(states)[:, 0] < 0).sum() > 2000
    reached = env.target_margin(states) >= 0
    state, failed = states, torch.zeros_like(reached)
    for _ in range(900):
        state = env.dynamics(state, drive_to_the_target(env, state))
        failed |= (env.safety_margin(state) < 0) & ~reached
        reached |= env.target_margin(state) >= 0
    assert not failed.any()
    assert reached.all()


@pytest.mark.parametrize("settings", [*AVOID, *REACH_AVOID], ids=str)
def test_states_outside_the_set_fail_under_every_open_loop_plan(settings):
    env = make(dt=0.1, **settings)
    states = box(2000, reach=1.0)
    states = states[(env.exact_value(states) < -0.01) & (env.safety_margin(states)[:, 0] >= 0)][:40, None]
    assert len(states) == 40
    plans = open_loop_plans(env, 60, every=6)
    state = states.expand(-1, len(plans), -1)
    lost, won = (torch.zeros(*state.shape[:2], 1, dtype=torch.bool) for _ in range(2))
    for rate in plans.unbind(1):
        state = env.dynamics(state, rate.expand(len(states), -1, -1))
        lost |= env.safety_margin(state) < 0
        if env.problem == "reach_avoid":
            won |= (env.target_margin(state) >= 0) & ~lost
    assert not won.any()
    if env.problem == "avoid":
        assert lost.all()


class BodyGrid:
    """Bilinear interpolation over positions in the car's own frame: by symmetry the heading there is always 0."""

    def __init__(self, size: int, reach: float):
        self.size, self.reach = size, reach
        axis = torch.linspace(-reach, reach, size, dtype=torch.float64)
        positions = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1)
        self.states = torch.cat((positions, torch.zeros_like(positions[..., :1])), -1)

    def stencil(self, states: Tensor) -> tuple[Tensor, Tensor]:
        place = (torch.stack(body_frame(states), -1) / self.reach + 1) * (self.size - 1) / 2
        place = place.clamp(0, self.size - 1)
        corner = place.floor().clamp(0, self.size - 2)
        part, index, weight = place - corner, [], []
        for ahead, left in itertools.product((0, 1), repeat=2):
            index.append((corner[..., 0] + ahead).long() * self.size + (corner[..., 1] + left).long())
            weight.append((part[..., 0] - (1 - ahead)).abs() * (part[..., 1] - (1 - left)).abs())
        return torch.stack(index), torch.stack(weight)


def value_iteration(env: DubinsCarEnv, grid: BodyGrid, sweeps: int) -> Tensor:
    g, l = env.safety_margin(grid.states)[..., 0], env.target_margin(grid.states)[..., 0]  # noqa: E741
    stencils = [grid.stencil(env.dynamics(grid.states, rate.expand_as(g[..., None]))) for rate in env._action_table]
    value = g if env.problem == "avoid" else torch.minimum(g, l)
    for _ in range(sweeps):
        ahead = torch.stack([(value.flatten()[index] * weight).sum(0) for index, weight in stencils]).amax(0)
        value = torch.minimum(g, ahead if env.problem == "avoid" else torch.maximum(l, ahead))
    return value


@pytest.mark.parametrize("settings", [*AVOID, *REACH_AVOID], ids=str)
def test_the_exact_value_equals_undiscounted_value_iteration(settings):
    env, grid = make(dt=0.1, **settings), BodyGrid(129, 1.6)
    # Twice around a loop; with many more sweeps interpolation errors creep along closed loops, ever upwards.
    value, exact = value_iteration(env, grid, 200), env.exact_value(grid.states)
    # Cars that leave the grid before they can turn back are cut off at its edge.
    kept = (grid.states[..., :2].norm(dim=-1) <= 1) & (exact > -0.5)
    error = (value - exact)[kept].abs()
    cell = 3.2 / 128
    assert error.max() < 1.5 * cell
    assert error.mean() < 0.3 * cell
    wrong_sign = ((value >= 0) != env.exact_safe(grid.states)) & kept & (exact.abs() > 1e-9)
    assert (exact[wrong_sign].abs() < cell).all()
    assert wrong_sign.sum() < 0.01 * kept.sum()


def test_the_reach_avoid_set_is_that_of_the_published_arcs():
    x, y = torch.meshgrid(*[torch.linspace(-1.1, 1.1, 221, dtype=torch.float64)] * 2, indexing="ij")
    states = torch.stack((x, y, torch.zeros_like(x)), -1)
    distance = torch.hypot(x, y)
    centred = [torch.hypot(x, y - side) for side in (0.6, -0.6)]
    type_one = (x <= 0) | (distance <= 0.5) | (centred[0] <= 0.4) | (centred[1] <= 0.4)
    sharp = (make(**TYPE_I).exact_value(states).abs() > 1e-9) & ((distance - 1).abs() > 1e-9)
    assert torch.equal((type_one & (distance <= 1))[sharp], make(**TYPE_I).exact_safe(states)[sharp])
    centred = [torch.hypot(x, y - side) for side in (0.8, -0.8)]
    type_two = (distance <= 0.5) | ((x <= 0) & (centred[0] >= 0.3) & (centred[1] >= 0.3))
    sharp = (make(**TYPE_II).exact_value(states).abs() > 1e-9) & ((distance - 1).abs() > 1e-9)
    assert torch.equal((type_two & (distance <= 1))[sharp], make(**TYPE_II).exact_safe(states)[sharp])
    # Where the arcs meet the circles: the target (type I, outward cars), the wall (type II, inward cars).
    for settings, meeting, side in (
        (TYPE_I, ((0.5**2 - 1 + 1.2) / 1.2, 0.5), 1),
        (TYPE_II, ((1 + 0.8 - 0.25) / 1.6, 1.0), -1),
    ):
        height, radius = meeting
        corner = torch.tensor([side * math.sqrt(radius**2 - height**2), height, 0.0], dtype=torch.float64)
        assert make(**settings).exact_value(corner).item() == pytest.approx(0, abs=1e-9)


def test_the_value_is_continuous_and_cannot_exceed_the_largest_target_margin():
    for settings in [*AVOID, *REACH_AVOID]:
        env, states = make(**settings), box(20_000)
        value = env.exact_value(states)
        nearby = env.exact_value(states + 1e-4 * torch.randn(states.shape, generator=torch.Generator().manual_seed(2)))
        assert (value - nearby).abs().max() < 0.01 + 0.03 * (settings in AVOID)
        assert (value <= env.safety_margin(states)[:, 0] + 1e-12).all()
        if env.problem == "reach_avoid":
            assert (value >= torch.minimum(env.safety_margin(states), env.target_margin(states))[:, 0] - 1e-12).all()
            assert value.max() <= env.target_radius
        assert torch.equal(env.exact_safe(states), value >= 0)


@pytest.mark.parametrize("settings", [*AVOID, *REACH_AVOID], ids=str)
def test_well_inside_is_a_part_of_the_set_that_shrinks_with_the_share(settings):
    env, states = make(**settings), box(20_000)
    exact, inside, deep = env.exact_safe(states), env.well_inside(states), env.well_inside(states, share=0.8)
    assert torch.equal(env.well_inside(states, share=1.0), exact)
    assert not (inside & ~exact).any()
    assert deep.sum() < inside.sum() < exact.sum()
    assert inside.sum() > 0.8 * exact.sum()
    scale = 0.95 if env.problem == "avoid" else 1 / 0.95
    resized = states * torch.tensor([scale, scale, 1.0], dtype=torch.float64)
    assert torch.equal(inside, exact & env.exact_safe(resized))


def test_states_well_inside_the_double_integrators_set_are_those_of_the_shrunk_kernel():
    env = DoubleIntegratorEnv(dtype=torch.float64)
    states = box(4000, reach=2.0)[:, :2]
    inside = env.well_inside(states)
    assert torch.equal(inside, env.exact_value(states / 0.95) >= 0)
    assert not (inside & ~env.exact_safe(states)).any()
    assert torch.equal(env.well_inside(states, share=1.0), env.exact_safe(states))
    assert env.well_inside(torch.tensor([1, 0])).item() is False


@pytest.mark.parametrize("env", [DoubleIntegratorEnv(), DubinsCarEnv()], ids=["double_integrator", "dubins_car"])
@pytest.mark.parametrize("share", [0.0, -1.0, 1.1, math.nan])
def test_a_share_out_of_range_is_refused(env, share):
    with pytest.raises(ValueError, match=rf"share={share} must lie in \(0, 1\]"):
        env.well_inside(torch.zeros(3), share=share)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("batch", [(), (5,), (2, 3, 4)])
@pytest.mark.parametrize("settings", [{}, TYPE_I], ids=str)
def test_exact_solutions_take_any_batch_and_dtype(settings, batch, dtype):
    env = make(**{**settings, "dtype": torch.float32})
    states = (box(math.prod(batch)).reshape(*batch, 3) * 2).to(dtype)
    value = env.exact_value(states)
    assert value.shape == env.well_inside(states).shape == batch
    assert value.dtype == (dtype if dtype.is_floating_point else torch.float32)
    torch.testing.assert_close(value.double(), env.exact_value(states.double()), atol=2e-2, rtol=1e-2)
    assert torch.equal(env.exact_safe(states), value >= 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_envs", [1, 7])
def test_every_combination_of_settings_fulfils_its_specs(num_envs, dtype):
    for problem, discrete, max_steps in itertools.product(["avoid", "reach_avoid"], [True, False], [None, 3]):
        env = make(num_envs, problem=problem, discrete=discrete, max_steps=max_steps, dtype=dtype)
        check_env_specs(env, break_when_any_done="both")
        data = env.rollout(4, break_when_any_done=False)
        assert data["observation"].shape == (num_envs, 4, 3)
        for part in (data, data["next"]):
            distance = part["observation"][..., :2].norm(dim=-1, keepdim=True)
            margin = distance - 0.5 if problem == "avoid" else 1 - distance
            torch.testing.assert_close(part["safety_margin"], margin)
            assert ("target_margin" in part) is (problem == "reach_avoid")
            if problem == "reach_avoid":
                torch.testing.assert_close(part["target_margin"], 0.5 - distance)


@pytest.mark.parametrize(("problem", "reach"), [("avoid", 1.2), ("reach_avoid", 1.0)])
def test_starts_fill_the_box_of_the_problem_with_headings_in_range(problem, reach):
    states = make(4000, problem=problem).reset()["observation"]
    bound = torch.tensor([reach, reach, math.pi]).double()
    assert ((states >= -bound) & (states <= bound)).all()
    assert (states.amax(0) > 0.99 * bound).all()
    assert (states.amin(0) < -0.99 * bound).all()
    across = make(500, start_low=(0, 0, 3.0), start_high=(0, 0, 3.5)).reset()["observation"][:, 2]
    assert (across.abs() >= math.tau - 3.5 - 1e-9).all()
    assert (across.sign().unique() == torch.tensor([-1.0, 1.0])).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dt": 0.0}, "dt=0.0 must be positive"),
        ({"speed": -1.0}, "speed=-1.0 must be positive"),
        ({"turning_radius": math.inf}, "turning_radius=inf must be positive and finite"),
        ({"obstacle_radius": math.nan}, "obstacle_radius=nan"),
        ({"constraint_radius": 0.0}, "constraint_radius=0.0"),
        ({"target_radius": 1.0}, r"target_radius=1.0 must lie in \(0, constraint_radius=1.0\)"),
        ({"target_radius": 0.0}, "target_radius=0.0"),
        ({"start_low": (0.0, 0.0)}, r"start_low=\(0.0, 0.0\)"),
        ({"start_low": (0.0, 0.0, 4.0)}, "low <= high"),
        ({"start_high": (1.0, 1.0, math.nan)}, "finite"),
        ({"problem": "reach"}, "problem='reach' is unknown"),
        ({"end_criterion": "reach_avoid"}, "needs a target"),
    ],
)
def test_settings_out_of_range_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        make(**settings)
