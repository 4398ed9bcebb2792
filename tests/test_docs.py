"""What the pages under docs show runs as it stands, learns, and gives the numbers that stand beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from torchrl_safety import objectives, trainers

ROOT = Path(__file__).parents[1]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))}
BLOCKS = [
    pytest.param(block, id=f"{name}-{number}")
    for name, page in PAGES.items()
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
]
COMPOSING = PAGES["docs/composing.md"]


def improved(before: float, after: float, least: float) -> None:
    assert after >= least, (before, after)
    assert after >= before + 0.4, (before, after)


def trainer_learned(names: dict) -> None:
    rows = names["evaluation"].rows
    assert [row["frames"] for row in rows] == [1600, 3200, 4800, 6400]
    improved(names["untrained"], rows[-1]["safe_rate"], 0.85)
    assert float(names["loss"].gamma) == pytest.approx(0.999)
    assert 6400 - 2 * 64 <= len(names["buffer"]) <= 6400  # two frames of each may wait for their windows
    (logged,) = Path(names["logs"]).rglob("safe_rate.csv")
    assert len(logged.read_text().splitlines()) == len(rows)


def loop_learned(names: dict) -> None:
    assert names["batch"].shape == (64, 32)
    assert names["frames"] == names["total_frames"]
    improved(names["untrained"], names["trained"], 0.85)


def gymnasium_learned(names: dict) -> None:
    improved(names["untrained"].success_rate, names["trained"].success_rate, 0.6)


def numbers_stand_beside(names: dict) -> None:
    assert len(names["rows"]) == 14
    for problem, option, k, *found in names["rows"]:
        line = " | ".join((problem, option, str(k), *(f"{value:.3f}" for value in found)))
        assert f"\n| {line} |\n" in COMPOSING


LEARNED = {
    "Trainer(": trainer_learned,
    "SafetyPPOLoss(": loop_learned,
    "class Parking": gymnasium_learned,
    "def learned": numbers_stand_beside,
}
"""A text of a block -> what must hold once it ran."""


@pytest.mark.parametrize("code", BLOCKS)
def test_every_python_block_runs_and_does_what_it_says(code, recwarn):
    names: dict[str, object] = {}
    with torch.random.fork_rng():
        exec(code, names)
    for mark, check in LEARNED.items():
        if mark in code:
            check(names)
    shown = [str(w.message) for w in recwarn if issubclass(w.category, UserWarning | FutureWarning)]
    assert not shown


def test_each_check_has_its_block():
    for mark in LEARNED:
        assert sum(mark in block.values[0] for block in BLOCKS) == 1, mark


def test_every_loss_and_schedule_stands_in_its_table():
    losses = [name for name in objectives.__all__ if name.endswith("Loss")]
    home = trainers.StepGamma.__module__
    schedules = [
        name
        for name in trainers.__all__
        if isinstance(found := getattr(trainers, name), type) and found.__module__ == home
    ]
    estimators = [name for name in objectives.__all__ if name.endswith("BackupEstimator")]
    tabled = "".join(line for line in COMPOSING.splitlines() if line.startswith("|"))
    assert (len(losses), len(schedules), len(estimators)) == (19, 5, 3)
    for name in (*losses, *schedules, *estimators):
        assert re.search(rf"`{name}\b", tabled), name


@pytest.mark.parametrize("name", PAGES)
def test_every_link_of_a_page_leads_somewhere(name):
    anchors = {
        re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in re.findall(r"^#+ (.*)$", PAGES[name], re.M)
    }
    for target in re.findall(r"\]\((?!http)([^)]+)\)", PAGES[name]):
        file, _, anchor = target.partition("#")
        assert not file or (ROOT / name).parent.joinpath(file).exists(), target
        assert file or anchor in anchors, target
