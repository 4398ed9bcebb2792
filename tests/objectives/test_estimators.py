"""Laws of the value estimators, against loops over single trajectories and windows that share no code with them."""

from __future__ import annotations

import itertools

import pytest
import torch
from batches import flagged, random_windows, trajectories
from contracts import BACKUPS, LAWS, OPERATORS, SIGNALS
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch.testing import assert_close
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import MultiStepTransform
from torchrl.objectives.value.functional import generalized_advantage_estimate

from torchrl_safety.data import NStepTransform
from torchrl_safety.envs import DoubleIntegratorEnv
from torchrl_safety.objectives import (
    AvoidBackup,
    BackupEstimators,
    DiscountedReturnBackup,
    NStepBackupEstimator,
    OpponentBackup,
    ReachAvoidBackup,
    TD0BackupEstimator,
    TDLambdaBackupEstimator,
)

ESTIMATORS = (TD0BackupEstimator, NStepBackupEstimator, TDLambdaBackupEstimator)
ALIASES = tuple(zip(("backup_td0", "backup_nstep", "backup_tdlambda"), BackupEstimators, ESTIMATORS))

every_backup = pytest.mark.parametrize("backup", [b for b, _ in BACKUPS], ids=repr)
every_estimator = pytest.mark.parametrize("kind", ESTIMATORS)
either_truncation = pytest.mark.parametrize("bootstrap", [False, True])
GAMMAS, LAMBDAS, SEEDS = st.floats(0, 1, allow_subnormal=False), st.floats(0, 1, allow_subnormal=False), st.integers(0)
FEW = settings(LAWS, max_examples=8)


def every_ending(length: int) -> TensorDict:
    """A row per combination of steps that go on, end, or are cut: `[3**length, length]`."""
    kinds = torch.tensor(list(itertools.product(range(3), repeat=length))).unsqueeze(-1)
    return flagged(kinds == 1, kinds == 2)


def column(batch: TensorDict, key) -> list:
    """The entry `[*B, 1]` as nested lists `[*B]`."""
    return batch[key].squeeze(-1).tolist()


def rows(batch: TensorDict, bootstrap: bool):
    """Each row of `[B, T]` as lists: signals of each step, its value after, whether it is terminal, whether cut."""
    signals = [column(batch, ("next", name)) for name in SIGNALS]
    terminal = column(batch, ("next", "terminated" if bootstrap else "done"))
    others = column(batch, ("next", "state_value")), terminal, column(batch, ("next", "done"))
    for b in range(batch.shape[0]):
        steps = [dict(zip(SIGNALS, step)) for step in zip(*(signal[b] for signal in signals))]
        yield steps, *(other[b] for other in others)


def lambda_loop(backup, batch, gamma, lmbda, bootstrap):
    """The definition, backwards over each row of `[B, T]`: `[B, T, 1]`."""
    operator, result = OPERATORS[repr(backup)], []
    for steps, values, terminal, done in rows(batch, bootstrap):
        returns, following = [], None
        for t in reversed(range(len(steps))):
            cut = done[t] or following is None
            value = values[t] if cut else (1 - lmbda) * values[t] + lmbda * following
            following = operator(steps[t], value, gamma, terminal[t])
            returns.append([following])
        result.append(returns[::-1])
    return torch.tensor(result, dtype=torch.float64)


def one_step_loop(backup, batch, gamma, bootstrap):
    operator = OPERATORS[repr(backup)]
    targets = [
        [[operator(*args, gamma, ended)] for *args, ended in zip(steps, values, terminal)]
        for steps, values, terminal, _ in rows(batch, bootstrap)
    ]
    return torch.tensor(targets, dtype=torch.float64)


def build(kind, backup=None, **settings):
    return kind(backup=AvoidBackup() if backup is None else backup, **settings)


def linear(seed: int = 0, dtype=torch.float64, keys=("observation", "state_value")) -> TensorDictModule:
    torch.manual_seed(seed)
    return TensorDictModule(torch.nn.Linear(2, 1, dtype=dtype), [keys[0]], [keys[1]])


# --- the targets ---


@every_backup
@either_truncation
@pytest.mark.parametrize("lmbda", [0.0, 0.6, 1.0])
def test_endings_at_every_place_of_a_batch_give_the_loop_over_each_trajectory(backup, bootstrap, lmbda):
    batch = every_ending(4)
    common = {"backup": backup, "gamma": 0.9, "bootstrap_on_truncation": bootstrap}
    returns = TDLambdaBackupEstimator(lmbda=lmbda, **common).value_estimate(batch)
    assert_close(returns, lambda_loop(backup, batch, 0.9, lmbda, bootstrap))
    expected = one_step_loop(backup, batch, 0.9, bootstrap)
    for kind in (TD0BackupEstimator, NStepBackupEstimator):
        assert_close(kind(**common).value_estimate(batch), expected)
        assert_close(kind(**common).value_estimate(batch.reshape(-1)), expected.flatten(0, 1))


@every_backup
@either_truncation
@FEW
@given(seed=SEEDS, length=st.integers(1, 8), gamma=GAMMAS, lmbda=LAMBDAS)
def test_any_discount_and_lambda_give_the_loop(backup, bootstrap, seed, length, gamma, lmbda):
    batch = trajectories(2, length, seed=seed)
    settings = {"gamma": gamma, "lmbda": lmbda, "bootstrap_on_truncation": bootstrap}
    returns = TDLambdaBackupEstimator(backup=backup, **settings).value_estimate(batch)
    assert_close(returns, lambda_loop(backup, batch, gamma, lmbda, bootstrap), rtol=1e-9, atol=1e-9)


@every_backup
@either_truncation
@FEW
@given(seed=SEEDS, gamma=GAMMAS)
def test_lambda_zero_is_td0(backup, bootstrap, seed, gamma):
    batch = trajectories(3, 5, seed=seed)
    common = {"backup": backup, "gamma": gamma, "bootstrap_on_truncation": bootstrap}
    returns = TDLambdaBackupEstimator(lmbda=0.0, **common).value_estimate(batch)
    assert_close(returns, TD0BackupEstimator(**common).value_estimate(batch))
    assert_close(returns, one_step_loop(backup, batch, gamma, bootstrap))


def monte_carlo(backup, steps, bootstrap):
    """The undiscounted value of steps up to an end, or (bootstrap given) of steps that go on to that value."""
    g, l, r = ([step[name] for step in steps] for name in SIGNALS)  # noqa: E741
    on = bootstrap is not None
    if isinstance(backup, OpponentBackup):
        return -monte_carlo(backup.backup, steps, -bootstrap if on else None)
    if repr(backup) == "AvoidBackup()":
        return min(g + [bootstrap] * on)
    if repr(backup) == "ReachBackup()":
        return max(l + [bootstrap] * on)
    if repr(backup) == "DiscountedReturnBackup()":
        return sum(r + [bootstrap] * on)
    wins = [min(l[k], *g[: k + 1]) for k in range(len(g))]
    if on:
        wins.append(min(bootstrap, *g))
    elif getattr(backup, "terminal_type", "all") == "g":
        wins.append(min(g))
    return max(wins)


@every_backup
@either_truncation
@FEW
@given(seed=SEEDS)
def test_undiscounted_lambda_one_is_the_monte_carlo_value_up_to_the_end_of_the_segment(backup, bootstrap, seed):
    batch = trajectories(2, 6, seed=seed)
    settings = {"gamma": 1.0, "lmbda": 1.0, "bootstrap_on_truncation": bootstrap}
    returns = TDLambdaBackupEstimator(backup=backup, **settings).value_estimate(batch)
    for b, (steps, values, terminal, done) in enumerate(rows(batch, bootstrap)):
        for t in range(len(steps)):
            end = next((k for k in range(t, len(steps)) if done[k]), len(steps) - 1)
            expected = monte_carlo(backup, steps[t : end + 1], None if terminal[end] else values[end])
            assert returns[b, t].item() == pytest.approx(expected, abs=1e-9)


@either_truncation
@LAWS
@given(seed=SEEDS, gamma=GAMMAS, lmbda=LAMBDAS)
def test_every_target_stays_between_the_margins(bootstrap, seed, gamma, lmbda):
    batch = trajectories(3, 7, seed=seed)
    batch["next", "state_value"] *= 100
    settings = {"gamma": gamma, "lmbda": lmbda, "bootstrap_on_truncation": bootstrap}
    margin, slack = batch["next", "safety_margin"], 1e-9
    both = torch.minimum(margin, batch["next", "target_margin"])
    assert (TDLambdaBackupEstimator(backup=AvoidBackup(), **settings).value_estimate(batch) <= margin + slack).all()
    found = TDLambdaBackupEstimator(backup=ReachAvoidBackup(), **settings).value_estimate(batch)
    assert ((both - slack <= found) & (found <= margin + slack)).all()


def worked_example() -> TensorDict:
    """V = 3 everywhere, g = 1, 1, 1, -1 and then the end."""
    margin = torch.tensor([1.0, 1.0, 1.0, -1.0], dtype=torch.float64).reshape(1, 4, 1)
    ended, value = torch.arange(4).reshape(1, 4, 1) == 3, torch.full((1, 4, 1), 3.0, dtype=torch.float64)
    after = {"safety_margin": margin, "terminated": ended, "done": ended, "state_value": value}
    return TensorDict({"state_value": value, "next": after}, [1, 4])


def test_a_sum_of_one_step_errors_leaves_the_range_of_the_margins_and_the_lambda_return_does_not():
    batch, settings = worked_example(), {"backup": AvoidBackup(), "gamma": 0.999}
    estimator = TDLambdaBackupEstimator(lmbda=0.95, **settings)
    estimator(batch)
    assert batch["value_target"][0, 0].item() == pytest.approx(-0.4249, abs=5e-5)
    assert batch["advantage"][0, 0].item() == pytest.approx(-3.4249, abs=5e-5)
    errors = TD0BackupEstimator(**settings).value_estimate(batch) - 3.0
    leaky = 3.0 + sum((0.999 * 0.95) ** t * errors[0, t].item() for t in range(4))
    assert leaky == pytest.approx(-6.12, abs=0.01)
    ended = batch["next", "done"]
    _, peer = generalized_advantage_estimate(0.999, 0.95, *[batch["next", "state_value"]] * 2, errors, ended, ended)
    assert (peer < -1.0).any()
    assert (batch["value_target"] >= -1.0).all()


# --- ends ---


@every_estimator
@either_truncation
def test_a_clock_never_adds_the_next_value_to_the_margin(kind, bootstrap):
    batch = trajectories(4, 6, share=0.3)
    batch["next", "state_value"] += 50.0
    before = batch.clone()
    found = build(kind, gamma=0.9, bootstrap_on_truncation=bootstrap)(batch)["value_target"]
    margin, cut = batch["next", "safety_margin"], batch["next", "truncated"]
    assert cut.any()
    assert_close(found[cut], margin[cut])  # min(g, v) = g for so large a v; a peer has g + .9 v there
    assert (found <= margin + 1e-9).all()
    assert (batch["next"] == before["next"]).all()


@every_estimator
@either_truncation
def test_a_next_value_behind_a_terminal_step_is_ignored_even_if_it_is_nan(kind, bootstrap):
    batch = trajectories(4, 6, share=0.3)
    ended = batch["next", "terminated" if bootstrap else "done"]
    estimator = build(kind, gamma=0.9, bootstrap_on_truncation=bootstrap)
    expected = estimator.value_estimate(batch)
    batch["next", "state_value"] = batch["next", "state_value"].masked_fill(ended, torch.nan)
    assert torch.equal(estimator.value_estimate(batch), expected)


@every_estimator
def test_a_next_observation_that_is_nan_is_refused_where_it_counts_and_only_there(kind):
    batch = trajectories(3, 4, share=0.4)
    network = linear()
    after = batch["next", "observation"]
    for bootstrap, flag in ((False, "done"), (True, "terminated")):
        ended = batch["next", flag].squeeze(-1)
        estimator = build(kind, value_network=network, bootstrap_on_truncation=bootstrap)
        expected = estimator(batch.clone())["value_target"]
        batch["next", "observation"] = after.masked_fill(ended.unsqueeze(-1), torch.nan)
        assert torch.equal(estimator(batch.clone())["value_target"], expected)
        assert torch.equal(estimator.value_estimate(batch.clone()), expected)
        running = (~ended).nonzero()[0].tolist()
        batch["next", "observation"] = after.clone()
        batch["next", "observation"][tuple(running)] = torch.nan
        for call in (estimator, estimator.value_estimate):
            with pytest.raises(ValueError, match=r"\('next', 'observation'\) is NaN at a step that goes on"):
                call(batch.clone())
        batch["next", "observation"] = after


def test_a_truncated_step_continues_into_its_final_observation_and_not_into_the_reset_one():
    env = DoubleIntegratorEnv(3, max_steps=3)
    env.set_seed(0)
    batch = env.rollout(10, break_when_any_done=False)
    cut = batch["next", "truncated"][:, :-1].squeeze(-1)
    assert cut.any()
    final, reset = batch["next", "observation"][:, :-1][cut], batch["observation"][:, 1:][cut]
    assert (final != reset).any(-1).all()
    network = TensorDictModule(lambda x: x[..., :1] - 5.0, ["observation"], ["state_value"])
    estimator = build(TDLambdaBackupEstimator, gamma=1.0, value_network=network, bootstrap_on_truncation=True)
    assert_close(estimator(batch)["value_target"][:, :-1][cut], final[:, :1] - 5.0)


# --- the time dimension ---


def test_time_is_the_dimension_of_that_name_wherever_it_is():
    batch, estimator = trajectories(3, 5), build(TDLambdaBackupEstimator, lmbda=0.7)
    expected = estimator.value_estimate(batch)
    batch.names = [None, "time"]
    assert torch.equal(estimator.value_estimate(batch), expected)
    first = batch.transpose(0, 1).contiguous()
    first.names = ["time", None]
    assert_close(estimator.value_estimate(first), expected.transpose(0, 1))
    assert_close(estimator(first)["advantage"], (expected - batch["state_value"]).transpose(0, 1))
    middle = torch.stack([first, first], 0)
    middle.names = [None, "time", None]
    assert_close(estimator.value_estimate(middle)[1], expected.transpose(0, 1))


@pytest.mark.parametrize("dim", [0, -2])
def test_time_dim_overrules_the_names(dim):
    batch = trajectories(3, 5)
    expected = build(TDLambdaBackupEstimator).value_estimate(batch)
    first = batch.transpose(0, 1).contiguous()
    first.names = [None, "time"]
    assert_close(build(TDLambdaBackupEstimator, time_dim=dim).value_estimate(first), expected.transpose(0, 1))
    assert_close(build(TDLambdaBackupEstimator).value_estimate(first, time_dim=dim), expected.transpose(0, 1))
    with pytest.raises(ValueError, match=r"time_dim is 2, the batch \[5, 3\] has 2 dimensions"):
        build(TDLambdaBackupEstimator, time_dim=2).value_estimate(first)


def test_a_trajectory_of_one_environment_is_told_from_a_replay_batch_by_its_name():
    batch = trajectories(1, 6)
    expected, estimator = build(TDLambdaBackupEstimator).value_estimate(batch)[0], build(TDLambdaBackupEstimator)
    alone = batch[0]
    alone.names = ["time"]
    assert_close(estimator.value_estimate(alone), expected)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    buffer.extend(alone)
    for flat in (buffer.sample(), batch.reshape(-1), TensorDict(dict(batch[0].items()), [6])):
        for call in (estimator, estimator.value_estimate):
            with pytest.raises(ValueError, match="is no trajectory: a lambda-return needs"):
                call(flat.clone())
    assert_close(build(TDLambdaBackupEstimator, time_dim=0).value_estimate(batch.reshape(-1)), expected)


# --- windows ---


def frames() -> TensorDict:
    """Real roll-outs `[3, 25]` with failures and clocks, each frame with its place."""
    env = DoubleIntegratorEnv(3, problem="reach_avoid", dt=0.15, max_steps=9)
    env.set_seed(1)
    torch.manual_seed(1)
    batch = env.rollout(25, break_when_any_done=False)
    batch["place"] = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(25), indexing="ij"), -1)
    assert batch["next", "truncated"].any()
    assert batch["next", "terminated"].any()
    return batch


def value_of(observation) -> float:
    return 0.3 - 0.5 * observation[0] + 0.2 * observation[1]


def window_targets(backup, batch, place, n, gamma, bootstrap):
    """The 1..k-step targets of the window that starts at `place` of the roll-outs."""
    env, start = place
    row = batch[env]
    k = next((k for k in range(1, n + 1) if row["next", "done"][start + k - 1]), n)
    operator, targets = OPERATORS[repr(backup)], []
    for length in range(1, k + 1):
        value = value_of(row["next", "observation"][start + length - 1].tolist())
        for t in reversed(range(start, start + length)):
            step = {name: row["next", name][t].item() for name in backup.signals}
            ended = row["next", "terminated" if bootstrap else "done"][t].item()
            value = operator(step, value, gamma, ended)
        targets.append(value)
    return targets


@pytest.mark.parametrize("backup", [AvoidBackup(), ReachAvoidBackup(), DiscountedReturnBackup()], ids=repr)
@either_truncation
@pytest.mark.parametrize("n", [1, 3, 5])
def test_windows_of_real_roll_outs_give_the_loop_over_their_frames(backup, bootstrap, n):
    batch = frames()
    signals = (*backup.signals, "observation")
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100), transform=NStepTransform(n, signals=signals, num_envs=3)
    )
    buffer.extend(batch)
    windows = buffer[:]
    estimator = NStepBackupEstimator(backup=backup, gamma=0.97, bootstrap_on_truncation=bootstrap)
    last = estimator.value_estimate(windows, next_value=value_of(windows["next", "observation"].unbind(-1))[:, None])
    best = estimator.best_estimate(windows, value_of(windows["steps", "observation"].unbind(-1))[..., None])
    assert len(windows) > 60
    for i, place in enumerate(windows["place"].tolist()):
        targets = window_targets(backup, batch, place, n, 0.97, bootstrap)
        assert last[i].item() == pytest.approx(targets[-1], abs=1e-5)
        assert best[i].item() == pytest.approx(max(targets), abs=1e-5)


@every_backup
@either_truncation
def test_the_best_estimate_is_the_largest_over_the_steps_that_exist(backup, bootstrap):
    batch, n = random_windows(40, 4), 4
    values = torch.randn(40, n, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    values = values.masked_fill(~batch["steps", "valid"], torch.nan)
    estimator = NStepBackupEstimator(backup=backup, gamma=0.9, bootstrap_on_truncation=bootstrap)
    best, operator = estimator.best_estimate(batch, values), OPERATORS[repr(backup)]
    for i in range(40):
        k, targets = int(batch["steps", "valid"][i].sum()), []
        ended = batch["next", "terminated" if bootstrap else "done"][i].item()
        for length in range(1, k + 1):
            value = values[i, length - 1].item()
            for t in reversed(range(length)):
                step = {name: batch["steps", name][i, t].item() for name in SIGNALS}
                value = operator(step, value, 0.9, ended and t == k - 1)
            targets.append(value)
        assert best[i].item() == pytest.approx(max(targets), abs=1e-12)


@every_backup
def test_the_best_estimate_of_a_transition_is_its_target(backup):
    batch, estimator = trajectories(20), NStepBackupEstimator(backup=backup, gamma=0.9)
    best = estimator.best_estimate(batch, batch["next", "state_value"].unsqueeze(-2))
    assert torch.equal(best, estimator.value_estimate(batch))


@pytest.mark.parametrize("kind", [TD0BackupEstimator, TDLambdaBackupEstimator])
def test_windows_are_refused_by_estimators_that_would_misread_them(kind):
    with pytest.raises(ValueError, match=r"n-step windows \('steps'\), which TD\(.*NStepBackupEstimator"):
        build(kind).value_estimate(random_windows(6, 3))


@every_estimator
def test_windows_of_summed_rewards_are_refused(kind):
    batch = trajectories(8)
    batch["next"] = batch["next"].select("reward", "observation", "safety_margin", "done", "terminated", "truncated")
    summed = MultiStepTransform(n_steps=2, gamma=0.9)._inv_call(batch)
    assert "steps_to_next_obs" in summed
    estimator = build(kind)
    for key in ("steps_to_next_obs", ("agents", "steps")):
        moved = summed.exclude("steps_to_next_obs")
        moved[key] = summed["steps_to_next_obs"].unsqueeze(-1)
        estimator.set_keys(steps_to_next_obs=key)
        trajectory = moved.unsqueeze(0)
        with pytest.raises(ValueError, match=r"MultiStepTransform.*use torchrl_safety\.data\.NStepTransform"):
            estimator.value_estimate(trajectory, next_value=torch.zeros(*trajectory.shape, 1))
    assert estimator.value_estimate(trajectories(2, 3)).shape == (2, 3, 1)
