"""Every loss as a case of the shared tests, and what its targets are by loops over samples and steps."""

from __future__ import annotations

import pytest
import torch
from contracts import LOSSES, SIGNALS, LossCase
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.objectives import LossModule

from torchrl_safety.data import NStepTransform


def losses(*families: str, but: tuple[str, ...] = ()):
    cases = [case for case in LOSSES if (not families or case.family in families) and case.family not in but]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.loss.__name__)


ONE_PLAYER = ("DQN", "SAC", "discrete SAC")
OFF_POLICY = (*ONE_PLAYER, "game DQN", "game SAC")
CATEGORICAL = ("categorical DQN", "game categorical DQN")
EVERY, SCALAR = losses(), losses(but=CATEGORICAL)  # distributions have their own loops, in test_dqn.py


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


def rows(*tables: Tensor) -> zip:
    return zip(*(table.flatten(end_dim=-3) for table in tables))


def ended_frames(case: LossCase) -> TensorDict:
    frames = case.batch(20, seed=3)
    frames["next", "done"][-1] = frames["next", "terminated"][-1] = True
    return frames.set("frame", torch.arange(20))


def windows_of(case: LossCase, n: int) -> TensorDict:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)
    buffer.append_transform(NStepTransform(n, signals=(*SIGNALS, "observation")))
    buffer.extend(ended_frames(case))
    return buffer[:]
