"""What is particular to two players of PPO: saddles, and the sign of the advantage."""

from __future__ import annotations

import pytest
import torch
from game_cases import PPO, Table, close
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl.modules import ProbabilisticActor, ValueOperator

from torchrl_safety.objectives import IsaacsPPOLoss


def ppo_game(payoff: Tensor, logits: tuple[list[float], list[float]]) -> tuple[IsaacsPPOLoss, TensorDict]:
    """A matrix game of one step that pays the margin, with one transition for every pair of moves."""
    heads = [TensorDictModule(Table(torch.tensor(row).double()), ["observation"], ["logits"]) for row in logits]
    actor, disturbance = (
        ProbabilisticActor(
            head,
            in_keys=["logits"],
            out_keys=[key],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        )
        for head, key in zip(heads, ("action", "disturbance"))
    )
    critic = ValueOperator(Table(torch.zeros(1).double()), in_keys=["observation"])
    loss = IsaacsPPOLoss(actor, disturbance, critic, entropy_bonus=False, reduction="sum")
    pairs = torch.cartesian_prod(*(torch.arange(size) for size in payoff.shape))
    batch = TensorDict({"observation": torch.zeros(len(pairs), 1, 2).double()}, [len(pairs), 1])
    batch["action"], batch["disturbance"] = pairs[:, :1], pairs[:, 1:]
    end = torch.ones(len(pairs), 1, 1, dtype=torch.bool)
    margin = payoff.double().flatten().reshape(-1, 1, 1)
    batch["next"] = {"observation": batch["observation"], "safety_margin": margin, "terminated": end, "done": end}
    return loss, batch


def policy_step(loss: IsaacsPPOLoss, batch: TensorDict, rate: float) -> None:
    """One exact policy gradient step of both players: each pair counts as often as it is played."""
    with torch.no_grad():
        log_probs = [
            network.get_dist(batch.clone()).log_prob(batch[key]).unsqueeze(-1)
            for network, key in ((loss.actor_network, "action"), (loss.disturbance_network, "disturbance"))
        ]
        batch["action_log_prob"], batch["disturbance_log_prob"] = (each.squeeze(-1) for each in log_probs)
        batch["advantage"] = batch["next", "safety_margin"] * sum(log_probs).exp()
        batch["value_target"] = batch["next", "safety_margin"]
    parameters = [*loss.actor_network_params.parameters(), *loss.disturbance_loss.parameters()]
    result = loss(batch)
    gradients = torch.autograd.grad(result["loss_controller"] + result["loss_disturbance"], parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients):
            parameter -= rate * gradient


SADDLE = torch.tensor([[2.0, 1.0, 3.0], [4.0, 0.0, 5.0]])  # 1, at (0, 1)


@pytest.mark.parametrize("start", [([0.0, 0.0], [0.0, 0.0, 0.0]), ([-1.0, 1.0], [1.0, -1.0, 1.0])])
def test_both_policies_find_the_saddle_of_a_matrix_game(start):
    loss, batch = ppo_game(SADDLE, start)
    for _ in range(60):
        policy_step(loss, batch, 3.0)
    assert loss.actor_network.get_dist(batch[:1].clone()).probs.flatten()[0] > 0.9
    assert loss.disturbance_network.get_dist(batch[:1].clone()).probs.flatten()[1] > 0.9


def test_one_step_of_each_policy_is_the_gradient_of_the_expected_payoff_up_for_one_and_down_for_the_other():
    start = [0.3, -0.2], [0.5, 0.0, -0.4]
    loss, batch = ppo_game(SADDLE, start)
    policy_step(loss, batch, 1.0)
    logits = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in start]
    expected = logits[0].softmax(-1) @ SADDLE.double() @ logits[1].softmax(-1)
    climb, descend = torch.autograd.grad(expected, logits)
    for network, row, move in zip((loss.actor_network, loss.disturbance_network), logits, (climb, -descend)):
        close(next(network.parameters()), row + move, 1e-6)


def test_the_disturbance_is_the_policy_loss_of_the_negated_advantage():
    loss, batch = PPO.build(), PPO.batch()
    result = loss(batch.clone())
    loss.value_estimator(batch, params=loss.critic_network_params)
    ratios = (loss.disturbance_network.get_dist(batch.clone()).log_prob(batch["disturbance"])).exp()
    ratios = (ratios / batch["disturbance_log_prob"].exp()).flatten().tolist()
    gains = [
        min(ratio * -advantage, min(max(ratio, 0.8), 1.2) * -advantage)
        for ratio, advantage in zip(ratios, batch["advantage"].flatten().tolist())
    ]
    close(result["loss_disturbance"], torch.tensor(-sum(gains) / len(gains)), 1e-6)
