"""A network that can give one of its outputs alone is asked for that; the loss is the one of a full call."""

import copy

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase

from torchrl_safety.modules import RainbowNetwork, reset_noise
from torchrl_safety.objectives import AvoidBackup, CategoricalDQNLoss, IsaacsDQNLoss, SafetyDQNLoss

LOSSES = {
    "categorical": (CategoricalDQNLoss, {"backup": AvoidBackup()}, (-1.0, 1.0)),
    "scalar": (SafetyDQNLoss, {}, None),
    "game": (IsaacsDQNLoss, {"num_disturbances": 2}, None),
}


class Whole(TensorDictModuleBase):
    """The network of which nothing but a call is known."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.in_keys, self.out_keys = network.in_keys, network.out_keys

    def forward(self, tensordict):
        return self.network(tensordict)


def transitions(batch):
    flag = torch.zeros(*batch, 1, dtype=torch.bool)
    after = {"observation": torch.randn(*batch, 3), "safety_margin": torch.randn(*batch, 1), "done": flag}
    action = torch.randint(2, batch)
    here = {"observation": torch.randn(*batch, 3), "action": action, "disturbance": torch.randint(2, batch)}
    return TensorDict({**here, "next": {**after, "terminated": flag}}, batch)


@pytest.mark.parametrize("out_keys", [("value_logits", "action_value"), ("spread", ("q", "values"))])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", LOSSES)
def test_the_loss_its_gradient_and_its_priorities_are_those_of_a_full_call(kind, double, out_keys):
    torch.manual_seed(0)
    make_loss, settings, support = LOSSES[kind]
    network = RainbowNetwork(3, 4, support=support, hidden=(8,), out_keys=out_keys)
    losses = []
    for one in (network, Whole(copy.deepcopy(network))):
        loss = make_loss(one, double=double, **settings)
        loss.set_keys(value_logits=out_keys[0], action_value=out_keys[1])
        torch.manual_seed(1)
        reset_noise(loss)
        losses.append(loss)
    batch = transitions((5, 2))
    found = []
    for loss in losses:
        data = batch.clone()
        value = loss(data)["loss"]
        value.backward()
        slopes = {name.split("network.")[-1]: p.grad for name, p in loss.named_parameters() if p.grad is not None}
        found.append((value, data["td_error"], dict(sorted(slopes.items()))))
    (value, error, slopes), (whole, whole_error, whole_slopes) = found
    assert torch.equal(value, whole)
    assert torch.equal(error, whole_error)
    assert len(slopes) == len(whole_slopes) == 6
    for slope, whole_slope in zip(slopes.values(), whole_slopes.values()):
        torch.testing.assert_close(slope, whole_slope)


def test_outputs_that_nothing_reads_are_not_computed(monkeypatch):
    loss = CategoricalDQNLoss(RainbowNetwork(3, 4, support=(-1.0, 1.0), hidden=(8,)), backup=AvoidBackup())
    asked = []
    for name in ("logits", "action_values", "forward"):
        method = getattr(RainbowNetwork, name)
        monkeypatch.setattr(RainbowNetwork, name, lambda *args, m=method, n=name: asked.append(n) or m(*args))
    loss(transitions((5,)))
    # The target network's distributions, the online network's choice by its values (from its logits), its distribution.
    assert asked == ["logits", "action_values", "logits", "logits"]
