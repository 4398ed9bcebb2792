"""Laws of the n-step target and the lambda-return, against loops over single trajectories."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from contracts import CASE_BACKUPS, LAWS, OPERATORS, random_signals
from hypothesis import given
from hypothesis import strategies as st
from return_cases import every_backup, flags, lambda_loop, n_step_loop, trajectory, values
from torch.testing import assert_close

from torchrl_safety.objectives import (
    AvoidBackup,
    ClampedAffine,
    DiscountedReturnBackup,
    LipschitzReachAvoidBackup,
    ReachAvoidBackup,
    ReachBackup,
    lambda_return,
    n_step_return,
)

GAMMAS, LAMBDAS = st.floats(0, 1, allow_subnormal=False), st.floats(0, 1, allow_subnormal=False)
SEEDS, LENGTHS = st.integers(0, 2**31), st.integers(1, 9)


def between(maps, start, stop):
    """The steps from `start` up to `stop` of maps with fields `[B, T, 1]`."""
    return ClampedAffine(*(part[:, start:stop] for part in maps.parts))


def every_ending(length):
    """`terminated, truncated` `[3**length, length, 1]`: each step goes on, ends, or is cut, in every combination."""
    kinds = torch.tensor(list(itertools.product(range(3), repeat=length))).unsqueeze(-1)
    return kinds == 1, kinds == 2


@every_backup
@pytest.mark.parametrize("lmbda", [0.0, 0.6, 1.0])
def test_endings_at_every_place_of_a_batch_give_the_loop_over_each_trajectory(backup, names, lmbda):
    terminated, truncated = every_ending(4)
    batch = len(terminated)
    signals, following = random_signals(names, (batch, 4, 1)), values((batch, 4, 1))
    maps = backup.step_map(signals, gamma=0.9, terminated=terminated)
    done, operator = terminated | truncated, OPERATORS[repr(backup)]
    returns = lambda_return(maps, following, lmbda=lmbda, done=done).squeeze(-1)
    for b in range(batch):
        rows = (x[b].flatten().tolist() for x in (following, terminated, done))
        expected = lambda_loop(operator, trajectory(signals, b), *rows, 0.9, lmbda)
        assert returns[b].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@every_backup
def test_lambda_zero_is_the_one_step_target(backup, names):
    signals, following, ended = random_signals(names, (5, 7, 1)), values((5, 7, 1)), flags((5, 7, 1))
    maps = backup.step_map(signals, gamma=0.9, terminated=ended)
    assert torch.equal(lambda_return(maps, following, lmbda=0.0, done=ended), maps(following))


@every_backup
def test_lambda_one_is_the_longest_n_step_target(backup, names):
    signals, following = random_signals(names, (5, 7, 1)), values((5, 7, 1))
    maps = backup.step_map(signals, gamma=0.9, terminated=torch.zeros(5, 7, 1, dtype=torch.bool))
    returns = lambda_return(maps, following, lmbda=1.0)
    for t in range(7):
        assert_close(returns[:, t], n_step_return(between(maps, t, 7), following[:, -1]))


@every_backup
def test_one_step_is_the_one_step_target(backup, names):
    signals, following, ended = random_signals(names, (5, 1, 1)), values((5, 1, 1)), flags((5, 1, 1), share=0.5)
    maps = backup.step_map(signals, gamma=0.9, terminated=ended)
    assert torch.equal(n_step_return(maps, following[:, 0]), maps(following)[:, 0])
    assert torch.equal(lambda_return(maps, following, lmbda=0.7), maps(following))


def monte_carlo(name, g, l, r, bootstrap):  # noqa: E741
    """The undiscounted value of a segment that goes on to a state of value `bootstrap`."""
    if name == "avoid":
        return min([*g, bootstrap])
    if name == "reach":
        return max([*l, bootstrap])
    if name == "return":
        return sum(r) + bootstrap
    stops = [min(l[k], *g[: k + 1]) for k in range(len(g))]
    return max([*stops, min(bootstrap, *g)])


@pytest.mark.parametrize("name", CASE_BACKUPS)
@given(length=LENGTHS, seed=SEEDS)
@LAWS
def test_lambda_one_without_discount_is_the_monte_carlo_value(name, length, seed):
    signals = random_signals(("safety_margin", "target_margin", "reward"), (1, length, 1), seed=seed)
    following = values((1, length, 1), seed=seed + 1)
    going_on = torch.zeros(1, length, 1, dtype=torch.bool)
    maps = CASE_BACKUPS[name].step_map(signals, gamma=1.0, terminated=going_on)
    returns = lambda_return(maps, following, lmbda=1.0).flatten().tolist()
    g, l, r = (signal.flatten().tolist() for signal in signals.values())  # noqa: E741
    for t in range(length):
        expected = monte_carlo(name, g[t:], l[t:], r[t:], following[0, -1].item())
        assert returns[t] == pytest.approx(expected, abs=1e-12)
    window = n_step_return(maps, following[:, -1]).item()
    assert window == pytest.approx(monte_carlo(name, g, l, r, following[0, -1].item()), abs=1e-12)


def targets_of(backup, length, seed, gamma, lmbda):
    """Every lambda-return and every n-step target of random segments: `[8, T, 1]` each, with the margins."""
    signals = random_signals(("safety_margin", "target_margin"), (8, length, 1), seed=seed)
    following, ended = 5 * values((8, length, 1), seed=seed + 1), flags((8, length, 1), seed=seed)
    maps = backup.step_map(signals, gamma=gamma, terminated=ended)
    returns = lambda_return(maps, following, lmbda=lmbda, done=ended | flags((8, length, 1), seed=seed + 1))
    windows = torch.stack([n_step_return(between(maps, t, length), following[:, -1]) for t in range(length)], 1)
    return returns, windows, signals["safety_margin"], signals["target_margin"]


@given(LENGTHS, SEEDS, GAMMAS, LAMBDAS)
@LAWS
def test_an_avoid_target_is_at_most_the_safety_margin(length, seed, gamma, lmbda):
    returns, windows, g, _ = targets_of(AvoidBackup(), length, seed, gamma, lmbda)
    assert (returns <= g).all()
    assert (windows <= g).all()


@given(LENGTHS, SEEDS, GAMMAS, LAMBDAS)
@LAWS
def test_a_reach_target_is_at_least_the_target_margin(length, seed, gamma, lmbda):
    returns, windows, _, l = targets_of(ReachBackup(), length, seed, gamma, lmbda)  # noqa: E741
    assert (returns >= l).all()
    assert (windows >= l).all()


@pytest.mark.parametrize("backup", [ReachAvoidBackup(), ReachAvoidBackup("g"), LipschitzReachAvoidBackup()], ids=repr)
@given(length=LENGTHS, seed=SEEDS, gamma=GAMMAS, lmbda=LAMBDAS)
@LAWS
def test_a_reach_avoid_target_lies_between_the_anchor_and_the_safety_margin(backup, length, seed, gamma, lmbda):
    returns, windows, g, l = targets_of(backup, length, seed, gamma, lmbda)  # noqa: E741
    for target in (returns, windows):
        assert (torch.minimum(l, g) - 1e-12 <= target).all()
        assert (target <= g + 1e-12).all()


@every_backup
@given(seed=SEEDS, gamma=GAMMAS, lmbda=LAMBDAS)
@LAWS
def test_targets_are_monotone_contractions_of_the_values(backup, names, seed, gamma, lmbda):
    signals, ended = random_signals(names, (3, 6, 1), seed=seed), flags((3, 6, 1), seed=seed)
    low = values((3, 6, 1), seed=seed + 1)
    shift = values((3, 6, 1), seed=seed + 2).abs()
    maps = backup.step_map(signals, gamma=gamma, terminated=ended)
    above, below = (lambda_return(maps, value, lmbda=lmbda, done=ended) for value in (low + shift, low))
    moved = above - below
    assert (moved >= -1e-12).all()
    assert (moved <= gamma * shift.amax(1, keepdim=True) + 1e-12).all()
    window = n_step_return(maps, (low + shift)[:, -1]) - n_step_return(maps, low[:, -1])
    assert (window >= -1e-12).all()
    assert (window <= gamma**6 * shift[:, -1] + 1e-12).all()


def test_the_lambda_return_mixes_inside_the_operator_and_not_its_errors():
    margins, gamma, lmbda = [1.0, 1.0, 1.0, -1.0], 0.999, 0.95
    operator = OPERATORS["AvoidBackup()"]
    maps = AvoidBackup().step_map(
        {"safety_margin": torch.tensor(margins, dtype=torch.float64).unsqueeze(-1)},
        gamma=gamma,
        terminated=torch.tensor([[False], [False], [False], [True]]),
    )
    first = lambda_return(maps, torch.full((4, 1), 3.0, dtype=torch.float64), lmbda=lmbda)[0].item()
    steps, ends = [{"safety_margin": g} for g in margins], [False, False, False, True]
    assert first == pytest.approx(lambda_loop(operator, steps, [3.0] * 4, ends, ends, gamma, lmbda)[0], abs=1e-12)
    assert first == pytest.approx(-0.4249, abs=5e-5)
    errors = [operator(step, 3.0, gamma, end) - 3.0 for step, end in zip(steps, ends)]
    leaking = 3.0 + sum((gamma * lmbda) ** k * error for k, error in enumerate(errors))
    assert leaking == pytest.approx(-6.12, abs=5e-3)
    assert first >= min(margins) > leaking


def test_on_rewards_the_lambda_return_is_the_weighted_mean_of_the_n_step_returns():
    signals, following = random_signals(("reward",), (1, 6, 1)), values((1, 6, 1))
    going_on = torch.zeros(1, 6, 1, dtype=torch.bool)
    maps = DiscountedReturnBackup().step_map(signals, gamma=0.9, terminated=going_on)
    r, v = signals["reward"].flatten().tolist(), following.flatten().tolist()
    n_steps = [sum(0.9**i * r[i] for i in range(n)) + 0.9**n * v[n - 1] for n in range(1, 7)]
    weights = [0.2 * 0.8 ** (n - 1) for n in range(1, 6)] + [0.8**5]
    expected = sum(w * target for w, target in zip(weights, n_steps))
    assert lambda_return(maps, following, lmbda=0.8)[0, 0].item() == pytest.approx(expected, abs=1e-12)


@every_backup
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_nothing_after_a_terminal_step_reaches_back(backup, names, garbage):
    signals, following = random_signals(names, (2, 6, 1)), values((2, 6, 1))
    ended = torch.zeros(2, 6, 1, dtype=torch.bool)
    ended[:, 2] = True
    clean = backup.step_map(signals, gamma=0.9, terminated=ended)
    spoiled = {name: signal.clone() for name, signal in signals.items()}
    for signal in (*spoiled.values(), spoiled_value := following.clone()):
        signal[:, 3:] = garbage
    spoiled_value[:, 2] = garbage
    dirty = backup.step_map(spoiled, gamma=0.9, terminated=ended)
    for done in (ended, None):
        expected = lambda_return(clean, following, lmbda=0.9, done=done)[:, :3]
        assert torch.equal(lambda_return(dirty, spoiled_value, lmbda=0.9, done=done)[:, :3], expected)
    assert torch.equal(n_step_return(dirty, spoiled_value[:, -1]), n_step_return(clean, following[:, -1]))


@every_backup
def test_a_truncated_step_bootstraps_from_its_own_next_value(backup, names):
    signals, following = random_signals(names, (2, 5, 1)), values((2, 5, 1))
    going_on, cut = torch.zeros(2, 5, 1, dtype=torch.bool), torch.zeros(2, 5, 1, dtype=torch.bool)
    cut[:, 2] = True
    maps = backup.step_map(signals, gamma=0.9, terminated=going_on)
    returns = lambda_return(maps, following, lmbda=0.9, done=cut)
    assert torch.equal(returns[:, 2], maps(following)[:, 2])
    alone = lambda_return(between(maps, 0, 3), following[:, :3], lmbda=0.9)
    assert_close(returns[:, :3], alone, rtol=1e-12, atol=1e-12)


@every_backup
@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf])
def test_steps_that_are_not_valid_do_not_count(backup, names, garbage):
    signals, bootstrap = random_signals(names, (6, 5, 1)), values((6, 1))
    length = torch.arange(6).reshape(6, 1, 1)
    valid = torch.arange(5).reshape(1, 5, 1) < length
    ended = (torch.arange(5).reshape(1, 5, 1) == length - 1) & (length % 2 == 1)
    padded = {name: torch.where(valid, signal, garbage) for name, signal in signals.items()}
    targets = n_step_return(backup.step_map(padded, gamma=0.9, terminated=ended), bootstrap, valid=valid)
    for b in range(6):
        steps, ends = trajectory(signals, b)[:b], ended[b].flatten().tolist()[:b]
        expected = n_step_loop(OPERATORS[repr(backup)], steps, bootstrap[b].item(), ends, 0.9)
        assert targets[b].item() == pytest.approx(expected, abs=1e-12)


@every_backup
def test_an_n_step_target_pushes_every_atom_through_the_window(backup, names):
    signals, atoms, ended = random_signals(names, (3, 4, 1)), values((3, 5)), flags((3, 4, 1))
    maps = backup.step_map(signals, gamma=0.9, terminated=ended)
    together = n_step_return(maps, atoms)
    for i in range(5):
        assert torch.equal(together[:, i : i + 1], n_step_return(maps, atoms[:, i : i + 1]))
