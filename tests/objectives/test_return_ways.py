"""Every way to run through a segment gives the targets and gradients of the loop over it."""

from __future__ import annotations

import itertools

import pytest
import torch
from contracts import OPERATORS, random_signals
from return_cases import every_backup, every_precision, flags, lambda_loop, n_step_loop, trajectory, values
from torch.testing import assert_close

from torchrl_safety.objectives import AvoidBackup, ClampedAffine, clamped_affine, lambda_return, n_step_return


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
