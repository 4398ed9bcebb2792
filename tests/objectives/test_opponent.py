"""The opponent of a problem maximises what the problem's own player leaves of it."""

from __future__ import annotations

import torch
from contracts import BACKUPS, random_signals

from torchrl_safety.objectives import AvoidBackup, OpponentBackup, ReachBackup

SHAPE = (40, 1)


def test_who_avoids_is_opposed_by_who_reaches_the_failure_set():
    margin, value = random_signals(("safety_margin", "target_margin"), SHAPE).values()
    ended = torch.arange(40).reshape(SHAPE) % 3 == 0
    opponent = OpponentBackup(AvoidBackup()).step_map({"safety_margin": margin}, gamma=0.9, terminated=ended)
    reach = ReachBackup().step_map({"target_margin": -margin}, gamma=0.9, terminated=ended)
    assert torch.equal(opponent(value), reach(value))


def test_the_best_action_of_the_opponent_is_the_worst_of_the_problem():
    for backup, names in BACKUPS:
        signals = random_signals(names, SHAPE)
        choices = random_signals(("reward",), (40, 5), seed=1)["reward"]
        ended = torch.zeros(SHAPE, dtype=torch.bool)
        worst = backup.step_map(signals, gamma=0.9, terminated=ended)(choices.amin(-1, keepdim=True))
        opposed = OpponentBackup(backup).step_map(signals, gamma=0.9, terminated=ended)
        assert torch.allclose(opposed((-choices).amax(-1, keepdim=True)), -worst)
        twice = OpponentBackup(OpponentBackup(backup)).step_map(signals, gamma=0.9, terminated=ended)
        assert torch.allclose(twice(choices.amin(-1, keepdim=True)), worst)
