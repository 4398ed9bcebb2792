"""Segments and windows of random signals, and their returns by loops over single trajectories."""

from __future__ import annotations

import math

import pytest
import torch
from contracts import BACKUPS, random_signals

every_backup = pytest.mark.parametrize(("backup", "names"), BACKUPS, ids=[repr(b) for b, _ in BACKUPS])
every_precision = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])


def values(shape, seed=1, dtype=torch.float64):
    return random_signals(("value",), shape, seed=seed, dtype=dtype)["value"]


def flags(shape, seed=2, share=0.25):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


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
