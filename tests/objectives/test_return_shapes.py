"""The n-step target and the lambda-return take any batch shape, dtype, device and length, and compile."""

from __future__ import annotations

import pytest
import torch
from contracts import CASE_BACKUPS, CASES, random_signals
from return_cases import every_backup, every_precision, flags, values
from torch.testing import assert_close

from torchrl_safety.objectives import (
    AvoidBackup,
    DiscountedReturnBackup,
    ReachAvoidBackup,
    ReachBackup,
    lambda_return,
    n_step_return,
)

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["seed"]))


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
