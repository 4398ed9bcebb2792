"""An opponent against whom the margins break must not make the draws of a league uniform."""

from __future__ import annotations

import math

import pytest
import torch
from line_game import LineGameEnv, constant

from torchrl_safety.trainers import League


class Breaking(LineGameEnv):
    """Its margin is NaN wherever the last push went to the right."""

    def dynamics(self, state, control, disturbance):
        moved = super().dynamics(state, control, disturbance)
        return torch.where(disturbance > 0, torch.nan, moved)


def test_an_opponent_against_whom_the_margin_is_nan_has_won_and_comes_more_often_than_the_others():
    fixed = {"idle": constant(1, "disturbance"), "breaks": constant(2, "disturbance")}
    league = League(
        Breaking(60),
        constant(1),
        constant(1, "disturbance"),
        fixed=fixed,
        max_steps=3,
        frames_per_step=3 * 2 * 60,
        init_key="step_count",
        generator=torch.Generator().manual_seed(0),
    )
    league.update(100)
    assert league.disturbance_scores.tolist() == [0.0, 1.0, 0.0]
    total = 2 + math.exp(3)
    assert league.probabilities.tolist() == pytest.approx([1 / total, math.exp(3) / total, 1 / total])
