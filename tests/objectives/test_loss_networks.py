"""What every loss does to its networks: what is trained, saved, cast, noisy, and left as it was."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from contracts import LOSSES
from loss_cases import EVERY, close, losses, run, same
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl.objectives import SoftUpdate, ValueEstimators
from torchrl.objectives.value import GAE, TD0Estimator

from torchrl_safety.modules import NoisyLinear, RainbowNetwork, reset_noise
from torchrl_safety.objectives import (
    AvoidBackup,
    BackupEstimators,
    NStepBackupEstimator,
    ReachAvoidBackup,
    SafetyDQNLoss,
    TD0BackupEstimator,
)


@EVERY
def test_each_term_trains_its_own_network_and_no_target(case):
    loss, batch = case.build(backup=ReachAvoidBackup()), case.batch()
    targets = {name: value.clone() for name, value in loss.state_dict().items() if name.startswith("target_")}
    assert bool(targets) != case.on_policy
    optimizer = torch.optim.SGD(loss.parameters(), 0.1)
    result = run(loss, batch)
    assert {name for name in result.keys() if name.startswith("loss")} == {*case.terms}  # noqa: SIM118
    for term, prefix in case.terms.items():
        optimizer.zero_grad()
        result[term].backward(retain_graph=True)
        moved = {name for name, value in loss.named_parameters() if value.grad is not None and value.grad.any()}
        assert moved == {name for name, _ in loss.named_parameters() if name.split(".")[0] == prefix}, term
    optimizer.step()
    for name, value in loss.state_dict().items():
        if name.startswith("target_"):
            assert torch.equal(value, targets[name]), name
            assert not value.requires_grad


@losses(but=("A2C", "PPO", "game PPO"))
def test_a_target_updater_can_be_built_after_the_loss_has_run(case):
    loss = case.build(backup=AvoidBackup())
    before = run(loss, case.batch())[case.critic]
    SoftUpdate(loss, tau=0.5).step()
    assert not torch.equal(run(loss, case.batch())[case.critic], before)
    assert not any(name.startswith("target_") for name, _ in loss.named_parameters())


@EVERY
def test_state_dict_round_trip_with_weights_only(case):
    loss, batch = case.build(backup=ReachAvoidBackup()), case.batch()
    loss.gamma = 0.77
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.add_(0.1)
    file = io.BytesIO()
    torch.save(loss.state_dict(), file)
    file.seek(0)
    other = case.build(backup=ReachAvoidBackup(), gamma=0.1)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.gamma == 0.77
    same(run(other, batch.clone()), run(loss, batch.clone()))
    same(run(copy.deepcopy(loss), batch.clone()), run(loss, batch.clone()))


@EVERY
def test_what_is_not_named_stays_as_it_is(case):
    backup = ReachAvoidBackup(terminal_type="g")
    given = {"lmbda": 0.3} if case.on_policy else {}
    loss = case.build(backup=backup, gamma=0.8, bootstrap_on_truncation=True, **given)
    loss.set_keys(safety_margin=("agent", "margin"))
    loss.gamma = 0.7  # as a schedule does
    for name in (TD0BackupEstimator, "backup_nstep", BackupEstimators.BACKUP_TD0, None):
        assert loss.make_value_estimator(name) is loss
        found = loss.value_estimator
        assert loss.backup is backup
        assert (loss.gamma.item(), found.bootstrap_on_truncation) == (0.7, True)
        assert found.tensor_keys.safety_margin == ("agent", "margin")
    assert isinstance(loss.value_estimator, TD0BackupEstimator)
    loss.make_value_estimator(gamma=0.6)
    assert (type(loss.value_estimator), loss.gamma.item()) == (TD0BackupEstimator, 0.6)
    loss.make_value_estimator(BackupEstimators.BACKUP_TDLAMBDA)
    assert (loss.gamma.item(), loss.value_estimator.lmbda.item()) == (0.6, given.get("lmbda", 0.95))


@EVERY
def test_an_estimator_that_takes_no_backup_is_refused_and_changes_nothing(case):
    loss = case.build(backup=AvoidBackup(), gamma=0.8)
    before = loss.value_estimator
    for other in (ValueEstimators.TD0, "gae", TD0Estimator, GAE(gamma=0.9, lmbda=0.9, value_network=None)):
        with pytest.raises(NotImplementedError, match=r"takes no backup; give one of .*BACKUP_NSTEP"):
            loss.make_value_estimator(other)
    for settings in ({"gamma": 2}, {"backup": "avoid"}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            loss.make_value_estimator(**settings)
    with pytest.raises(ValueError, match="gamma"):
        loss.make_value_estimator(NStepBackupEstimator(backup=AvoidBackup()), gamma=0.5)
    assert loss.value_estimator is before
    loss.make_value_estimator()
    assert (loss.gamma, loss.backup) == (0.8, before.backup)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cast_leaves_the_discount_exact(case, dtype):
    loss = case.build(gamma=0.9999).to(dtype)
    assert loss.gamma.dtype == torch.float64
    assert loss.gamma.item() == 0.9999
    assert next(loss.parameters()).dtype == dtype
    loss.gamma = 0.99995
    assert loss.gamma.item() == 0.99995


@EVERY
def test_settings_are_checked_when_the_loss_is_built(case):
    distance = "loss_critic_type" if case.on_policy else "loss_function"
    wrong = {"reduction": "x", "bootstrap_on_truncation": "no"} | ({} if case.categorical else {distance: "x"})
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"{name} is '{value}'"):
            case.build(**{name: value})


def noisy_loss(**settings) -> SafetyDQNLoss:
    torch.manual_seed(0)
    return SafetyDQNLoss(RainbowNetwork(2, 3, support=None, hidden=(8,), dtype=torch.float64), **settings)


def test_noise_is_on_inside_a_loss_and_its_scale_learns():
    loss, batch = noisy_loss(), LOSSES[0].batch()
    before = loss(batch)["loss"]
    reset_noise(loss)
    result = loss(batch)["loss"]
    assert not torch.equal(before, result)
    result.backward()
    scales = [value for name, value in loss.named_parameters() if "sigma" in name]
    assert len(scales) == sum(isinstance(layer, NoisyLinear) for layer in loss.value_network.modules()) * 2
    assert all(scale.grad.any() for scale in scales)


def test_the_target_network_has_noise_of_its_own_that_does_not_stay():
    loss = noisy_loss()
    seen = []
    for _ in range(3):
        reset_noise(loss)
        for params in (loss.value_network_params, loss.target_value_network_params):
            seen += [value.clone().flatten() for key, value in params.items(True, True) if key[-1] == "bias_noise"]
    assert len(seen) == 6
    assert all(not torch.equal(one, other) for i, one in enumerate(seen) for other in seen[:i])


class Tied(torch.nn.Module):
    """Every action is worth the same."""

    def __init__(self) -> None:
        super().__init__()
        self.worth = torch.nn.Parameter(torch.tensor(10.0, dtype=torch.float64))

    def forward(self, observation: Tensor) -> Tensor:
        return self.worth.expand(*observation.shape[:-1], 3)


@pytest.mark.parametrize("double", [True, False])
def test_tied_actions_do_not_add_up(double):
    loss = SafetyDQNLoss(TensorDictModule(Tied(), ["observation"], ["action_value"]), gamma=1.0, double=double)
    batch = LOSSES[0].batch()
    batch["next", "done"][:] = False
    batch["next", "safety_margin"][:] = 100.0
    loss(batch)
    close(batch["td_error"], torch.zeros(12, 1))
