"""What the order of moves means to the soft actor-critic of a game: who sees what, and whose gradient runs where."""

from __future__ import annotations

import pytest
import torch
from game_cases import SAC, close, going_on, player
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import ProbabilisticActor

from torchrl_safety.objectives import DiscountedReturnBackup, IsaacsSACLoss


class Mean(nn.Module):
    """The same mean in every state, or `slope` times the control that is seen."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value, dtype=torch.float64))

    def forward(self, observation: Tensor, *seen: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.value * seen[0] if seen else self.value.expand(*observation.shape[:-1], 1)
        return mean, torch.ones_like(mean)


class Gap(nn.Module):
    """Q(u, d) = (u - d)², with a parameter that leaves it as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, control: Tensor, disturbance: Tensor) -> Tensor:
        return (control - disturbance).square() + self.shift


def game(controller: ProbabilisticActor, disturbance: ProbabilisticActor) -> IsaacsSACLoss:
    critic = TensorDictModule(Gap(), ["action", "disturbance"], ["state_action_value"])
    return IsaacsSACLoss(
        controller,
        disturbance,
        critic,
        backup=DiscountedReturnBackup(),
        gamma=1.0,
        target_entropy=-1.0,
        target_entropy_disturbance=-1.0,
    )


@pytest.mark.parametrize(("sees", "expected"), [(("action",), 0.09), ((), 0.01)])
def test_in_the_target_the_disturbance_answers_the_control_of_the_next_state(sees, expected):
    """The policy plays u' = .6; d' = u'/2 gives (.6 - .3)² = .09, a blind d' = .5 gives .01, whatever was stored."""
    loss, batch = game(player(Mean(0.6), "action"), player(Mean(0.5), "disturbance", sees=sees)), going_on(SAC)
    batch["action"], batch["disturbance"] = (torch.full_like(batch[key], 2.0) for key in ("action", "disturbance"))
    loss(batch)
    close(batch["td_error"].flatten(), torch.full((len(batch),), expected, dtype=torch.float64))


def test_the_controllers_gradient_does_not_run_through_the_disturbance_that_answers_it():
    """With d = u/2 given, dQ/du = 2 (u - d) = u; through the answer it would be u/2."""
    controller, disturbance = Mean(0.6), Mean(0.5)
    loss = game(player(controller, "action"), player(disturbance, "disturbance", sees=("action",)))
    result = loss(going_on(SAC))
    (climb, none) = torch.autograd.grad(
        result["loss_controller"], [controller.value, disturbance.value], allow_unused=True
    )
    assert climb.item() == pytest.approx(-0.6)
    assert none is None
    (none, descend) = torch.autograd.grad(
        result["loss_disturbance"], [controller.value, disturbance.value], allow_unused=True
    )
    assert none is None
    assert descend.item() == pytest.approx(-2 * (0.6 - 0.3) * 0.6)
