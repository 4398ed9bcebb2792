"""Laws of every loss, against loops over samples and steps that share no code with them."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import re

import pytest
import torch
from contracts import BACKUPS, LOSSES, OPERATORS, SIGNALS, Keys, LossCase
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.objectives import LossModule, SoftUpdate, ValueEstimators
from torchrl.objectives.value import GAE, TD0Estimator

from torchrl_safety.data import NStepTransform
from torchrl_safety.modules import NoisyLinear, RainbowNetwork, reset_noise
from torchrl_safety.objectives import (
    AvoidBackup,
    BackupEstimators,
    DiscountedReturnBackup,
    NStepBackupEstimator,
    ReachAvoidBackup,
    SafetyDQNLoss,
    TD0BackupEstimator,
)

GAMMA, LMBDA = 0.9, 0.8


def losses(*families: str, but: tuple[str, ...] = ()):
    cases = [case for case in LOSSES if (not families or case.family in families) and case.family not in but]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.loss.__name__)


ONE_PLAYER = ("DQN", "SAC", "discrete SAC")
OFF_POLICY = (*ONE_PLAYER, "game DQN", "game SAC")
CATEGORICAL = ("categorical DQN", "game categorical DQN")
EVERY, SCALAR = losses(), losses(but=CATEGORICAL)  # distributions have their own loops, in test_dqn.py
PAIRS = [pair for pair in itertools.pairwise(LOSSES) if pair[0].family == pair[1].family]


def run(loss: LossModule, batch: TensorDict) -> TensorDict:
    """The same random draws each time."""
    torch.manual_seed(1)
    return loss(batch)


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got.detach().double(), expected.detach().double(), rtol=tolerance, atol=tolerance)


def same(one: TensorDict, other: TensorDict) -> None:
    assert set(one.keys()) == set(other.keys())
    for key in one.keys():  # noqa: SIM118
        close(one[key], other[key], 1e-12)


# --- the values of the networks, from plain modules ---


def modules(loss: LossModule, name: str, *, target: bool = False) -> list:
    """Stand-alone copies of a network, one for each critic."""
    params = getattr(loss, f"{'target_' * target}{name}_params").data.clone()
    found = [params[i] for i in range(len(params))] if params.batch_dims else [params]
    copies = [copy.deepcopy(getattr(loss, name)) for _ in found]
    for module, values in zip(copies, found):
        values.to_module(module, preserve_module_state=False)
    return copies


def next_value(case: LossCase, loss: LossModule, observation: Tensor) -> Tensor:
    """The value `[*]` of states, as each learner defines it."""
    state = TensorDict({"observation": observation}, observation.shape[:-1])
    if case.on_policy:
        return modules(loss, "critic_network")[0](state)["state_value"].squeeze(-1)
    if case.family == "game DQN":
        online = modules(loss, "value_network")[0](state)["action_value"]
        target = modules(loss, "value_network", target=True)[0](state)["action_value"]
        return torch.stack([minimax(one, other) for one, other in rows(online, target)]).reshape(state.shape)
    if case.family == "DQN":
        choice = modules(loss, "value_network")[0](state)["action_value"].argmax(-1, keepdim=True)
        return modules(loss, "value_network", target=True)[0](state)["action_value"].gather(-1, choice).squeeze(-1)
    distribution = modules(loss, "actor_network")[0].get_dist(state)
    critics = modules(loss, "qvalue_network", target=True)
    if case.continuous:
        state["action"] = distribution.rsample()
        if case.game:
            state["disturbance"] = modules(loss, "disturbance_network")[0].get_dist(state.clone()).rsample()
        return torch.stack([critic(state)["state_action_value"] for critic in critics]).amin(0).squeeze(-1)
    least = torch.stack([critic(state)["action_value"] for critic in critics]).amin(0)
    return (distribution.probs * least).sum(-1)


def rows(*tables: Tensor) -> zip:
    return zip(*(table.flatten(end_dim=-3) for table in tables))


def minimax(choices: Tensor, values: Tensor) -> Tensor:
    """The entry of `values` at the place where `choices` has the largest of the least entries of its rows."""
    worst = [min(range(len(row)), key=row.__getitem__) for row in choices.tolist()]
    best = max(range(len(worst)), key=lambda u: choices[u][worst[u]].item())
    return values[best][worst[best]]


def predictions(case: LossCase, loss: LossModule, batch: TensorDict) -> Tensor:
    """What each critic says `[K, *B]` of the states and actions of a batch."""
    batch = batch.clone()
    if case.on_policy:
        return next_value(case, loss, batch["observation"]).unsqueeze(0)
    name = "value_network" if "DQN" in case.family else "qvalue_network"
    key = "state_action_value" if case.continuous else "action_value"
    found = torch.stack([critic(batch)[key] for critic in modules(loss, name)])
    if case.continuous:
        return found.squeeze(-1)
    if case.game:
        played = zip(found[0].flatten(end_dim=-3), batch["action"].flatten(), batch["disturbance"].flatten())
        return torch.stack([table[u][d] for table, u, d in played]).reshape(1, *batch.shape)
    return found.gather(-1, batch["action"].expand(len(found), *batch.shape).unsqueeze(-1)).squeeze(-1)


# --- targets, one number after the other ---


def signals_of(frame: TensorDict) -> dict[str, float]:
    return {name: frame["next", name].item() for name in SIGNALS}


def transition_targets(operator, batch: TensorDict, values: Tensor, *, flag: str) -> Tensor:
    rows, values = batch.reshape(-1), values.flatten().tolist()
    found = [operator(signals_of(row), v, GAMMA, row["next", flag].item()) for row, v in zip(rows, values)]
    return torch.tensor(found, dtype=torch.float64).reshape(batch.shape)


def lambda_targets(operator, batch: TensorDict, values: Tensor, *, flag: str) -> Tensor:
    targets = torch.zeros(batch.shape, dtype=torch.float64)
    for b in range(batch.shape[0]):
        later = None
        for t in reversed(range(batch.shape[1])):
            frame, v = batch[b, t], values[b, t].item()
            if later is not None and not frame["next", "done"].item():
                v = (1 - LMBDA) * v + LMBDA * later
            later = operator(signals_of(frame), v, GAMMA, frame["next", flag].item())
            targets[b, t] = later
    return targets


def window_target(operator, frames: TensorDict, start: int, n: int, values: list[float], *, flag: str) -> float:
    """The largest of the targets of 1..k steps if `values` has k numbers, that of all steps if it has one."""
    last = start
    while last + 1 < start + n and not frames["next", "done"][last].item():
        last += 1
    ends, found = range(start, last + 1) if len(values) > 1 else [last], []
    for end, v in zip(ends, values):
        for t in reversed(range(start, end + 1)):
            v = operator(signals_of(frames[t]), v, GAMMA, t == last and frames["next", flag][t].item())
        found.append(v)
    return max(found)


def ended_frames(case: LossCase) -> TensorDict:
    frames = case.batch(20, seed=3)
    frames["next", "done"][-1] = frames["next", "terminated"][-1] = True
    return frames.set("frame", torch.arange(20))


def windows_of(case: LossCase, n: int) -> TensorDict:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)
    buffer.append_transform(NStepTransform(n, signals=(*SIGNALS, "observation")))
    buffer.extend(ended_frames(case))
    return buffer[:]


def check_critic(case: LossCase, loss: LossModule, batch: TensorDict, target: Tensor) -> None:
    """The loss of the critics is the squared distance to this target, the priority its largest root."""
    error = predictions(case, loss, batch) - target
    close(run(loss, batch)[case.critic], error.square().sum(0))
    if not case.on_policy:
        close(batch["td_error"].reshape(batch.shape), error.abs().amax(0))


def settings_of(case: LossCase) -> dict:
    return {"gamma": GAMMA, "reduction": "none", **({"lmbda": LMBDA} if case.on_policy else {})}


@SCALAR
@pytest.mark.parametrize("bootstrap", [False, True])
def test_the_target_of_every_step_equals_the_loop(case, bootstrap):
    flag = "terminated" if bootstrap else "done"
    for backup, _ in BACKUPS:
        loss, batch = case.build(backup=backup, bootstrap_on_truncation=bootstrap, **settings_of(case)), case.batch()
        assert batch["next", "done"].any()
        assert not batch["next", "done"].all()
        torch.manual_seed(1)
        values = next_value(case, loss, batch["next", "observation"])
        targets = lambda_targets if case.on_policy else transition_targets
        check_critic(case, loss, batch, targets(OPERATORS[repr(backup)], batch, values, flag=flag))


@losses(*OFF_POLICY)
@pytest.mark.parametrize("n_step", ["last", "best"])
@pytest.mark.parametrize("bootstrap", [False, True])
def test_the_target_of_every_window_equals_the_loop_over_its_frames(case, n_step, bootstrap):
    if case.game and n_step == "best":
        with pytest.raises(ValueError, match="n_step is 'best', a lower bound of the value for a single player only"):
            case.build(n_step=n_step)
        return
    flag, n = "terminated" if bootstrap else "done", 3
    frames = ended_frames(case)
    for backup, _ in BACKUPS:
        batch = windows_of(case, n)
        loss = case.build(backup=backup, n_step=n_step, bootstrap_on_truncation=bootstrap, **settings_of(case))
        torch.manual_seed(1)
        place = batch["steps" if n_step == "best" else "next", "observation"]
        values = next_value(case, loss, place).reshape(len(batch), -1).tolist()
        operator = OPERATORS[repr(backup)]
        target = [
            window_target(operator, frames, start, n, row, flag=flag)
            for start, row in zip(batch["frame"].tolist(), values)
        ]
        check_critic(case, loss, batch, torch.tensor(target, dtype=torch.float64))


@EVERY
@pytest.mark.parametrize("bootstrap", [False, True])
def test_a_terminal_step_ignores_what_follows_even_nan(case, bootstrap):
    loss, batch = case.build(backup=ReachAvoidBackup(), bootstrap_on_truncation=bootstrap), case.batch()
    expected = run(loss, batch.clone())
    ended = batch["next", "terminated" if bootstrap else "done"].squeeze(-1)
    batch["next", "observation"][ended] = torch.nan
    close(run(loss, batch)[case.critic], expected[case.critic])


# --- the pairs ---


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].family)
def test_the_two_of_a_pair_differ_in_nothing_but_the_default_backup(pair):
    safety, reach_avoid = (case.loss for case in pair)
    assert inspect.signature(safety) == inspect.signature(reach_avoid)
    assert {*vars(reach_avoid)} - {"default_backup"} <= {*vars(safety)}
    assert [repr(case.build().backup) for case in pair] == ["AvoidBackup()", "ReachAvoidBackup(terminal_type='all')"]
    for backup, _ in BACKUPS:
        one, other = (run(case.build(backup=backup), case.batch()) for case in pair)
        same(one, other)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].family)
def test_terminal_type_counts_for_reach_avoid_and_is_harmless_for_avoid(pair):
    safety, reach_avoid = pair
    batch = safety.batch()
    for terminal_type in ("all", "g"):
        explicit = run(reach_avoid.build(backup=ReachAvoidBackup(terminal_type=terminal_type)), batch.clone())
        same(run(reach_avoid.build(terminal_type=terminal_type), batch.clone()), explicit)
        same(run(safety.build(terminal_type=terminal_type), batch.clone()), run(safety.build(), batch.clone()))
    critic = reach_avoid.critic
    assert not torch.equal(explicit[critic], run(reach_avoid.build(), batch.clone())[critic])
    for case in pair:
        with pytest.raises(ValueError, match="terminal_type is 'g' beside backup"):
            case.build(backup=ReachAvoidBackup(), terminal_type="g")
        with pytest.raises(ValueError, match="terminal_type"):
            case.build(terminal_type="l")


# --- keys ---

NESTED = Keys(("agent", "state"), ("agent", "move"), ("agent", "score"), ("other", "move"), ("other", "score"))


def renamed(batch: TensorDict, names: dict) -> TensorDict:
    """`batch` with entries of the root and of the next state under other keys."""
    batch = batch.clone()
    for place in (batch, batch["next"]):
        for old, new in names.items():
            if old in place.keys():  # noqa: SIM118
                place.rename_key_(old, new)
    return batch


@EVERY
def test_nested_keys_change_nothing(case):
    flags = {name: ("agent", name) for name in (*SIGNALS, "terminated", "done")}
    loss = case.build(keys=NESTED, backup=ReachAvoidBackup())
    loss.set_keys(action=NESTED.action, **flags, **({"disturbance": NESTED.disturbance} if case.game else {}))
    names = {name if name != "log_prob" else "action_log_prob": key for name, key in NESTED._asdict().items()}
    batch = renamed(case.batch(), {**flags, **names})
    same(run(loss, batch), run(case.build(backup=ReachAvoidBackup()), case.batch()))


@EVERY
def test_every_key_of_a_loss_can_be_renamed_those_of_torchrls_loss_too(case):
    written = {"action_value", "value_logits", "state_action_value", "value"}  # by the networks
    keys = Keys("observation", "my_action", "my_sample_log_prob", "my_disturbance", "my_disturbance_log_prob")
    loss = case.build(keys=keys, backup=ReachAvoidBackup())
    plain, batch = case.build(backup=ReachAvoidBackup()), case.batch()
    batch["priority_weight"] = torch.linspace(0.1, 1, batch.numel(), dtype=torch.float64).reshape(batch.shape)
    names = {name: key for name, key in vars(plain.tensor_keys).items() if name not in written}
    loss.set_keys(**{name: f"my_{name}" for name in names})
    moved = renamed(batch, {key: f"my_{name}" for name, key in names.items()})
    if case.on_policy:
        for each, rows in ((plain, batch), (loss, moved)):
            each.value_estimator(rows, params=each.critic_network_params)
        assert torch.equal(moved["my_advantage"], batch["advantage"])
        assert torch.equal(moved["my_value_target"], batch["value_target"])
    same(run(loss, moved), run(plain, batch))
    assert not {"advantage", "value_target", "td_error"} & {*moved.keys()}
    if not case.on_policy:
        assert torch.equal(moved["my_priority"], batch["td_error"])


@EVERY
def test_a_ready_estimator_gets_the_keys_of_the_loss(case):
    loss, batch = case.build(backup=AvoidBackup(), gamma=0.5), case.batch()
    expected = run(loss, batch.clone())
    kind, network = type(loss.value_estimator), getattr(loss, "critic_network", None)
    loss.set_keys(safety_margin=("agent", "g"), done=("agent", "done"))
    for ready in (kind(backup=AvoidBackup(), gamma=0.5, value_network=network), kind):
        settings = {} if ready is not kind else {"backup": AvoidBackup(), "gamma": 0.5}
        loss.make_value_estimator(ready, **settings)
        assert loss.value_estimator.tensor_keys.safety_margin == ("agent", "g")
        same(run(loss, renamed(batch, {"safety_margin": ("agent", "g"), "done": ("agent", "done")})), expected)


@EVERY
def test_a_margin_can_stand_on_the_reward(case):
    loss, batch = case.build(backup=AvoidBackup()), case.batch()
    expected = run(loss, batch.clone())
    del batch["next", "reward"]
    batch["next"].rename_key_("safety_margin", "reward")
    loss.set_keys(safety_margin="reward")
    same(run(loss, batch), expected)
    assert ("next", "reward") in loss.in_keys
    assert ("next", "safety_margin") not in loss.in_keys


@EVERY
def test_a_batch_without_a_signal_is_refused_by_name(case):
    for backup, names in BACKUPS:
        for name in names:
            loss, batch = case.build(backup=backup), case.batch()
            del batch["next", name]
            with pytest.raises(KeyError, match=rf"\('next', '{name}'\) is missing; present: .*'action'.*set_keys"):
                loss(batch)


@EVERY
def test_keyword_tensors_equal_the_tensordict(case):
    loss, batch = case.build(backup=ReachAvoidBackup(), bootstrap_on_truncation=True), case.batch()
    expected = run(loss, batch.clone())
    assert len(loss.in_keys) == len({*loss.in_keys})
    tensors = {key if isinstance(key, str) else "_".join(key): batch[key] for key in loss.in_keys}
    assert {"observation", "action", "next_observation", "next_safety_margin", "next_target_margin"} <= {*tensors}
    assert "next_reward" not in tensors  # which this backup does not read
    torch.manual_seed(1)
    found = loss(**tensors)
    found = (found,) if isinstance(found, Tensor) else found
    assert len(found) == len(loss.out_keys)
    for key, value in zip(loss.out_keys, found):
        close(value, expected[key], 1e-12)


# --- batches and numbers ---


@EVERY
def test_float64_stays_float64_and_float32_agrees(case):
    loss, narrow = case.build(backup=AvoidBackup()), case.build(backup=AvoidBackup(), dtype=torch.float32)
    narrow.load_state_dict(loss.state_dict())
    double, single = run(loss, case.batch()), run(narrow, case.batch(dtype=torch.float32))
    for term in case.terms:
        assert (double[term].dtype, single[term].dtype) == (torch.float64, torch.float32)
        if not case.continuous:  # whose draws differ by type
            close(single[term], double[term], 1e-4)


@EVERY
def test_reductions_are_the_terms_their_sum_and_their_mean(case):
    terms, total, average = (
        run(case.build(backup=ReachAvoidBackup(), reduction=name), case.batch()) for name in ("none", "sum", "mean")
    )
    for name in case.terms:
        assert terms[name].shape == case.batch().shape
        close(total[name], terms[name].sum())
        close(average[name], terms[name].mean())


@EVERY
def test_a_batch_of_one_is_a_batch(case):
    shape = (1, 1) if case.on_policy else (1,)
    result = run(case.build(backup=ReachAvoidBackup()), case.batch(*shape))
    assert all(torch.isfinite(result[name]) for name in case.terms)


@losses(but=("PPO", "game PPO"))
def test_an_empty_batch_has_no_mean(case):
    with pytest.raises(ValueError, match="holds no transition"):
        case.build(backup=AvoidBackup())(case.batch(*((0, 4) if case.on_policy else (0,))))


@EVERY
def test_more_batch_dimensions_are_the_same_rows(case):
    shape = (2, 3, 4) if case.on_policy else (2, 3)
    loss, batch = case.build(backup=ReachAvoidBackup(), reduction="none"), case.batch(*shape)
    flat = batch.reshape(-1, *shape[2:]).clone()
    expected, found = run(loss, flat), run(loss, batch)
    for name in case.terms:
        assert found[name].shape == shape
        close(found[name].flatten(), expected[name].flatten())
    if not case.on_policy:
        assert batch["td_error"].shape[:2] == shape
        close(batch["td_error"].flatten(), flat["td_error"].flatten())


@losses(*OFF_POLICY, *CATEGORICAL)
def test_priorities_are_positive_and_come_from_the_unweighted_error(case):
    loss, batch = case.build(backup=ReachAvoidBackup()), case.batch()
    plain, terms = batch.clone(), run(case.build(backup=ReachAvoidBackup(), reduction="none"), batch.clone())
    run(loss, plain)
    weight = torch.linspace(0, 0.8, 12, dtype=torch.float64)
    batch["priority_weight"] = weight
    result = run(loss, batch)
    assert (plain["td_error"] > 0).all()
    assert torch.equal(plain["td_error"], batch["td_error"])
    assert not batch["td_error"].requires_grad
    for name in case.terms:  # the mean of the weighted losses, not their sum over the sum of the weights
        close(result[name], (weight * terms[name]).sum() / 12)


@EVERY
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_margin_that_is_no_number_is_refused(case, bad):
    loss, batch = case.build(backup=AvoidBackup()), case.batch()
    batch["next", "safety_margin"].view(-1)[2] = bad
    with pytest.raises(ValueError, match=r"safety_margin.*NaN or inf"):
        loss(batch)


# --- what learns and what stays ---


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


# --- the discount and the estimator ---


@EVERY
def test_assigning_gamma_moves_the_target_and_refuses_what_is_no_discount(case):
    loss, batch = case.build(backup=ReachAvoidBackup()), case.batch()
    for gamma in (0.5, 0.0, 1, torch.tensor(0.25)):
        loss.gamma = gamma
        assert loss.gamma == gamma
        same(run(loss, batch.clone()), run(case.build(backup=ReachAvoidBackup(), gamma=gamma), batch.clone()))
    for gamma in (-0.1, 1.1, float("nan"), torch.tensor(1.5)):
        with pytest.raises(ValueError, match="gamma"):
            loss.gamma = gamma
        with pytest.raises(ValueError, match="gamma"):
            case.build(gamma=gamma)
        assert loss.gamma == 0.25


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
def test_td0_is_n_step_on_transitions_and_lambda_zero(case):
    loss, batch = case.build(backup=DiscountedReturnBackup(), gamma=GAMMA), case.batch(3, 5)
    expected = run(loss.make_value_estimator(BackupEstimators.BACKUP_TD0), batch.clone())
    same(run(loss.make_value_estimator(BackupEstimators.BACKUP_NSTEP), batch.clone()), expected)
    if not case.categorical:  # which asks the estimator for its maps only
        same(run(loss.make_value_estimator(BackupEstimators.BACKUP_TDLAMBDA, lmbda=0), batch.clone()), expected)
        # A return shows every step; between margins the bounds of a safety backup may hide the mixing.
        loss.make_value_estimator(backup=DiscountedReturnBackup())
        short, long = (run(loss.make_value_estimator(lmbda=lmbda), batch.clone())[case.critic] for lmbda in (0, 1))
        assert not torch.equal(short, long)


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


@losses(*ONE_PLAYER, "categorical DQN")
def test_the_best_of_a_window_needs_an_estimator_that_knows_windows(case):
    with pytest.raises(ValueError, match=re.escape("n_step is 'first'; choose one of ['last', 'best']")):
        case.build(n_step="first")
    loss = case.build(n_step="best")
    for name in ("backup_td0", "backup_tdlambda"):
        with pytest.raises(ValueError, match=r"n_step is 'best', which .* does not know"):
            loss.make_value_estimator(name)
    assert isinstance(loss.value_estimator, NStepBackupEstimator)


# --- what must not pass ---


@losses(but=("PPO", "game PPO"))
def test_a_loss_that_is_not_finite_is_refused_by_every_family(case):
    loss, batch = case.build(), case.batch()
    batch["observation"].view(-1)[0] = torch.nan
    with pytest.raises(ValueError, match="the loss is NaN or inf"):
        loss(batch)


@losses("PPO", "A2C", "game PPO")
def test_a_shuffled_trajectory_is_refused_though_its_dimension_is_still_named_time(case):
    loss, batch = case.build(), case.batch(1, 6)[0]
    batch["next", "observation"][:-1] = batch["observation"][1:]
    batch.names = ["time"]
    in_order = run(loss, batch.clone())
    assert torch.isfinite(in_order[case.critic])
    with pytest.raises(ValueError, match="before the batch is shuffled"):
        loss(batch[torch.tensor([1, 0, 3, 2, 5, 4])])


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


@losses("discrete SAC")
def test_an_action_may_keep_its_trailing_dimension(case):
    loss, batch = case.build(), case.batch()
    flat = batch.clone().set("action", batch["action"].reshape(batch.shape))
    same(run(loss, flat.clone()), run(loss, flat.clone().set("action", flat["action"].unsqueeze(-1))))


# --- compiled ---


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in ("DQN", "categorical DQN", "PPO") else pytest.mark.slow)
        for family in dict.fromkeys(case.family for case in LOSSES)
    ],
)
def test_compiles_without_graph_breaks_to_the_same_numbers(family):
    case = next(case for case in reversed(LOSSES) if case.family == family)
    compiles_to_the_same_numbers(case, case.build(backup=ReachAvoidBackup()), case.batch())


@pytest.mark.slow
@EVERY
def test_every_loss_compiles_without_graph_breaks(case):
    compiles_to_the_same_numbers(case, case.build(), case.batch())


@pytest.mark.slow
@losses(*OFF_POLICY, *CATEGORICAL)
@pytest.mark.parametrize("n_step", ["last", "best"])
def test_every_loss_compiles_on_windows_without_graph_breaks(case, n_step):
    if case.game and n_step == "best":
        return
    compiles_to_the_same_numbers(case, case.build(n_step=n_step), windows_of(case, 3))


def compiles_to_the_same_numbers(case, loss, batch):
    torch._dynamo.reset()
    graphs = []
    compiled = torch.compile(loss, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for gamma in (0.9, 0.9, 0.5):
        known = len(graphs)
        loss.gamma = gamma
        gradients, results = [], []
        for call in (loss, compiled):
            loss.zero_grad()
            results.append(run(call, batch.clone()))
            sum(results[-1][term] for term in case.terms).backward()
            gradients.append([parameter.grad for parameter in loss.parameters()])
        same(*results)
        for one, other in zip(*gradients):
            close(one, other, 1e-12)
    assert len(graphs) == known, "a schedule of the discount compiles the loss again"


@pytest.mark.slow
@losses("SAC", "discrete SAC")
def test_a_temperature_below_its_limit_is_lifted_under_ahead_of_time_autograd(case):
    torch._dynamo.reset()
    loss, batch = case.build(backup=ReachAvoidBackup(), alpha_init=1e-4, min_alpha=1e-3), case.batch()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager_decomp_partition")
    result = run(compiled, batch.clone())
    sum(result[term] for term in case.terms).backward()  # refused where the parameter is written past autograd
    close(result["alpha"], torch.tensor(1e-3), 1e-6)
    close(loss.log_alpha.exp(), torch.tensor(1e-3), 1e-6)


# --- a known value ---


class Known(torch.nn.Module):
    """The values of a table, at the place that the first entry of an observation names, for each of some actions."""

    def __init__(self, table: Tensor, actions: int) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.shift, self.actions = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)), actions

    def forward(self, observation: Tensor) -> Tensor:
        place = observation[..., :1].long().clamp(0, len(self.table) - 1)
        return (self.table[place] + self.shift).expand(*place.shape[:-1], self.actions)


@SCALAR
@pytest.mark.parametrize("backup", [AvoidBackup(), ReachAvoidBackup()], ids=repr)
def test_the_exact_value_is_a_fixed_point_whatever_the_temperature_and_the_policy(case, backup):
    """So that what is learned is a certificate: nothing but the problem moves it."""
    steps, batch, operator = 6, case.batch(1, 6), OPERATORS[repr(backup)]
    after = batch["next"]
    batch["observation"][0, :, 0], after["observation"][0, :, 0] = torch.arange(6.0), torch.arange(1.0, 7.0)
    after["done"] = after["terminated"] = (torch.arange(steps) == steps - 1).reshape(1, steps, 1)
    after["safety_margin"] = torch.tensor([0.9, 0.3, 0.7, 0.5, 0.4, 0.2], dtype=torch.float64).reshape(1, steps, 1)
    after["target_margin"] = torch.tensor([-0.8, -0.6, -0.1, 0.6, -0.4, 0.1], dtype=torch.float64).reshape(1, steps, 1)
    exact = torch.full((steps + 1,), 77.0, dtype=torch.float64)  # never read: the episode is over
    for t in reversed(range(steps)):
        exact[t] = operator(signals_of(batch[0, t]), exact[t + 1].item(), 1.0, t == steps - 1)
    assert exact[:4].tolist() == pytest.approx([0.2] * 4 if isinstance(backup, AvoidBackup) else [0.3, 0.3, 0.5, 0.5])
    *actor, critic = (network.double() for network in case.networks(Keys()))
    key = critic.out_keys[0]
    known = Known(exact, 3 if key == "action_value" else 1)
    if case.family == "game DQN":
        known = torch.nn.Sequential(known, torch.nn.Unflatten(-1, (3, 1)))
    table = TensorDictModule(known, ["observation"], [key])
    batch.update({"disturbance": torch.zeros_like(batch["action"])} if case.game else {})
    loss = case.loss(*actor, table, **{**case.settings, "backup": backup, "gamma": 1.0})
    if case.on_policy:
        for lmbda in (0.0, 0.7, 1.0):
            loss.make_value_estimator(lmbda=lmbda)
            found = loss.value_estimator(batch.clone(), params=loss.critic_network_params)
            close(found["value_target"].flatten(), exact[:steps])
            close(found["advantage"], torch.zeros(1, steps, 1))
        return
    for alpha in (1e-3, 10.0) if "SAC" in case.family else (None,):
        if alpha is not None:
            for name in ("log_alpha", "log_alpha_disturbance")[: 1 + case.game]:
                getattr(loss, name).data.fill_(alpha).log_()
        run(loss, batch)
        close(batch["td_error"].flatten(), torch.zeros(steps))


# --- noise and ties ---


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


@losses("DQN", "discrete SAC", "categorical DQN", "game DQN", "game categorical DQN")
def test_one_hot_actions_are_refused(case):
    loss, batch = case.build(backup=AvoidBackup()), case.batch(3)  # as many rows as actions, where shapes would fit
    batch["action"] = torch.nn.functional.one_hot(batch["action"], 3)
    with pytest.raises(ValueError, match="not one-hot"):
        loss(batch)
