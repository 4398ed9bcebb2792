"""Laws of a run's folder: what is due when, what is written, what a checkpoint keeps, and who may write there."""

from __future__ import annotations

import csv
import json
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensordict import TensorDict

from torchrl_safety.envs import DoubleIntegratorEnv
from torchrl_safety.objectives import AvoidBackup
from torchrl_safety.trainers import ExactSetEvaluator, TrainingRun, find_checkpoint, runs


def begin(folder, *, saved=None, budget=100, checkpoints=0, **components) -> TrainingRun:
    folder.mkdir(exist_ok=True)
    return TrainingRun(
        folder,
        saved,
        config=f"budget: {budget}\n",
        budget=budget,
        checkpoints=checkpoints,
        state=TensorDict({"observation": torch.zeros(2, 1)}, [2]),
        **{"net": torch.nn.Linear(1, 1), **components},
    )


def steps_in(folder, tag: str) -> list[int]:
    return [event.step for event in EventAccumulator(str(folder)).Reload().Scalars(tag)]


@pytest.mark.parametrize(("budget", "batch"), [(100, 1), (100, 7), (100, 64), (10, 256), (99, 100), (1000, 333)])
@pytest.mark.parametrize("times", [0, 1, 3, 10, 100])
def test_each_of_the_evenly_spaced_moments_is_due_once_at_the_first_batch_that_reaches_it(
    tmp_path, budget, batch, times
):
    due = []
    with begin(tmp_path, budget=budget) as run:
        while run.frames < budget:
            run.advance(batch)
            if run.due(times):
                due.append(run.frames)
    reaching = {-(-budget * k // (times * batch)) * batch for k in range(1, times + 1)}
    assert due == sorted(reaching)
    assert not times or due[-1] >= budget, "the end is one of the moments"


@pytest.mark.parametrize(("budget", "batch"), [(10, 256), (100, 30), (100, 25)])
def test_the_bar_ends_full_and_never_beyond_also_when_the_last_batch_passes_the_budget(tmp_path, capsys, budget, batch):
    with begin(tmp_path, budget=budget, checkpoints=1) as run:
        while run.frames < budget:
            run.advance(batch)
            run.save_if_due()
    assert f"{budget:.0f}/{budget:.0f}" in capsys.readouterr().err.replace(".0", "")
    with begin(tmp_path, saved=find_checkpoint(tmp_path), budget=budget) as run:
        assert run.frames >= budget
    last = capsys.readouterr().err.splitlines()[-1]
    assert "100%" in last


def test_a_run_that_goes_on_has_the_moments_of_one_that_was_not_stopped(tmp_path):
    def train(run, until, due):
        with run:
            while run.frames < until:
                run.advance(7)
                due += [run.frames] * run.due(9)
                run.save_if_due()

    whole, parts = [], []
    train(begin(tmp_path / "whole"), 100, whole)
    for until in (35, 63, 100):
        saved = find_checkpoint(tmp_path / "parts") if parts else None
        train(begin(tmp_path / "parts", saved=saved, checkpoints=100), until, parts)
    assert parts == whole


def test_seconds_count_everything_from_the_start_to_the_end_and_go_on_where_the_checkpoint_was(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(runs, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    with begin(tmp_path, checkpoints=2) as run:
        now[0] += 3  # collecting
        run.advance(50)
        now[0] += 2  # measuring
        run.report({"iou": 0.5})
        now[0] += 1  # saving
        run.save_if_due()
        now[0] += 50  # lost: killed before the next checkpoint
    now[0] = 7.0  # another process, another clock
    with begin(tmp_path, saved=find_checkpoint(tmp_path)) as run:
        now[0] += 4
        run.advance(50)
        run.report({"iou": 0.6})
        assert [row["seconds"] for row in run.rows] == [5.0, 10.0]


def test_what_was_reported_before_a_checkpoint_is_on_disk_with_it_and_what_came_after_is_replaced(tmp_path):
    killed = begin(tmp_path, checkpoints=2).__enter__()
    for frames, saved in ((25, False), (25, True), (25, False)):
        killed.advance(frames)
        killed.report({"iou": killed.frames / 100})
        if saved:
            killed.save_if_due()
            assert steps_in(tmp_path, "iou") == [25, 50], "before anything is closed"
    killed.__exit__(None, None, None)
    assert steps_in(tmp_path, "iou") == [25, 50, 75]
    with begin(tmp_path, saved=find_checkpoint(tmp_path)) as run:
        for _ in range(2):
            run.advance(25)
            run.report({"iou": run.frames / 100})
    assert steps_in(tmp_path, "iou") == [25, 50, 75, 100]
    with (tmp_path / "metrics.csv").open(newline="") as file:
        assert [(row["frames"], row["iou"]) for row in csv.DictReader(file)] == [
            ("25", "0.25"), ("50", "0.5"), ("75", "0.75"), ("100", "1.0"),
        ]  # fmt: skip


def test_a_checkpoint_keeps_the_progress_and_every_component(tmp_path):
    net = torch.nn.Linear(1, 1)
    with begin(tmp_path, checkpoints=1, net=net) as run:
        run.state = TensorDict({"observation": torch.ones(2, 1)}, [2])
        run.advance(100)
        run.count_update()
        run.report({"iou": 0.5, "success_rate": None})
        run.save_if_due()
    other = torch.nn.Linear(1, 1)
    with begin(tmp_path, saved=find_checkpoint(tmp_path), net=other) as resumed:
        assert (resumed.frames, resumed.updates, resumed.rows) == (100, 1, run.rows)
        assert torch.equal(resumed.state["observation"], torch.ones(2, 1))
        assert torch.equal(other.weight, net.weight)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_for_the_end_of_the_step_and_saves_it(tmp_path, capsys, number):
    def train():
        with begin(tmp_path) as run:
            while run.frames < 100:
                run.advance(10)
                if run.frames == 30:
                    os.kill(os.getpid(), number)
                run.report({"iou": 0.25})
                run.save_if_due()

    handlers = signal.getsignal(number)
    with pytest.raises(SystemExit) as left:
        train()
    assert left.value.code == 130
    assert f"stopped after 30 frames; continue with resume={tmp_path}" in capsys.readouterr().err
    assert signal.getsignal(number) == handlers
    with begin(tmp_path, saved=find_checkpoint(tmp_path)) as run:
        assert run.frames == 30
    assert steps_in(tmp_path, "iou") == [10, 20, 30]


def test_a_folder_that_holds_a_run_is_left_alone(tmp_path):
    with begin(tmp_path, checkpoints=1) as run:
        run.advance(100)
        run.save_if_due()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=f"{tmp_path} already holds a run: continue it with resume={tmp_path}"):
        begin(tmp_path, budget=200)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_checkpoint_of_other_components_leaves_the_folder_as_it_is(tmp_path):
    with begin(tmp_path, checkpoints=1) as run:
        run.advance(100)
        run.save_if_due()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RuntimeError, match="net"):
        begin(tmp_path, saved=find_checkpoint(tmp_path), budget=200, net=torch.nn.Linear(3, 1))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_end_of_a_run_is_a_table_a_summary_and_pictures(tmp_path, capsys):
    env = DoubleIntegratorEnv(4)
    measure = ExactSetEvaluator(env, AvoidBackup(), low=(-1.2, -2.2), high=(1.2, 2.2), grid=11, rollout_steps=3)
    found = measure(lambda td: td.set("action", torch.ones(4, dtype=torch.int64)), lambda states: states[..., :1])
    with begin(tmp_path) as run:
        run.advance(128)
        run.report(found.scores, loss=0.125)
        run.warn("something odd")
        run.finish(
            found.scores, draw=lambda: {"value_map": measure.picture(found, labels=("x", "v"))}, seed=3, problem="avoid"
        )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == {
        **found.scores,
        "frames": 128,
        "updates": 0,
        "seconds": summary["seconds"],
        "seed": 3,
        "problem": "avoid",
    }
    for name in ("value_map.png", "curves.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    out, err = capsys.readouterr()
    assert f"{'IoU with the exact set':<34}{summary['iou']:>10.4f}" in out
    assert f"{'frames':<34}{128:>10,}" in out
    assert "success rate" not in out
    assert "something odd" in out + err
    assert f"loss 0.125, safe rate {summary['safe_rate']:.4g}, IoU {summary['iou']:.4g}" in err


def test_a_run_that_reported_nothing_has_no_curves_and_its_value_map_still(tmp_path):
    env = DoubleIntegratorEnv(2)
    measure = ExactSetEvaluator(env, AvoidBackup(), low=(-1.2, -2.2), high=(1.2, 2.2), grid=11, rollout_steps=3)
    found = measure(lambda td: td.set("action", torch.ones(2, dtype=torch.int64)), lambda states: states[..., :1])
    with begin(tmp_path) as run:
        run.advance(100)
        run.finish(found.scores, draw=lambda: {"value_map": measure.picture(found, labels=("x", "v"))}, seed=0)
    assert (tmp_path / "value_map.png").exists()
    assert not (tmp_path / "curves.png").exists()
    assert not (tmp_path / "metrics.csv").exists()


def test_a_picture_that_fails_loses_no_summary(tmp_path):
    def fail():
        raise OSError("no space left")

    with begin(tmp_path) as run:
        run.advance(100)
        with pytest.raises(OSError, match="no space left"):
            run.finish({"iou": 0.5}, draw=fail, seed=0)
    assert json.loads((tmp_path / "summary.json").read_text())["iou"] == 0.5


def test_rows_may_have_different_columns(tmp_path):
    with begin(tmp_path) as run:
        for scores in ({"iou": 0.1, "loss": 1.0}, {"iou": 0.2}, {"iou": 0.3, "extra": 2.0}):
            run.advance(10)
            run.report(scores)
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert [row["iou"] for row in rows] == ["0.1", "0.2", "0.3"]
    assert [row["loss"] for row in rows] == ["1.0", "", ""]
    assert [row["extra"] for row in rows] == ["", "", "2.0"]


def test_a_run_that_ended_before_its_first_checkpoint_can_start_over(tmp_path):
    with begin(tmp_path) as run:
        run.advance(10)
    with pytest.raises(FileNotFoundError):
        find_checkpoint(tmp_path)
    with begin(tmp_path, checkpoints=1) as run:
        run.advance(100)
        run.save_if_due()
    with pytest.raises(ValueError, match="already holds a run: continue it with resume="):
        begin(tmp_path)
