"""The example of two-player games: what a run leaves, going on from a checkpoint, and what is refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from omegaconf import OmegaConf
from runs import checkpoints, differences, final_state, metrics, module, run

SHORT = [
    "num_envs=16", "frames=800", "evaluations=2", "checkpoints=2", "hidden=[16]", "env.max_steps=10", "rollouts=8",
    "env.grid.nodes=21", "rollout_steps=10", "response.frames=0",
]  # fmt: skip
REPLAY = [*SHORT, "warmup_frames=128", "batch_size=32", "buffer_size=512"]  # filled, or garbage would be compared
BATCHES = [*SHORT, "algo.steps=5", "algo.epochs=2", "algo.minibatch=48"]
LEAGUE = ["league.share=0.5", "league.envs=16", "league.frames_per_step=480", "league.interval=200"]
LEARNERS = {
    "categorical": [*REPLAY, "algo=dqn", "failure_depth=0.02"],
    "scalar": [*REPLAY, "algo=dqn", "algo.categorical=false", "algo.noisy=false", "algo.dueling=null", "game=gameplay"],
    "sac": [*REPLAY, "algo=sac"],
    "simultaneous": [*REPLAY, "algo=sac", "algo.second_mover=false", "game=gameplay"],
    "league": [*REPLAY, "algo=dqn", *LEAGUE],
    "league_sac": [*REPLAY, "algo=sac", *LEAGUE],
    "ppo": [*BATCHES, "algo=ppo"],
    "in_turn": [*BATCHES, "algo=ppo", "algo.periods.alternating=true", "algo.second_mover=false", "game=gameplay"],
}


RESPONSE = ["response.frames=200", "response.envs=8", "response.starts=8", "response.level=-9"]
PLAYED = [option for option in REPLAY if "grid" not in option] + ["env.plane.nodes=5", *RESPONSE]
LEARNERS |= {
    "pursuit": [*PLAYED, "env=pursuit_evasion"],
    "attack": [
        *PLAYED, "env=attack_defense", "game=gameplay", "response.sequences={decisions: 2, hold: 2, states: 20}",
        *LEAGUE,
    ],
    "bicycle": [*PLAYED, "env=bicycle", "algo=sac"],
}  # fmt: skip

PLAYING = ("pursuit", "attack", "bicycle")
"""Those in environments without an exact set."""
COMMON = ("categorical", "league", "ppo")
"""Those that are run each time."""
EVERY = [pytest.param(name, marks=[] if name in COMMON else pytest.mark.slow) for name in LEARNERS]


@pytest.fixture(scope="module")
def finish(tmp_path_factory):
    made = {}

    def finish(learner: str):
        if learner not in made:
            folder = tmp_path_factory.mktemp(learner) / "run"
            made[learner] = folder, run("game_safety", folder, *LEARNERS[learner])
        folder, outcome = made[learner]
        assert outcome.code == 0, outcome.err
        return folder, outcome

    return finish


@pytest.mark.parametrize("learner", EVERY)
def test_a_run_leaves_its_table_pictures_metrics_model_and_summary(finish, learner):
    folder, (_, out, _) = finish(learner)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["problem"] == ("reach_avoid" if "game=gameplay" in LEARNERS[learner] else "avoid")
    if learner in PLAYING:
        assert 0 <= summary["claimed"] <= 1
    else:
        assert 0 <= summary["iou"] <= 1
        assert f"{'IoU with the exact set':<34}{summary['iou']:>10.4f}" in out
    assert [row["frames"] for row in metrics(folder)] == ["400", "800"]
    for name in ("value_map", "curves"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert torch.load(folder / "model.pt", weights_only=True)


@pytest.mark.parametrize("learner", EVERY)
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(finish, tmp_path, learner):
    whole, _ = finish(learner)
    folder = shutil.copytree(whole, tmp_path / "run")
    code, _, err = run("game_safety", tmp_path / "unused", f"resume={checkpoints(folder)[0]}")
    assert code == 0, err
    assert differences(final_state(whole), final_state(folder), but=frozenset({"match_seconds"})) == []
    rows, expected = ([{**row, "match_seconds": None} for row in metrics(path)] for path in (folder, whole))
    assert rows == expected


def test_margins_are_stored_down_to_the_depth_of_a_failure(finish):
    folder, _ = finish("categorical")
    [buffer] = [state for name, state in final_state(folder).items() if name.endswith("buffer/state.pt")]
    margins = buffer["_storage"]["_storage"]["steps.safety_margin"]
    assert margins.min().item() == pytest.approx(-0.02)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["game=chess"], "game/chess"),
        (["algo=ddpg"], "algo/ddpg"),
        (["algo.categorical=maybe"], "algo.categorical is 'maybe'; give true or false"),
        (["algo=sac", "lr.disturbance=-1"], "lr.disturbance is -1; give a positive number"),
        (
            ["algo=ppo", "algo.minibatch=5000"],
            "algo.minibatch=5000 is more than a batch of num_envs=128 times algo.steps",
        ),
        (["batch_size=4096"], "batch_size=4096, warmup_frames=2000"),
        (["env.max_disturbance=2"], "max_disturbance=2 must lie in [0, max_control=1.0)"),
        (["env=pursuit_evasion", "solution=none.npz"], "No such file or directory: 'none.npz'"),
        (
            ["env=bicycle", "env.scale=[1, 0, 1, 1, 1]"],
            "env.scale=[1, 0, 1, 1, 1] must have a positive number for each",
        ),
        (["solution=a.npz"], "solution=a.npz is one of env=pursuit_evasion, not of double_integrator"),
        (["response.frames=-1"], "response.frames is -1; give a whole number of at least 0"),
        (["env=dubins_car"], "env.name is 'dubins_car'; choose one of ['double_integrator', 'pursuit_evasion'"),
        (["evaluate=nothing"], "evaluate=nothing holds no config.yaml, which every run leaves"),
        (["failure_depth=0"], "failure_depth is 0; give a positive number, or null for none"),
        (["random_actions.end=2"], "random_actions.end is 2; give a number in [0, 1]"),
    ],
)
def test_a_wrong_option_is_one_clear_complaint(tmp_path, options, words):
    code, _, err = run("game_safety", tmp_path / "run", *options)
    assert code == 1
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_run_meets_the_worst_opponents_and_its_model_meets_them_again(finish):
    folder, _ = finish("attack")
    summary = json.loads((folder / "summary.json").read_text())
    rates = [summary[f"against_{name}"] for name in ("zero", "random", "trained", "best_response")]
    assert all(0 <= rate <= 1 for rate in rates)
    assert sum(1 for name in summary if name.startswith("against_disturbance_")) > 0
    assert sum(count for name, count in summary.items() if name.startswith(("claimed_", "unclaimed_"))) == 20
    assert (folder / "cross_play.png").read_bytes().startswith(b"\x89PNG")
    code, out, err = run("game_safety", folder.parent / "unused", f"evaluate={folder}", "response.frames=0")
    assert code == 0, err
    for name in ("claimed", "safe_rate", "success_rate", "lost_elsewhere"):
        if summary[name] is not None:
            assert f"{name:<34}{summary[name]:>10.4f}" in out


def test_a_run_that_has_not_ended_cannot_be_measured(finish, tmp_path):
    folder, _ = finish("attack")
    shutil.copy(folder / "config.yaml", tmp_path)
    code, _, err = run("game_safety", tmp_path / "unused", f"evaluate={tmp_path}")
    assert code == 1
    assert f"holds no model.pt, which a run leaves at its end: finish it with resume={tmp_path}" in err


def test_a_league_tells_its_scores(finish):
    folder, _ = finish("league")
    row = metrics(folder)[-1]
    assert 0 <= float(row["best_disturbance"]) <= 1
    assert 0 < float(row["match_frames"]) <= 480


def test_random_actions_fade_from_the_first_update_to_the_given_share():
    game = module("game_safety")
    cfg = OmegaConf.create(
        {"warmup_frames": 10, "frames": 100, "random_actions": {"start": 0.8, "end": 0.2, "fraction": 0.5}}
    )
    assert [game["at_random"](cfg, frames) for frames in (0, 9, 10, 25, 50, 100)] == pytest.approx(
        [1.0, 1.0, 0.68, 0.5, 0.2, 0.2]
    )
