"""What a run of each example leaves behind, and that it depends on its seed and on nothing else."""

from __future__ import annotations

import json
import math

import pytest
from runs import FRAMES, LEARNERS, SCRIPTS, SHORT, checkpoints, differences, final_state, metrics, module, passed, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SCORES = ("iou", "false_safe", "false_unsafe", "safe_rate", "success_rate")


@pytest.mark.parametrize("algorithm", LEARNERS)
def test_a_run_leaves_its_table_pictures_metrics_events_checkpoints_and_summary(finish, algorithm):
    folder, (_, out, err) = finish(algorithm)
    moments, last = passed(LEARNERS[algorithm].batch), passed(LEARNERS[algorithm].batch)[-1]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary.keys() == {*SCORES, "frames", "updates", "seconds", "seed", "problem", "env", "algorithm"}
    assert {key: summary[key] for key in ("frames", "seed", "problem", "env", "algorithm")} == {
        "frames": last, "seed": 0, "problem": "avoid", "env": "double_integrator", "algorithm": algorithm,
    }  # fmt: skip
    assert summary["success_rate"] is None, "an avoid problem has no target"
    rows = metrics(folder)
    assert [int(row["frames"]) for row in rows] == moments
    assert {key: float(rows[-1][key]) for key in SCORES[:4]} == {key: summary[key] for key in SCORES[:4]}
    assert [int(path.name.split("-")[-1]) for path in checkpoints(folder)] == moments[-2:]
    for name in ("value_map.png", "curves.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(folder)).Reload()
    assert "value_map" in events.Tags()["images"]
    assert [event.step for event in events.Scalars("iou")] == moments
    assert f"frames: {FRAMES}" in (folder / "config.yaml").read_text()
    for line in (
        "IoU with the exact set",
        "false-safe rate",
        "false-unsafe rate",
        "safe rate of the policy",
        "seconds",
    ):
        assert line in out
    assert str(folder) in out
    for part in ("frame/s", "γ 0.", "safe rate", "IoU", "1.50k/1.50k", "100%"):
        assert part in err


@pytest.mark.parametrize("algorithm", LEARNERS)
def test_a_seed_gives_the_same_run_again_however_often_it_is_measured(finish, tmp_path, algorithm):
    folder, _ = finish(algorithm)
    learner = LEARNERS[algorithm]
    code, _, err = run(learner.script, tmp_path / "run", *learner.options, "evaluations=1")
    assert code == 0, err
    assert differences(final_state(folder), final_state(tmp_path / "run"), but=frozenset({"rows"})) == []
    assert metrics(tmp_path / "run") == metrics(folder)[-1:]


@pytest.mark.parametrize("algorithm", ["rainbow", "sac", "ppo"])
def test_another_seed_gives_another_run(finish, tmp_path, algorithm):
    folder, _ = finish(algorithm)
    learner = LEARNERS[algorithm]
    assert run(learner.script, tmp_path / "run", *learner.options, "seed=1").code == 0
    changed = differences(final_state(folder), final_state(tmp_path / "run"))
    assert any("loss" in path for path in changed)
    assert any("generator" in path for path in changed), "of the environment"


NOTHING_BETWEEN = ["evaluations=0", "checkpoints=0"]
DUBINS = ["env=dubins_car", "env.grid.nodes=[9,9,8]", "problem=reach_avoid"]


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("rainbow_safety", DUBINS),
        ("sac_safety", [*DUBINS, "n_step=best"]),
        ("ppo_safety", [*DUBINS, "algorithm=a2c"]),
    ],
)
def test_a_target_gives_a_success_rate_and_three_dimensions_a_picture(tmp_path, script, options):
    folder = tmp_path / "run"
    code, out, err = run(script, folder, *SHORT[script], "frames=600", *options)
    assert code == 0, err
    assert "success rate of the policy" in out
    summary = json.loads((folder / "summary.json").read_text())
    assert 0 <= summary["success_rate"] <= 1
    assert (summary["env"], summary["problem"]) == ("dubins_car", "reach_avoid")
    assert (folder / "value_map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("rainbow_safety", ["problem=return"]),
        (
            "rainbow_safety",
            ["double=false", "dueling=null", "noisy=false", "prioritized=false", "n_steps=1", "atoms=9"],
        ),
        ("rainbow_safety", ["dueling=max", "problem=reach_avoid", "num_envs=7"]),
        ("rainbow_safety", ["categorical=false", "problem=reach_avoid", "env=dubins_car", "env.grid.nodes=9"]),
        # The first windows fill long after the warm-up; nothing is measured or saved on the way.
        (
            "rainbow_safety",
            ["num_envs=1", "n_steps=60", "warmup_frames=1", "batch_size=1", "frames=300", *NOTHING_BETWEEN],
        ),
        # No window fills, so that nothing is learned.
        ("rainbow_safety", ["n_steps=60", "frames=600", "checkpoints=1"]),
        ("sac_safety", ["n_steps=60", "frames=600", "checkpoints=1"]),
        ("sac_safety", ["entropy_in_target=true", "n_steps=1", "critics=1", "num_envs=7"]),
        ("sac_safety", ["n_step=best", "problem=reach_avoid", "alpha.max=0.1", "random_actions=0"]),
        ("sac_safety", ["env=dubins_car", "env.grid.nodes=9", *NOTHING_BETWEEN]),
        ("ppo_safety", ["problem=reach_avoid", "lmbda=1", "num_envs=7"]),
        ("ppo_safety", ["minibatch=127"]),  # the last one holds a single row
        ("ppo_safety", ["algorithm=a2c", "epochs=1", "env=dubins_car", "env.grid.nodes=9"]),
        ("ppo_safety", ["frames=10", "evaluations=10", "checkpoints=10"]),  # less than a batch
    ],
)
def test_every_part_can_be_switched(tmp_path, script, options):
    folder = tmp_path / "run"
    code, out, err = run(script, folder, *SHORT[script], "frames=1000", *options)
    assert code == 0, err
    assert "IoU" in out
    values = [value for row in metrics(folder) for value in row.values() if value]
    assert all(math.isfinite(float(value)) for value in values)


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["avoid", "reach_avoid"])
@pytest.mark.parametrize("env", sorted(module("control_tasks")["NATIVE"]))
@pytest.mark.parametrize(
    ("script", "option"),
    [
        *((script, "seed=1") for script in SCRIPTS),
        *(("rainbow_safety", f"variant={name}") for name in ("rainbow_200k", "dqn_200k")),
    ],
)
def test_every_environment_problem_and_variant_trains(tmp_path, script, option, env, problem):
    options = [f"env={env}", f"problem={problem}", option, *SHORT[script], "env.grid.nodes=15", "frames=500"]
    code, _, err = run(script, tmp_path / "run", *options)
    assert code == 0, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["env"], summary["problem"]) == (env, problem)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_sweep_over_seeds_is_one_run_after_the_other(tmp_path, script):
    sweep = tmp_path / "sweep"
    options = [*SHORT[script], "frames=600", "seed=0,1", f"hydra.sweep.dir={sweep}", "-m"]
    code, _, err = run(script, tmp_path / "unused", *options)
    assert code == 0, err
    for seed in range(2):
        assert json.loads((sweep / str(seed) / "summary.json").read_text())["seed"] == seed
