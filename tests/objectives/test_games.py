"""What is particular to two players: signs, who moves second, what one player leaves of a game."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from contracts import LOSSES, Keys, LossCase
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import Bounded, Composite
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator

from torchrl_safety.modules import RainbowNetwork, greedy_game_policy
from torchrl_safety.objectives import (
    AvoidBackup,
    CategoricalDQNLoss,
    DiscountedReturnBackup,
    IsaacsCategoricalDQNLoss,
    IsaacsDQNLoss,
    IsaacsPPOLoss,
    IsaacsSACLoss,
    SafetyDQNLoss,
    SafetySACLoss,
)

CASES = [case for case in LOSSES if case.game]
EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.loss.__name__)
KINDS = pytest.mark.parametrize("case", CASES[::2], ids=lambda case: case.family)
DQN, CATEGORICAL, SAC, PPO = CASES[::2]
TAKING_TURNS = pytest.mark.parametrize("case", [SAC, PPO], ids=lambda case: case.family)


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got.detach().double(), expected.detach().double(), rtol=tolerance, atol=tolerance)


def run(loss, batch: TensorDict) -> TensorDict:
    torch.manual_seed(1)
    return loss(batch)


# --- what a batch must hold ---


@EACH
def test_a_batch_without_the_disturbance_is_refused_by_name(case):
    with pytest.raises(KeyError, match=r"'disturbance' is missing; present: .*set_keys"):
        run(case.build(), case.batch().exclude("disturbance"))


@EACH
def test_one_terminal_type_holds_for_both_players(case):
    loss = case.build(terminal_type="g")
    problem = "AvoidBackup()" if isinstance(case.backup, AvoidBackup) else "ReachAvoidBackup(terminal_type='g')"
    assert repr(loss.backup) == problem
    estimators = [part for part in loss.modules() if hasattr(part, "backup") and hasattr(part, "step_maps")]
    assert {repr(part.backup) for part in estimators} <= {problem}


@pytest.mark.parametrize("case", [DQN, CATEGORICAL], ids=lambda case: case.family)
def test_a_disturbance_out_of_range_is_refused(case):
    loss, batch = case.build(), case.batch()
    batch["disturbance"][0] = 2
    with pytest.raises(ValueError, match=r"a disturbance lies outside 0\.\.1"):
        loss(batch)


def test_values_that_are_no_table_are_refused():
    flat = SafetyDQNLoss(RainbowNetwork(2, 6, support=None)).value_network
    with pytest.raises(ValueError, match=r"\[12, 6\] are no table .* num_disturbances="):
        IsaacsDQNLoss(flat)(DQN.batch(dtype=torch.float32))
    with pytest.raises(ValueError, match="num_disturbances is 4, which does not divide the network's 6 values"):
        IsaacsDQNLoss(flat, num_disturbances=4)(DQN.batch(dtype=torch.float32))
    with pytest.raises(ValueError, match="num_disturbances is 0"):
        IsaacsDQNLoss(flat, num_disturbances=0)


def test_players_that_write_the_same_key_are_refused():
    actor, _, critic = PPO.networks(Keys())
    with pytest.raises(ValueError, match="the players share a key"):
        IsaacsPPOLoss(actor, copy.deepcopy(actor), critic)


# --- tables ---


class Table(nn.Module):
    """One table of values for every state."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, observation: Tensor) -> Tensor:
        return self.table.expand(*observation.shape[:-1], *self.table.shape)


def table_loss(table: Tensor, **settings) -> IsaacsDQNLoss:
    network = TensorDictModule(Table(table.double()), ["observation"], ["action_value"])
    return IsaacsDQNLoss(
        network, **{"backup": DiscountedReturnBackup(), "gamma": 1.0, "loss_function": "l2"} | settings
    )


def going_on(case: LossCase) -> TensorDict:
    """Transitions that lead on, for nothing."""
    batch = case.batch()
    batch["next", "done"][:] = batch["next", "terminated"][:] = False
    batch["next", "reward"][:] = 0.0
    return batch


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


# --- two actors ---


class Still(torch.distributions.Normal):
    """Normal in name, without randomness: it draws its mean, with log-probability zero."""

    def rsample(self, sample_shape=()):
        return self.mean.expand(*sample_shape, *self.mean.shape)

    def log_prob(self, value):
        return torch.zeros_like(self.mean[..., 0])


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


def player(head: nn.Module, key: str, kind: type = Still, sees: tuple[str, ...] = ()) -> ProbabilisticActor:
    module = TensorDictModule(head, ["observation", *sees], ["loc", "scale"])
    return ProbabilisticActor(module, in_keys=["loc", "scale"], out_keys=[key], distribution_class=kind)


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


# --- two policies on one critic ---


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


def test_settings_of_the_disturbance_alone():
    plain, other = PPO.build(), PPO.build(disturbance_settings={"entropy_coeff": 0.5, "clip_epsilon": 0.1})
    expected, found = run(plain, PPO.batch()), run(other, PPO.batch())
    close(found["loss_entropy_disturbance"], expected["loss_entropy_disturbance"] * 50, 1e-6)
    close(found["loss_entropy_controller"], expected["loss_entropy_controller"])
    for name in ("advantage_norm", "delay_actor"):
        with pytest.raises(ValueError, match=f"{name} is True, which a game cannot take"):
            PPO.build(**{name: True})


# --- turns ---


@TAKING_TURNS
@pytest.mark.parametrize("active", [(), ("controller",), ("disturbance",), ("disturbance", "controller")])
def test_a_player_that_rests_has_losses_of_zero_without_a_gradient(case, active):
    loss, batch = case.build(), case.batch()
    expected = run(loss, batch.clone())
    loss.active_players = active
    found = run(loss, batch)
    for name in case.terms:
        rests = any(player in name and player not in active for player in ("controller", "disturbance"))
        close(found[name], torch.zeros(()) if rests else expected[name])
        assert found[name].requires_grad != rests
    assert {*loss.out_keys} <= {*found.keys()}


@TAKING_TURNS
def test_the_critic_of_a_resting_player_is_not_asked(case, monkeypatch):
    loss, batch = case.build(active_players=()), case.batch()
    if case is SAC:
        asked = []
        monkeypatch.setattr(
            loss, "_critics", lambda *inputs: asked.append(inputs) or type(loss)._critics(loss, *inputs)
        )
        run(loss, batch)
        assert len(asked) == 2  # of the batch, and of the next states
    else:
        monkeypatch.setattr(loss.disturbance_loss, "forward", lambda _: pytest.fail("the disturbance rests"))
        run(loss, batch)


@TAKING_TURNS
def test_who_may_be_active_is_checked(case):
    for players in ("controller", ("pilot",), ("controller", "pilot")):
        with pytest.raises(ValueError, match="active_players is"):
            case.build(active_players=players)


@pytest.mark.slow
@TAKING_TURNS
def test_a_loss_compiles_for_each_turn(case):
    torch._dynamo.reset()
    loss, batch = case.build(), case.batch()
    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    for active in (("controller",), ("disturbance",)):
        loss.active_players = active
        expected, found = run(loss, batch.clone()), run(compiled, batch.clone())
        for name in case.terms:
            close(found[name], expected[name], 1e-12)
