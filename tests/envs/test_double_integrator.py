"""The double integrator's motion, and its exact sets against roll-outs and value iteration."""

import itertools
import math

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_safety.envs import DoubleIntegratorEnv
from torchrl_safety.objectives import AvoidBackup, ReachAvoidBackup


def make(num_envs: int = 4, **settings) -> DoubleIntegratorEnv:
    return DoubleIntegratorEnv(num_envs, **{"seed": 0, **settings})


def start(env: DoubleIntegratorEnv, states) -> TensorDict:
    states = torch.as_tensor(states, dtype=env.dtype)
    return env.reset(TensorDict({"observation": states}, [len(states)]))


def braking(env: DoubleIntegratorEnv, state: Tensor, worst: Tensor | float = 0.0) -> Tensor:
    """The control that stops as fast as it can and then stands still, against a known disturbance."""
    return (-state[..., 1:] / env.dt - worst).clamp(-env.max_control, env.max_control)


def box(n: int) -> Tensor:
    unit = torch.rand(n, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (2 * unit - 1) * torch.tensor([1.0, 2.2], dtype=torch.float64)


@pytest.mark.parametrize("discrete", [True, False])
def test_one_step_equals_a_fine_integration(discrete):
    env = make(9, dtype=torch.float64, max_control=1.5, max_disturbance=0.7, discrete=discrete)
    states, pairs = box(9), torch.cartesian_prod(torch.arange(3), torch.arange(3))
    push = 1.5 * (pairs[:, 0] - 1.0) + 0.7 * (pairs[:, 1] - 1.0)
    control, disturbance = pairs.unbind(-1) if discrete else ((pairs - 1.0) * torch.tensor([1.5, 0.7])).split(1, -1)
    actions = {"action": control, "disturbance": disturbance}
    got = env.step(start(env, states).update(actions))["next", "observation"]
    position, velocity = states.unbind(-1)
    for _ in range(5000):
        position, velocity = position + 1e-5 * velocity, velocity + 1e-5 * push
    torch.testing.assert_close(got, torch.stack((position, velocity), -1), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("max_control", "max_disturbance"), [(0.5, 0.0), (1.0, 0.0), (2.0, 0.5)])
def test_the_kernel_has_the_area_of_the_closed_form(max_control, max_disturbance):
    env = make(max_control=max_control, max_disturbance=max_disturbance)
    reach = 2.2 * math.sqrt(max_control)
    x, v = torch.linspace(-1.1, 1.1, 1201, dtype=torch.float64), torch.linspace(-reach, reach, 1201).double()
    states = torch.stack(torch.meshgrid(x, v, indexing="ij"), -1)
    area = env.exact_safe(states).double().mean() * 2.2 * 2 * reach
    assert area.item() == pytest.approx(16 * math.sqrt(max_control - max_disturbance) / 3, rel=3e-3)


def test_a_disturbance_shrinks_the_kernel():
    states = box(2000)
    alone, opposed = make().exact_safe(states), make(max_disturbance=0.5).exact_safe(states)
    assert not (opposed & ~alone).any()
    assert 0.6 < opposed.sum() / alone.sum() < 0.8  # areas stand as √.5 to 1, on the kernel's part in the box


@pytest.mark.parametrize("max_disturbance", [0.0, 0.4])
def test_the_exact_value_is_the_worst_margin_under_full_braking(max_disturbance):
    env = make(500, dt=0.005, discrete=False, dtype=torch.float64, max_disturbance=max_disturbance)
    state = states = box(500)
    worst_margin = env.safety_margin(states)
    push = max_disturbance * states[:, 1:].sign()
    for _ in range(800):
        state = env.dynamics(state, braking(env, state, push), push)
        worst_margin = torch.minimum(worst_margin, env.safety_margin(state))
    torch.testing.assert_close(env.exact_value(states), worst_margin[:, 0], atol=1e-4, rtol=0)


def test_states_in_the_shrunk_kernel_stay_safe_under_braking():
    env = make(400, discrete=False, end_criterion="timeout", dtype=torch.float64)
    states = box(4000)
    tensordict = start(env, states[env.exact_safe(states / 0.95)][:400])
    for _ in range(100):
        tensordict["action"] = braking(env, tensordict["observation"])
        _, tensordict = env.step_and_maybe_reset(tensordict)
        assert (tensordict["safety_margin"] >= 0).all()


def test_states_outside_the_kernel_fail_whatever_the_control():
    env = make()
    states = box(4000)
    states = states[env.exact_value(states) < -0.05][:300]
    generator = torch.Generator().manual_seed(1)
    strategies = [lambda s: braking(env, s), lambda s: -s[..., 1:].sign()]
    for bias in (0.0, 0.5, 0.9):  # random controls, some of them leaning towards braking
        strategies += 6 * [
            lambda s, bias=bias: torch.where(
                torch.rand(len(s), 1, generator=generator, dtype=s.dtype) < bias,
                braking(env, s),
                2 * torch.rand(len(s), 1, generator=generator, dtype=s.dtype) - 1,
            )
        ]
    for strategy in strategies:
        state, failed = states, torch.zeros(len(states), 1, dtype=torch.bool)
        for _ in range(60):
            state = env.dynamics(state, strategy(state).to(state.dtype))
            failed |= env.safety_margin(state) < 0
        assert failed.all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("batch", [(), (5,), (2, 3, 4)])
def test_exact_solutions_take_any_batch_and_dtype(batch, dtype):
    env = make(problem="reach_avoid")
    states = (box(math.prod(batch)).reshape(*batch, 2) * 2).to(dtype)
    value = env.exact_value(states)
    assert value.shape == batch
    assert value.dtype == (dtype if dtype.is_floating_point else torch.float32)
    torch.testing.assert_close(value.double(), env.exact_value(states.double()), atol=2e-2, rtol=1e-2)
    assert torch.equal(env.exact_safe(states), value >= 0)


class Grid:
    """Bilinear interpolation on 201² points of [-X, X] x [-V, V], extended linearly outside or held constant there."""

    size = 201

    def __init__(self, extent: tuple[float, float], *, extend: bool):
        self.extent = torch.tensor(extent, dtype=torch.float64)
        self.extend = extend
        axes = [torch.linspace(-end, end, self.size, dtype=torch.float64) for end in extent]
        self.states = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)

    def stencil(self, states: Tensor) -> tuple[Tensor, Tensor]:
        place = (states / self.extent + 1) * (self.size - 1) / 2
        place = place if self.extend else place.clamp(0, self.size - 1)
        corner = place.floor().clamp(0, self.size - 2)
        part = place - corner
        index, weight = [], []
        for up_x, up_v in itertools.product((0, 1), repeat=2):
            index.append((corner[..., 0] + up_x).long() * self.size + (corner[..., 1] + up_v).long())
            weight.append((part[..., 0] if up_x else 1 - part[..., 0]) * (part[..., 1] if up_v else 1 - part[..., 1]))
        return torch.stack(index), torch.stack(weight)


def value_iteration(env: DoubleIntegratorEnv, grid: Grid, backup, gamma: float, tolerance: float) -> Tensor:
    a, d = env.max_control, env.max_disturbance
    stencils = [
        [
            grid.stencil(env.dynamics(grid.states, torch.full_like(grid.states[..., :1], u), torch.tensor([w])))
            for w in ((-d, 0.0, d) if d else (0.0,))
        ]
        for u in (-a, 0.0, a)
    ]
    g, l = env.safety_margin(grid.states), env.target_margin(grid.states)  # noqa: E741
    signals = {"safety_margin": g, "target_margin": l, "reward": torch.zeros_like(g)}
    step = backup.step_map(signals, gamma=gamma, terminated=torch.zeros_like(g, dtype=torch.bool))
    value = g if isinstance(backup, AvoidBackup) else torch.minimum(g, l)
    for _ in range(3000):
        replies = [torch.stack([(value.flatten()[index] * weight).sum(0) for index, weight in row]) for row in stencils]
        previous, value = value, step(torch.stack([reply.amin(0) for reply in replies]).amax(0).unsqueeze(-1))
        if (value - previous).abs().max() < tolerance:
            return value[..., 0]
    raise AssertionError("value iteration did not converge")


@pytest.mark.parametrize("gamma", [0.9, 0.99])
def test_discounted_value_iteration_on_the_aligned_grid_equals_the_closed_form(gamma):
    env = make(dtype=torch.float64)
    grid = Grid((1.2, 100 * env.dt / 2), extend=True)  # dv = a dt / 2: braking lands on grid points
    value = value_iteration(env, grid, AvoidBackup(), gamma, 1e-13)
    x, v = grid.states[100:, 100:].unbind(-1)
    expected = 1 - x
    for k in range(1, 200):
        expected = expected - gamma**k * (v * env.dt - env.dt**2 * (k - 0.5)).clamp(min=0)
    torch.testing.assert_close(value[100:, 100:], expected, atol=1e-10, rtol=0)


def set_quality(env: DoubleIntegratorEnv, grid: Grid, value: Tensor) -> tuple[float, float, float]:
    kept = grid.states[..., 1].abs() <= 2.2
    safe, called = env.exact_safe(grid.states)[kept], value[kept] >= 0
    iou = (safe & called).sum() / (safe | called).sum()
    return iou.item(), (called & ~safe).sum().div((~safe).sum()).item(), (safe & ~called).sum().div(safe.sum()).item()


@pytest.mark.parametrize(
    ("problem", "gamma", "expected"),
    [
        ("avoid", 0.99, (0.956, 0.047, 0.0)),
        ("avoid", 0.999, (0.9955, 0.0046, 0.0)),
        ("avoid", 0.9999, (0.9995, 0.0005, 0.0001)),
        ("reach_avoid", 0.9, (0.076, 0.0, 0.924)),
        ("reach_avoid", 0.99, (0.637, 0.0, 0.363)),
        ("reach_avoid", 0.999, (0.986, 0.0, 0.014)),
        ("reach_avoid", 0.9999, (0.9987, 0.0, 0.0013)),
    ],
)
def test_discounting_grows_the_avoid_set_and_shrinks_the_reach_avoid_set(problem, gamma, expected):
    env = make(problem=problem, dtype=torch.float64)
    grid = Grid((1.2, 2.5), extend=False)
    backup = AvoidBackup() if problem == "avoid" else ReachAvoidBackup()
    value = value_iteration(env, grid, backup, gamma, 1e-8)
    assert set_quality(env, grid, value) == pytest.approx(expected, abs=2e-3)


def test_the_kernel_of_the_game_is_that_of_value_iteration_over_both_players():
    env = make(max_disturbance=0.5, dtype=torch.float64)
    grid = Grid((1.2, 2.5), extend=False)
    value = value_iteration(env, grid, AvoidBackup(), 0.999, 1e-5)
    assert set_quality(env, grid, value)[0] > 0.99
    alone = make(dtype=torch.float64)
    assert set_quality(alone, grid, value)[0] < 0.8  # another game: the disturbance counts
    kept = env.exact_safe(grid.states) & (grid.states[..., 1].abs() <= 2)
    error = (value - env.exact_value(grid.states))[kept].abs()
    assert error.max() < 0.03
    assert error.mean() < 0.005


def play(env: DoubleIntegratorEnv, states: Tensor, worst: bool, steps: int = 80) -> Tensor:
    """Least margins `[N]` when the controller brakes, and the disturbance pushes on or at random, all by `step`."""
    tensordict = start(env, states)
    least, generator = tensordict["safety_margin"], torch.Generator().manual_seed(1)
    for _ in range(steps):
        velocity = tensordict["observation"][:, 1:]
        push = velocity.sign() if worst else 2 * torch.rand(velocity.shape, generator=generator, dtype=env.dtype) - 1
        tensordict["disturbance"] = env.max_disturbance * push
        tensordict["action"] = braking(env, tensordict["observation"], tensordict["disturbance"])
        _, tensordict = env.step_and_maybe_reset(tensordict)
        least = torch.minimum(least, tensordict["safety_margin"])
    return least[:, 0]


def test_a_braking_controller_holds_the_kernel_of_the_game_against_every_disturbance():
    settings = {"max_disturbance": 0.5, "discrete": False, "end_criterion": "timeout", "dtype": torch.float64}
    env = make(400, dt=0.02, **settings)
    states = box(4000)
    inside = states[env.exact_value(states) > 0.02][:400]
    for worst in (True, False):
        assert (play(env, inside, worst) >= 0).all()


def test_the_worst_disturbance_breaks_every_braking_outside_the_kernel_of_the_game():
    settings = {"max_disturbance": 0.5, "discrete": False, "end_criterion": "timeout", "dtype": torch.float64}
    env, alone = make(300, dt=0.02, **settings), make()
    states = box(20_000)
    between = states[(env.exact_value(states) < -0.02) & (alone.exact_value(states) > 0.05)][:300]
    assert len(between) == 300
    assert (play(env, between, worst=True, steps=120) < 0).all()
    env.max_disturbance = 0.0  # it does not push: braking alone saves them all
    assert (play(env, between, worst=True, steps=120) >= 0).all()


def test_discrete_and_continuous_disturbances_have_their_own_specs():
    discrete, continuous = (make(3, max_disturbance=0.5, discrete=kind) for kind in (True, False))
    assert discrete.full_action_spec["disturbance"].n == 3
    assert discrete.control(torch.arange(3), "disturbance").flatten().tolist() == [-0.5, 0.0, 0.5]
    space = continuous.full_action_spec["disturbance"].space
    assert (space.low == -0.5).all()
    assert (space.high == 0.5).all()
    assert discrete.zero_action().tolist() == [1, 1, 1]
    assert not continuous.zero_action().any()


@pytest.mark.parametrize(
    ("settings", "extent"),
    [
        # The second has a target so large for its brakes that stopping the clock there beats staying safe.
        ({"max_disturbance": 0.5}, (2.5, 2.5)),
        ({"max_control": 0.3, "target_radius": 0.6, "dt": 0.1}, (2.0, 1.5)),
    ],
)
def test_the_exact_reach_avoid_value_equals_undiscounted_value_iteration(settings, extent):
    env = make(problem="reach_avoid", dtype=torch.float64, **settings)
    grid = Grid(extent, extend=False)
    value = value_iteration(env, grid, ReachAvoidBackup(), 1.0, 1e-9)
    kept = (grid.states[..., 0].abs() <= 1) & (grid.states[..., 1].abs() <= 0.6 * extent[1])
    error = (value - env.exact_value(grid.states))[kept].abs()
    assert error.max() < 0.05  # the grid's and the step's, where a wrong formula is off by .9
    assert error.mean() < 0.015
    wrong_sign = (value >= 0) != env.exact_safe(grid.states)
    assert wrong_sign[kept].double().mean() < 0.01


def test_the_reach_avoid_set_is_the_avoid_kernel():
    states = box(20_000)
    assert torch.equal(make(problem="reach_avoid").exact_safe(states), make().exact_safe(states))
