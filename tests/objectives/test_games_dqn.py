"""What is particular to two players that choose from a table: who moves second, and what one player leaves."""

from __future__ import annotations

import copy

import pytest
import torch
from game_cases import CATEGORICAL, DQN, Table, close, going_on
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import MLP

from torchrl_safety.modules import RainbowNetwork, greedy_game_policy
from torchrl_safety.objectives import (
    AvoidBackup,
    CategoricalDQNLoss,
    DiscountedReturnBackup,
    IsaacsCategoricalDQNLoss,
    IsaacsDQNLoss,
    SafetyDQNLoss,
)


def test_values_that_are_no_table_are_refused():
    flat = SafetyDQNLoss(RainbowNetwork(2, 6, support=None)).value_network
    with pytest.raises(ValueError, match=r"\[12, 6\] are no table .* num_disturbances="):
        IsaacsDQNLoss(flat)(DQN.batch(dtype=torch.float32))
    with pytest.raises(ValueError, match="num_disturbances is 4, which does not divide the network's 6 values"):
        IsaacsDQNLoss(flat, num_disturbances=4)(DQN.batch(dtype=torch.float32))
    with pytest.raises(ValueError, match="num_disturbances is 0"):
        IsaacsDQNLoss(flat, num_disturbances=0)


def table_loss(table: Tensor, **settings) -> IsaacsDQNLoss:
    network = TensorDictModule(Table(table.double()), ["observation"], ["action_value"])
    return IsaacsDQNLoss(
        network, **{"backup": DiscountedReturnBackup(), "gamma": 1.0, "loss_function": "l2"} | settings
    )


PENNIES = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])


def test_the_second_mover_takes_the_lower_value_of_matching_pennies():
    """Simultaneous play is worth 0: both mix evenly. A disturbance that sees the control wins always."""
    loss, batch = table_loss(PENNIES), going_on(DQN)
    batch["action"].clamp_(max=1)
    loss(batch)
    played = PENNIES[batch["action"], batch["disturbance"]]
    close(batch["td_error"].squeeze(-1), (played + 1).abs())
    assert (PENNIES.mean(0) == 0).all()
    assert (PENNIES.mean(1) == 0).all()


def test_the_target_is_the_value_of_the_greedy_policy_of_both_players():
    loss, batch = DQN.build(double=False), going_on(DQN)
    loss.make_value_estimator(backup=DiscountedReturnBackup(), gamma=1.0)
    loss.value_network_params.data.zero_()
    loss(batch)
    network = copy.deepcopy(loss.value_network)
    loss.target_value_network_params.data.clone().to_module(network, preserve_module_state=False)
    found = greedy_game_policy(network)(batch["next"].select("observation"))
    close(batch["td_error"], found["chosen_action_value"].abs())


def test_double_lets_the_online_network_choose_for_both_players():
    loss, batch = table_loss(torch.tensor([[3.0, 1.0], [0.0, 2.0]])), going_on(DQN)
    loss.target_value_network_params["module", "table"].copy_(torch.tensor([[10.0, 20.0], [30.0, 40.0]]))
    batch["action"], batch["disturbance"] = torch.zeros(12, dtype=torch.int64), torch.zeros(12, dtype=torch.int64)
    loss(batch)
    close(batch["td_error"], torch.full((12, 1), 20.0 - 3.0))  # online: row 0, there column 1
    loss.double = False
    loss(batch)
    close(batch["td_error"], torch.full((12, 1), 30.0 - 3.0))  # target: row 1, there column 0


@pytest.mark.parametrize("shape", ["table", "row"])
def test_a_single_disturbance_leaves_the_loss_of_one_player(shape):
    torch.manual_seed(0)
    network = MLP(in_features=2, out_features=3, num_cells=[8]).double()
    one = SafetyDQNLoss(TensorDictModule(network, ["observation"], ["action_value"]))
    head = copy.deepcopy(network) if shape == "row" else nn.Sequential(copy.deepcopy(network), nn.Unflatten(-1, (3, 1)))
    settings = {"num_disturbances": 1} if shape == "row" else {}
    two = IsaacsDQNLoss(TensorDictModule(head, ["observation"], ["action_value"]), **settings)
    batch = DQN.batch()
    batch["disturbance"].zero_()
    expected, found = batch.clone(), batch.clone()
    close(two(found)["loss"], one(expected)["loss"])
    close(found["td_error"], expected["td_error"])


def test_a_single_disturbance_leaves_the_categorical_loss_of_one_player():
    torch.manual_seed(0)
    network = RainbowNetwork(2, 3, support=(-2.0, 2.0), dtype=torch.float64)
    one = CategoricalDQNLoss(copy.deepcopy(network), backup=AvoidBackup())
    two = IsaacsCategoricalDQNLoss(network, num_disturbances=1)
    batch = CATEGORICAL.batch()
    batch["disturbance"].zero_()
    expected, found = batch.clone(), batch.clone()
    close(two(found)["loss"], one(expected)["loss"])
    close(found["td_error"], expected["td_error"])


def test_the_categorical_target_is_the_distribution_of_the_minimax_pair():
    loss, batch = CATEGORICAL.build(double=False, backup=DiscountedReturnBackup(), gamma=1.0), going_on(CATEGORICAL)
    target, _ = loss.target_distribution(batch)
    network = copy.deepcopy(loss.value_network)
    loss.target_value_network_params.data.clone().to_module(network, preserve_module_state=False)
    found = network(batch["next"].select("observation"))
    for i in range(len(batch)):
        worst = [min(row) for row in found["action_value"][i].reshape(3, 2).tolist()]
        control = worst.index(max(worst))
        row = found["action_value"][i].reshape(3, 2)[control].tolist()
        probs = found["value_logits"][i].reshape(3, 2, 7)[control][row.index(min(row))].softmax(-1)
        close(target[i], probs, 1e-6)


def test_swapped_roles_and_negated_values_are_the_same_game_where_it_has_a_saddle():
    """Zero-sum symmetry: with max-min equal to min-max, the disturbance may as well move first."""
    table = torch.tensor([[2.0, 1.0, 3.0], [4.0, 0.0, 5.0]])  # the saddle is 1, at (0, 1)
    batch = going_on(DQN)
    batch["action"], batch["disturbance"] = torch.zeros(12, dtype=torch.int64), torch.zeros(12, dtype=torch.int64)
    mirrored = batch.clone()
    table_loss(table)(batch)
    table_loss(-table.T)(mirrored)
    close(batch["td_error"], torch.full((12, 1), 2.0 - 1.0))
    close(mirrored["td_error"], batch["td_error"])
