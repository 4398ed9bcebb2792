"""What the value estimators read and write, under which keys, and which settings and batches they refuse."""

from __future__ import annotations

import io

import pytest
import torch
from batches import random_windows, trajectories
from contracts import BACKUPS, OPERATORS, SIGNALS
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch.testing import assert_close
from torchrl.objectives.utils import default_value_kwargs, get_value_estimator_entry

from torchrl_safety.objectives import (
    AvoidBackup,
    BackupEstimators,
    NStepBackupEstimator,
    ReachAvoidBackup,
    SafetyDQNLoss,
    TD0BackupEstimator,
    TDLambdaBackupEstimator,
)
from torchrl_safety.objectives.estimators import BackupEstimator

ESTIMATORS = (TD0BackupEstimator, NStepBackupEstimator, TDLambdaBackupEstimator)
ALIASES = tuple(zip(("backup_td0", "backup_nstep", "backup_tdlambda"), BackupEstimators, ESTIMATORS))

every_backup = pytest.mark.parametrize("backup", [b for b, _ in BACKUPS], ids=repr)
every_estimator = pytest.mark.parametrize("kind", ESTIMATORS)
either_truncation = pytest.mark.parametrize("bootstrap", [False, True])


def build(kind, backup=None, **settings):
    return kind(backup=AvoidBackup() if backup is None else backup, **settings)


def linear(seed: int = 0, dtype=torch.float64, keys=("observation", "state_value")) -> TensorDictModule:
    torch.manual_seed(seed)
    return TensorDictModule(torch.nn.Linear(2, 1, dtype=dtype), [keys[0]], [keys[1]])


def renamed(name: str) -> tuple[str, str]:
    return ("agents", f"my_{name}")


# --- keys ---


@every_backup
@every_estimator
@either_truncation
def test_every_key_can_be_renamed_and_nested(kind, backup, bootstrap):
    settings = {"backup": backup, "gamma": 0.9, "bootstrap_on_truncation": bootstrap}
    plain = trajectories(3, 5)
    estimator = kind(value_network=linear(), **settings)
    estimator(plain)
    nested = kind(value_network=linear(keys=(renamed("observation"), renamed("state_value"))), **settings)
    names = (*SIGNALS, "terminated", "done", "advantage", "value_target")
    nested.set_keys(value=renamed("state_value"), **{name: renamed(name) for name in names})
    batch = TensorDict({}, [3, 5])
    for key, value in trajectories(3, 5).items(True, True):
        path = key if isinstance(key, tuple) else (key,)
        batch[(*path[:-1], *renamed(path[-1]))] = value
    nested(batch)
    for name in ("advantage", "value_target", "state_value"):
        assert torch.equal(batch[renamed(name)], plain[name])
    read = ("observation", *backup.signals, "terminated", "done")
    assert set(estimator.in_keys) == {"observation", *(("next", name) for name in read)}
    assert set(nested.in_keys) == {renamed("observation"), *(("next", *renamed(name)) for name in read)}
    assert nested.out_keys == [renamed("advantage"), renamed("value_target")]


@every_estimator
def test_a_margin_may_stand_in_the_reward(kind):
    batch, estimator = trajectories(3, 5), build(kind)
    expected = estimator.value_estimate(batch)
    batch["next", "reward"] = batch["next"].pop("safety_margin")
    estimator.set_keys(safety_margin="reward")
    assert torch.equal(estimator.value_estimate(batch), expected)


def test_windows_are_read_under_the_renamed_keys_too():
    batch, estimator = random_windows(8, 3), build(NStepBackupEstimator)
    expected = estimator.value_estimate(batch)
    batch["steps", "agents", "g"] = batch["steps"].pop("safety_margin")
    estimator.set_keys(safety_margin=("agents", "g"))
    assert torch.equal(estimator.value_estimate(batch), expected)


@every_estimator
def test_keys_that_torchrl_sets_can_be_set_as_well_as_the_margins(kind):
    estimator = build(kind)
    names = set(kind.default_keys.__dataclass_fields__)
    assert {"advantage", "value_target", "value", "reward", "done", "terminated", "sample_log_prob"} <= names
    estimator.set_keys(**{name: f"my_{name}" for name in names})
    assert vars(estimator.tensor_keys) == {name: f"my_{name}" for name in names}
    with pytest.raises(KeyError, match="margin is not an accepted"):
        estimator.set_keys(margin="g")


@every_estimator
@pytest.mark.parametrize("with_network", [False, True])
def test_keyword_arguments_do_what_a_tensordict_does(kind, with_network):
    estimator = build(kind, value_network=linear() if with_network else None)
    batch = trajectories(3, 5)
    arguments = {"_".join(key) if isinstance(key, tuple) else key: batch[key] for key in estimator.in_keys}
    advantage, target = estimator(**arguments)
    estimator(batch)
    assert torch.equal(advantage, batch["advantage"])
    assert torch.equal(target, batch["value_target"])
    if kind is TDLambdaBackupEstimator:
        with pytest.raises(ValueError, match="is no trajectory"):
            estimator(**{name: value.flatten(0, 1) for name, value in arguments.items()})


@every_backup
@every_estimator
@either_truncation
def test_a_missing_key_is_named_and_has_no_default(kind, backup, bootstrap):
    estimator = build(kind, backup, bootstrap_on_truncation=bootstrap)
    flags = {"done"} if kind is TDLambdaBackupEstimator else set()
    flags.add("terminated" if bootstrap else "done")
    for name in (*backup.signals, *flags, "state_value"):
        batch = trajectories(3, 5)
        del batch["next", name]
        for call in (estimator, estimator.value_estimate):
            with pytest.raises(KeyError, match=rf"the key \('next', '{name}'\) is missing; present: 'observation'"):
                call(batch.clone())
    with pytest.raises(KeyError, match=r"the key 'state_value' is missing.*set_keys"):
        estimator(trajectories(3, 5).exclude("state_value"))


@every_estimator
def test_a_missing_observation_is_named(kind):
    estimator = build(kind, value_network=linear())
    for call in (estimator, estimator.value_estimate):
        batch = trajectories(3, 5)
        del batch["next", "observation"]
        with pytest.raises(KeyError, match=r"\('next', 'observation'\) is missing.*true next observation"):
            call(batch)
    with pytest.raises(KeyError, match="the key 'observation' is missing"):
        estimator(trajectories(3, 5).exclude("observation"))


@pytest.mark.parametrize("name", ["safety_margin", "target_margin", "valid"])
def test_a_window_that_lacks_a_signal_does_not_fall_back_on_its_last_step(name):
    batch = random_windows(6, 3)
    del batch["steps", name]
    with pytest.raises(KeyError, match=rf"\('steps', '{name}'\) is missing.*NStepTransform"):
        build(NStepBackupEstimator, ReachAvoidBackup()).value_estimate(batch)


# --- numbers ---


@every_estimator
@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
def test_a_margin_that_is_nan_or_infinite_is_refused(kind, fault):
    for name in ("safety_margin", "target_margin"):
        batch = trajectories(3, 5)
        batch["next", name][1, 2] = fault
        for call in (build(kind, ReachAvoidBackup()), build(kind, ReachAvoidBackup()).value_estimate):
            with pytest.raises(ValueError, match=rf"\('next', '{name}'\) holds NaN or inf"):
                call(batch.clone())
    windows = random_windows(6, 3)
    windows["steps", "safety_margin"][2, 0] = fault
    with pytest.raises(ValueError, match=r"\('steps', 'safety_margin'\) holds NaN or inf"):
        build(NStepBackupEstimator).value_estimate(windows)


@every_estimator
def test_shapes_that_would_broadcast_are_refused(kind):
    batch = trajectories(5, 5)
    with pytest.raises(ValueError, match=r"shape \[5, 5\].*(trailing dimension|must agree)"):
        build(kind).value_estimate(batch, next_value=torch.zeros(5, 5))
    batch["next", "safety_margin"] = batch["next", "safety_margin"].squeeze(-1)
    with pytest.raises(ValueError, match=r"'safety_margin'\) has shape \[5, 5\].*must be `\[\*B, 1\]`"):
        build(kind).value_estimate(batch)


@every_backup
@every_estimator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_target_has_the_precision_of_the_batch(kind, backup, dtype):
    batch = trajectories(3, 5, dtype=dtype)
    estimator = kind(backup=backup, gamma=0.9, value_network=linear(dtype=dtype))
    estimator(batch)
    assert batch["value_target"].dtype == batch["advantage"].dtype == dtype
    double = kind(backup=backup, gamma=0.9).value_estimate(batch.to(torch.float64))
    assert_close(batch["value_target"].double(), double, atol=1e-5, rtol=1e-5)


@every_estimator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_rest_of_a_discount_near_one_keeps_every_digit(kind, dtype):
    batch = trajectories(1, 1, share=0.0, dtype=dtype)
    batch["next", "safety_margin"].fill_(1.0)
    batch["next", "state_value"].zero_()
    exact = 1 - 0.9999
    found = build(kind, gamma=0.9999).value_estimate(batch).item()  # (1 - gamma) g; float32's gamma gives 1.00017e-4
    assert found == pytest.approx(exact, rel=4 * torch.finfo(dtype).eps)
    assert build(kind, gamma=torch.tensor(0.9999, dtype=torch.float64)).gamma.item() == 0.9999


@every_estimator
def test_a_checkpoint_restores_discount_and_lambda(kind):
    more = {"lmbda": 0.123456789} if kind is TDLambdaBackupEstimator else {}
    estimator, stored = build(kind, gamma=0.99990001, value_network=linear(), **more), io.BytesIO()
    torch.save(estimator.state_dict(), stored)
    stored.seek(0)
    other = build(kind, gamma=0.5, value_network=linear())
    other.load_state_dict(torch.load(stored, weights_only=True))
    batch = trajectories(3, 5)
    assert torch.equal(other.value_estimate(batch), estimator.value_estimate(batch))
    for name, buffer in estimator.named_buffers():
        assert buffer.dtype == torch.float64
        assert torch.equal(other.get_buffer(name), buffer)
    assert {name for name, _ in estimator.named_buffers()} == {"gamma", *more}
    assert not list(estimator.parameters())  # the network belongs to the loss


# --- forward ---


@every_backup
@every_estimator
def test_forward_writes_the_target_and_what_it_adds_to_the_value(kind, backup):
    batch, network = trajectories(3, 5), linear()
    estimator = kind(backup=backup, gamma=0.9, value_network=network)
    estimator(batch)
    with torch.no_grad():
        value, following = network.module(batch["observation"]), network.module(batch["next", "observation"])
    expected = estimator.value_estimate(batch, next_value=following)
    assert_close(batch["value_target"], expected)
    assert_close(batch["advantage"], expected - value)
    assert_close(batch["state_value"], value)


@every_estimator
def test_params_give_the_value_and_target_params_the_next_one(kind):
    batch, network = trajectories(3, 5), linear()
    params, target_params = (TensorDict.from_module(linear(seed)) for seed in (1, 2))
    estimator = build(kind, gamma=0.9, value_network=network)
    estimator(batch, params=params, target_params=target_params)
    with torch.no_grad():
        value = linear(1).module(batch["observation"])
        expected = estimator.value_estimate(batch, next_value=linear(2).module(batch["next", "observation"]))
    assert_close(batch["value_target"], expected)
    assert_close(batch["advantage"], expected - value)
    assert_close(estimator.value_estimate(trajectories(3, 5), target_params=target_params), expected)
    assert all(p.grad is None and p.requires_grad for p in params.values(True, True))


@every_estimator
def test_no_gradient_reaches_the_value_network_through_a_target(kind):
    batch, network = trajectories(3, 5), linear()
    target_params = TensorDict.from_module(linear(2))
    online = TensorDict.from_module(network)
    for settings in ({}, {"differentiable": True}):
        estimator = build(kind, value_network=network, **settings)
        for given in ({}, {"params": online, "target_params": target_params.detach()}):
            written = estimator(batch.clone(), **given)
            assert not written["value_target"].requires_grad
            assert not written["advantage"].requires_grad
        assert not estimator.value_estimate(batch).requires_grad
        assert not estimator.value_estimate(batch, target_params=target_params.detach()).requires_grad
    assert not build(kind, value_network=network).value_estimate(batch, target_params=online).requires_grad
    following = network.module(batch["next", "observation"])
    assert not build(kind).value_estimate(batch, next_value=following).requires_grad
    assert build(kind, differentiable=True).value_estimate(batch, next_value=following).requires_grad
    assert all(p.requires_grad and p.grad is None for p in network.parameters())


@every_estimator
def test_gradients_reach_the_margins_only_if_asked_to(kind):
    batch = trajectories(3, 5)
    margin = batch["next", "safety_margin"].requires_grad_()
    assert not build(kind)(batch.clone())["value_target"].requires_grad
    build(kind, differentiable=True)(batch)["value_target"].sum().backward()
    assert margin.grad.abs().sum() > 0


def test_an_estimator_compiles_in_one_graph():
    batch, estimator = trajectories(2, 3), build(TDLambdaBackupEstimator, value_network=linear())
    torch.compiler.reset()
    compiled = torch.compile(estimator, fullgraph=True, backend="eager")
    assert_close(compiled(batch.clone())["value_target"], estimator(batch.clone())["value_target"])


# --- settings ---


@every_estimator
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"average_rewards": True}, "average_rewards is true, but standardised rewards are no margins; leave it out"),
        ({"shifted": True}, "shifted is true, but values of a shifted observation are not those of the true final one"),
        ({"backup": AvoidBackup}, "backup is <class .*give an instance of a Backup"),
        ({"backup": None}, "backup is None; give an instance of a Backup"),
        ({"gamma": 1.1}, r"gamma is 1\.1; it must lie in \[0, 1\]"),
        ({"gamma": torch.nan}, r"gamma is nan; it must lie in \[0, 1\]"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        kind(**{"backup": AvoidBackup(), **settings})


def test_a_lambda_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"lmbda is -0\.1; it must lie in \[0, 1\]"):
        build(TDLambdaBackupEstimator, lmbda=-0.1)


@every_estimator
def test_settings_that_change_nothing_are_taken_and_unknown_ones_are_not(kind):
    build(kind, average_rewards=False, shifted=False, skip_existing=True, deactivate_vmap=True)
    with pytest.raises(TypeError, match="gama"):
        build(kind, gama=0.9)


def test_the_shared_part_has_no_target_of_its_own():
    with pytest.raises(NotImplementedError, match="use TD0BackupEstimator"):
        BackupEstimator(backup=AvoidBackup()).value_estimate(trajectories(3))


# --- names ---


@pytest.mark.parametrize(("alias", "member", "kind"), ALIASES)
def test_torchrl_finds_an_estimator_by_member_and_by_name(alias, member, kind):
    assert get_value_estimator_entry(member).cls is kind
    assert get_value_estimator_entry(alias).cls is kind
    assert default_value_kwargs(member) == {"gamma": 0.99} | ({"lmbda": 0.95} if kind is ALIASES[2][2] else {})


@pytest.mark.parametrize(("alias", "member", "kind"), ALIASES)
@pytest.mark.parametrize("form", ["alias", "member", "kind"])
def test_a_loss_of_this_package_takes_any_form_and_keeps_what_is_not_given(alias, member, kind, form):
    network = TensorDictModule(torch.nn.Linear(2, 3, dtype=torch.float64), ["observation"], ["action_value"])
    loss = SafetyDQNLoss(network, gamma=0.8, bootstrap_on_truncation=True)
    loss.set_keys(safety_margin="reward")
    loss.make_value_estimator({"alias": alias, "member": member, "kind": kind}[form], gamma=0.7)
    estimator = loss.value_estimator
    assert type(estimator) is kind
    assert (estimator.gamma.item(), estimator.bootstrap_on_truncation) == (0.7, True)
    assert estimator.tensor_keys.safety_margin == "reward"
    batch = trajectories(3, 4)
    batch["action"] = torch.zeros(3, 4, dtype=torch.int64)
    assert loss(batch)["loss"].isfinite()


def test_a_column_of_values_by_hand_is_the_operator_itself():
    batch = trajectories(6, share=0.0)
    for backup, _ in BACKUPS:
        found = TD0BackupEstimator(backup=backup, gamma=0.9).value_estimate(batch, next_value=torch.ones(6, 1))
        for i in range(6):
            step = {name: batch["next", name][i].item() for name in SIGNALS}
            assert found[i].item() == pytest.approx(OPERATORS[repr(backup)](step, 1.0, 0.9), abs=1e-12)
