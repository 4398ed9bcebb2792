"""Finished runs that the tests of the examples share."""

from __future__ import annotations

import pytest
from runs import LEARNERS, run


@pytest.fixture(scope="session")
def finish(tmp_path_factory):
    """The folder and the outcome of the short run of a learner; made once, to be copied before it is changed."""
    made = {}

    def finish(algorithm: str):
        if algorithm not in made:
            learner = LEARNERS[algorithm]
            folder = tmp_path_factory.mktemp(algorithm) / "run"
            made[algorithm] = folder, run(learner.script, folder, *learner.options)
        folder, outcome = made[algorithm]
        assert outcome.code == 0, outcome.err
        return folder, outcome

    return finish
