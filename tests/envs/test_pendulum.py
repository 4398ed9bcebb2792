"""The pendulum's motion, and its exact set against roll-outs and value iteration."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.envs.utils import check_env_specs

from torchrl_safety.envs import PendulumEnv
from torchrl_safety.objectives import AvoidBackup, ReachAvoidBackup

# The control can balance any safe lean, or gravity beats it there, slightly or by far.
PENDULUMS: tuple[dict[str, float], ...] = (
    {"max_angle": 0.3},
    {},
    {"gravity": 15.0, "max_control": 6.0, "max_angle": 1.2},
)


def make(num_envs: int = 4, **settings) -> PendulumEnv:
    return PendulumEnv(num_envs, **{"seed": 0, "dtype": torch.float64, **settings})


def start(env: PendulumEnv, states) -> TensorDict:
    states = torch.as_tensor(states, dtype=env.dtype)
    return env.reset(TensorDict({"observation": states}, [len(states)]))


def box(env: PendulumEnv, n: int) -> Tensor:
    return env.sample_states(n, torch.Generator().manual_seed(0))


def barrier(env: PendulumEnv, angle: Tensor, points: int = 200) -> Tensor:
    """The largest safe velocity: ω dω = (A sin θ - U) dθ integrated back from where full braking just comes to rest."""
    balanced = env.max_control >= env.gravity * math.sin(env.max_angle)
    rest = env.max_angle if balanced else math.asin(env.max_control / env.gravity)
    width = (rest - angle) / points
    middles = angle.unsqueeze(-1) + width.unsqueeze(-1) * (torch.arange(points, dtype=angle.dtype) + 0.5)
    energy = (env.max_control - env.gravity * middles.sin()).sum(-1) * width
    return (rest - angle).sign() * (2 * energy.clamp(min=0)).sqrt()


def steering(env: PendulumEnv, state: Tensor) -> Tensor:
    """Full control, -1 or 1 `[*B]`, towards the middle of the kernel, which leads to the upright rest."""
    angle, velocity = state.unbind(-1)
    middle = (barrier(env, angle) - barrier(env, -angle)) / 2
    return torch.where(velocity > middle, -1.0, 1.0).to(state.dtype)


@pytest.mark.parametrize("discrete", [True, False])
def test_one_step_equals_a_fine_integration(discrete):
    env = make(9, max_control=2.0, dt=0.04, discrete=discrete)
    states, index = box(env, 9), torch.arange(9) % 3
    push = 2.0 * (index - 1.0)
    got = env.step(start(env, states).set("action", index if discrete else push.unsqueeze(-1)))["next", "observation"]
    angle, velocity = states.unbind(-1)
    for _ in range(4000):
        angle, velocity = angle + 1e-5 * velocity, velocity + 1e-5 * (10 * angle.sin() + push)
    torch.testing.assert_close(got, torch.stack((angle, velocity), -1), atol=1e-4, rtol=0)


def test_halving_the_step_divides_the_error_by_sixteen():
    coarse = make()
    states = box(coarse, 500)
    control = 6 * torch.rand(500, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 3

    def after_one_second(steps: int) -> Tensor:
        env, state = make(dt=1 / steps), states
        for _ in range(steps):
            state = env.dynamics(state, control)
        return state

    truth = after_one_second(640)
    errors = [(after_one_second(steps) - truth).norm().item() for steps in (10, 20, 40, 80)]
    for error, half in itertools.pairwise(errors):
        assert 12 < error / half < 20


def test_full_braking_from_the_barrier_keeps_its_energy_where_semi_implicit_euler_does_not():
    env = make()
    angle = torch.linspace(-0.5, 0.25, 50, dtype=torch.float64)
    exact = inexact = torch.stack((angle, barrier(env, angle)), -1)

    def energy(state: Tensor) -> Tensor:
        return state[:, 1] ** 2 / 2 + 10 * state[:, 0].cos() + 3 * state[:, 0]

    for _ in range(10):
        exact = env.dynamics(exact, torch.full((50, 1), -3.0, dtype=torch.float64))
        velocity = inexact[:, 1] + env.dt * (10 * inexact[:, 0].sin() - 3)
        inexact = torch.stack((inexact[:, 0] + env.dt * velocity, velocity), -1)
    constant = energy(torch.stack((angle, barrier(env, angle)), -1))
    assert (energy(exact) - constant).abs().max() < 1e-4
    assert (energy(inexact) - constant).abs().max() > 1e-2


@pytest.mark.parametrize("problem", ["avoid", "reach_avoid"])
def test_margins_are_recomputed_by_hand(problem):
    env = make(50, problem=problem, target_radius=0.1, end_criterion="timeout")
    data = env.rollout(8, break_when_any_done=False)["next"]
    for (angle, velocity), g in zip(data["observation"].reshape(-1, 2).tolist(), data["safety_margin"].flatten()):
        assert g.item() == pytest.approx(0.5 - abs(angle), abs=1e-12)
        l = env.target_margin(torch.tensor([angle, velocity], dtype=torch.float64))  # noqa: E741
        assert l.item() == pytest.approx(0.1 - max(abs(angle), abs(velocity)), abs=1e-12)
    assert ("target_margin" in data.keys()) == (problem == "reach_avoid")  # noqa: SIM118


@pytest.mark.parametrize("settings", PENDULUMS)
def test_the_kernel_lies_between_the_barriers_of_full_braking(settings):
    env = make(**settings)
    states = 1.2 * box(env, 5000)
    angle, velocity = states.unbind(-1)
    upper, lower = barrier(env, angle, 2000), -barrier(env, -angle, 2000)
    depth = torch.stack((env.max_angle - angle.abs(), upper - velocity, velocity - lower)).amin(0)
    decided = depth.abs() > 1e-3
    assert torch.equal(env.exact_safe(states)[decided], (depth >= 0)[decided])
    assert 0.1 < env.exact_safe(box(env, 5000)).double().mean() < 0.9


def test_a_lean_that_gravity_wins_is_safe_only_on_the_way_back():
    env = make()
    lean = torch.tensor([[0.4, 0.0], [0.4, -0.2], [0.4, -0.5], [0.3, 0.0], [0.31, 0.0]], dtype=torch.float64)
    assert env.exact_safe(lean).tolist() == [False, False, True, True, False]
    assert torch.equal(env.exact_safe(-lean), env.exact_safe(lean))


@pytest.mark.parametrize("settings", [*PENDULUMS, {"gravity": 30.0, "max_control": 1.0, "max_angle": 1.5}])
def test_the_shrunk_sets_are_nested_in_the_exact_one(settings):
    env = make(**settings)
    states = box(env, 50_000)
    larger = env.exact_safe(states)
    assert torch.equal(env.well_inside(states, 1.0), larger)
    for share in (0.95, 0.8, 0.5):
        inside = env.well_inside(states, share)
        assert not (inside & ~larger).any()
        assert 0 < inside.sum() < larger.sum()
        larger = inside


def test_where_the_sine_is_straight_the_shrunk_set_is_the_exact_one_scaled():
    env = make(max_angle=0.01, max_control=0.05)
    states = box(env, 20_000)
    assert (env.well_inside(states, 0.9) == env.exact_safe(states / 0.9)).double().mean() > 0.9995


@pytest.mark.parametrize("settings", PENDULUMS)
@pytest.mark.parametrize("discrete", [True, False])
def test_states_in_the_kernel_stay_safe_and_come_to_the_upright_rest(settings, discrete):
    env = make(500, problem="reach_avoid", discrete=discrete, end_criterion="timeout", **settings)
    states = box(env, 5000)
    tensordict = start(env, states[env.well_inside(states, 0.999)][:500])
    reached = tensordict["target_margin"] >= 0
    for _ in range(100):
        push = steering(env, tensordict["observation"])
        tensordict["action"] = (push + 1).long() if discrete else env.max_control * push.unsqueeze(-1)
        _, tensordict = env.step_and_maybe_reset(tensordict)
        assert (tensordict["safety_margin"] >= 0).all()
        reached |= tensordict["target_margin"] >= 0
    assert reached.all()


@pytest.mark.parametrize("settings", PENDULUMS)
def test_states_outside_the_kernel_fail_whatever_the_control(settings):
    env = make(**settings)
    states = box(env, 4000)
    states = states[~env.exact_safe(states) & ~env.exact_safe(states / 1.03)][:400]
    generator = torch.Generator().manual_seed(1)

    def mixed(bias: float) -> Callable[[Tensor], Tensor]:
        """Random controls, some of them steering back."""

        def control(state: Tensor) -> Tensor:
            steer = torch.rand(len(state), generator=generator) < bias
            noise = 2 * torch.rand(len(state), generator=generator, dtype=state.dtype) - 1
            return torch.where(steer, steering(env, state), noise)

        return control

    constant = [lambda s, push=push: torch.full_like(s[:, 0], push) for push in (-1.0, 0.0, 1.0)]
    for strategy in (*constant, *(mixed(bias) for bias in (0.0, 0.5, 0.9, 1.0)), lambda s: -s[:, 1].sign()):
        state, failed = states, torch.zeros(len(states), 1, dtype=torch.bool)
        for _ in range(60):
            # A state that has failed stays where it is: far away it could swing round.
            following = env.dynamics(state, env.max_control * strategy(state).unsqueeze(-1))
            state = torch.where(failed, state, following)
            failed |= env.safety_margin(state) < 0
        assert failed.all()


class Grid:
    """Bilinear interpolation on 101² points around the kernel, held constant outside."""

    size = 101

    def __init__(self, env: PendulumEnv):
        fastest = barrier(env, torch.tensor(-env.max_angle, dtype=torch.float64)).item()
        self.extent = torch.tensor([1.2 * env.max_angle, 1.2 * fastest], dtype=torch.float64)
        axes = [torch.linspace(-end, end, self.size, dtype=torch.float64) for end in self.extent.tolist()]
        self.states = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)

    def read(self, states: Tensor) -> Callable[[Tensor], Tensor]:
        place = ((states / self.extent + 1) * (self.size - 1) / 2).clamp(0, self.size - 1)
        corner = place.floor().clamp(0, self.size - 2)
        (row, column), (down, right) = corner.long().unbind(-1), (place - corner).unbind(-1)

        def interpolate(value: Tensor) -> Tensor:
            upper = value[row, column] * (1 - right) + value[row, column + 1] * right
            lower = value[row + 1, column] * (1 - right) + value[row + 1, column + 1] * right
            return upper * (1 - down) + lower * down

        return interpolate


def value_iteration(env: PendulumEnv, grid: Grid, dynamics: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    pushes = [torch.full_like(grid.states[..., :1], push * env.max_control) for push in (-1, 0, 1)]
    after = [grid.read(dynamics(grid.states, push)) for push in pushes]
    g, l = env.safety_margin(grid.states), env.target_margin(grid.states)  # noqa: E741
    reach_avoid = env.problem == "reach_avoid"
    step = (ReachAvoidBackup() if reach_avoid else AvoidBackup()).step_map(
        {"safety_margin": g, "target_margin": l}, gamma=1.0, terminated=torch.zeros_like(g, dtype=torch.bool)
    )
    value = (torch.minimum(g, l) if reach_avoid else g)[..., 0]
    for _ in range(2000):
        previous, value = value, step(torch.stack([read(value) for read in after]).amax(0).unsqueeze(-1))[..., 0]
        if (value - previous).abs().max() < 1e-6:
            return value
    raise AssertionError("value iteration did not converge")


def overlap(called: Tensor, safe: Tensor) -> float:
    return ((called & safe).sum() / (called | safe).sum()).item()


@pytest.mark.parametrize("problem", ["avoid", "reach_avoid"])
@pytest.mark.parametrize("settings", PENDULUMS)
def test_value_iteration_finds_the_exact_set_up_to_one_cell(settings, problem):
    env = make(problem=problem, **settings)
    grid = Grid(env)
    found, safe = value_iteration(env, grid, env.dynamics) >= 0, env.exact_safe(grid.states)
    cell = 2 * grid.extent / (grid.size - 1)
    around = torch.stack(
        [env.exact_safe(grid.states + cell * torch.tensor(move)) for move in itertools.product((-1, 0, 1), repeat=2)]
    )
    near = around.any(0) & ~around.all(0)
    assert near.double().mean() < 0.08
    assert torch.equal(found[~near], safe[~near])
    assert overlap(found, safe) > 0.94


def test_semi_implicit_euler_would_move_the_kernel():
    env = make()
    grid = Grid(env)

    def euler(state: Tensor, control: Tensor) -> Tensor:
        angle, velocity = state.split(1, -1)
        velocity = velocity + env.dt * (env.gravity * angle.sin() + control)
        return torch.cat((angle + env.dt * velocity, velocity), -1)

    safe = env.exact_safe(grid.states)
    right, moved = (overlap(value_iteration(env, grid, step) >= 0, safe) for step in (env.dynamics, euler))
    assert moved < 0.93 < 0.96 < right


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("batch", [(), (5,), (2, 3, 4)])
def test_exact_solutions_take_any_batch_and_dtype(batch, dtype):
    env = make(dtype=torch.float32)
    states = (box(env, math.prod(batch)).reshape(*batch, 2) * 8).round().div(8).to(dtype)  # the same in every type
    for solution in (env.exact_safe, env.well_inside):
        safe = solution(states)
        assert safe.shape == batch
        assert safe.dtype == torch.bool
        assert torch.equal(safe, solution(states.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_envs", [1, 5])
@pytest.mark.parametrize("max_steps", [None, 3])
def test_every_combination_of_settings_fulfils_its_specs(num_envs, dtype, max_steps):
    for problem, discrete in itertools.product(["avoid", "reach_avoid"], [True, False]):
        env = make(num_envs, problem=problem, discrete=discrete, dtype=dtype, max_steps=max_steps)
        check_env_specs(env, break_when_any_done="both")
        data = env.rollout(4, break_when_any_done=False)["next"]
        assert data["observation"].dtype == data["safety_margin"].dtype == dtype


@pytest.mark.parametrize("settings", PENDULUMS)
def test_starts_fill_a_box_that_surrounds_the_kernel(settings):
    env = make(20_000, **settings)
    states = env.reset()["observation"]
    around = 1.5 * box(env, 100_000)
    kernel = around[env.exact_safe(around)].abs().amax(0)
    assert (states.abs().amax(0) > 0.999 * kernel).all()
    assert (states.abs().amax(0) < 1.1 * kernel).all()
    assert (states.amin(0) < -0.999 * kernel).all()


def test_one_given_corner_of_the_start_box_is_mirrored():
    for corner in ({"start_low": (-0.2, -1.0)}, {"start_high": (0.2, 1.0)}):
        states = make(5000, **corner).reset()["observation"]
        torch.testing.assert_close(states.amin(0), torch.tensor([-0.2, -1.0]).double(), atol=1e-2, rtol=0)
        torch.testing.assert_close(states.amax(0), torch.tensor([0.2, 1.0]).double(), atol=1e-2, rtol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dt": 0.0}, r"dt=0.0 must lie in \(0, 0.3162\]"),
        ({"dt": 0.5}, "dt=0.5 must lie in .*take smaller steps"),
        ({"gravity": 0.0}, "gravity=0.0 must be positive and finite"),
        ({"gravity": math.nan}, "gravity=nan must be positive and finite"),
        ({"max_control": math.inf}, "max_control=inf must be positive and finite"),
        ({"max_angle": 0.0}, r"max_angle=0.0 must lie in \(0, π/2\]"),
        ({"max_angle": 30.0}, "max_angle=30.0 must lie in .*in radians"),
        ({"target_radius": 0.0}, "target_radius=0.0 must be positive"),
        ({"problem": "reach_avoid", "target_radius": 0.4}, "target_radius=0.4 is too large.*take it smaller"),
        ({"problem": "reach"}, "problem='reach' is unknown"),
        ({"end_criterion": "reach_avoid"}, "needs a target"),
        ({"start_low": (0.2, 0.0), "start_high": (0.1, 1.0)}, "low <= high"),
        ({"start_high": (0.1, math.inf)}, "must be finite"),
        ({"start_low": (0.1,)}, r"must be finite \(θ, ω\)"),
    ],
)
def test_wrong_settings_are_named_with_their_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


@pytest.mark.parametrize("share", [0.0, 1.01, math.nan])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(ValueError, match=r"must lie in \(0, 1\]"):
        make().well_inside(torch.zeros(2), share)
