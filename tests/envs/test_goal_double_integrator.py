"""The goal-conditioned double integrator: its goal stays, its margins, and its exact value against value iteration."""

from __future__ import annotations

import io
import itertools
import math
import pickle

import pytest
import torch
from tensordict import TensorDict
from test_double_integrator import Grid, value_iteration
from torch import Tensor
from torchrl.envs.utils import check_env_specs

from torchrl_safety.envs import DoubleIntegratorEnv, GoalDoubleIntegratorEnv, check_safety_env
from torchrl_safety.objectives import ReachAvoidBackup


def make(num_envs: int = 4, **settings) -> GoalDoubleIntegratorEnv:
    return GoalDoubleIntegratorEnv(num_envs, **{"seed": 0, **settings})


def start(env: GoalDoubleIntegratorEnv, states) -> TensorDict:
    states = torch.as_tensor(states, dtype=env.dtype)
    return env.reset(TensorDict({"observation": states}, [len(states)]))


def box(n: int) -> Tensor:
    unit = torch.rand(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (2 * unit - 1) * torch.tensor([1.0, 2.2, 0.7], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_envs", [1, 7])
@pytest.mark.parametrize("max_steps", [None, 3])
def test_every_combination_of_settings_fulfils_its_specs(num_envs, dtype, max_steps):
    for problem, discrete in itertools.product(["avoid", "reach_avoid"], [True, False]):
        env = make(num_envs, problem=problem, discrete=discrete, dtype=dtype, max_steps=max_steps)
        check_env_specs(env, break_when_any_done="both")
        data = env.rollout(4, break_when_any_done=False)
        assert ("target_margin" in data.keys()) == (problem == "reach_avoid")  # noqa: SIM118
        assert data["next", "observation"].shape == (num_envs, 4, 3)
        assert data["next", "observation"].dtype == data["next", "safety_margin"].dtype == dtype


def test_it_gives_the_losses_what_they_take_for_granted():
    check_safety_env(make(8, max_steps=20))


@pytest.mark.parametrize("discrete", [True, False])
def test_the_motion_is_the_double_integrators_and_the_goal_stays(discrete):
    env, plain = (kind(64, seed=0, discrete=discrete, max_control=1.5) for kind in (
        GoalDoubleIntegratorEnv, DoubleIntegratorEnv,
    ))  # fmt: skip
    states = box(64).float()
    actions = plain.action_spec.rand()
    after = env.step(start(env, states).set("action", actions))["next"]
    given = plain.reset(TensorDict({"observation": states[:, :2]}, [64])).set("action", actions)
    expected = plain.step(given)["next"]
    assert torch.equal(after["observation"][:, :2], expected["observation"])
    assert torch.equal(after["observation"][:, 2], states[:, 2])
    for key in ("safety_margin", "terminated", "reward"):
        assert torch.equal(after[key], expected[key])


def test_margins_are_the_distances_to_the_walls_and_to_the_goal_at_rest():
    env = make(dtype=torch.float64, target_radius=0.3, goal_limit=0.6)
    for state in box(200):
        x, v, goal = state.tolist()
        assert env.safety_margin(state).item() == pytest.approx(1 - abs(x))
        assert env.target_margin(state).item() == pytest.approx(0.3 - max(abs(x - goal), abs(v)))


def test_goals_and_starts_are_uniform_and_drawn_anew_for_each_episode():
    env = make(20_000, goal_limit=0.5, start_low=(-0.5, 0.0), start_high=(0.5, 2.0))
    states = env.reset()["observation"]
    low, high = torch.tensor([-0.5, 0.0, -0.5]), torch.tensor([0.5, 2.0, 0.5])
    assert ((states >= low) & (states <= high)).all()
    counts = torch.histogramdd(states, bins=[2, 2, 4]).hist.flatten()
    assert (counts - 1250).abs().max() < 5 * 34.2  # 16 equal cells of 1250 expected each, standard deviation 34
    data = make(16, max_steps=4).rollout(40, break_when_any_done=False)
    now, following = data["observation"][..., 2], data["next", "observation"][..., 2]
    assert torch.equal(now, following)
    changed = now[:, 1:] != now[:, :-1]
    assert torch.equal(changed, data["next", "done"][:, :-1, 0])


class At:
    """The plane of one goal, as two-dimensional value iteration takes it."""

    max_disturbance = 0.0

    def __init__(self, env: GoalDoubleIntegratorEnv, goal: float):
        self.env, self.goal, self.max_control = env, goal, env.max_control

    def lift(self, states: Tensor) -> Tensor:
        return torch.cat((states, torch.full_like(states[..., :1], self.goal)), -1)

    def dynamics(self, states: Tensor, control: Tensor, _: Tensor) -> Tensor:
        return self.env.dynamics(self.lift(states), control)[..., :2]

    def safety_margin(self, states: Tensor) -> Tensor:
        return self.env.safety_margin(self.lift(states))

    def target_margin(self, states: Tensor) -> Tensor:
        return self.env.target_margin(self.lift(states))


@pytest.mark.parametrize(
    ("settings", "extent", "goals"),
    [
        ({}, (2.0, 2.2), (-0.7, 0.3)),
        # A target so large for its brakes that stopping the clock there beats staying safe.
        ({"max_control": 0.3, "target_radius": 0.45, "goal_limit": 0.2, "dt": 0.1}, (2.0, 1.5), (0.2,)),
    ],
)
def test_the_exact_value_equals_undiscounted_value_iteration(settings, extent, goals):
    env = make(dtype=torch.float64, **settings)
    grid = Grid(extent, extend=False)
    for goal in goals:
        plane = At(env, goal)
        value = value_iteration(plane, grid, ReachAvoidBackup(), 1.0, 1e-9)
        exact = env.exact_value(plane.lift(grid.states))
        kept = (grid.states[..., 0].abs() <= 1) & (grid.states[..., 1].abs() <= 0.6 * extent[1])
        error = (value - exact)[kept].abs()
        assert error.max() < 0.06  # the grid's and the step's
        assert error.mean() < 0.015
        wrong_sign = (value >= 0) != env.exact_safe(plane.lift(grid.states))
        assert wrong_sign[kept].double().mean() < 0.01


def test_at_a_goal_in_the_middle_the_value_is_the_plain_double_integrators():
    states = box(5000)
    states[:, 2] = 0
    for problem in ("avoid", "reach_avoid"):
        expected = DoubleIntegratorEnv(problem=problem).exact_value(states[:, :2])
        torch.testing.assert_close(make(problem=problem).exact_value(states), expected)


def test_the_solution_set_is_the_avoid_kernel_whatever_the_goal():
    states = box(20_000)
    env = make()
    assert torch.equal(env.exact_safe(states), DoubleIntegratorEnv().exact_safe(states[:, :2]))
    mirrored = env.exact_value(-states)
    torch.testing.assert_close(mirrored, env.exact_value(states))
    larger = env.exact_safe(states)
    for share in (0.95, 0.5):
        inside = env.well_inside(states, share)
        assert 0 < inside.sum() < larger.sum()
        assert not (inside & ~larger).any()
        larger = inside
    with pytest.raises(ValueError, match="share=0"):
        env.well_inside(states, 0)


def towards_goal(env: GoalDoubleIntegratorEnv, state: Tensor) -> Tensor:
    """Brake where a wall is near, else go to the goal as fast as full braking still stops there."""
    x, v, goal = state.unbind(-1)
    away = goal - x
    wanted = away.sign() * (0.8 * env.max_control * away.abs()).sqrt()
    stopping = 1 - (x * v.sign() + v.square() / (2 * env.max_control)) < 0.05
    return torch.where(stopping, -v.sign(), ((wanted - v) / env.dt).clamp(-1, 1)).unsqueeze(-1) * env.max_control


def test_from_well_inside_the_goal_is_reached_without_a_failure():
    env = make(1000, discrete=False, end_criterion="timeout", dtype=torch.float64, dt=0.02)
    states = box(8000)
    tensordict = start(env, states[env.well_inside(states, 0.9)][:1000])
    reached = tensordict["target_margin"] >= 0
    for _ in range(400):
        tensordict["action"] = towards_goal(env, tensordict["observation"])
        _, tensordict = env.step_and_maybe_reset(tensordict)
        assert (tensordict["safety_margin"] >= 0).all()
        reached |= tensordict["target_margin"] >= 0
    assert reached.all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("batch", [(), (5,), (2, 3, 4)])
def test_exact_solutions_take_any_batch_and_dtype(batch, dtype):
    env = make()
    states = (box(math.prod(batch)).reshape(*batch, 3) * 2).to(dtype)
    value = env.exact_value(states)
    assert value.shape == batch
    assert value.dtype == (dtype if dtype.is_floating_point else torch.float32)
    torch.testing.assert_close(value.double(), env.exact_value(states.double()), atol=2e-2, rtol=1e-2)
    assert torch.equal(env.exact_safe(states), value >= 0)


def test_a_seed_touches_no_global_generator_and_a_saved_state_continues_the_draws():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    env = make(8, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    env.reset()
    file = io.BytesIO()
    torch.save(env.state_dict(), file)
    file.seek(0)
    other = make(8, seed=9)
    other.load_state_dict(torch.load(file, weights_only=True))
    copied = pickle.loads(pickle.dumps(make(8, seed=3)))
    copied.reset()
    expected = env.reset()["observation"]
    assert torch.equal(other.reset()["observation"], expected)
    assert torch.equal(copied.reset()["observation"], expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dt": 0.0}, "dt=0.0 must be positive"),
        ({"target_radius": 0.0}, "target_radius=0.0 must lie in"),
        ({"goal_limit": -0.1}, r"goal_limit=-0.1 must lie in \[0, 0.78\]"),
        ({"goal_limit": 0.9}, r"goal_limit=0.9 must lie in \[0, 0.78\] with target_radius=0.2"),
        ({"goal_limit": math.nan}, "goal_limit=nan must lie in"),
        ({"problem": "reach"}, "problem='reach' is unknown"),
        ({"start_low": (3.0, 0.0)}, r"start_low=\(3.0, 0.0\).*low <= high"),
    ],
)
def test_wrong_settings_are_named_with_their_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)
