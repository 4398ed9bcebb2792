"""Calling a network with other parameters: what is computed, and what is left behind."""

import copy

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictParams
from torch import nn
from torchrl.objectives import SoftUpdate

from torchrl_safety.modules import RainbowNetwork, reset_noise
from torchrl_safety.objectives import AvoidBackup, CategoricalDQNLoss, SafetyDQNLoss
from torchrl_safety.objectives.parameter_swap import ParameterSwap


def parameters(module: nn.Module) -> TensorDictParams:
    values = TensorDict.from_module(copy.deepcopy(module)).data
    return TensorDictParams(
        values.apply(lambda value: value + torch.rand(value.shape).to(value.dtype)), no_convert=True
    )


class Recurrent(nn.Module):
    """Its LSTM holds its weights in a second place."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


@pytest.mark.parametrize(
    "network",
    [nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)), Recurrent()],
    ids=["linear", "buffers", "lstm"],
)
def test_computes_as_a_copy_with_those_parameters_and_puts_its_own_back(network):
    network, x = network.eval(), torch.randn(5, 3)
    before, params = network(x), parameters(network)
    other = copy.deepcopy(network)
    params.data.to_module(other)
    with ParameterSwap(network)(params):
        found = network(x)
    torch.testing.assert_close(found, other(x))
    assert not torch.equal(found, before)
    assert torch.equal(network(x), before)


def test_own_tensors_come_back_after_an_error():
    network = nn.Linear(3, 2)
    own = network.weight
    with pytest.raises(RuntimeError, match="in between"), ParameterSwap(network)(parameters(network)):
        raise RuntimeError("in between")
    assert network.weight is own


def test_a_tied_parameter_takes_both_places():
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    network[1].weight = network[0].weight
    params = parameters(network)
    with ParameterSwap(network)(params):
        assert network[0].weight is params["0", "weight"]
        assert network[1].weight is params["1", "weight"]


def make_batch(dtype: torch.dtype = torch.float32) -> TensorDict:
    ended = torch.tensor([[False], [True], [False]])
    after = {"observation": torch.randn(3, 4, dtype=dtype), "safety_margin": torch.randn(3, 1, dtype=dtype)}
    after |= {"terminated": ended, "done": ended}
    return TensorDict(
        {"observation": torch.randn(3, 4, dtype=dtype), "action": torch.tensor([0, 1, 1]), "next": after}, [3]
    )


def evaluated(loss: CategoricalDQNLoss, batch: TensorDict) -> TensorDict:
    """The loss with parameters swapped by TensorDict."""
    other = copy.deepcopy(loss)
    other._swap.is_plain = False
    return other(batch.clone())


def cast(loss):
    return loss.to(torch.float64)


def loaded(loss):
    state = {name: value + 0.1 if value.is_floating_point() else value for name, value in loss.state_dict().items()}
    loss.load_state_dict(state)
    return loss


def loaded_within(loss):
    outer = nn.ModuleDict({"loss": loss})
    outer.load_state_dict({name: value * 1.1 for name, value in outer.state_dict().items()})
    return loss


def updated(loss):
    updater = SoftUpdate(loss, tau=0.5)
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.add_(0.3)
    updater.step()
    return loss


@pytest.mark.parametrize("change", [copy.deepcopy, cast, loaded, loaded_within, updated])
def test_a_loss_sees_whatever_changed_its_parameters(change):
    torch.manual_seed(0)
    network = RainbowNetwork(4, 2, support=(-1.0, 1.0), hidden=(8,))
    loss = change(CategoricalDQNLoss(network, backup=AvoidBackup()))
    reset_noise(loss)
    batch = make_batch(next(loss.parameters()).dtype)
    expected, found = evaluated(loss, batch), loss(batch.clone())
    torch.testing.assert_close(found["loss"], expected["loss"])
    found["loss"].backward()
    assert all(parameter.grad is not None for parameter in loss.parameters())


def test_networks_of_tensordict_modules_are_swapped_too():
    network = TensorDictModule(nn.Linear(3, 2), ["observation"], ["action_value"])
    params, x = parameters(network), TensorDict({"observation": torch.randn(5, 3)}, [5])
    with ParameterSwap(network)(params):
        found = network(x)["action_value"]
    expected = nn.functional.linear(x["observation"], params["module", "weight"], params["module", "bias"])
    torch.testing.assert_close(found, expected)


def relayered(loss):
    loss.value_network.torso[0] = nn.Linear(4, 8)
    return loss


def given_another_network(loss):
    loss.value_network = copy.deepcopy(loss.value_network)
    return loss


@pytest.mark.parametrize("change", [relayered, given_another_network])
def test_a_replaced_layer_or_network_computes_with_the_parameters_of_the_loss(change):
    torch.manual_seed(0)
    loss = CategoricalDQNLoss(RainbowNetwork(4, 2, support=(-1.0, 1.0), hidden=(8,)), backup=AvoidBackup())
    batch = make_batch()
    expected = loss(batch.clone())["loss"]
    found = change(loss)(batch.clone())["loss"]
    torch.testing.assert_close(found, expected)
    found.backward()
    assert all(parameter.grad is not None for parameter in loss.value_network_params.parameters())


class Counter(nn.Module):
    """Assigns its buffer anew, instead of writing into it."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return self.layer(x)


def test_a_buffer_that_the_network_assigns_anew_belongs_to_the_parameters():
    loss = SafetyDQNLoss(TensorDictModule(Counter(), ["observation"], ["action_value"]), backup=AvoidBackup())
    for _ in range(3):
        loss(make_batch())
    assert loss.target_value_network_params["module", "count"].item() == 3
    assert loss.state_dict()["target_value_network_params.module.count"].item() == 3
    assert loss.value_network.module.count.item() == 0
