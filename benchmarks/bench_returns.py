"""Lambda-returns of the avoid problem, against a loop over time written by hand.

Run with `OMP_NUM_THREADS=1 python -m pytest benchmarks/bench_returns.py --benchmark-columns=median`: one table per
shape `[T, B, 1]`, with the ratio to its fastest row in brackets. The backup is part of the loop, so compare it with
`whole`, that is `step_map` and `lambda_return`. The ways to walk back are timed without the mixing before them.
"""

import pytest
import torch
from torch import Tensor

from torchrl_safety.objectives import AvoidBackup, ClampedAffine, clamped_affine, lambda_return

SHAPES = [(1000, 64), (2048, 16), (16, 4096), (1000, 1), (48, 1024), (128, 4096)]
GAMMA, LMBDA = 0.99, 0.95

every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")


def segments(shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`margin, next_value, terminated, done`; two in a hundred steps end and as many are cut."""
    generator = torch.Generator().manual_seed(0)
    margin, next_value = torch.randn(2, *shape, 1, generator=generator)
    terminated, truncated = torch.rand(2, *shape, 1, generator=generator) < 0.02
    return margin, next_value, terminated, terminated | truncated


def by_hand(margin: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor) -> Tensor:
    returns, after = torch.empty_like(margin), next_value[-1]
    for t in reversed(range(len(margin))):
        mixed = torch.where(done[t], next_value[t], (1 - LMBDA) * next_value[t] + LMBDA * after)
        running = (1 - GAMMA) * margin[t] + GAMMA * torch.minimum(margin[t], mixed)
        after = torch.where(terminated[t], margin[t], running)
        returns[t] = after
    return returns


def maps_of(margin: Tensor, terminated: Tensor) -> ClampedAffine:
    return AvoidBackup().step_map({"safety_margin": margin}, gamma=GAMMA, terminated=terminated)


def whole(margin: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor) -> Tensor:
    return lambda_return(maps_of(margin, terminated), next_value, lmbda=LMBDA, done=done, time_dim=0)


def measure(benchmark, shape, function, *args):
    benchmark.group = f"{shape[0]}x{shape[1]}"
    with torch.no_grad():
        return benchmark(function, *args)


@every_shape
@pytest.mark.benchmark(max_time=0.3)
@pytest.mark.parametrize("function", [by_hand, whole])
def test_whole(benchmark, shape, function):
    inputs = segments(shape)
    returns = measure(benchmark, shape, function, *inputs)
    torch.testing.assert_close(returns, by_hand(*inputs), rtol=1e-4, atol=1e-4)


@every_shape
@pytest.mark.benchmark(max_time=0.3)
def test_step_map_alone(benchmark, shape):
    margin, _, terminated, _ = segments(shape)
    measure(benchmark, shape, maps_of, margin, terminated)


@every_shape
@pytest.mark.benchmark(max_time=0.3)
def test_lambda_return_alone(benchmark, shape):
    margin, next_value, terminated, done = segments(shape)
    maps = maps_of(margin, terminated)
    measure(benchmark, shape, lambda: lambda_return(maps, next_value, lmbda=LMBDA, done=done, time_dim=0))


def by_doubling(maps, value):
    return ClampedAffine.of(maps).scan(0, suffix=True)(value.expand_as(maps[0]))


@every_shape
@pytest.mark.benchmark(max_time=0.3)
@pytest.mark.parametrize("way", [clamped_affine._in_turn, clamped_affine._in_blocks, by_doubling])
def test_way(benchmark, shape, way):
    margin, next_value, terminated, _ = segments(shape)
    parts = maps_of(margin, terminated).parts
    measure(benchmark, shape, way, parts, next_value[-1])
