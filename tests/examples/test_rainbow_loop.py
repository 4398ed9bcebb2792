"""What the loop of the main example does at each step."""

from __future__ import annotations

import json
from unittest import mock

import torch
from runs import SHORT, run
from torchrl.objectives import LossModule

from torchrl_safety.modules import reset_noise


def test_noise_is_drawn_at_every_action_and_before_every_update_and_gradients_are_clipped_at_ten(tmp_path):
    """MATH §9: both networks draw noise before each update, the online one at each action; clip-norm 10."""
    clip, done = torch.nn.utils.clip_grad_norm_, []

    def counted_reset(module, generator=None):
        done.append("loss" if isinstance(module, LossModule) else "policy")
        reset_noise(module, generator)

    def counted_clip(parameters, norm):
        assert done[-1] == "loss", "an update without noise of its own"
        done.append(norm)
        return clip(parameters, norm)

    with (
        mock.patch("torchrl_safety.modules.reset_noise", counted_reset),
        mock.patch("torch.nn.utils.clip_grad_norm_", counted_clip),
    ):
        code, _, err = run("rainbow_safety", tmp_path / "run", *SHORT["rainbow_safety"], "frames=800")
    assert code == 0, err
    updates = json.loads((tmp_path / "run" / "summary.json").read_text())["updates"]
    assert updates > 10
    assert done.count("policy") == 800 / 16
    assert done.count("loss") == done.count(10.0) == updates
