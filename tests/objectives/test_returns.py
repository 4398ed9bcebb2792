"""Laws of the n-step target and the lambda-return, against loops over single trajectories and the numeric cases."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from contracts import BACKUPS, CASE_BACKUPS, CASES, LAWS, OPERATORS, random_signals
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from torchrl_safety.objectives import (
    AvoidBackup,
    ClampedAffine,
    DiscountedReturnBackup,
    LipschitzReachAvoidBackup,
    ReachAvoidBackup,
    ReachBackup,
    clamped_affine,
    lambda_return,
    n_step_return,
)

every_backup = pytest.mark.parametrize(("backup", "names"), BACKUPS, ids=[repr(b) for b, _ in BACKUPS])
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["seed"]))
every_precision = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
GAMMAS, LAMBDAS = st.floats(0, 1, allow_subnormal=False), st.floats(0, 1, allow_subnormal=False)
SEEDS, LENGTHS = st.integers(0, 2**31), st.integers(1, 9)


def values(shape, seed=1, dtype=torch.float64):
    return random_signals(("value",), shape, seed=seed, dtype=dtype)["value"]


def flags(shape, seed=2, share=0.25):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def between(maps, start, stop):
    """The steps from `start` up to `stop` of maps with fields `[B, T, 1]`."""
    return ClampedAffine(*(part[:, start:stop] for part in maps.parts))


def trajectory(signals, b):
    """The signals of one row of a `[B, T, 1]` batch, as one dictionary of floats per step."""
    length = next(iter(signals.values())).shape[1]
    return [{name: signal[b, t].item() for name, signal in signals.items()} for t in range(length)]


def lambda_loop(operator, steps, following, terminated, done, gamma, lmbda):
    """The definition, backwards over one trajectory."""
    result, after = [], math.nan
    for t in reversed(range(len(steps))):
        cut = done[t] or t == len(steps) - 1
        value = following[t] if cut else (1 - lmbda) * following[t] + lmbda * after
        after = operator(steps[t], value, gamma, terminated[t])
        result.append(after)
    return result[::-1]


def n_step_loop(operator, steps, bootstrap, terminated, gamma):
    for step, ended in reversed(list(zip(steps, terminated))):
        bootstrap = operator(step, bootstrap, gamma, ended)
    return bootstrap


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
@pytest.mark.parametrize("length", range(1, 10))
def test_segments_of_every_length_give_the_loop(backup, names, length):
    signals, following = random_signals(names, (3, length, 1), seed=length), values((3, length, 1))
    ended = flags((3, length, 1))
    maps = backup.step_map(signals, gamma=0.95, terminated=ended)
    returns = lambda_return(maps, following, lmbda=0.8, done=ended).squeeze(-1)
    targets = n_step_return(maps, following[:, -1])
    for b in range(3):
        operator, steps, end = OPERATORS[repr(backup)], trajectory(signals, b), ended[b].flatten().tolist()
        expected = lambda_loop(operator, steps, following[b].flatten().tolist(), end, end, 0.95, 0.8)
        assert returns[b].tolist() == pytest.approx(expected, abs=1e-12)
        window = n_step_loop(operator, steps, following[b, -1].item(), end, 0.95)
        assert targets[b].item() == pytest.approx(window, abs=1e-12)


def by_doubling(maps, value):
    return clamped_affine._apply(ClampedAffine.of(maps).scan(0, suffix=True).parts, value)


def by_way(monkeypatch, way):
    """Lambda-returns walk back in this way from here on, whatever their shape."""
    monkeypatch.setattr(
        clamped_affine, "_fastest", lambda length, width: way if length > 1 else clamped_affine._in_turn
    )


every_way = pytest.mark.parametrize("way", [clamped_affine._in_turn, clamped_affine._in_blocks, by_doubling])


@every_backup
@every_way
@every_precision
def test_every_way_and_length_gives_the_loop(monkeypatch, backup, names, way, dtype, tolerance):
    by_way(monkeypatch, way)
    for length, lmbda in zip(range(1, 41), itertools.cycle([0.0, 0.3, 1.0, torch.tensor(0.6, dtype=torch.float64)])):
        shape = (length, 1)
        signals = random_signals(names, shape, seed=length, dtype=dtype)
        following, terminated = values(shape, seed=length, dtype=dtype), flags(shape, seed=length, share=0.1)
        done = terminated | flags(shape, seed=length + 1, share=0.1)
        maps = backup.step_map(signals, gamma=0.9, terminated=terminated)
        returns = lambda_return(maps, following, lmbda=lmbda, done=done)
        steps = trajectory({name: signal.unsqueeze(0) for name, signal in signals.items()}, 0)
        rows = (x.flatten().tolist() for x in (following, terminated, done))
        expected = lambda_loop(OPERATORS[repr(backup)], steps, *rows, 0.9, float(lmbda))
        assert returns.dtype == dtype
        assert returns.flatten().tolist() == pytest.approx(expected, rel=tolerance, abs=tolerance)


@every_way
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_every_way_takes_time_in_any_dimension_of_any_batch(monkeypatch, batch, way):
    shape = (*batch, 21, 1)
    signals, following, ended = random_signals(("safety_margin",), shape), values(shape), flags(shape, share=0.1)
    lmbda = torch.rand(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    maps = AvoidBackup().step_map(signals, gamma=0.9, terminated=ended)
    expected = lambda_return(maps, following, lmbda=lmbda, done=ended)
    by_way(monkeypatch, way)
    for dim in range(len(batch) + 1):
        turned = {name: signal.movedim(-2, dim) for name, signal in signals.items()}
        maps = AvoidBackup().step_map(turned, gamma=0.9, terminated=ended.movedim(-2, dim))
        value, factor, done = (x.movedim(-2, dim) for x in (following, lmbda, ended))
        for time_dim in (dim, dim - len(shape)):
            returns = lambda_return(maps, value, lmbda=factor, done=done, time_dim=time_dim)
            assert_close(returns.movedim(dim, -2), expected, rtol=1e-12, atol=1e-12)


@every_backup
def test_gradients_are_the_same_in_every_way(monkeypatch, backup, names):
    signals, following, ended = random_signals(names, (2, 21, 1)), values((2, 21, 1)), flags((2, 21, 1), share=0.1)
    inputs = [x.requires_grad_() for x in (following, *signals.values())]
    weights = values((2, 21, 1), seed=5)

    def gradients(way):
        by_way(monkeypatch, way)
        maps = backup.step_map(signals, gamma=0.9, terminated=ended)
        return torch.autograd.grad((lambda_return(maps, following, lmbda=0.8, done=ended) * weights).sum(), inputs)

    expected = gradients(clamped_affine._in_turn)
    for way in (clamped_affine._in_blocks, by_doubling):
        for one, other in zip(gradients(way), expected):
            assert_close(one, other, rtol=1e-12, atol=1e-12)


@every_backup
def test_gradients_of_long_segments_are_those_of_finite_differences(backup, names):
    signals, following, ended = random_signals(names, (14, 1)), values((14, 1)), flags((14, 1), share=0.1)
    factors = [torch.tensor(x, dtype=torch.float64) for x in (0.9, 0.8)]

    def returns(following, gamma, lmbda, *margins):
        maps = backup.step_map(dict(zip(names, margins)), gamma=gamma, terminated=ended)
        return lambda_return(maps, following, lmbda=lmbda, done=ended)

    with_margins = (following, *factors, *signals.values())
    assert torch.autograd.gradcheck(returns, [x.requires_grad_() for x in with_margins])
    for factor in factors:
        factor.requires_grad_(False)
    assert torch.autograd.gradcheck(returns, with_margins)


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


@every_case
@every_precision
def test_lambda_returns_match_the_cases(case, dtype, tolerance):
    assert set(case["lambda_return"]) == set(CASE_BACKUPS)
    for name, expected in case["lambda_return"].items():
        backup = CASE_BACKUPS[name]
        signals = {n: torch.tensor(case[n], dtype=dtype).unsqueeze(-1) for n in backup.signals}
        terminated, truncated = (torch.tensor(case[k]).bool().unsqueeze(-1) for k in ("terminated", "truncated"))
        maps = backup.step_map(signals, gamma=case["gamma"], terminated=terminated)
        following = torch.tensor(case["next_value"], dtype=dtype).unsqueeze(-1)
        returns = lambda_return(maps, following, lmbda=case["lmbda"], done=terminated | truncated)
        assert returns.dtype == dtype
        error = (returns.squeeze(-1).double() - torch.tensor(expected, dtype=torch.float64)).abs().max()
        assert error <= tolerance * max(map(abs, expected)), name


@every_case
@every_precision
def test_n_step_targets_match_the_cases(case, dtype, tolerance):
    window = case["n_step"]
    assert set(window) == {*CASE_BACKUPS, "k", "terminated", "bootstrap"}
    for name, backup in CASE_BACKUPS.items():
        signals = {n: torch.tensor(case[n][: window["k"]], dtype=dtype).unsqueeze(-1) for n in backup.signals}
        maps = backup.step_map(
            signals, gamma=case["gamma"], terminated=torch.tensor(window["terminated"]).unsqueeze(-1)
        )
        target = n_step_return(maps, torch.tensor([window["bootstrap"]], dtype=dtype))
        assert target.dtype == dtype
        assert abs(target.item() - window[name]) <= tolerance * abs(window[name]), name


@every_backup
def test_time_may_stand_in_any_dimension(backup, names):
    signals, following, ended = random_signals(names, (3, 6, 1)), values((3, 6, 1)), flags((3, 6, 1))
    late = backup.step_map(signals, gamma=0.9, terminated=ended)
    turned = {name: signal.movedim(1, 0) for name, signal in signals.items()}
    early = backup.step_map(turned, gamma=0.9, terminated=ended.movedim(1, 0))
    expected = lambda_return(late, following, lmbda=0.8, done=ended)
    result = lambda_return(early, following.movedim(1, 0), lmbda=0.8, done=ended.movedim(1, 0), time_dim=0)
    assert torch.equal(result.movedim(0, 1), expected)
    valid = ~flags((3, 6, 1), seed=5)
    expected = n_step_return(late, following[:, -1], valid=valid)
    assert torch.equal(n_step_return(early, following[:, -1], valid=valid.movedim(1, 0), time_dim=0), expected)


@every_backup
@pytest.mark.parametrize("shape", [(4, 1), (2, 4, 1), (2, 3, 4, 1), (0, 4, 1)])
def test_every_batch_shape_is_a_batch_of_segments(backup, names, shape):
    signals, following, ended = random_signals(names, shape), values(shape), flags(shape)
    maps = backup.step_map(signals, gamma=0.9, terminated=ended)
    returns = lambda_return(maps, following, lmbda=0.8, done=ended)
    assert returns.shape == shape
    flat = backup.step_map(
        {name: signal.reshape(-1, 4, 1) for name, signal in signals.items()},
        gamma=0.9,
        terminated=ended.reshape(-1, 4, 1),
    )
    expected = lambda_return(flat, following.reshape(-1, 4, 1), lmbda=0.8, done=ended.reshape(-1, 4, 1))
    assert torch.equal(returns, expected.reshape(shape))
    assert n_step_return(maps, following[..., -1, :]).shape == (*shape[:-2], 1)


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_flags_of_any_kind_are_flags(kind):
    signals, following, ended = random_signals(("safety_margin",), (3, 6, 1)), values((3, 6, 1)), flags((3, 6, 1))
    maps = AvoidBackup().step_map(signals, gamma=0.9, terminated=ended)
    expected = lambda_return(maps, following, lmbda=0.8, done=ended)
    assert torch.equal(lambda_return(maps, following, lmbda=0.8, done=ended.to(kind)), expected)
    expected = n_step_return(maps, following[:, -1], valid=ended)
    assert torch.equal(n_step_return(maps, following[:, -1], valid=ended.to(kind)), expected)


@every_backup
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_is_kept_whatever_gamma_and_lambda_are(backup, names, dtype):
    signals, following = random_signals(names, (3, 6, 1), dtype=dtype), values((3, 6, 1), dtype=dtype)
    gamma, lmbda = torch.tensor(0.9, dtype=torch.float64), torch.tensor(0.8, dtype=torch.float64)
    ended = flags((3, 6, 1))
    maps = backup.step_map(signals, gamma=gamma, terminated=ended)
    assert lambda_return(maps, following, lmbda=lmbda, done=ended).dtype == dtype
    assert n_step_return(maps, following[:, -1], valid=ended).dtype == dtype


@every_backup
def test_targets_live_on_any_device(backup, names):
    signals = {name: torch.zeros(3, 6, 1, device="meta") for name in names}
    following, ended = torch.zeros(3, 6, 1, device="meta"), torch.zeros(3, 6, 1, dtype=torch.bool, device="meta")
    maps = backup.step_map(signals, gamma=0.9, terminated=ended)
    returns = lambda_return(maps, following, lmbda=0.8, done=ended)
    target = n_step_return(maps, torch.zeros(3, 7, device="meta"), valid=~ended)
    assert (returns.device.type, target.device.type) == ("meta", "meta")
    assert (returns.shape, target.shape) == ((3, 6, 1), (3, 7))


def both_targets(backup, signals, following, ended, gamma, lmbda):
    maps = backup.step_map(signals, gamma=gamma, terminated=ended)
    returns = lambda_return(maps, following, lmbda=lmbda, done=ended)
    return returns, n_step_return(maps, following[..., -1, :], valid=~ended)


@every_backup
@pytest.mark.parametrize("length", [6, 21])
def test_targets_can_be_vmapped(backup, names, length):
    shape = (4, 2, length, 1)
    signals, following, ended = random_signals(names, shape), values(shape), flags(shape)

    def targets(signals, following, ended):
        return both_targets(backup, signals, following, ended, 0.9, 0.8)

    for result, expected in zip(torch.vmap(targets)(signals, following, ended), targets(signals, following, ended)):
        assert_close(result, expected)


@pytest.mark.parametrize(
    ("backup", "length", "backend"),
    [(AvoidBackup(), 21, "aot_eager"), (ReachAvoidBackup(), 6, "eager"), (DiscountedReturnBackup(), 6, "eager")],
    ids=repr,
)
def test_targets_compile_without_graph_breaks(backup, length, backend):
    shape = (2, length, 1)
    signals, following, ended = random_signals(backup.signals, shape), values(shape), flags(shape)
    gamma, lmbda = torch.tensor(0.9, dtype=torch.float64), torch.tensor(0.8, dtype=torch.float64)
    torch.compiler.reset()
    compiled = torch.compile(both_targets, fullgraph=True, backend=backend)
    expected = both_targets(backup, signals, following, ended, gamma, lmbda)
    for result, target in zip(compiled(backup, signals, following, ended, gamma, lmbda), expected):
        assert_close(result, target)


@every_backup
def test_gradients_flow_through_whole_segments(backup, names):
    signals, following, ended = random_signals(names, (2, 4, 1)), values((2, 4, 1)), flags((2, 4, 1))

    def targets(following, *margins):
        return both_targets(backup, dict(zip(names, margins)), following, ended, 0.9, 0.8)

    assert torch.autograd.gradcheck(targets, [x.requires_grad_() for x in (following, *signals.values())])


def maps_of_three_steps():
    signals = {"safety_margin": torch.zeros(2, 3, 1)}
    return AvoidBackup().step_map(signals, gamma=0.9, terminated=torch.zeros(2, 3, 1, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(2, 3), (3, 1), (2, 1, 1), (2, 4, 1), (2, 3, 2)])
def test_a_lambda_return_refuses_values_and_flags_of_another_shape(shape):
    maps = maps_of_three_steps()
    with pytest.raises(ValueError, match=r"next_value has shape .*step map \[2, 3, 1\].*`\[\*B, T, 1\]`"):
        lambda_return(maps, torch.zeros(shape), lmbda=0.9)
    with pytest.raises(ValueError, match=r"done has shape .*step map \[2, 3, 1\].*`\[\*B, T, 1\]`"):
        lambda_return(maps, torch.zeros(2, 3, 1), lmbda=0.9, done=torch.zeros(shape, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 2, 3, 1)])
def test_a_lambda_that_would_enlarge_the_batch_is_refused(shape):
    with pytest.raises(ValueError, match=r"lmbda has shape .* does not fit \[2, 3, 1\]"):
        lambda_return(maps_of_three_steps(), torch.zeros(2, 3, 1), lmbda=torch.zeros(shape))


@pytest.mark.parametrize("lmbda", [-0.1, 1.1, float("nan")])
def test_a_lambda_outside_the_unit_interval_is_refused(lmbda):
    with pytest.raises(ValueError, match=rf"lmbda is {lmbda}: it must lie in \[0, 1\]"):
        lambda_return(maps_of_three_steps(), torch.zeros(2, 3, 1), lmbda=lmbda)


def test_values_that_are_whole_numbers_may_be_integers():
    for length in (3, 20, 21):
        whole = torch.randint(-3, 4, (2, length, 1), generator=torch.Generator().manual_seed(length))
        maps = ReachBackup().step_map(
            {"target_margin": values((2, length, 1))}, gamma=0.9, terminated=flags(whole.shape)
        )
        expected = lambda_return(maps, whole.double(), lmbda=0.5)
        assert torch.equal(lambda_return(maps, whole, lmbda=0.5), expected)


@pytest.mark.parametrize("shape", [(2,), (2, 3, 1), (3, 1), (1, 1)])
def test_an_n_step_target_refuses_a_value_of_another_shape(shape):
    with pytest.raises(ValueError, match=r"does not fit a map of shape \[2, 1\].*unsqueeze\(-1\)"):
        n_step_return(maps_of_three_steps(), torch.zeros(shape))


@pytest.mark.parametrize("shape", [(2, 3), (3, 1), (2, 1)])
def test_an_n_step_target_refuses_a_validity_of_another_shape(shape):
    with pytest.raises(ValueError, match=r"valid has shape .*step map \[2, 3, 1\].*`\[\*B, T, 1\]`"):
        n_step_return(maps_of_three_steps(), torch.zeros(2, 1), valid=torch.ones(shape, dtype=torch.bool))


def test_an_empty_window_is_refused_and_an_empty_segment_is_empty():
    empty = {"safety_margin": torch.zeros(2, 0, 1)}
    maps = AvoidBackup().step_map(empty, gamma=0.9, terminated=torch.zeros(2, 0, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="pass at least one step"):
        n_step_return(maps, torch.zeros(2, 1))
    assert lambda_return(maps, torch.zeros(2, 0, 1), lmbda=0.9).shape == (2, 0, 1)
