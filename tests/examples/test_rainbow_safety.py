"""The main example, run as a user runs it: its outputs, its options, its errors, and what survives a kill."""

from __future__ import annotations

import csv
import importlib.util
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SCRIPT = Path(__file__).parents[2] / "examples" / "rainbow_safety.py"
CONFIGS = SCRIPT.parent / "configs"
SHORT = [
    "frames=9600", "warmup_frames=512", "batch_size=64", "buffer_size=4096", "hidden=[32,32]", "grid=21",
    "rollouts=8", "rollout_steps=10", "evaluations=4", "checkpoints=6",
]  # fmt: skip


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("rainbow_safety_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(folder: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, str(SCRIPT), f"hydra.run.dir={folder}", *options]
    return subprocess.Popen(command, cwd=folder.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(folder: Path, *options: str) -> tuple[int, str, str]:
    process = start(folder, *options)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def final_state(folder: Path) -> dict:
    """Every payload of the newest checkpoint, without the clock."""
    newest = max((folder / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[-1]))
    state = {str(path.relative_to(newest)): torch.load(path, weights_only=True) for path in newest.rglob("*.pt")}
    assert state
    return {"frames": newest.name, **state}


def differences(one, other, path: str = "") -> list[str]:
    """Where two nested states differ in any bit, apart from the clock and from generators that nothing draws from."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{path}: keys {sorted(map(str, one.keys() ^ other.keys()))}"]
        return [
            d
            for key in one.keys() - {"seconds", "python", "numpy"}
            for d in differences(one[key], other[key], f"{path}/{key}")
        ]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return [d for i, pair in enumerate(zip(one, other)) for d in differences(*pair, f"{path}/{i}")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
        return [] if same else [path]
    return [] if type(one) is type(other) and one == other else [f"{path}: {one!r} != {other!r}"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    code, out, err = run(folder, *SHORT)
    assert code == 0, err
    for line in ("IoU with the exact set", "false-safe rate", "false-unsafe rate", "safe rate of", "frames", "seconds"):
        assert line in out
    for part in ("frame/s", "γ", "loss", "safe rate", "IoU"):
        assert part in err
    return folder


def test_a_run_leaves_its_table_pictures_metrics_and_checkpoints(finished):
    summary = json.loads((finished / "summary.json").read_text())
    assert {"iou", "false_safe", "false_unsafe", "safe_rate", "frames", "seconds", "seed", "problem"} <= summary.keys()
    assert summary["frames"] == 9600
    assert summary["problem"] == "avoid"
    rows = list(csv.DictReader((finished / "metrics.csv").open()))
    assert [int(row["frames"]) for row in rows] == [2432, 4800, 7232, 9600]
    assert float(rows[-1]["iou"]) == summary["iou"]
    for name in ("value_map.png", "curves.png"):
        assert (finished / name).read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(finished)).Reload()
    assert "value_map" in events.Tags()["images"]
    assert [event.step for event in events.Scalars("iou")] == [2432, 4800, 7232, 9600]
    assert "n_steps: 3" in (finished / "config.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["avoid", "reach_avoid"])
def test_a_killed_and_resumed_run_ends_bit_for_bit_like_one_that_was_not(tmp_path, problem):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = [*SHORT, f"problem={problem}"]
    assert run(whole, *options)[0] == 0
    process = start(killed, *options)
    while not list(killed.glob("checkpoints/checkpoint-*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    time.sleep(random.uniform(0, 1.5))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    code, _, err = run(tmp_path / "unused", f"resume={killed}")
    assert code == 0, err
    assert differences(final_state(whole), final_state(killed)) == []
    rows = [list(csv.DictReader((folder / "metrics.csv").open())) for folder in (whole, killed)]
    for row in (row for table in rows for row in table):
        row.pop("seconds")
    assert rows[0] == rows[1]
    assert not (tmp_path / "unused").exists()


@pytest.mark.slow
def test_an_interrupted_run_is_saved_and_says_how_to_go_on(tmp_path):
    folder = tmp_path / "run"
    process = start(folder, *SHORT, "frames=10_000_000", "checkpoints=1")
    while "frame" not in (line := process.stderr.readline()) and process.poll() is None:
        assert "rror" not in line
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"resume={folder}" in err
    assert list(folder.glob("checkpoints/checkpoint-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "kept"),
    [
        ("n_steps=4", "the run has n_steps="),
        ("hidden=[16]", "the run has hidden=[32, 32]"),
        ("problem=return", "the run has problem={'name': 'avoid'"),
        ("env.dt=0.1", "the run has env={'name': 'double_integrator', 'dt': 0.05"),
    ],
)
def test_a_resume_with_options_that_do_not_fit_is_refused_with_nothing_changed(finished, tmp_path, option, kept):
    folder = shutil.copytree(finished, tmp_path / "run")
    code, _, err = run(tmp_path / "unused", f"resume={folder}", option)
    assert code == 1
    assert "Traceback" not in err
    assert option in err
    assert kept in err
    assert (folder / "config.yaml").read_text() == (finished / "config.yaml").read_text()
    assert differences(final_state(folder), final_state(finished)) == []


@pytest.mark.slow
def test_a_finished_run_can_be_shown_again_and_lengthened(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    newest = max(folder.glob("checkpoints/checkpoint-*"))
    for path, options in ((folder, SHORT), (newest, ["frames=12800"]), (folder, ["problem=avoid", "seed=0"])):
        code, _, err = run(tmp_path / "unused", f"resume={path}", *options)
        assert code == 0, err
        expected = 12800 if "frames: 12800" in (folder / "config.yaml").read_text() else 9600
        assert json.loads((folder / "summary.json").read_text())["frames"] == expected
    assert expected == 12800, "the longer budget is remembered"
    old, new = (list(csv.DictReader((path / "metrics.csv").open())) for path in (finished, folder))
    assert new[:4] == old
    assert int(new[-1]["frames"]) == 12800


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_still_works(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    older, newest = sorted(folder.glob("checkpoints/checkpoint-*"))
    payload = max(newest.rglob("*.pt"), key=lambda path: path.stat().st_size)
    payload.write_bytes(payload.read_bytes()[:-1000])
    code, _, err = run(tmp_path / "unused", f"resume={folder}")
    assert code == 1
    assert "Traceback" not in err
    for word in ("'buffer'", "another checkpoint", str(folder)):
        assert word in err
    code, _, err = run(tmp_path / "unused", f"resume={older}")
    assert code == 0, err
    assert differences(final_state(folder), final_state(finished)) == []


@pytest.mark.slow
def test_a_folder_belongs_to_the_run_that_started_in_it_and_to_none_that_could_not(tmp_path):
    folder = tmp_path / "run"
    code, _, err = run(folder, *SHORT, "alpha=-1")
    assert code == 1
    assert "alpha must lie in" in err
    assert run(folder, *SHORT)[0] == 0
    state = final_state(folder)
    code, _, err = run(folder, *SHORT, "seed=1")
    assert code == 1
    assert f"already holds a run: continue it with resume={folder}" in err
    assert differences(final_state(folder), state) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["problem=return"],
        ["double=false", "dueling=null", "noisy=false", "prioritized=false", "n_steps=1", "atoms=21"],
        ["dueling=max", "problem=reach_avoid", "num_envs=7"],
        # The first windows fill long after the warm-up; nothing is measured or saved on the way.
        ["num_envs=1", "n_steps=60", "warmup_frames=1", "batch_size=1", "frames=300", "evaluations=0", "checkpoints=0"],
    ],
)
def test_every_part_can_be_switched(tmp_path, options):
    code, out, err = run(tmp_path / "run", *SHORT, "frames=3000", *options)
    assert code == 0, err
    assert "IoU" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["problem=fly"], ["problem/fly", "avoid", "reach_avoid", "return"]),
        (["env=pendulum9"], ["env/pendulum9", "double_integrator"]),
        (["resume=/nowhere/at/all"], ["/nowhere/at/all", "is no checkpoint"]),
        (["batch_size=4096"], ["batch_size=4096", "warmup_frames"]),
        (["buffer_size=100"], ["batch_size=256", "buffer_size=100"]),
        (["n_step=3"], ["n_step"]),
    ],
)
def test_a_wrong_option_is_one_clear_complaint(tmp_path, options, words):
    code, _, err = run(tmp_path / "run", *options)
    assert code == 1
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1, err
    assert len(err) < 300
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("problem.name", "fly", r"problem.name is 'fly'; choose one of \['avoid', 'reach_avoid', 'return'\]"),
        ("env.name", "pendulum9", r"env.name is 'pendulum9'; choose one of \['double_integrator'\]"),
        ("noisy", "maybe", "noisy is 'maybe'; give true or false"),
        ("batch_size", 200_000, "batch_size=200000, .*buffer_size=128000"),
        ("frames", 10, "frames=10 is less than warmup_frames=2000"),
        ("frames", 3000.5, "frames is 3000.5; give a whole number of at least 1"),
        ("threads", 0, "threads is 0; give a whole number"),
        ("lr.start", 0, "lr.start is 0; give a positive number"),
        ("lr.end", "small", "lr.end is 'small'; give a positive number"),
        ("device", "tpu", "device is 'tpu', which PyTorch cannot use here; use device=cpu"),
    ],
)
def test_a_value_that_cannot_be_right_is_one_line_with_the_remedy(example, option, value, words):
    cfg = OmegaConf.load(CONFIGS / "rainbow_safety.yaml")
    cfg.merge_with({"problem": {"name": "avoid"}, "env": {"name": "double_integrator"}})
    example.check(cfg)
    OmegaConf.update(cfg, option, value)
    with pytest.raises(ValueError, match=words) as caught:
        example.check(cfg)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("shares", "warnings"),
    [([0.02] * 8, 1), ([0.02, 0.0, 0.02, 0.02, 0.02, 0.02, 0.0, 0.02, 0.02, 0.02], 1), ([0.02, 0.02, 0.0] * 4, 0)],
)
def test_mass_that_stays_beyond_the_support_is_told_once(example, shares, warnings, tmp_path):
    said, rows = [], []
    bar = SimpleNamespace(write=said.append, set_postfix_str=lambda text: None)
    writer = SimpleNamespace(add_scalar=lambda *entry: None)
    for frames, share in enumerate(shares):
        row = dict.fromkeys(("gamma", "loss", "safe_rate", "iou"), 0.0) | {"frames": frames, "clipped_mass": share}
        rows.append(row)
        example.report(row, rows, writer, bar, tmp_path)
    assert len(said) == warnings
    assert all("widen problem.support" in text for text in said)
