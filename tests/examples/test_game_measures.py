"""What game_safety.py measures at its end, on games whose every outcome can be worked out."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from line_game import LineGameEnv, constant
from runs import configuration, module
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from torchrl_safety.envs import DoubleIntegratorEnv, PursuitEvasionEnv
from torchrl_safety.modules import AngleEncoding
from torchrl_safety.objectives import AvoidBackup, ReachAvoidBackup

CONTROLS, DISTURBANCES = (-2.0, 0.0, 2.0), (-1.0, 0.0, 1.0)
PUSHES = torch.tensor(DISTURBANCES)[:, None]


@pytest.fixture(scope="module")
def measures() -> dict:
    return module("game_measures")


def towards(goal: float) -> TensorDictModule:
    """The control that goes to `goal`, and none at it."""
    return TensorDictModule(lambda state: 1 + (goal - state[..., 0]).sign().long(), ["observation"], ["action"])


def outcome(x: float, goal: float, sequence: tuple[float, ...], *, reach: bool) -> bool:
    """Whether the control `towards(goal)` wins on the line, step by step."""
    if abs(x) > 3.5:
        return False
    for push in sequence:
        if reach and x >= 1.5:
            return True
        x += CONTROLS[1 + (goal > x) - (goal < x)] + push
        if abs(x) > 3.5:
            return False
    return not reach or x >= 1.5


@pytest.mark.parametrize("problem", ["avoid", "reach_avoid"])
@pytest.mark.parametrize(("decisions", "hold"), [(3, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("goal", [0.0, 1.0])
def test_the_tree_of_sequences_finds_what_their_list_does(measures, problem, decisions, hold, goal):
    starts = torch.linspace(-4, 4, 33)
    found = measures["withstands_every_sequence"](
        LineGameEnv(1, problem=problem), towards(goal), starts[:, None], PUSHES, decisions=decisions, hold=hold
    )
    sequences = [
        tuple(push for push in chosen for _ in range(hold))
        for chosen in itertools.product(DISTURBANCES, repeat=decisions)
    ]
    reach = problem == "reach_avoid"
    expected = [all(outcome(x, goal, sequence, reach=reach) for sequence in sequences) for x in starts.tolist()]
    assert 0 < sum(expected) < len(expected)
    assert found.tolist() == expected


def test_a_sequence_has_as_many_steps_as_it_takes_to_push_an_idle_controller_out(measures):
    tried = measures["withstands_every_sequence"]
    still = LineGameEnv(1), constant(1), torch.zeros(1, 1), PUSHES
    assert tried(*still, decisions=3, hold=1).tolist() == [True]
    assert tried(*still, decisions=4, hold=1).tolist() == [False]
    assert tried(*still, decisions=2, hold=2).tolist() == [False]


def test_sequences_end_where_the_last_state_is_decided_while_a_push_is_held(measures):
    tried = measures["withstands_every_sequence"]
    one_push = LineGameEnv(1), constant(1), torch.full((1, 1), 3.0), PUSHES[2:]
    assert tried(*one_push, decisions=1, hold=3).tolist() == [False]


def test_a_table_of_outcomes_counts_each_kind(measures):
    claimed, withstood = torch.tensor([1, 1, 1, 0, 0]).bool(), torch.tensor([1, 1, 0, 1, 0]).bool()
    assert list(measures["confusion"](claimed, withstood).values()) == [2, 1, 1, 1]


@pytest.mark.parametrize("discrete", [True, False])
def test_the_exact_disturbance_pushes_on_towards_the_wall_ahead(measures, discrete):
    env = DoubleIntegratorEnv(1, max_disturbance=0.5, discrete=discrete)
    states = torch.tensor([[0.0, 1.0], [0.0, -1.0], [0.9, 0.1], [-0.9, -0.1]])
    braking = torch.tensor([0, 2, 0, 2]) if discrete else torch.tensor([[-1.0], [1.0], [-1.0], [1.0]])
    moved = measures["exact_disturbance"](env)(TensorDict({"observation": states, "action": braking}, [4]))
    assert env.control(moved["disturbance"], "disturbance").flatten().tolist() == [0.5, -0.5, 0.5, -0.5]


def test_the_value_of_a_state_heeds_its_own_margins(measures):
    states = torch.tensor([[0.0], [2.0], [4.0]])  # g = 3.5, 1.5, -.5 and l = -1.5, .5, 2.5
    for problem, backup, expected in (
        ("avoid", AvoidBackup(), [1.0, 1.0, -0.5]),
        ("reach_avoid", ReachAvoidBackup(), [1.0, 1.0, -0.5]),
    ):
        value = measures["own_value"](LineGameEnv(1, problem=problem), backup, torch.ones_like, states)
        assert value.tolist() == expected
    low = measures["own_value"](
        LineGameEnv(1, problem="reach_avoid"), ReachAvoidBackup(), lambda part: torch.full_like(part, -1.0), states
    )
    assert low.tolist() == [-1.0, 0.5, -0.5]


def test_nobody_meets_where_nothing_is_claimed(measures):
    cfg = configuration("game_safety", "env=bicycle", "algo=ppo", "response.starts=4")
    learner = module("game_learners")["make_learner"](cfg, measures["make_arena"](cfg, 2))
    learner = learner._replace(value=lambda states: torch.full_like(states[..., :1], -1.0))
    assert measures["meet_the_worst"](cfg, learner) == ({}, {})


def test_a_scaled_state_keeps_its_angles():
    encoder = module("game_learners")["Scaled"](torch.tensor([4.0, 1.0]), AngleEncoding(2, (1,)))
    assert encoder(torch.tensor([[2.0, 0.0], [-8.0, math.pi]])).tolist() == [
        [0.5, 1.0, 0.0],
        pytest.approx([-2.0, -1.0, 0.0], abs=1e-6),
    ]


def test_a_grid_is_read_in_the_lengths_of_the_environment(measures, tmp_path):
    table = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    np.savez(tmp_path / "grid.npz", V=table, lo=[-5.0, -10.0, 0.0], hi=[5.0, 10.0, 2 * math.pi])
    load = measures["GridSolution"].load
    env = PursuitEvasionEnv(speed=1.0, capture_radius=1.0)
    grid = load(tmp_path / "grid.npz", env)
    assert grid.states()[1, 2, 1].tolist() == pytest.approx([1.0, 2.0, math.pi / 2])
    assert grid.value[1, 2, 1].item() == pytest.approx(21 / 5)
    with pytest.raises(ValueError, match=r"solution=.* is that of v = w R, but the environment has speed=2\.0"):
        load(tmp_path / "grid.npz", PursuitEvasionEnv(speed=2.0, capture_radius=1.0))


@pytest.mark.parametrize("kind", ["text", "array", "empty", "zip", "other arrays"])
def test_a_file_that_holds_no_grid_is_refused_by_name(measures, tmp_path, kind):
    path = tmp_path / "grid.npz"
    contents = {"text": b"x, y", "empty": b"", "zip": b"PK\x03\x04 and no more"}
    with path.open("wb") as file:
        if kind in contents:
            file.write(contents[kind])
        elif kind == "array":
            np.save(file, np.zeros(3))
        else:
            np.savez(file, value=np.zeros((2, 3, 4)))
    with pytest.raises(ValueError, match=r"solution=\S*grid.npz is no .npz file with the arrays V, lo and hi"):
        measures["GridSolution"].load(path, PursuitEvasionEnv(speed=1.0, capture_radius=1.0))


def test_a_grid_of_other_axes_is_refused(measures, tmp_path):
    np.savez(tmp_path / "grid.npz", V=np.zeros((3, 4)), lo=[-5.0, -10.0], hi=[5.0, 10.0])
    with pytest.raises(ValueError, match=r"has V, lo and hi of shapes \(3, 4\), \(2,\) and \(2,\): V needs the axes"):
        measures["GridSolution"].load(tmp_path / "grid.npz", PursuitEvasionEnv(speed=1.0, capture_radius=1.0))


def test_a_set_is_played_from_inside_and_from_outside(measures, tmp_path):
    """Both cars drive straight on: the evader fails exactly if the pursuer's way comes closer than the radius."""
    np.savez(tmp_path / "grid.npz", V=np.full((3, 3, 4), -1.0), lo=[-6.0, -10.0, 0.0], hi=[20.0, 10.0, 2 * math.pi])
    cfg = configuration(
        "game_safety", "env=pursuit_evasion", "rollouts=64", "rollout_steps=100", f"solution={tmp_path / 'grid.npz'}"
    )
    measure = measures["PlayedSet"](cfg, AvoidBackup())

    def passes(state: torch.Tensor) -> torch.Tensor:
        x, y, heading = state.unbind(-1)
        speed_x, speed_y = heading.cos() - 1, heading.sin()
        when = (-(x * speed_x + y * speed_y) / (speed_x.square() + speed_y.square() + 1e-9)).clamp(0, 10)
        return (torch.hypot(x + when * speed_x, y + when * speed_y) - 1).unsqueeze(-1)

    straight = TensorDictModule(
        lambda state: 2 * (torch.ones_like(state[..., 0], dtype=torch.int64),),
        ["observation"],
        ["action", "disturbance"],
    )
    found = measure(straight, passes)
    assert 0.2 < found.scores["claimed"] < 0.9
    assert found.scores["safe_rate"] > 0.95  # steps of .1 s miss no more than grazes
    assert found.scores["lost_elsewhere"] > 0.95
    assert found.scores["iou"] == 0.0  # nothing is safe on that grid
    nodes = measure.solution.states().flatten(0, -2)
    own = torch.minimum(passes(nodes), measure.env.safety_margin(nodes))
    assert found.scores["false_safe"] == pytest.approx((own >= 0).double().mean().item())
    assert found.scores["agreement"] == pytest.approx((own < 0).double().mean().item())
    assert found.value.shape == (3, 3)
