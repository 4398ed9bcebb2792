"""Every example in a docstring of the package runs and shows what it says."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
import torch

import torchrl_safety

ROOT = Path(torchrl_safety.__file__).parent
MODULES = sorted(
    ".".join((ROOT.name, *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name):
    module = importlib.import_module(name)
    # No example shows a random number; the seed makes a failure repeatable.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        failures, _ = doctest.testmod(module)
    assert failures == 0


def test_examples_are_found_also_on_decorated_classes():
    algebra = importlib.import_module("torchrl_safety.objectives.clamped_affine")
    found = {test.name.rsplit(".", 1)[-1] for test in doctest.DocTestFinder().find(algebra) if test.examples}
    assert "ClampedAffine" in found
