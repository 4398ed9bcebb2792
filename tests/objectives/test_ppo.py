"""What is particular to the on-policy losses: trajectories, advantages, minibatches."""

from __future__ import annotations

import math

import pytest
import torch
from contracts import LOSSES, LossCase
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator

from torchrl_safety.objectives import AvoidBackup, ReachAvoidBackup, SafetyA2CLoss, SafetyPPOLoss

CASES = [case for case in LOSSES if case.family in ("PPO", "A2C")]
EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.loss.__name__)
KINDS = pytest.mark.parametrize("case", CASES[::2], ids=lambda case: case.family)


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got.detach().double(), expected.detach().double(), rtol=tolerance, atol=tolerance)


def with_advantage(loss, batch: TensorDict) -> TensorDict:
    return loss.value_estimator(
        batch.clone(), params=loss.critic_network_params, target_params=loss.target_critic_network_params
    )


class Constant(torch.nn.Module):
    """The same value everywhere."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.tensor(value, dtype=torch.float64))

    def forward(self, observation: Tensor) -> Tensor:
        return self.value.expand(*observation.shape[:-1], 1)


def with_critic(case: LossCase, critic: torch.nn.Module, **settings):
    return case.loss(case.build().actor_network, ValueOperator(critic, in_keys=["observation"]), **settings)


# --- the advantage and what is made of it ---


@EACH
def test_the_advantage_is_the_return_less_the_value(case):
    loss, batch = case.build(), case.batch()
    found = with_advantage(loss, batch)
    close(found["advantage"], found["value_target"] - found["state_value"])
    close(found["state_value"], loss.critic_network(batch.clone())["state_value"])
    assert not found["advantage"].requires_grad
    assert not found["value_target"].requires_grad


@EACH
def test_the_policy_term_equals_the_loop(case):
    loss, batch = case.build(reduction="none"), case.batch()
    advantages = with_advantage(loss, batch)["advantage"].flatten().tolist()
    now = loss.actor_network.get_dist(batch.clone()).log_prob(batch["action"]).flatten().tolist()
    then = batch["action_log_prob"].flatten().tolist()
    expected = []
    for advantage, new, old in zip(advantages, now, then):
        ratio = math.exp(new - old)
        clipped = min(max(ratio, 0.8), 1.2)
        expected.append(-min(ratio * advantage, clipped * advantage) if case.family == "PPO" else -new * advantage)
    close(loss(batch)["loss_objective"].flatten(), torch.tensor(expected, dtype=torch.float64), 1e-7)


@KINDS
def test_returns_stay_within_the_margins_whatever_the_critic_says(case):
    """Summing one-step errors, as generalised advantage estimation does, gives -6.12 here."""
    loss = with_critic(case, Constant(3.0), gamma=0.999, lmbda=0.95)
    batch = case.batch(1, 4)
    batch["next", "safety_margin"] = torch.tensor([1.0, 1.0, 1.0, -1.0], dtype=torch.float64).reshape(1, 4, 1)
    batch["next", "done"] = batch["next", "terminated"] = torch.tensor([0, 0, 0, 1]).bool().reshape(1, 4, 1)
    targets = with_advantage(loss, batch)["value_target"].flatten()
    close(targets[0], torch.tensor(-0.4248), 1e-4)
    assert (targets <= 1).all()
    for backup, low in ((ReachAvoidBackup(), "least"), (AvoidBackup(), None)):
        loss, batch = with_critic(case, Constant(50.0), backup=backup), case.batch(8, 20)
        margin, target_margin = batch["next", "safety_margin"], batch["next", "target_margin"]
        targets = with_advantage(loss, batch)["value_target"]
        assert (targets <= margin + 1e-9).all()
        if low:
            assert (targets >= torch.minimum(margin, target_margin) - 1e-9).all()


@EACH
def test_a_timeout_is_a_terminal_step_unless_asked_to_go_on(case):
    batch = case.batch(1, 6)
    flags = batch["next"]
    flags["terminated"][:] = False
    flags["truncated"] = flags["done"] = torch.tensor([0, 0, 1, 0, 0, 1]).bool().reshape(1, 6, 1)
    cut = with_advantage(case.build(), batch)["value_target"][0, 2]
    margins = flags["safety_margin"][0, 2], flags["target_margin"][0, 2]
    close(cut, margins[0] if isinstance(case.backup, AvoidBackup) else torch.minimum(*margins))
    # Between these margins the target is the value, and what belongs to the next episode is far below it.
    flags["safety_margin"][:], flags["target_margin"][:] = 9.0, -9.0
    flags["safety_margin"][:, 3:] = -9.0
    going_on = case.build(bootstrap_on_truncation=True, gamma=1.0)
    found = with_advantage(going_on, batch)
    close(found["value_target"][0, 2], going_on.critic_network(flags.clone())["state_value"][0, 2])
    assert (found["value_target"][0, 3:] == -9).all()


# --- minibatches ---


@EACH
def test_minibatches_of_precomputed_advantages_add_up_to_the_whole(case):
    loss, batch = case.build(reduction="sum"), case.batch(4, 6)
    whole = loss(batch.clone())
    rows = with_advantage(loss, batch).reshape(-1)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    parts = [loss(rows[index]) for index in order.split(7)]
    for term in case.terms:
        close(sum(part[term] for part in parts), whole[term])


@EACH
def test_a_flat_minibatch_without_an_advantage_is_refused(case):
    with pytest.raises(ValueError, match=r"\[15\] is no trajectory.*before the batch is flattened"):
        case.build()(case.batch().reshape(-1))


@KINDS
def test_a_batch_that_lacks_what_the_policy_did_is_refused_by_name(case):
    loss, batch = case.build(), case.batch(4, 6)
    for name in loss.stored_keys:
        key = getattr(loss.tensor_keys, name)
        with pytest.raises(KeyError, match=f"the key '{key}' is missing.*Collect it with the policy"):
            loss(batch.exclude(key))
    with pytest.raises(ValueError, match=r"the batch \[0, 6\] holds no transition"):
        loss(batch[:0])
    key = getattr(loss.tensor_keys, loss.stored_keys[-1])
    kept = batch[key].double().requires_grad_()
    with pytest.raises(ValueError, match=f"'{key}' in the batch requires gradients; collect it under torch.no_grad"):
        loss(batch.set(key, kept))


@KINDS
def test_lambda_is_part_of_the_state(case):
    loss, other = case.build(lmbda=0.3), case.build()
    other.load_state_dict(loss.state_dict())
    close(other.value_estimator.lmbda, torch.tensor(0.3, dtype=torch.float64), 0)
    with pytest.raises(ValueError, match="lmbda"):
        case.build(lmbda=1.5)


@pytest.mark.slow
@KINDS
def test_minibatches_of_any_size_compile_without_graph_breaks(case):
    torch._dynamo.reset()
    loss = case.build()
    rows = with_advantage(loss, case.batch(4, 6)).reshape(-1)
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="eager")
    for size in (24, 7):
        expected, found = loss(rows[:size]), compiled(rows[:size])
        for term in case.terms:
            close(found[term], expected[term], 1e-12)


# --- other networks ---


@pytest.mark.parametrize("kind", [SafetyPPOLoss, SafetyA2CLoss])
def test_continuous_actions_and_a_critic_with_inputs_of_its_own(kind):
    torch.manual_seed(0)
    head = torch.nn.Sequential(MLP(in_features=2, out_features=2, num_cells=[8]), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(head, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    critic = ValueOperator(MLP(in_features=3, out_features=1, num_cells=[8]), in_keys=["state"])
    loss = kind(actor, critic)
    batch = CASES[0].batch(dtype=torch.float32)
    batch["action"] = torch.rand(3, 5, 1) * 1.8 - 0.9
    batch["state"], batch["next", "state"] = torch.randn(3, 5, 3), torch.randn(3, 5, 3)
    assert {"state", ("next", "state")} <= {*loss.in_keys}
    tensors = {key if isinstance(key, str) else "_".join(key): batch[key] for key in loss.in_keys}
    torch.manual_seed(1)
    expected = loss(batch)
    torch.manual_seed(1)
    for key, value in zip(loss.out_keys, loss(**tensors)):
        close(value, expected[key], 1e-6)
    expected["loss_critic"].backward(retain_graph=True)
    expected["loss_objective"].backward()
    assert all(parameter.grad is not None for parameter in loss.parameters())
