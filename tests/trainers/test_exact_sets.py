"""Laws of set metrics, of reading a set off a critic, and of the grid on which it is compared with the exact one."""

from __future__ import annotations

import math

import pytest
import torch
from torchrl.envs import TransformedEnv

from torchrl_safety.envs import DoubleIntegratorEnv, NativeEnv
from torchrl_safety.objectives import AvoidBackup, DiscountedReturnBackup, ReachAvoidBackup, ReachBackup
from torchrl_safety.trainers import ExactSetEvaluator, exact_sets, set_metrics, state_value

BOX = {"low": (-1.2, -2.2), "high": (1.2, 2.2)}


def test_set_metrics_equal_counting_state_by_state():
    generator = torch.Generator().manual_seed(0)
    predicted, exact = torch.rand(2, 7, 11, generator=generator) > 0.4
    pairs = list(zip(predicted.flatten().tolist(), exact.flatten().tolist()))
    both = sum(p and e for p, e in pairs)
    metrics = set_metrics(predicted, exact)
    assert metrics.iou == pytest.approx(both / sum(p or e for p, e in pairs))
    assert metrics.false_safe == pytest.approx(sum(p and not e for p, e in pairs) / sum(not e for _, e in pairs))
    assert metrics.false_unsafe == pytest.approx(sum(e and not p for p, e in pairs) / sum(e for _, e in pairs))


def test_calling_everything_safe_misses_no_safe_state_and_every_unsafe_one():
    exact = torch.tensor([True, False, False, False])
    assert set_metrics(torch.ones(4, dtype=torch.bool), exact) == (0.25, 1.0, 0.0)


def test_empty_sets_have_no_rate_to_speak_of():
    nothing = torch.zeros(3, dtype=torch.bool)
    assert set_metrics(nothing, nothing) == (1.0, 0.0, 0.0)
    assert set_metrics(~nothing, ~nothing) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("predicted", "exact"),
    [(torch.ones(3), torch.ones(3)), (torch.ones(3, dtype=torch.bool), torch.ones(3, 1, dtype=torch.bool))],
)
def test_set_metrics_refuse_values_and_mismatched_shapes(predicted, exact):
    with pytest.raises(ValueError, match=r"bool|differ in shape"):
        set_metrics(predicted, exact)


def test_the_value_of_a_state_adds_its_own_margins_to_the_critic():
    g, l, v = torch.randn(3, 50, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)  # noqa: E741
    signals = {"safety_margin": g, "target_margin": l}
    assert torch.equal(state_value(AvoidBackup(), signals, v), torch.minimum(g, v))
    assert torch.equal(state_value(ReachBackup(), signals, v), torch.maximum(l, v))
    expected = torch.minimum(g, torch.maximum(l, v))
    assert torch.equal(state_value(ReachAvoidBackup(), signals, v), expected)
    assert torch.equal(state_value(DiscountedReturnBackup(), {"reward": g}, v), g + v)


class RingEnv(NativeEnv):
    """Turns in place at `(x, y)`; safe where `x cos θ + y sin θ` is at most 1."""

    angles = (2,)

    def __init__(self, num_envs=1, **settings):
        super().__init__(num_envs, state_dim=3, control_table=torch.tensor([[-1.0], [0.0], [1.0]]), **settings)

    def dynamics(self, state, control, disturbance=None):
        return state + 0.1 * torch.cat([torch.zeros_like(state[..., :2]), control], -1)

    def safety_margin(self, state):
        ahead = state[..., 0] * state[..., 2].cos() + state[..., 1] * state[..., 2].sin()
        return (1 - ahead).unsqueeze(-1)

    def target_margin(self, state):
        return -self.safety_margin(state)

    def sample_states(self, n, generator):
        return torch.zeros(n, 3)

    def exact_safe(self, state):
        """The safe set of one who keeps his heading."""
        return self.safety_margin(state).squeeze(-1) >= 0

    def well_inside(self, state, share=0.95):
        """The same a little further inside."""
        return self.safety_margin(state).squeeze(-1) >= 1 - share


def stand(tensordict):
    return tensordict.set("action", torch.ones(tensordict.batch_size, dtype=torch.int64))


CUBE = {"low": (-2.0, -1.5, -math.pi), "high": (2.0, 1.5, math.pi), "grid": (9, 7, 12)}


def test_the_scores_equal_a_loop_over_the_nodes_in_which_no_angle_counts_twice(monkeypatch):
    monkeypatch.setattr(exact_sets, "CHUNK", 50)  # the last part is a smaller one
    env = RingEnv(6)
    measure = ExactSetEvaluator(env, AvoidBackup(), **CUBE, rollout_steps=5)
    sizes = []

    def next_value(states):
        sizes.append(len(states))
        return 0.5 - states[:, :1].abs()

    found = measure(stand, next_value)
    assert sum(sizes) == 9 * 7 * 12
    assert max(sizes) == 50

    counts = {"both": 0, "either": 0, "false_safe": 0, "false_unsafe": 0, "safe": 0, "nodes": 0}
    for i in range(9):
        for j in range(7):
            for k in range(12):
                x, y, angle = -2 + 0.5 * i, -1.5 + 0.5 * j, -math.pi + k * math.tau / 12
                margin = 1 - x * math.cos(angle) - y * math.sin(angle)
                exact = bool(measure.exact[i, j, k])
                assert exact == (margin >= 0) or abs(margin) < 1e-5
                assert measure.grid[i, j, k].tolist() == pytest.approx([x, y, angle], abs=1e-5)
                assert found.value[i, j, k].item() == pytest.approx(min(margin, 0.5 - abs(x)), abs=1e-5)
                claimed = exact and abs(x) <= 0.5
                counts["nodes"] += 1
                counts["safe"] += exact
                counts["both"] += claimed and exact
                counts["either"] += claimed or exact
                counts["false_unsafe"] += exact and not claimed
    assert counts["nodes"] == measure.exact.numel()
    assert found.scores["iou"] == pytest.approx(counts["both"] / counts["either"])
    assert found.scores["false_unsafe"] == pytest.approx(counts["false_unsafe"] / counts["safe"])
    assert list(found.scores) == ["iou", "false_safe", "false_unsafe", "safe_rate", "success_rate"]
    assert found.scores["safe_rate"] == 1.0
    assert found.states.shape == (6, 6, 3)


def test_an_axis_of_an_angle_that_does_not_go_all_the_way_round_keeps_both_ends():
    measure = ExactSetEvaluator(RingEnv(), AvoidBackup(), low=(-1, -1, 0), high=(1, 1, 1.5), grid=4)
    assert measure.axes[2].tolist() == pytest.approx([0, 0.5, 1, 1.5])


def test_a_plane_is_taken_at_the_nearest_nodes():
    measure = ExactSetEvaluator(RingEnv(), AvoidBackup(), **CUBE)
    value = torch.rand(9, 7, 12, generator=torch.Generator().manual_seed(0))
    axes, plane, exact = measure.plane(value, at={2: 0.1})  # θ = 0 is node 6
    assert torch.equal(plane, value[:, :, 6])
    assert torch.equal(exact, measure.exact[:, :, 6])
    assert (axes[0] is measure.axes[0], axes[1] is measure.axes[1]) == (True, True)
    axes, plane, _ = measure.plane(value, at={1: -9.0})
    assert torch.equal(plane, value[:, 0])
    assert [len(axis) for axis in axes] == [9, 12]
    for at in ({}, {0: 0.0, 1: 0.0}, {5: 0.0}, {1: 0.0, 5: 0.0}):
        with pytest.raises(ValueError, match="leaves no plane of 3 dimensions"):
            measure.plane(value, at=at)


def test_a_plane_holds_the_exact_value_where_the_environment_has_one():
    env = DoubleIntegratorEnv()
    measure = ExactSetEvaluator(env, AvoidBackup(), **BOX, grid=(21, 31))
    (first, second), _, exact = measure.plane(torch.zeros(21, 31), at={})
    for i in range(21):
        assert torch.equal(exact[i], env.exact_value(torch.stack([first[i].expand(31), second], -1)))


def test_roll_outs_start_at_nodes_well_inside_and_are_the_same_every_time():
    env = DoubleIntegratorEnv(50)
    first, second = (ExactSetEvaluator(env, AvoidBackup(), **BOX, grid=41, seed=3) for _ in range(2))
    assert torch.equal(first.starts, second.starts)
    assert env.exact_safe(first.starts / 0.95).all()
    nodes = {tuple(node) for node in first.grid.flatten(0, -2).tolist()}
    assert {tuple(start) for start in first.starts.tolist()} <= nodes
    assert not torch.equal(first.starts, ExactSetEvaluator(env, AvoidBackup(), **BOX, grid=41, seed=4).starts)


def test_no_roll_out_starts_at_the_target_where_nothing_is_left_to_do():
    env = DoubleIntegratorEnv(200, problem="reach_avoid")
    starts = ExactSetEvaluator(env, ReachAvoidBackup(), **BOX, grid=41).starts
    assert (env.target_margin(starts) < 0).all()
    assert (env.target_margin(ExactSetEvaluator(env, AvoidBackup(), **BOX, grid=41).starts) >= 0).any()


@pytest.mark.parametrize("problem", ["avoid", "reach_avoid"])
def test_the_exact_value_is_scored_perfectly_under_a_state_key_of_its_own(problem):
    env = DoubleIntegratorEnv(4, problem=problem, state_key="state")
    backup = {"avoid": AvoidBackup, "reach_avoid": ReachAvoidBackup}[problem]()
    measure = ExactSetEvaluator(env, backup, **BOX, grid=31, rollout_steps=3)
    found = measure(stand, lambda states: env.exact_value(states).unsqueeze(-1))
    assert (found.scores["iou"], found.scores["false_safe"], found.scores["false_unsafe"]) == (1.0, 0.0, 0.0)
    assert torch.equal(found.states[:, 0], measure.starts)


@pytest.mark.parametrize("grid", [0, 1, 2])
def test_a_grid_without_a_node_to_start_from_is_refused(grid):
    with pytest.raises(ValueError, match=f"take more nodes than grid={grid}"):
        ExactSetEvaluator(DoubleIntegratorEnv(2), AvoidBackup(), **BOX, grid=grid)


@pytest.mark.parametrize(
    "settings", [{"low": (-1.2,), "high": (1.2, 2.2)}, {"low": (-1,) * 3, "high": (1,) * 3}, {**BOX, "grid": (5, 5, 5)}]
)
def test_a_grid_of_another_dimension_than_the_state_is_refused(settings):
    with pytest.raises(ValueError, match="one entry for each of 2 dimensions"):
        ExactSetEvaluator(DoubleIntegratorEnv(2), AvoidBackup(), **settings)


def test_an_environment_without_an_exact_solution_is_refused():
    class Unsolved(RingEnv):
        exact_safe = None

    with pytest.raises(ValueError, match=r"Unsolved has no exact solution.*exact_safe"):
        ExactSetEvaluator(Unsolved(), AvoidBackup(), **CUBE)


def test_a_transformed_environment_is_measured_as_the_one_inside():
    env = DoubleIntegratorEnv(3)
    plain, wrapped = (ExactSetEvaluator(e, AvoidBackup(), **BOX, grid=21) for e in (env, TransformedEnv(env)))
    assert torch.equal(plain.starts, wrapped.starts)
    found = [measure(stand, lambda states: states[:, :1]).scores for measure in (plain, wrapped)]
    assert found[0] == found[1]


def test_an_evaluator_lives_where_its_environment_does():
    with torch.device("meta"):  # which holds no numbers
        env = DoubleIntegratorEnv(2, device="cpu")
        evaluator = ExactSetEvaluator(env, AvoidBackup(), **BOX, grid=11)
    assert env.exact_safe(evaluator.starts).all()
