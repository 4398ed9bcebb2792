"""The backup estimators inside TorchRL's own losses: what a swap of the estimator gives, and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from batches import random_windows, trajectories
from contracts import OPERATORS, SIGNALS
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor
from torch.testing import assert_close
from torchrl.envs import MultiStepTransform
from torchrl.modules import MLP, ProbabilisticActor, QValueActor, TanhNormal, ValueOperator
from torchrl.objectives import (
    A2CLoss,
    ClipPPOLoss,
    DDPGLoss,
    DiscreteSACLoss,
    DQNLoss,
    LossModule,
    REDQLoss,
    SACLoss,
    TD3Loss,
)

from torchrl_safety.objectives import (
    AvoidBackup,
    BackupEstimators,
    NStepBackupEstimator,
    ReachAvoidBackup,
    TD0BackupEstimator,
    TDLambdaBackupEstimator,
)

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")
ACTIONS, GAMMA = 3, 0.9


# --- the losses ---


def mlp(inputs: int, outputs: int) -> MLP:
    return MLP(in_features=inputs, out_features=outputs, num_cells=[8], activation_class=torch.nn.Tanh)


def gaussian(**settings) -> ProbabilisticActor:
    head = torch.nn.Sequential(mlp(2, 2), NormalParamExtractor())
    module = TensorDictModule(head, ["observation"], ["loc", "scale"])
    return ProbabilisticActor(module, in_keys=["loc", "scale"], distribution_class=TanhNormal, **settings)


def categorical() -> ProbabilisticActor:
    module = TensorDictModule(mlp(2, ACTIONS), ["observation"], ["logits"])
    return ProbabilisticActor(module, in_keys=["logits"], distribution_class=torch.distributions.Categorical)


def deterministic() -> TensorDictModule:
    return TensorDictModule(torch.nn.Sequential(mlp(2, 1), torch.nn.Tanh()), ["observation"], ["action"])


def critic() -> ValueOperator:
    return ValueOperator(mlp(3, 1), in_keys=["observation", "action"])


def dqn(double: bool) -> DQNLoss:
    network = QValueActor(mlp(2, ACTIONS), in_keys=["observation"], action_space="categorical")
    return DQNLoss(network, action_space="categorical", double_dqn=double, delay_value=True)


def redq() -> REDQLoss:
    actor = gaussian(return_log_prob=True)
    return REDQLoss(actor, critic(), num_qvalue_nets=3, sub_sample_len=2, target_entropy=-1.0)


def discrete_sac() -> DiscreteSACLoss:
    network = TensorDictModule(mlp(2, ACTIONS), ["observation"], ["action_value"])
    return DiscreteSACLoss(categorical(), network, action_space="categorical", num_actions=ACTIONS)


def evaluate(network, params, batch: TensorDict, key: str) -> Tensor:
    with params.to_module(network, preserve_module_state=False), torch.no_grad():
        return network(batch.select("observation", "action", strict=False)).get(key)


def predictions(loss: LossModule, batch: TensorDict) -> Tensor:
    """What each online critic says of the taken actions, `[critics, B]`."""
    if isinstance(loss, DQNLoss | DDPGLoss):
        pairs = [(loss.value_network, loss.value_network_params)]
    else:
        pairs = [(loss.qvalue_network, loss.qvalue_network_params[i]) for i in range(loss.num_qvalue_nets)]
    if isinstance(loss, DQNLoss | DiscreteSACLoss):
        action = batch["action"].unsqueeze(-1)
        return torch.stack([evaluate(*pair, batch, "action_value").gather(-1, action).squeeze(-1) for pair in pairs])
    return torch.stack([evaluate(*pair, batch, "state_action_value").squeeze(-1) for pair in pairs])


def dqn_next(loss: DQNLoss, after: TensorDict) -> Tensor:
    values = evaluate(loss.value_network, loss.target_value_network_params, after, "action_value")
    chooser = evaluate(loss.value_network, loss.value_network_params, after, "action_value")
    return values.gather(-1, (chooser if loss.double_dqn else values).argmax(-1, keepdim=True))


def ddpg_next(loss: DDPGLoss, after: TensorDict) -> Tensor:
    after["action"] = evaluate(loss.actor_network, loss.target_actor_network_params, after, "action")
    return evaluate(loss.value_network, loss.target_value_network_params, after, "state_action_value")


def discrete_sac_next(loss: DiscreteSACLoss, after: TensorDict) -> Tensor:
    log_probs = evaluate(loss.actor_network, loss.actor_network_params, after, "logits").log_softmax(-1)
    critics = [loss.target_qvalue_network_params[i] for i in range(2)]
    least = torch.stack([evaluate(loss.qvalue_network, params, after, "action_value") for params in critics]).amin(0)
    return (log_probs.exp() * (least - loss._alpha * log_probs)).sum(-1, keepdim=True)


class OffPolicy(NamedTuple):
    """One of TorchRL's losses: what its estimator must know, its next value, its priority |Q - y|**power."""

    name: str
    build: Callable[[], LossModule]
    network: str | None
    value: str
    power: int
    next_value: Callable[[Any, TensorDict], Tensor] | None = None
    discrete: bool = False


OFF_POLICY = (
    OffPolicy("DQN", lambda: dqn(False), "value_network", "chosen_action_value", 2, dqn_next, True),
    OffPolicy("double DQN", lambda: dqn(True), "value_network", "chosen_action_value", 2, dqn_next, True),
    OffPolicy("SAC", lambda: SACLoss(gaussian(), critic(), target_entropy=-1.0), None, "state_value", 1),
    OffPolicy("discrete SAC", discrete_sac, None, "state_value", 1, discrete_sac_next, True),
    OffPolicy(
        "DDPG",
        lambda: DDPGLoss(deterministic(), critic(), delay_actor=True, delay_value=True),
        "actor_critic",
        "state_action_value",
        2,
        ddpg_next,
    ),
    OffPolicy("TD3", lambda: TD3Loss(deterministic(), critic(), bounds=(-1, 1)), None, "state_action_value", 2),
    OffPolicy("REDQ", redq, None, "state_value", 2),
)
ON_POLICY = {
    "PPO": lambda actor, value: ClipPPOLoss(actor, value, loss_critic_type="l2", entropy_bonus=False),
    "A2C": lambda actor, value: A2CLoss(actor, value, loss_critic_type="l2", entropy_bonus=False),
}
TAKE_WINDOWS = tuple(case for case in OFF_POLICY if case.name != "REDQ")

either_truncation = pytest.mark.parametrize("bootstrap", [False, True])
both_problems = pytest.mark.parametrize("backup", [AvoidBackup(), ReachAvoidBackup()], ids=repr)


def off_policy(cases=OFF_POLICY):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def made(case: OffPolicy) -> LossModule:
    """The loss, its target networks apart from the online ones."""
    torch.manual_seed(0)
    loss = case.build()
    with torch.no_grad():
        for name in ("target_value_network_params", "target_qvalue_network_params", "target_actor_network_params"):
            params = getattr(loss, name, None)
            for value in () if params is None else params.values(True, True):
                value.add_(0.3 * torch.randn_like(value))
    return loss


def swap(loss: LossModule, case: OffPolicy, form: str = "instance", kind=TD0BackupEstimator, **settings) -> None:
    network = {} if case.network is None else {"value_network": getattr(loss, case.network)}
    if form == "instance":
        loss.make_value_estimator(kind(**network, **settings))
        loss.set_keys()
    elif form == "class":
        loss.make_value_estimator(kind, **network, **settings)
        loss.set_keys()
    else:
        loss.SUPPORTED_VALUE_ESTIMATORS = tuple(BackupEstimators)
        alias = {TD0BackupEstimator: "backup_td0", NStepBackupEstimator: "backup_nstep"}[kind]
        loss.make_value_estimator(alias, **settings)


def with_actions(batch: TensorDict, discrete: bool) -> TensorDict:
    batch = batch.exclude("state_value", ("next", "state_value"))
    batch["action"] = torch.arange(len(batch)) % ACTIONS if discrete else torch.linspace(-0.9, 0.9, len(batch))[:, None]
    return batch.apply(lambda x: x.float() if x.is_floating_point() else x)


def transitions(case: OffPolicy, size: int = 24) -> TensorDict:
    return with_actions(trajectories(size, share=0.3), case.discrete)


def windows(case: OffPolicy, size: int = 24) -> TensorDict:
    return with_actions(random_windows(size, 4), case.discrete)


def watch(loss: LossModule) -> list[tuple[TensorDict, Tensor | None, Tensor]]:
    """What the loss hands its estimator (batch, next value) and gets back, call by call."""
    estimator, seen = loss.value_estimator, []
    original = estimator.value_estimate

    def watched(tensordict, *args, next_value=None, **settings):
        target = original(tensordict, *args, next_value=next_value, **settings)
        seen.append((tensordict.copy(), next_value, target))
        return target

    estimator.value_estimate = watched
    return seen


def loop(backup, batch: TensorDict, following: Tensor, bootstrap: bool) -> Tensor:
    """The target of each transition or window, step by step from its end."""
    targets = []
    for i in range(len(batch)):
        source = batch["next"].unsqueeze(1) if "steps" not in batch else batch["steps"]
        length = 1 if "steps" not in batch else int(batch["steps", "valid"][i].sum())
        value = following[i].item()
        for t in reversed(range(length)):
            step = {name: source[name][i, t].item() for name in SIGNALS}
            ended = batch["next", "terminated" if bootstrap else "done"][i].item() and t == length - 1
            value = OPERATORS[repr(backup)](step, value, GAMMA, ended)
        targets.append([value])
    return torch.tensor(targets)


def check_target(case: OffPolicy, loss: LossModule, batch: TensorDict, backup, bootstrap: bool) -> None:
    """The target that the loss learns is the loop over its own next value, and carries no gradient."""
    seen = watch(loss)
    losses = loss(batch)
    [(given, next_value, target)] = seen
    if case.next_value is not None:
        expected_next = case.next_value(loss, batch["next"].select("observation"))
        handed = given.get(("next", case.value), None) if next_value is None else next_value
        if handed is not None:
            assert_close(handed, expected_next)
        next_value = expected_next
    elif next_value is None:
        next_value = given["next", case.value]
    assert next_value.shape == target.shape == (len(batch), 1)
    expected = loop(backup, batch, next_value, bootstrap)
    assert_close(target, expected)
    assert not target.requires_grad
    errors = (predictions(loss, batch) - expected.squeeze(-1)).abs().amax(0) ** case.power
    assert_close(batch["td_error"].flatten(), errors, rtol=1e-4, atol=1e-5)
    sum(value.sum() for name, value in losses.items() if name.startswith("loss")).backward()
    frozen = [value for name, value in loss.named_buffers() if name.startswith("target_") and value.is_floating_point()]
    assert frozen
    assert all(value.grad is None and not value.requires_grad for value in frozen)


# --- a swap is enough for transitions ---


@off_policy()
@both_problems
@either_truncation
@pytest.mark.parametrize("form", ["instance", "class", "alias"])
def test_the_loss_learns_the_backup_of_its_own_next_value(case, backup, bootstrap, form):
    loss = made(case)
    swap(loss, case, form, backup=backup, gamma=GAMMA, bootstrap_on_truncation=bootstrap)
    check_target(case, loss, transitions(case), backup, bootstrap)


@off_policy(TAKE_WINDOWS)
@both_problems
@either_truncation
def test_the_loss_learns_the_composed_backups_of_windows(case, backup, bootstrap):
    loss = made(case)
    swap(loss, case, kind=NStepBackupEstimator, backup=backup, gamma=GAMMA, bootstrap_on_truncation=bootstrap)
    check_target(case, loss, windows(case), backup, bootstrap)


@pytest.mark.parametrize("name", ON_POLICY)
@both_problems
@either_truncation
@pytest.mark.parametrize("form", ["instance", "class", "alias"])
def test_an_on_policy_loss_learns_the_lambda_return_of_its_critic(name, backup, bootstrap, form):
    loss, value, batch = on_policy(name)
    settings = {"backup": backup, "gamma": GAMMA, "lmbda": 0.8, "bootstrap_on_truncation": bootstrap}
    if form == "alias":
        loss.SUPPORTED_VALUE_ESTIMATORS = tuple(BackupEstimators)
        loss.make_value_estimator("backup_tdlambda", **settings)
    else:
        given = TDLambdaBackupEstimator(value_network=value, **settings) if form == "instance" else None
        if given is None:
            loss.make_value_estimator(TDLambdaBackupEstimator, value_network=loss.critic_network, **settings)
        else:
            loss.make_value_estimator(given)
        loss.set_keys()
    seen = watch(loss)
    losses = loss(batch)
    [(_, _, target)] = seen
    with loss.critic_network_params.to_module(loss.critic_network), torch.no_grad():
        values, following = (loss.critic_network(td.select("observation")) for td in (batch, batch["next"]))
    expected = lambda_loop(backup, batch, following["state_value"], 0.8, bootstrap)
    assert_close(target, expected)
    assert not target.requires_grad
    error = (values["state_value"] - expected).square().mean()
    assert losses["loss_critic"].item() == pytest.approx((loss.critic_coeff * error).item(), rel=1e-4)
    losses["loss_critic"].backward()
    assert "advantage" not in batch


def on_policy(name: str):
    torch.manual_seed(0)
    value = ValueOperator(mlp(2, 1), in_keys=["observation"])
    batch = trajectories(3, 5).exclude("state_value", ("next", "state_value"))
    batch = batch.apply(lambda x: x.float() if x.is_floating_point() else x)
    batch["action"], batch["action_log_prob"] = torch.zeros(3, 5, dtype=torch.int64), torch.full((3, 5), -1.0)
    return ON_POLICY[name](categorical(), value), value, batch


def lambda_loop(backup, batch, following, lmbda, bootstrap) -> Tensor:
    operator, (size, length) = OPERATORS[repr(backup)], batch.shape
    result = torch.empty(size, length, 1)
    for b in range(size):
        for t in reversed(range(length)):
            value = following[b, t].item()
            if t < length - 1 and not batch["next", "done"][b, t]:
                value = (1 - lmbda) * value + lmbda * result[b, t + 1].item()
            step = {name: batch["next", name][b, t].item() for name in SIGNALS}
            ended = batch["next", "terminated" if bootstrap else "done"][b, t].item()
            result[b, t] = operator(step, value, GAMMA, ended)
    return result


@pytest.mark.parametrize("name", ON_POLICY)
def test_minibatches_keep_the_advantage_and_are_refused_without_one(name):
    loss, value, batch = on_policy(name)
    loss.make_value_estimator(TDLambdaBackupEstimator(backup=AvoidBackup(), gamma=GAMMA, value_network=value))
    with pytest.raises(ValueError, match="is no trajectory"):
        loss(batch.reshape(-1))
    params = {"params": loss.critic_network_params.detach(), "target_params": loss.target_critic_network_params}
    whole = loss.value_estimator(batch.clone(), **params)
    assert loss(whole.reshape(-1))["loss_critic"].item() == pytest.approx(loss(batch)["loss_critic"].item(), rel=1e-5)


# --- what needs more than a swap ---


@off_policy()
def test_a_loss_takes_no_member_of_other_estimators_until_it_is_told_that_they_are_supported(case):
    loss = made(case)
    for value_type in (BackupEstimators.BACKUP_TD0, "backup_td0"):
        with pytest.raises(NotImplementedError, match="is not implemented for loss"):
            loss.make_value_estimator(value_type, backup=AvoidBackup())
    loss.SUPPORTED_VALUE_ESTIMATORS = tuple(BackupEstimators)
    loss.make_value_estimator(BackupEstimators.BACKUP_TD0, backup=AvoidBackup())
    assert loss.value_estimator.tensor_keys.value == case.value


@off_policy()
@pytest.mark.parametrize("form", ["instance", "class"])
def test_an_instance_or_a_class_gets_the_keys_of_the_loss_only_from_set_keys(case, form):
    loss, batch = made(case), transitions(case)
    loss.set_keys(done=("agents", "done"))
    batch["next", "agents", "done"] = batch["next"].pop("done")
    network = {} if case.network is None else {"value_network": getattr(loss, case.network)}
    if form == "instance":
        loss.make_value_estimator(TD0BackupEstimator(backup=AvoidBackup(), gamma=GAMMA, **network))
    else:
        loss.make_value_estimator(TD0BackupEstimator, backup=AvoidBackup(), gamma=GAMMA, **network)
    assert loss.value_estimator.tensor_keys.value == "state_value"
    with pytest.raises(KeyError, match=r"the key \('next', '(done|state_value)'\) is missing"):
        loss(batch)
    loss.set_keys()
    assert loss.value_estimator.tensor_keys.value == case.value
    batch["next", "done"] = batch["next", "agents", "done"]
    check_target(case, loss, batch, AvoidBackup(), False)


@off_policy()
def test_the_margins_keys_are_set_on_the_estimator_because_the_loss_knows_none(case):
    loss, batch = made(case), transitions(case)
    swap(loss, case, backup=AvoidBackup(), gamma=GAMMA)
    with pytest.raises(ValueError, match="safety_margin is not an accepted"):
        loss.set_keys(safety_margin="g")
    moved = batch.clone()
    moved["next", "agents", "g"] = moved["next"].pop("safety_margin")
    with pytest.raises(KeyError, match=r"\('next', 'safety_margin'\) is missing; present"):
        loss(moved)
    loss.value_estimator.set_keys(safety_margin=("agents", "g"))
    loss.set_keys()
    assert loss.value_estimator.tensor_keys.safety_margin == ("agents", "g")
    seen = watch(loss)
    loss(moved)
    assert len(seen) == 1
    assert ("next", "safety_margin") not in loss.in_keys  # so keyword arguments cannot carry it


@off_policy([case for case in OFF_POLICY if case.network is not None and case.name != "double DQN"])
def test_a_loss_that_leaves_the_next_value_to_its_estimator_needs_the_value_network_there(case):
    loss = made(case)
    loss.make_value_estimator(TD0BackupEstimator(backup=AvoidBackup()))
    loss.set_keys()
    with pytest.raises(KeyError, match=rf"\('next', '{case.value}'\) is missing.*Give the estimator a value network"):
        loss(transitions(case))


@off_policy()
def test_a_replay_batch_is_no_trajectory_in_any_loss(case):
    loss = made(case)
    swap(loss, case, kind=TDLambdaBackupEstimator, backup=AvoidBackup())
    with pytest.raises(ValueError, match=r"is no trajectory.*for replay batches use NStepBackupEstimator"):
        loss(transitions(case))


@off_policy(TAKE_WINDOWS)
def test_windows_of_summed_rewards_are_refused_inside_a_loss(case):
    loss = made(case)
    swap(loss, case, backup=AvoidBackup())
    batch = MultiStepTransform(n_steps=2, gamma=GAMMA)._inv_call(transitions(case))
    with pytest.raises(ValueError, match="MultiStepTransform"):
        loss(batch)


@off_policy([case for case in OFF_POLICY if case.name == "REDQ"])
def test_redq_hides_windows_from_its_estimator_so_it_takes_transitions_only(case):
    loss, batch = made(case), windows(case)
    swap(loss, case, kind=NStepBackupEstimator, backup=AvoidBackup(), gamma=GAMMA)
    seen = watch(loss)
    loss(batch)
    [(given, _, target)] = seen
    assert "steps" not in given
    assert_close(target, loop(AvoidBackup(), batch.exclude("steps"), given["next", "state_value"], False))


@pytest.mark.parametrize("name", ["SAC", "discrete SAC", "REDQ"])
def test_soft_losses_put_the_entropy_into_the_next_value(name):
    case = next(case for case in OFF_POLICY if case.name == name)
    seen_values = []
    for alpha in (1e-6, 1.0):
        loss, batch = made(case), transitions(case)
        swap(loss, case, backup=AvoidBackup(), gamma=GAMMA)
        loss.log_alpha.data.fill_(alpha).log_()
        loss.min_log_alpha = None if loss.min_log_alpha is None else torch.tensor(-20.0)
        seen = watch(loss)
        torch.manual_seed(3)
        loss(batch)
        seen_values.append(seen[0][0]["next", "state_value"])
    assert (seen_values[0] - seen_values[1]).abs().min() > 1e-3


def test_sac_that_skips_done_states_bootstraps_timeouts_from_a_zero_action():
    case = next(case for case in OFF_POLICY if case.name == "SAC")
    torch.manual_seed(0)
    loss, batch = SACLoss(gaussian(), critic(), target_entropy=-1.0, skip_done_states=True), transitions(case)
    swap(loss, case, backup=AvoidBackup(), gamma=GAMMA, bootstrap_on_truncation=True)
    seen = watch(loss)
    loss(batch)
    cut, after = batch["next", "truncated"].squeeze(-1), batch["next"].select("observation")
    after["action"] = torch.zeros(len(batch), 1)
    critics = [loss.target_qvalue_network_params[i] for i in range(2)]
    values = [evaluate(loss.qvalue_network, params, after, "state_action_value") for params in critics]
    assert_close(seen[0][0]["next", "state_value"][cut], torch.stack(values).amin(0)[cut])
