"""Random transitions, trajectories and n-step windows for the tests of the value estimators."""

from __future__ import annotations

import torch
from contracts import SIGNALS
from tensordict import TensorDict
from torch import Tensor


def flagged(terminated: Tensor, truncated: Tensor, seed: int = 0, dtype: torch.dtype = torch.float64) -> TensorDict:
    """Random signals, values and observations beside these flags `[*B, 1]`, batch shape `[*B]`."""
    source, shape = torch.Generator().manual_seed(seed), terminated.shape
    drawn = {name: torch.randn(shape, generator=source, dtype=dtype) for name in (*SIGNALS, "state_value")}
    observations = torch.randn(2, *shape[:-1], 2, generator=source, dtype=dtype)
    flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
    root = {"observation": observations[0], "state_value": torch.randn(shape, generator=source, dtype=dtype)}
    return TensorDict({**root, "next": {**drawn, **flags, "observation": observations[1]}}, shape[:-1])


def trajectories(*shape: int, seed: int = 0, share: float = 0.2, dtype: torch.dtype = torch.float64) -> TensorDict:
    """Random transitions of this batch shape, of which `share` terminate and `share` are truncated."""
    source = torch.Generator().manual_seed(seed % 2**31)
    kind = torch.rand(*shape, 1, generator=source)
    return flagged(kind < share, kind > 1 - share, seed % 2**31, dtype)


def random_windows(size: int, n: int, seed: int = 0) -> TensorDict:
    """Windows of 1..n steps; what stands in the steps that do not exist is finite rubbish."""
    batch, source = trajectories(size, seed=seed, share=0.3), torch.Generator().manual_seed(seed + 1)
    valid = torch.arange(n).unsqueeze(-1) < torch.randint(1, n + 1, (size, 1, 1), generator=source)
    steps = {name: torch.randn(size, n, 1, generator=source, dtype=torch.float64) for name in SIGNALS}
    steps = {name: torch.where(valid, step, 1e3) for name, step in steps.items()}
    batch["steps"] = TensorDict({**steps, "valid": valid}, [size, n])
    return batch
