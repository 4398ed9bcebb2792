"""What the loop of the main example does at each step."""

from __future__ import annotations

import json
import shutil
from unittest import mock

import pytest
import torch
from runs import SHORT, checkpoints, differences, final_state, run
from torchrl.objectives import HardUpdate, LossModule

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


@pytest.mark.parametrize("period", [1, 7])
def test_a_target_network_that_is_copied_is_so_every_period_of_updates_also_across_a_resume(tmp_path, period):
    copied, step = [], HardUpdate.step

    def counted_step(updater):
        step(updater)
        online, target = (getattr(updater.loss_module, f"{name}value_network_params") for name in ("", "target_"))
        copied.append(torch.equal(online["head", "weight_mu"], target["head", "weight_mu"]))

    whole = tmp_path / "whole"
    with mock.patch.object(HardUpdate, "step", counted_step):
        code, _, err = run("rainbow_safety", whole, *SHORT["rainbow_safety"], f"target_period={period}")
    assert code == 0, err
    assert all(copied)
    assert len(copied) == json.loads((whole / "summary.json").read_text())["updates"] // period
    resumed = shutil.copytree(whole, tmp_path / "resumed")
    assert run("rainbow_safety", tmp_path / "unused", f"resume={checkpoints(resumed)[1]}").code == 0
    assert differences(final_state(whole), final_state(resumed)) == []
