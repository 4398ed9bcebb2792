"""What is particular to two players of SAC: saddles, pessimism, and the entropy of each."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from contracts import Keys
from game_cases import SAC, close, going_on, player, run
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.data import Bounded, Composite
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator

from torchrl_safety.objectives import DiscountedReturnBackup, IsaacsSACLoss, SafetySACLoss


class Noisy(torch.distributions.Independent):
    """Normal with one log-probability per action."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        super().__init__(torch.distributions.Normal(loc, scale), 1)


class Ignoring(nn.Module):
    """A critic of the controller's action only."""

    def __init__(self, critic: nn.Module) -> None:
        super().__init__()
        self.critic = critic

    def forward(self, observation: Tensor, control: Tensor, _: Tensor) -> Tensor:
        return self.critic(torch.cat([observation, control], -1))


class Place(nn.Module):
    """The same mean everywhere, and `spread` for a scale; it may read more than the observation."""

    def __init__(self, mean: float, spread: float = 1.0) -> None:
        super().__init__()
        self.mean, self.spread = nn.Parameter(torch.tensor(mean, dtype=torch.float64)), spread

    def forward(self, observation: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.mean.expand(*observation.shape[:-1], 1)
        return mean, torch.full_like(mean, self.spread)


class Answer(nn.Module):
    """A mean that is a multiple, which it learns, of the control that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.0, dtype=torch.float64))

    def forward(self, observation: Tensor, control: Tensor) -> tuple[Tensor, Tensor]:
        return self.slope * control, torch.full_like(control, 0.1)


class Payoff(nn.Module):
    """Q(u, d), the same in every state, with a parameter that leaves it as it is."""

    def __init__(self, payoff, shift: float = 0.0) -> None:
        super().__init__()
        self.payoff, self.shift = payoff, nn.Parameter(torch.tensor(shift, dtype=torch.float64))

    def forward(self, control: Tensor, disturbance: Tensor) -> Tensor:
        return self.payoff(control, disturbance) + self.shift


def sac_game(payoff, controller: ProbabilisticActor, disturbance: ProbabilisticActor, **settings) -> IsaacsSACLoss:
    critic = ValueOperator(Payoff(payoff), in_keys=["action", "disturbance"], out_keys=["state_action_value"])
    entropies = {"target_entropy": -1.0, "target_entropy_disturbance": -1.0}
    return IsaacsSACLoss(controller, disturbance, critic, **{"loss_function": "l2", **entropies, **settings})


def saddle(control: Tensor, disturbance: Tensor) -> Tensor:
    """Concave in u, convex in d, with its saddle at u = 0.3, d = -0.2."""
    u, d = control - 0.3, disturbance + 0.2
    return d**2 - u**2 + u * d


@pytest.mark.parametrize(("start", "other"), [(0.9, -0.9), (-0.5, 0.4)])
def test_the_gradients_of_both_players_lead_to_the_saddle(start, other):
    controller, disturbance = Place(start), Place(other)
    loss, batch = sac_game(saddle, player(controller, "action"), player(disturbance, "disturbance")), SAC.batch()
    result = run(loss, batch)
    (result["loss_controller"] + result["loss_disturbance"]).backward()
    # Of the payoff, by hand: the controller climbs it, the disturbance descends it.
    assert controller.mean.grad.item() == pytest.approx(2 * (start - 0.3) - (other + 0.2))
    assert disturbance.mean.grad.item() == pytest.approx(2 * (other + 0.2) + (start - 0.3))
    optimizer = torch.optim.SGD([controller.mean, disturbance.mean], 0.2)
    for _ in range(25):
        optimizer.zero_grad()
        result = run(loss, batch)
        (result["loss_controller"] + result["loss_disturbance"]).backward()
        optimizer.step()
    assert controller.mean.item() == pytest.approx(0.3, abs=1e-4)
    assert disturbance.mean.item() == pytest.approx(-0.2, abs=1e-4)


def test_a_disturbance_that_sees_the_control_holds_the_max_min_that_a_blind_one_cannot():
    """Q = (u - d)², u random: blind, the least mean is the variance of both; seeing, that of its own noise."""
    values = {}
    for name, head, sees, rate in (("blind", Place(0.5, 0.1), (), 0.3), ("seeing", Answer(), ("action",), 1.5)):
        players = player(Place(0.0, 0.5), "action", Noisy), player(head, "disturbance", Noisy, sees)
        loss = sac_game(lambda u, d: (u - d) ** 2, *players)
        optimizer, batch = torch.optim.SGD(head.parameters(), rate), SAC.batch(256)
        torch.manual_seed(0)
        for _ in range(12):
            optimizer.zero_grad()
            loss(batch)["loss_disturbance"].backward()
            optimizer.step()
        state = TensorDict({"observation": torch.zeros(4096, 2, dtype=torch.float64)}, [4096])
        with torch.no_grad():
            for each in players:
                state["disturbance" if each is players[1] else "action"] = each.get_dist(state.clone()).rsample()
        values[name] = (state["action"] - state["disturbance"]).square().mean().item()
    assert values["blind"] == pytest.approx(0.25 + 0.01, rel=0.1)
    assert values["seeing"] == pytest.approx(0.01, rel=0.3)


@pytest.mark.parametrize(("pessimism", "expected"), [("per_player", (0.25, 0.75)), ("min", (0.25, 0.25))])
def test_each_player_fears_the_critic_that_is_worse_for_itself(pessimism, expected):
    """MATH §7: q_u is the least over the critics, q_d the largest; the target takes the least."""
    players = player(Place(0.4), "action"), player(Place(-0.4), "disturbance")
    loss = sac_game(lambda u, d: 0 * (u + d), *players, pessimism=pessimism, backup=DiscountedReturnBackup(), gamma=1.0)
    for params, values in ((loss.qvalue_network_params, (0.75, 0.25)), (loss.target_qvalue_network_params, (5.0, 3.0))):
        params["module", "shift"].data.copy_(torch.tensor(values))
    batch = going_on(SAC)
    result = run(loss, batch)
    assert (-result["loss_controller"].item(), result["loss_disturbance"].item()) == pytest.approx(expected)
    close(batch["td_error"].flatten(), torch.full((12,), 3.0 - 0.25))


@pytest.mark.parametrize("alpha", [0.3, 2.0])
def test_entropy_in_the_target_pays_the_controller_and_costs_the_disturbance(alpha):
    batch, found = going_on(SAC), {}
    batch["next", "reward"] += 100
    for included in (False, True):
        loss = SAC.build(backup=DiscountedReturnBackup(), gamma=1.0, entropy_in_target=included)
        loss.qvalue_network_params.data.zero_()
        loss.log_alpha.data.fill_(math.log(alpha))
        loss.log_alpha_disturbance.data.fill_(math.log(2 * alpha))
        run(loss, batch)
        found[included] = batch["td_error"].clone()
    state = batch["next"].select("observation")
    torch.manual_seed(1)
    control = loss.actor_network.get_dist(state.clone())
    state["action"] = control.rsample()
    disturbance = loss.disturbance_network.get_dist(state.clone())
    push = disturbance.rsample()
    bonus = -alpha * control.log_prob(state["action"]) + 2 * alpha * disturbance.log_prob(push)
    close(found[True] - found[False], bonus, 1e-6)


def test_a_disturbance_that_does_nothing_leaves_the_loss_of_one_player():
    torch.manual_seed(0)
    actor, _, _ = SAC.networks(Keys())
    critic = MLP(in_features=3, out_features=1, num_cells=[8])
    one_critic = ValueOperator(critic, in_keys=["observation", "action"], out_keys=["state_action_value"])
    ignoring = ValueOperator(
        Ignoring(copy.deepcopy(critic)),
        in_keys=["observation", "action", "disturbance"],
        out_keys=["state_action_value"],
    )
    settings = {"num_qvalue_nets": 1, "target_entropy": -1.0, "reduction": "none"}
    one = SafetySACLoss(copy.deepcopy(actor).double(), one_critic.double(), **settings)
    two = IsaacsSACLoss(
        actor.double(),
        player(Place(0.0), "disturbance"),
        ignoring.double(),
        target_entropy_disturbance=-1.0,
        **settings,
    )
    for name in ("qvalue_network_params", "target_qvalue_network_params"):
        for theirs, ours in zip(getattr(one, name).values(True, True), getattr(two, name).values(True, True)):
            ours.data.copy_(theirs)
    batch = SAC.batch()
    expected_batch, found_batch = batch.clone(), batch.clone()
    expected, found = run(one, expected_batch), run(two, found_batch)
    for theirs, ours in (("actor", "controller"), ("qvalue", "qvalue"), ("alpha", "alpha_controller")):
        close(found[f"loss_{ours}"], expected[f"loss_{theirs}"])
    close(found_batch["td_error"], expected_batch["td_error"])


@pytest.mark.parametrize("name", ["controller", "disturbance"])
def test_each_temperature_learns_towards_the_target_of_its_player(name):
    for target, direction in ((-100.0, -1), (100.0, 1)):
        suffix = "_disturbance" if name == "disturbance" else ""
        loss = SAC.build(**{f"target_entropy{suffix}": target})
        run(loss, SAC.batch())[f"loss_alpha_{name}"].backward()
        moved = getattr(loss, f"log_alpha{suffix}")
        assert -moved.grad * direction > 0
        assert (loss.log_alpha.grad is None) == (name == "disturbance")


def test_both_temperatures_stay_within_the_limits():
    loss = SAC.build(min_alpha=0.5, max_alpha=0.6, alpha_init=0.55)
    loss.log_alpha.data.fill_(-9.0)
    loss.log_alpha_disturbance.data.fill_(9.0)
    result = run(loss, SAC.batch())
    assert result["alpha_controller"].item() == pytest.approx(0.5)
    assert result["alpha_disturbance"].item() == pytest.approx(0.6)


def test_the_target_entropy_of_the_disturbance_is_by_default_minus_its_size():
    actor, disturbance, critic = (network.double() for network in SAC.networks(Keys()))
    with pytest.raises(ValueError, match=r"target_entropy_disturbance is 'auto'.* no spec of 'disturbance'"):
        IsaacsSACLoss(actor, disturbance, critic)
    module = disturbance.module[0]
    for spec in (Bounded(-1, 1, (3,)), Composite(disturbance=Bounded(-1, 1, (3,)))):
        known = ProbabilisticActor(
            module, in_keys=["loc", "scale"], out_keys=["disturbance"], spec=spec, distribution_class=TanhNormal
        )
        assert IsaacsSACLoss(actor, known, critic).target_entropy_disturbance == -3
    with pytest.raises(ValueError, match="pessimism is 'max'"):
        IsaacsSACLoss(actor, known, critic, pessimism="max")
