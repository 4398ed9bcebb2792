"""What is particular to soft actor-critic: the temperature, the entropy, several critics."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from contracts import LOSSES, Keys, LossCase
from tensordict import TensorDict
from torch import Tensor
from torchrl.modules import ValueOperator

from torchrl_safety.objectives import DiscountedReturnBackup, SafetySACLoss

CASES = [case for case in LOSSES if case.family in ("SAC", "discrete SAC")]
EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.loss.__name__)
KINDS = pytest.mark.parametrize("case", CASES[::2], ids=lambda case: case.family)
GAMMA = 0.9


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got.detach().double(), expected.detach().double(), rtol=tolerance, atol=tolerance)


def run(loss, batch: TensorDict) -> TensorDict:
    torch.manual_seed(1)
    return loss(batch)


def set_alpha(loss, alpha: float):
    with torch.no_grad():
        loss.log_alpha.fill_(math.log(alpha))
    return loss


def targets(case: LossCase, batch: TensorDict, *, alpha: float = 1.0, **settings) -> Tensor:
    """Those of critics that say zero: their errors, where the targets are positive."""
    loss = set_alpha(case.build(backup=DiscountedReturnBackup(), gamma=GAMMA, **settings), alpha)
    loss.qvalue_network_params.data.zero_()
    batch = batch.clone()
    batch["next", "reward"] += 100
    run(loss, batch)
    return batch["td_error"] - 100


def next_policy(case: LossCase, batch: TensorDict):
    loss = case.build()
    state = TensorDict({"observation": batch["next", "observation"]}, batch.shape)
    return loss.actor_network.get_dist(state)


# --- the entropy ---


@EACH
def test_the_temperature_does_not_touch_the_target(case):
    batch = case.batch()
    cold, hot = (targets(case, batch, alpha=alpha) for alpha in (1e-3, 10.0))
    assert torch.equal(cold, hot)


@EACH
@pytest.mark.parametrize("alpha", [0.3, 2.0])
def test_entropy_in_the_target_adds_the_negated_log_probability(case, alpha):
    batch = case.batch()
    policy = next_policy(case, batch)
    torch.manual_seed(1)
    if case.continuous:
        bonus = -alpha * policy.log_prob(policy.rsample())
    else:
        bonus = torch.tensor([-alpha * sum(p * math.log(p) for p in row) for row in policy.probs.tolist()])
    expected = torch.where(batch["next", "done"].squeeze(-1), 0.0, GAMMA * bonus)
    gained = targets(case, batch, alpha=alpha, entropy_in_target=True) - targets(case, batch, alpha=alpha)
    close(gained, expected, 1e-6)
    assert gained.abs().max() > 0.01


@KINDS
def test_the_temperature_learns_towards_the_target_entropy(case):
    for target_entropy, direction in ((-100.0, -1), (100.0, 1)):
        loss = case.build(target_entropy=target_entropy)
        run(loss, case.batch())["loss_alpha"].backward()
        assert -loss.log_alpha.grad * direction > 0


# --- the limits of the temperature ---


@EACH
@pytest.mark.parametrize(("target_entropy", "limits", "end"), [(-1e4, {}, 1e-3), (1e4, {"max_alpha": 0.5}, 0.5)])
def test_the_temperature_stays_within_its_limits(case, target_entropy, limits, end):
    loss, batch = case.build(target_entropy=target_entropy, alpha_init=0.4, **limits), case.batch()
    optimizer = torch.optim.SGD([loss.log_alpha], 1.0)
    for _ in range(3):
        result = run(loss, batch.clone())
        optimizer.zero_grad()
        result["loss_alpha"].backward()
        optimizer.step()
    result = run(loss, batch.clone())
    assert result["alpha"].item() == pytest.approx(end, rel=1e-5)
    assert loss.log_alpha.exp().item() == pytest.approx(end, rel=1e-5)
    at_the_limit = run(set_alpha(case.build(target_entropy=target_entropy), end), batch.clone())
    close(result["loss_actor"], at_the_limit["loss_actor"], 1e-6)


@KINDS
def test_without_limits_the_temperature_goes_anywhere(case):
    for alpha in (1e-6, 1e6):
        result = run(set_alpha(case.build(min_alpha=None), alpha), case.batch())
        assert result["alpha"].item() == pytest.approx(alpha, rel=1e-4)


@KINDS
@pytest.mark.parametrize("limits", [{"min_alpha": -1.0}, {"min_alpha": math.nan}, {"max_alpha": 1e-4}])
def test_limits_that_make_no_interval_are_refused(case, limits):
    with pytest.raises(ValueError, match=next(iter(limits))):
        case.build(**limits)


# --- the critics ---


@KINDS
@pytest.mark.parametrize("count", [1, 3])
def test_the_target_takes_the_least_of_the_critics(case, count):
    batch = case.batch()
    loss = case.build(num_qvalue_nets=count)
    state = TensorDict({"observation": batch["next", "observation"]}, batch.shape)
    policy, found = next_policy(case, batch), []
    torch.manual_seed(1)
    state["action"] = policy.rsample() if case.continuous else batch["action"]
    for i in range(count):
        critic = copy.deepcopy(loss.qvalue_network)
        loss.target_qvalue_network_params.data.clone()[i].to_module(critic, preserve_module_state=False)
        found.append(critic(state)["state_action_value" if case.continuous else "action_value"])
    rows = torch.stack(found).amin(0)
    value = rows.squeeze(-1) if case.continuous else (policy.probs * rows).sum(-1)
    expected = batch["next", "reward"].squeeze(-1) + GAMMA * value * ~batch["next", "done"].squeeze(-1)
    close(targets(case, batch, num_qvalue_nets=count), expected)


@KINDS
def test_critic_values_are_those_of_each_critic(case):
    loss, batch = case.build(num_qvalue_nets=3), case.batch()
    values = loss.critic_values(batch)
    assert values.shape == (3, 12, 1 if case.continuous else 3)
    for i in range(3):
        critic = copy.deepcopy(loss.qvalue_network)
        loss.qvalue_network_params.data.clone()[i].to_module(critic, preserve_module_state=False)
        close(values[i], critic(batch.clone())["state_action_value" if case.continuous else "action_value"])


@EACH
def test_skip_done_states_does_not_change_what_a_timeout_bootstraps_from(case):
    batch = case.batch()
    assert (batch["next", "truncated"] & ~batch["next", "terminated"]).any()
    plain, skipping = (
        targets(case, batch, bootstrap_on_truncation=True, skip_done_states=skip) for skip in (False, True)
    )
    assert torch.equal(plain, skipping)


def test_one_hot_actions_are_read_where_the_action_space_says_so():
    case = CASES[2]
    batch = case.batch()
    expected = run(case.build(), batch.clone())
    batch["action"] = torch.nn.functional.one_hot(batch["action"], 3)
    found = run(case.build(action_space="one-hot"), batch)
    for term in case.terms:
        close(found[term], expected[term])


# --- what cannot be given ---


def test_a_state_value_network_is_refused():
    case = CASES[0]
    with pytest.raises(ValueError, match="value_network is given"):
        case.build(value_network=ValueOperator(torch.nn.Linear(2, 1), in_keys=["observation"]))


def test_critics_that_write_another_key_are_named():
    actor, critic = CASES[0].networks(Keys())
    critic.out_keys[0] = "state_value"
    loss = SafetySACLoss(actor.double(), critic.double(), target_entropy=-1.0)
    with pytest.raises(KeyError, match=r"'state_action_value' is missing; present: .*'state_value'.*set_keys"):
        loss(CASES[0].batch())


@KINDS
def test_single_terms_come_without_the_scalars_and_without_a_warning(case):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = case.build(reduction="none")
    assert set(run(loss, case.batch()).keys()) == {*case.terms}
