"""The goal-conditioned example: its tasks, what a run leaves, how it goes on, and what it refuses."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from omegaconf import OmegaConf
from runs import EXAMPLES, checkpoints, configuration, differences, final_state, metrics, module, passed, run, start

from torchrl_safety.trainers import TrainingRun

SCRIPT = "hindsight_prioritized"
FRAMES, TIMES = 320, 4
SHORT = [
    f"frames={FRAMES}", f"evaluations={TIMES}", f"checkpoints={TIMES}", "hidden=[16]", "warmup_frames=64",
    "batch_size=32", "buffer_size=256", "rollouts=8",
]  # fmt: skip
SMALL = ["env.grid.nodes=7", "env.max_steps=10", "num_envs=8"]
ROBOT = ["env.package=robot_env", "env.id=PushedMass-v0", "env.threshold=0.3", "num_envs=1"]
LEARNERS = {
    "bits": ["env=bit_flip", "env.bits=4", "num_envs=8"],
    "uniform": ["env=bit_flip", "env.bits=4", "num_envs=8", "prioritized=false", "strategy=random", "n_steps=3"],
    "plain": ["env=bit_flip", "env.bits=4", "num_envs=8", "hindsight=false", "updates=2"],
    "integrator": ["env=goal_double_integrator", *SMALL, "n_steps=3", "n_step=best", "env.end_criterion=reach_avoid"],
    "controls": ["env=goal_double_integrator", *SMALL, "env.discrete=false", "strategy=episode"],
    "robot": [
        "env=point_maze",
        *ROBOT,
        "~env.continuing_task",
        "strategy=final",
        "frames=128",
        "warmup_frames=32",
        "rollouts=2",
    ],
}
ENVS = {name: 1 if name == "robot" else 8 for name in LEARNERS}


@pytest.fixture(scope="module", autouse=True)
def _robot_can_be_imported():
    """Here and in the processes that are started from here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        yield


@pytest.fixture(scope="module")
def finish(tmp_path_factory):
    """The folder and the outcome of the short run of a learner; made once, to be copied before it is changed."""
    made = {}

    def finish(learner: str):
        if learner not in made:
            folder = tmp_path_factory.mktemp(learner) / "run"
            made[learner] = folder, run(SCRIPT, folder, *SHORT, *LEARNERS[learner])
        folder, outcome = made[learner]
        assert outcome.code == 0, outcome.err
        return folder, outcome

    return finish


@pytest.mark.parametrize("learner", LEARNERS)
def test_a_run_leaves_its_table_curves_metrics_checkpoints_and_summary(finish, learner):
    folder, (_, out, err) = finish(learner)
    moments = passed(ENVS[learner], frames=128 if learner == "robot" else FRAMES, times=TIMES)
    summary = json.loads((folder / "summary.json").read_text())
    exact = learner in ("integrator", "controls")
    facts = {"success_rate", "frames", "updates", "seconds", "seed", "problem", "env", "algorithm", "hindsight"}
    assert summary.keys() == facts | ({"iou", "false_safe", "false_unsafe", "safe_rate"} if exact else set())
    assert summary["frames"] == moments[-1]
    assert summary["hindsight"] == (learner != "plain")
    assert summary["algorithm"] == ("sac" if learner in ("controls", "robot") else "dqn")
    assert summary["problem"] == ("reach_avoid" if exact else "reach")
    assert 0 <= summary["success_rate"] <= 1
    rows = metrics(folder)
    assert [int(row["frames"]) for row in rows] == moments
    assert float(rows[-1]["success_rate"]) == summary["success_rate"]
    assert [int(path.name.split("-")[-1]) for path in checkpoints(folder)] == moments[-2:]
    for name in ("curves.png", *(["value_map.png"] if exact else [])):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert str(folder) in out
    assert "100%" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("learner", LEARNERS)
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit_with_every_row_once(finish, tmp_path, learner):
    whole, _ = finish(learner)
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / "metrics.csv").unlink()
    code, _, err = run(SCRIPT, tmp_path / "unused", f"resume={checkpoints(folder)[0]}")
    assert code == 0, err
    assert differences(final_state(whole), final_state(folder)) == []
    assert metrics(folder) == metrics(whole)
    summaries = [json.loads((path / "summary.json").read_text()) for path in (whole, folder)]
    assert summaries[0] | {"seconds": 0} == summaries[1] | {"seconds": 0}


@pytest.mark.slow
@pytest.mark.parametrize("learner", ["bits", "integrator", "robot"])
def test_a_killed_and_resumed_run_ends_bit_for_bit_like_one_that_was_not(tmp_path, learner):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = [*SHORT, *LEARNERS[learner], f"frames={4 * FRAMES}", "checkpoints=6"]
    assert run(SCRIPT, whole, *options).code == 0
    process = start(SCRIPT, killed, *options)
    while not checkpoints(killed):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    time.sleep(random.uniform(0, 1.5))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    code, _, err = run(SCRIPT, tmp_path / "unused", f"resume={killed}")
    assert code == 0, err
    assert differences(final_state(whole), final_state(killed)) == []
    assert metrics(whole) == metrics(killed)


def test_a_run_depends_on_its_seed_and_on_nothing_else(finish, tmp_path):
    whole, _ = finish("bits")
    for seed in (0, 1):
        assert run(SCRIPT, tmp_path / str(seed), *SHORT, *LEARNERS["bits"], f"seed={seed}").code == 0
    assert metrics(tmp_path / "0") == metrics(whole)
    assert metrics(tmp_path / "1") != metrics(whole)


@pytest.mark.parametrize("learner", ["bits", "integrator", "robot"])
def test_the_functions_of_a_task_say_of_its_own_frames_what_the_environment_said(learner):
    cfg = configuration(SCRIPT, *LEARNERS[learner])
    task = module(SCRIPT)["make_task"](cfg, num_envs=ENVS[learner], seed=0)
    data = task.env.rollout(300, break_when_any_done=False)
    relabel = task.relabel
    following, goals = data["next"], relabel["goal_conditions"]
    assert following["terminated"].any()
    if learner == "integrator":
        torch.testing.assert_close(relabel["target_margin_fn"](data), following["target_margin"])
        failed = following["safety_margin"] < 0
        assert torch.equal(relabel["terminated_fn"](data) | failed, following["terminated"])
        assert torch.equal(goals.measurement(following), following["observation"][..., :1])
    else:
        paid = following["reward"] - float(learner == "robot")  # which pays 1 at the goal
        assert torch.equal(relabel["reward_fn"](data), paid)
        assert torch.equal(relabel["terminated_fn"](data), following["terminated"])
    assert torch.equal(goals.goal(following), goals.goal(data)), "a goal stays for an episode"


def test_the_buffer_holds_copies_that_are_at_their_goal_exactly_with_hindsight(tmp_path):
    for hindsight in (True, False):
        folder = tmp_path / str(hindsight)
        options = ["strategy=final", f"hindsight={hindsight}", f"frames={FRAMES}", f"warmup_frames={FRAMES}"]
        options += ["buffer_size=1024"]
        assert run(SCRIPT, folder, *SHORT, *LEARNERS["bits"], *options).code == 0
        (stored,) = (value for name, value in final_state(folder).items() if "buffer" in name)
        rows = stored["_storage"]["_storage"]
        filled = stored["_storage"]["_len"]
        copies = rows["relabelled"][:filled] if hindsight else torch.zeros(filled, 1, dtype=torch.bool)
        reward, terminated = rows["next.reward"][:filled], rows["next.terminated"][:filled]
        assert copies.any() == hindsight
        assert torch.equal(reward == 0, terminated)
        assert not hindsight or (reward[copies] == 0).any()


def refusal(folder, *options: str) -> str:
    """The one line with which the script refuses the options."""
    with mock.patch.object(TrainingRun, "advance", side_effect=AssertionError(f"{options} trains")):
        code, out, err = run(SCRIPT, folder, *options)
    assert code == 1, out
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1, err
    assert not folder.exists()
    return err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["env=maze"], "env/maze"),
        (["env.name=maze"], "env.name is 'maze'; choose one of ['bit_flip', 'fetch_reach'"),
        (["strategy=last"], "strategy is 'last'; choose one of ['final', 'future', 'episode', 'random']"),
        (["env.bits=0"], "bits=0 must be a whole number"),
        (["env.bit=3"], "env.bit"),
        (["hindsight=2"], "hindsight is 2; give true or false"),
        (["batch_size=4096"], "batch_size=4096, warmup_frames=1000"),
        (["frames=10"], "frames=10: need batch_size <= warmup_frames"),
        (["env=fetch_reach", "num_envs=4"], "num_envs=4, but fetch_reach runs one simulator; set num_envs=1"),
        (["env=fetch_reach", "env.package=no_robots"], "needs no_robots: pip install 'torchrl-safety[robotics]'"),
        (["env=goal_double_integrator", "env.goal_limit=2"], "goal_limit=2 must lie in"),
        (["target_entropy=none"], "target_entropy is 'none'; give a finite number"),
        (["resume=/nowhere/at/all"], "is no checkpoint"),
    ],
)
def test_a_wrong_option_is_one_clear_complaint(tmp_path, options, words):
    assert words in refusal(tmp_path / "run", *options)


def leaves(options, path: str = ""):
    """The dotted names of all options."""
    for key, value in options.items():
        name = f"{path}.{key}" if path else key
        yield from leaves(value, name) if isinstance(value, dict) and value else [name]


OPTIONS = list(leaves(OmegaConf.to_container(configuration(SCRIPT), resolve=True)))


def test_a_value_that_cannot_be_right_is_one_line_with_the_name_and_the_value():
    check, default = module(SCRIPT)["check"], configuration(SCRIPT)
    for option in OPTIONS:
        for value in (float("nan"), "junk", [None], -7.5):
            if option in ("resume", "env.bits") or (option, value) == ("target_entropy", -7.5):
                continue
            cfg = default.copy()
            OmegaConf.update(cfg, option, value)
            with pytest.raises(ValueError, match=rf"^{re.escape(option)} is {re.escape(repr(value))}; ") as caught:
                check(cfg)
            assert "\n" not in str(caught.value)


def test_every_option_is_read_by_the_script():
    text = "".join((EXAMPLES / f"{name}.py").read_text() for name in (SCRIPT, "launch"))
    unread = [name for name in OPTIONS if not re.search(rf"cfg\.{re.escape(name)}\b", text)]
    assert [name for name in unread if name not in ("resume", "env.bits")] == []


@pytest.mark.parametrize(
    ("option", "kept"),
    [("num_goal_samples=2", "the run has num_goal_samples=4"), ("hindsight=false", "the run has hindsight=True")],
)
def test_a_resumed_run_stays_what_it_was(finish, tmp_path, option, kept):
    whole, _ = finish("bits")
    folder = shutil.copytree(whole, tmp_path / "run")
    code, _, err = run(SCRIPT, tmp_path / "unused", f"resume={folder}", option)
    assert code == 1
    assert option in err
    assert kept in err
    assert differences(final_state(folder), final_state(whole)) == []


@pytest.mark.slow
def test_fifteen_bits_are_learned_with_hindsight_and_not_without(tmp_path):
    for hindsight in (True, False):
        folder = tmp_path / str(hindsight)
        options = ["env.bits=15", "frames=60_000", "evaluations=3", "checkpoints=0", "buffer_size=100_000"]
        assert run(SCRIPT, folder, *options, f"hindsight={hindsight}").code == 0
        success_rate = json.loads((folder / "summary.json").read_text())["success_rate"]
        assert success_rate >= 0.95 if hindsight else success_rate < 0.05
