"""The climbing point's margins, and its exact sets against roll-outs and value iteration."""

import itertools
import math

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.envs.utils import check_env_specs

from torchrl_safety.envs import PointMassEnv
from torchrl_safety.objectives import AvoidBackup, ReachAvoidBackup

PROBLEMS = ("reach_avoid", "avoid")


def make(num_envs: int = 4, **settings) -> PointMassEnv:
    return PointMassEnv(num_envs, **{"seed": 0, "dtype": torch.float64, **settings})


def start(env: PointMassEnv, states) -> TensorDict:
    states = torch.as_tensor(states, dtype=env.dtype)
    return env.reset(TensorDict({"observation": states}, [len(states)]))


def box(n: int, margin: float = 0.0) -> Tensor:
    unit = torch.rand(n, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (unit - 0.5) * torch.tensor([4.0 + margin, 12.0 + margin]) + torch.tensor([0.0, 4.0])


def passing(state: Tensor) -> Tensor:
    """The control `[*B, 1]` that goes between the side boxes, then around the centre box, then to the target."""
    x, y = state.split(1, dim=-1)
    outwards = torch.where(x < 0, -1.0, 1.0)
    around = torch.where((y < 6.75) & (x.abs() < 1.2), outwards, torch.zeros_like(x))
    inwards = torch.where(x.abs() > 0.1, -outwards, torch.zeros_like(x))
    return torch.where((y >= 2.75) & (y < 6.75), around, inwards)


def rectangle_distance(x: float, y: float, low: tuple[float, float], high: tuple[float, float]) -> float:
    """The signed infinity-norm distance, from the distance to the nearest point or to the nearest side."""
    if low[0] < x < high[0] and low[1] < y < high[1]:
        return -min(x - low[0], high[0] - x, y - low[1], high[1] - y)
    nearest = (min(max(x, low[0]), high[0]), min(max(y, low[1]), high[1]))
    return max(abs(x - nearest[0]), abs(y - nearest[1]))


def test_margins_are_signed_distances_to_the_boxes():
    states = box(500, margin=2.0)
    states[:3] = torch.tensor([[-1.25, 2.0], [0.0, 6.0], [0.0, 9.25]])
    boxes = [((0.5, 1.25), (2.0, 2.75)), ((-2.0, 1.25), (-0.5, 2.75)), ((-0.75, 5.25), (0.75, 6.75))]
    for problem in PROBLEMS:
        env = make(problem=problem)
        top = 10.0 if problem == "reach_avoid" else math.inf
        for state in states:
            x, y = state.tolist()
            obstacles = min(rectangle_distance(x, y, *corners) for corners in boxes)
            walls = min(x + 2, 2 - x, y + 2, top - y)
            outside = max(-2 - x, x - 2, -2 - y, y - top)  # the same as -walls, and the distance where positive
            g = min(obstacles, walls if outside < 0 else -outside)
            assert env.safety_margin(state).item() == pytest.approx(g, abs=1e-12)
            target = rectangle_distance(x, y, (-0.75, 8.5), (0.75, 10.0))
            assert env.target_margin(state).item() == pytest.approx(-target, abs=1e-12)


@pytest.mark.parametrize("discrete", [True, False])
def test_a_step_climbs_by_two_and_drifts_by_the_control(discrete):
    env = make(5, discrete=discrete, dt=0.1)
    states = box(5)
    action = torch.tensor([0, 1, 2, 2, 0]) if discrete else torch.tensor([[-1.0], [0.0], [1.0], [7.0], [-0.25]])
    control = torch.tensor([-1.0, 0.0, 1.0, 1.0, -1.0 if discrete else -0.25])
    got = env.step(start(env, states).set("action", action))["next", "observation"]
    torch.testing.assert_close(got, states + torch.stack((0.1 * control, torch.full((5,), 0.2)), -1))


def test_past_the_top_reach_avoid_has_failed_and_avoid_goes_on():
    states = [[0.0, 9.95], [1.5, 9.95], [0.0, 8.45]]
    for problem, failed in (("reach_avoid", [True, True, False]), ("avoid", [False, False, False])):
        env = make(3, problem=problem)
        following = env.step(start(env, states).set("action", torch.ones(3, dtype=torch.int64)))["next"]
        assert (following["safety_margin"] < 0).flatten().tolist() == failed
        assert following["terminated"].flatten().tolist() == failed
    assert make().exact_safe(torch.tensor([[0.0, 9.95], [0.0, 10.0], [0.0, 10.05]])).tolist() == [True, True, False]


def test_an_episode_can_end_at_the_target():
    env = make(2, end_criterion="reach_avoid")
    following = env.step(start(env, [[0.0, 8.45], [1.0, 8.45]]).set("action", torch.ones(2, dtype=torch.int64)))["next"]
    assert (following["target_margin"] >= 0).flatten().tolist() == [True, False]
    assert following["terminated"].flatten().tolist() == [True, False]


@pytest.mark.parametrize(("problem", "corners"), [("reach_avoid", 2 * 1.25 * 2.5 / 2), ("avoid", 0.0)])
def test_the_set_has_the_area_that_boxes_and_triangles_leave(problem, corners):
    x, y = (torch.arange(2000, dtype=torch.float64) + 0.5) / 500 - 2, (torch.arange(2400) + 0.5) / 200 - 2
    states = torch.stack(torch.meshgrid(x, y.double(), indexing="ij"), -1)
    area = 48 * make(problem=problem).exact_safe(states).double().mean()
    triangles = 1.5 * 1.5 / 2 + 2 * 1.5 * 3 / 2  # those at the sides end at the wall
    assert area.item() == pytest.approx(48 - 3 * 1.5**2 - triangles - corners, abs=0.01)


def test_the_sets_mirror_themselves_and_are_nested():
    states = box(20_000, margin=1.0)
    mirrored = states * torch.tensor([-1.0, 1.0])
    for problem in PROBLEMS:
        env = make(problem=problem)
        safe = env.exact_safe(states)
        assert torch.equal(safe, env.exact_safe(mirrored))
        assert torch.equal(safe, env.well_inside(states, share=1.0))
        assert (env.safety_margin(states)[safe] >= 0).all()
        larger = safe
        for share in (0.95, 0.8, 2 / 3):
            inside = env.well_inside(states, share)
            assert 0 < inside.sum() < larger.sum()
            assert not (inside & ~larger).any()
            larger = inside
    assert not (make().exact_safe(states) & ~make(problem="avoid").exact_safe(states)).any()


def test_the_slits_of_no_width_at_the_walls_are_closed():
    env = make()
    wall = torch.tensor([[2.0, -1.0], [2.0, 2.0], [-2.0, 1.0]], dtype=torch.float64)
    assert (env.safety_margin(wall) == 0).all()
    assert not env.exact_safe(wall).any()
    assert env.exact_safe(torch.tensor([2.0, 3.0]))


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("discrete", [True, False])
def test_states_well_inside_pass_the_boxes_and_reach_the_target(problem, discrete):
    env = make(1000, problem=problem, discrete=discrete, end_criterion="timeout")
    states = box(20_000)
    tensordict = start(env, states[env.well_inside(states)][:1000])
    alive = torch.ones(1000, 1, dtype=torch.bool)
    reached = env.target_margin(tensordict["observation"]) >= 0
    for _ in range(120):
        control = passing(tensordict["observation"])
        tensordict["action"] = (control[:, 0] + 1).long() if discrete else control
        _, tensordict = env.step_and_maybe_reset(tensordict)
        alive &= tensordict["safety_margin"] >= 0
        reached |= alive & (env.target_margin(tensordict["observation"]) >= 0)
        assert (alive | reached if problem == "reach_avoid" else alive).all()
    assert problem == "avoid" or reached.all()


def test_every_safe_state_passes_the_boxes_under_the_best_control():
    env = make(problem="avoid")
    states = box(20_000)
    state = states[env.exact_safe(states)]
    for _ in range(120):
        state = env.dynamics(state, passing(state))
        assert (env.safety_margin(state) >= -1e-12).all()


@pytest.mark.parametrize("problem", PROBLEMS)
def test_states_outside_the_set_fail_whatever_the_control(problem):
    env = make(problem=problem, dt=0.01)
    states = box(6000)
    step = torch.tensor([0.0, 2 * env.dt], dtype=torch.float64)
    unsafe = ~(env.exact_safe(states) | env.exact_safe(states - step) | env.exact_safe(states + step))
    states = states[unsafe][:500]
    generator = torch.Generator().manual_seed(1)
    # Constant controls, and one switch between two of them at a random step: a fastest path is of this kind.
    for first, second in itertools.product((-1.0, 0.0, 1.0), repeat=2):
        switch = torch.randint(0, 600, (len(states), 1), generator=generator)
        state, failed = states, env.safety_margin(states) < 0
        reached = torch.zeros_like(failed)
        for step_count in range(600):
            control = torch.where(step_count < switch, first, second).double()
            state = env.dynamics(state, control)
            failed |= env.safety_margin(state) < 0
            reached |= ~failed & (env.target_margin(state) >= 0)
        assert failed.all()
        assert problem == "avoid" or not reached.any()


def value_iteration(env: PointMassEnv, gamma: float) -> tuple[Tensor, Tensor]:
    """States `[X, Y, 2]` and their values; each step leads from a node to nodes, so that one sweep down is exact.

    Nodes and the slopes of the triangles do not meet: ties would be decided by rounding.
    """
    dx, dy = env.dt, 2 * env.dt
    columns, rows = round(2 / dx) + 2, round(12 / dy) + 2
    x = (torch.arange(-columns, columns, dtype=torch.float64) + 0.5) * dx
    y = (torch.arange(rows, dtype=torch.float64) + 0.3) * dy - 2
    states = torch.stack(torch.meshgrid(x, y, indexing="ij"), -1)
    g, l = env.safety_margin(states), env.target_margin(states)  # noqa: E741
    reach_avoid = env.problem == "reach_avoid"
    step = (ReachAvoidBackup() if reach_avoid else AvoidBackup()).step_map(
        {"safety_margin": g, "target_margin": l}, gamma=gamma, terminated=torch.zeros_like(g, dtype=torch.bool)
    )
    value = torch.minimum(g, l) if reach_avoid else g.clone()
    for row in range(rows - 2, -1, -1):
        following = value[:, row + 1]
        left, right = torch.cat((following[:1], following[:-1])), torch.cat((following[1:], following[-1:]))
        after = torch.zeros_like(value)
        after[:, row] = torch.stack((left, following, right)).amax(0)
        value[:, row] = step(after)[:, row]
    return states, value[..., 0]


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("dt", [0.05, 0.0125])
@pytest.mark.parametrize("share", [1.0, 0.95, 0.8, 2 / 3])
def test_value_iteration_on_the_aligned_grid_finds_the_exact_sets_up_to_one_step(problem, dt, share):
    env = make(problem=problem, dt=dt)
    states, value = value_iteration(env, gamma=1.0)
    found = value >= 0.75 * (1 - share)
    step = torch.tensor([0.0, 2 * dt], dtype=torch.float64)
    here, below, above = (env.well_inside(place, share) for place in (states, states - step, states + step))
    # A step may cut a corner of a box, and it may jump over the last moment at which the target can be entered.
    assert not (found & ~(here | below)).any()
    assert not (here & above & ~found).any()
    assert (found & here).sum() / (found | here).sum() > 1 - 0.7 * dt
    if problem == "avoid":
        assert not (here & ~found).any()


def test_discounting_grows_the_avoid_set_and_shrinks_the_reach_avoid_set():
    for problem, grows in (("avoid", True), ("reach_avoid", False)):
        areas = [(value_iteration(make(problem=problem), gamma)[1] >= 0).sum().item() for gamma in (0.9, 0.99, 1.0)]
        assert areas == sorted(areas, reverse=grows)
        assert len(set(areas)) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("batch", [(), (5,), (2, 3, 4)])
def test_exact_solutions_take_any_batch_and_dtype(batch, dtype):
    env = make(dtype=torch.float32)
    states = (box(math.prod(batch)).reshape(*batch, 2) * 8).round().div(8).to(dtype)  # the same in every type
    for solution in (env.exact_safe, env.well_inside):
        safe = solution(states)
        assert safe.shape == batch
        assert safe.dtype == torch.bool
        assert torch.equal(safe, solution(states.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_envs", [1, 5])
@pytest.mark.parametrize("max_steps", [None, 3])
def test_every_combination_of_settings_fulfils_its_specs(num_envs, dtype, max_steps):
    for problem, discrete in itertools.product(PROBLEMS, [True, False]):
        env = make(num_envs, problem=problem, discrete=discrete, dtype=dtype, max_steps=max_steps)
        check_env_specs(env, break_when_any_done="both")
        data = env.rollout(4, break_when_any_done=False)
        assert ("target_margin" in data.keys()) == (problem == "reach_avoid")  # noqa: SIM118
        assert data["next", "observation"].dtype == data["next", "safety_margin"].dtype == dtype


def test_starts_fill_the_box_that_surrounds_the_set():
    states = make(20_000).reset()["observation"]
    assert (states.amin(0) < torch.tensor([-1.99, -1.98])).all()
    assert (states.amax(0) > torch.tensor([1.99, 9.98])).all()
    torch.testing.assert_close(states.mean(0), torch.tensor([0.0, 4.0]).double(), atol=0.08, rtol=0)
    states = make(100, start_low=(-0.5, -2.0), start_high=(0.5, -2.0)).reset()["observation"]
    assert (states[:, 0].abs() <= 0.5).all()
    assert (states[:, 1] == -2).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dt": 0.0}, r"dt=0.0 must lie in \(0, 0.25\]"),
        ({"dt": 0.3}, r"dt=0.3 must lie in \(0, 0.25\]: larger steps jump"),
        ({"dt": math.nan}, "dt=nan must lie in"),
        ({"problem": "reach"}, "problem='reach' is unknown"),
        ({"problem": "avoid", "end_criterion": "reach_avoid"}, "needs a target"),
        ({"start_low": (3.0, 0.0)}, r"start_low=\(3.0, 0.0\).*low <= high"),
        ({"start_high": (2.0, math.inf)}, "must be finite"),
        ({"start_low": (0.0,)}, r"must be finite \(x, y\)"),
    ],
)
def test_wrong_settings_are_named_with_their_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


@pytest.mark.parametrize("share", [0.5, 1.01, math.nan])
def test_a_share_at_which_the_triangles_overlap_is_refused(share):
    with pytest.raises(ValueError, match=r"must lie in \[2/3, 1\]"):
        make().well_inside(torch.zeros(2), share)
