"""A run that was stopped, by whatever, goes on as if it had not been; and only as what it was."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time

import pytest
from omegaconf import OmegaConf
from runs import LEARNERS, checkpoints, differences, final_state, metrics, run, start
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@pytest.mark.parametrize("algorithm", LEARNERS)
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit_with_every_row_once(finish, tmp_path, algorithm):
    whole, _ = finish(algorithm)
    folder = shutil.copytree(whole, tmp_path / "run")
    older = checkpoints(folder)[0]
    (folder / "metrics.csv").unlink()
    code, _, err = run(LEARNERS[algorithm].script, tmp_path / "unused", f"resume={older}")
    assert code == 0, err
    assert differences(final_state(whole), final_state(folder)) == []
    assert metrics(folder) == metrics(whole)
    events = [EventAccumulator(str(path)).Reload() for path in (whole, folder)]
    for tag in events[0].Tags()["scalars"]:
        first, second = ([(event.step, event.value) for event in found.Scalars(tag)] for found in events)
        assert first == second or tag == "seconds", tag
    summaries = [json.loads((path / "summary.json").read_text()) for path in (whole, folder)]
    assert summaries[0] | {"seconds": 0} == summaries[1] | {"seconds": 0}
    assert not (tmp_path / "unused").exists()
    aside = [path.name for path in (folder / "checkpoints").glob("abandoned-*")]
    assert aside == [f"abandoned-{checkpoints(whole)[-1].name}"], "the branch that was left is not taken for the run"


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["avoid", "reach_avoid"])
@pytest.mark.parametrize("algorithm", LEARNERS)
def test_a_killed_and_resumed_run_ends_bit_for_bit_like_one_that_was_not(tmp_path, algorithm, problem):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    script = LEARNERS[algorithm].script
    options = [*LEARNERS[algorithm].options, f"problem={problem}", "frames=6000", "checkpoints=6"]
    assert run(script, whole, *options).code == 0
    process = start(script, killed, *options)
    while not checkpoints(killed):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    time.sleep(random.uniform(0, 1.5))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    code, _, err = run(script, tmp_path / "unused", f"resume={killed}")
    assert code == 0, err
    assert differences(final_state(whole), final_state(killed)) == []
    assert metrics(whole) == metrics(killed)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["rainbow", "sac", "ppo"])
def test_an_interrupted_run_is_saved_and_says_how_to_go_on(tmp_path, algorithm):
    folder = tmp_path / "run"
    process = start(LEARNERS[algorithm].script, folder, *LEARNERS[algorithm].options, "frames=10_000_000")
    while not (folder / "config.yaml").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert f"continue with resume={folder}" in err
    assert "Traceback" not in err
    assert len(checkpoints(folder)) == 1


@pytest.mark.parametrize(
    ("algorithm", "option", "kept"),
    [
        ("rainbow", "n_steps=4", "the run has n_steps=3"),
        ("rainbow", "hidden=[32]", "the run has hidden=[16, 16]"),
        ("rainbow", "categorical=false", "the run has categorical=True"),
        ("rainbow", "problem=return", "the run has problem={'name': 'avoid'"),
        ("rainbow", "env.dt=0.1", "the run has env={'name': 'double_integrator', 'dt': 0.05"),
        ("sac", "critics=3", "the run has critics=2"),
        ("sac", "++seed=3", "the run has seed=0"),
        ("sac", "~hidden", "the run has hidden=[16, 16]"),
        ("rainbow", "variant=dqn_200k", "the run has no variant"),
        ("ppo", "algorithm=a2c", "the run has algorithm=ppo"),
        ("ppo", "env=dubins_car", "the run has env={'name': 'double_integrator'"),
    ],
)
def test_a_resume_with_options_that_do_not_fit_is_refused_with_nothing_changed(
    finish, tmp_path, algorithm, option, kept
):
    whole, _ = finish(algorithm)
    folder = shutil.copytree(whole, tmp_path / "run")
    code, _, err = run(LEARNERS[algorithm].script, tmp_path / "unused", f"resume={folder}", option)
    assert code == 1
    assert len(err.splitlines()) == 1, err
    assert option in err
    assert kept in err
    for name in ("config.yaml", "summary.json", "metrics.csv"):
        assert (folder / name).read_text() == (whole / name).read_text()
    assert differences(final_state(folder), final_state(whole)) == []


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["rainbow", "sac", "ppo"])
def test_a_finished_run_can_be_shown_again_and_lengthened(finish, tmp_path, algorithm):
    whole, _ = finish(algorithm)
    learner = LEARNERS[algorithm]
    folder = shutil.copytree(whole, tmp_path / "run")
    longer = checkpoints(folder)[-1], ["++frames=2000", "gamma={start:0.5,end:0.9,ratio:0.1,period:0.1}"]
    for path, options in ((folder, learner.options), longer, (folder, ["problem=avoid", "seed=0"])):
        code, _, err = run(learner.script, tmp_path / "unused", f"resume={path}", *options)
        assert code == 0, err
        config = OmegaConf.load(folder / "config.yaml")
        expected = config.frames
        frames = json.loads((folder / "summary.json").read_text())["frames"]
        assert expected <= frames < expected + learner.batch
    assert (config.frames, config.gamma.start, config.gamma.end) == (2000, 0.5, 0.9), "new options are remembered"
    assert metrics(folder)[-1]["gamma"] == metrics(whole)[-1]["gamma"], "a discount never falls"
    assert metrics(folder)[:4] == metrics(whole)
    assert int(metrics(folder)[-1]["frames"]) == frames


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_still_works(finish, tmp_path):
    whole, _ = finish("rainbow")
    folder = shutil.copytree(whole, tmp_path / "run")
    older, newest = checkpoints(folder)
    (payload,) = newest.glob("components/*-buffer/*.pt")
    payload.write_bytes(payload.read_bytes()[:-1000])
    code, _, err = run("rainbow_safety", tmp_path / "unused", f"resume={folder}")
    assert code == 1
    for word in ("'buffer'", "another checkpoint", str(folder)):
        assert word in err
    code, _, err = run("rainbow_safety", tmp_path / "unused", f"resume={older}")
    assert code == 0, err
    assert differences(final_state(folder), final_state(whole)) == []


@pytest.mark.parametrize("algorithm", ["rainbow", "sac", "ppo"])
def test_a_folder_belongs_to_the_run_that_started_in_it(finish, tmp_path, algorithm):
    whole, _ = finish(algorithm)
    folder = shutil.copytree(whole, tmp_path / "run")
    code, _, err = run(LEARNERS[algorithm].script, folder, *LEARNERS[algorithm].options, "seed=1")
    assert code == 1
    assert f"already holds a run: continue it with resume={folder}" in err
    assert len(err.splitlines()) == 1, err
    assert differences(final_state(folder), final_state(whole)) == []
