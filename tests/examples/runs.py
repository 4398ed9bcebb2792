"""Running the examples as a user does, in this process or in one that can be killed, and comparing what they leave."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = ("rainbow_safety", "sac_safety", "ppo_safety")
ENVS, FRAMES, TIMES = 16, 1500, 4

_SHORT = [
    f"num_envs={ENVS}", f"frames={FRAMES}", f"evaluations={TIMES}", f"checkpoints={TIMES}", "hidden=[16,16]",
    "env.max_steps=10", "env.grid.nodes=21", "rollouts=8", "rollout_steps=10",
]  # fmt: skip
_REPLAY = [*_SHORT, "warmup_frames=256", "batch_size=32", "buffer_size=1024"]
_BATCHES = [*_SHORT, "steps=8", "minibatch=48", "epochs=2"]
SHORT = {"rainbow_safety": _REPLAY, "sac_safety": _REPLAY, "ppo_safety": _BATCHES}
"""Options with which each script takes a second or two."""


class Learner(NamedTuple):
    """What one script trains with some option."""

    script: str
    option: str
    algorithm: str
    batch: int
    """Frames that are collected between two updates."""

    @property
    def options(self) -> list[str]:
        return [*SHORT[self.script], self.option]


LEARNERS = {
    learner.algorithm: learner
    for learner in (
        Learner("rainbow_safety", "categorical=true", "rainbow", ENVS),
        Learner("rainbow_safety", "categorical=false", "dqn", ENVS),
        Learner("sac_safety", "n_steps=2", "sac", ENVS),
        Learner("ppo_safety", "algorithm=ppo", "ppo", 8 * ENVS),
        Learner("ppo_safety", "algorithm=a2c", "a2c", 8 * ENVS),
    )
}


class Outcome(NamedTuple):
    """How a program ended."""

    code: int
    out: str
    err: str


def run(script: str, folder: Path, *options: str) -> Outcome:
    """The script as ``python script.py hydra.run.dir=folder *options``, in this process, which it leaves as it was."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    arguments = [script, f"hydra.run.dir={folder}", *options]
    threads = torch.get_num_threads()
    with (
        mock.patch.object(sys, "argv", arguments),
        mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
        mock.patch.dict(os.environ),
        torch.random.fork_rng(devices=[]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        torch.seed()  # so that only a script that seeds itself repeats itself
        try:
            runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
        except SystemExit as end:  # as the interpreter does: a text is printed and the code is 1
            code = end.code if isinstance(end.code, int) else 1
            if isinstance(end.code, str):
                print(end.code, file=err)
        finally:
            torch.set_num_threads(threads)
    return Outcome(code, out.getvalue(), err.getvalue())


def start(script: str, folder: Path, *options: str) -> subprocess.Popen:
    """The script in a process of its own."""
    command = [sys.executable, str(EXAMPLES / f"{script}.py"), f"hydra.run.dir={folder}", *options]
    return subprocess.Popen(command, cwd=folder.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def module(script: str) -> dict:
    """What the script defines."""
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        return runpy.run_path(str(EXAMPLES / f"{script}.py"))


def configuration(script: str, *options: str) -> DictConfig:
    """The options that the script is given by its files and by `options`."""
    with initialize_config_dir(str(EXAMPLES / "configs"), version_base="1.3"):
        return compose(script, list(options))


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    return sorted((folder / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[-1]))


def final_state(folder: Path) -> dict:
    """Every payload of the newest checkpoint."""
    newest = checkpoints(folder)[-1]
    state = {str(path.relative_to(newest)): torch.load(path, weights_only=True) for path in newest.rglob("*.pt")}
    assert state
    return {"frames": newest.name, **state}


def differences(one, other, path: str = "", but: frozenset[str] = frozenset()) -> list[str]:
    """Where two nested states differ in any bit, apart from the clock, from generators that nothing draws from, and
    from the keys `but`."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{path}: keys {sorted(map(str, one.keys() ^ other.keys()))}"]
        if {"_storage", "_len"} <= one.keys():  # anything may stand in slots that were not written yet
            one, other = ({**each, "_storage": _first(each["_storage"], each["_len"])} for each in (one, other))
        keys = one.keys() - {"seconds", "python", "numpy"} - but
        return [d for key in keys for d in differences(one[key], other[key], f"{path}/{key}", but)]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return [d for i, pair in enumerate(zip(one, other)) for d in differences(*pair, f"{path}/{i}", but)]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
        return [] if same else [path]
    return [] if type(one) is type(other) and one == other else [f"{path}: {one!r} != {other!r}"]


def _first(entries, length: int):
    """The first rows of every tensor."""
    if isinstance(entries, torch.Tensor):
        return entries[:length] if entries.ndim else entries
    return {key: _first(value, length) for key, value in entries.items()} if isinstance(entries, dict) else entries


def metrics(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv, which a run that reports nothing does not write, without the clock."""
    if not (folder / "metrics.csv").exists():
        return []
    with (folder / "metrics.csv").open(newline="") as file:
        return [{key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(file)]


def passed(batch: int, *, frames: int = FRAMES, times: int = TIMES) -> list[int]:
    """The frames at which each of `times` evenly spaced moments has just been passed, by batches of `batch`."""
    counts = range(batch, frames + batch, batch)
    return [next(count for count in counts if count >= frames * k / times) for k in range(1, times + 1)]
