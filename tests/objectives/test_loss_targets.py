"""The targets of every loss, against loops over samples and steps that share no code with them."""

from __future__ import annotations

import copy
import inspect
import itertools
import re

import pytest
import torch
from contracts import BACKUPS, LOSSES, OPERATORS, SIGNALS, Keys, LossCase
from loss_cases import EVERY, OFF_POLICY, ONE_PLAYER, SCALAR, close, ended_frames, losses, rows, run, same, windows_of
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl.objectives import LossModule

from torchrl_safety.objectives import (
    AvoidBackup,
    BackupEstimators,
    DiscountedReturnBackup,
    NStepBackupEstimator,
    ReachAvoidBackup,
)

GAMMA, LMBDA = 0.9, 0.8
PAIRS = [pair for pair in itertools.pairwise(LOSSES) if pair[0].family == pair[1].family]


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


@losses(*ONE_PLAYER, "categorical DQN")
def test_the_best_of_a_window_needs_an_estimator_that_knows_windows(case):
    with pytest.raises(ValueError, match=re.escape("n_step is 'first'; choose one of ['last', 'best']")):
        case.build(n_step="first")
    loss = case.build(n_step="best")
    for name in ("backup_td0", "backup_tdlambda"):
        with pytest.raises(ValueError, match=r"n_step is 'best', which .* does not know"):
            loss.make_value_estimator(name)
    assert isinstance(loss.value_estimator, NStepBackupEstimator)


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
