"""What the README shows runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from torchrl_safety.modules import RainbowNetwork
from torchrl_safety.objectives import CategoricalDQNLoss
from torchrl_safety.trainers import find_checkpoint, make_checkpoint, rotation

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_every_python_block_runs(code, tmp_path):
    if "<time>" in code:
        # A run that learned nothing yet stands in for the reader's.
        torch.save(RainbowNetwork(2, 3, support=(-0.4, 1.0)).state_dict(), tmp_path / "model.pt")
        code = code.replace("outputs/rainbow_safety/<time>", tmp_path.as_posix())
    names: dict[str, object] = {}
    exec(code, names)
    assert names


def test_a_run_that_has_not_finished_has_its_network_in_a_checkpoint(tmp_path):
    (sentence,) = re.findall(r"`(make_checkpoint\(loss=.*?)`", README)
    saved, network = (RainbowNetwork(2, 3, support=(-0.4, 1.0)) for _ in range(2))
    rotation(tmp_path).save(make_checkpoint(loss=CategoricalDQNLoss(saved)), step=1)
    names = {"make_checkpoint": make_checkpoint, "find_checkpoint": find_checkpoint, "run": tmp_path}
    eval(sentence, {**names, "CategoricalDQNLoss": CategoricalDQNLoss, "network": network})
    assert torch.equal(network.head.weight_mu, saved.head.weight_mu)


def test_continuous_integration_runs_the_second_command_of_the_readme():
    commands = [line for line in README.splitlines() if line.startswith("python -m pip install")]
    assert len(commands) == 2
    assert commands[1] in (ROOT / ".ci" / "run").read_text()


def test_every_file_that_the_readme_links_to_exists():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
