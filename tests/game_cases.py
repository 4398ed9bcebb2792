"""Losses of two players as cases of tests."""

from __future__ import annotations

import torch
from contracts import LOSSES, LossCase
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import ProbabilisticActor

CASES = [case for case in LOSSES if case.game]
DQN, CATEGORICAL, SAC, PPO = CASES[::2]


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got.detach().double(), expected.detach().double(), rtol=tolerance, atol=tolerance)


def run(loss, batch: TensorDict) -> TensorDict:
    torch.manual_seed(1)
    return loss(batch)


class Table(nn.Module):
    """One table of values for every state."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, observation: Tensor) -> Tensor:
        return self.table.expand(*observation.shape[:-1], *self.table.shape)


def going_on(case: LossCase) -> TensorDict:
    """Transitions that lead on, for nothing."""
    batch = case.batch()
    batch["next", "done"][:] = batch["next", "terminated"][:] = False
    batch["next", "reward"][:] = 0.0
    return batch


class Still(torch.distributions.Normal):
    """Normal in name, without randomness: it draws its mean, with log-probability zero."""

    def rsample(self, sample_shape=()):
        return self.mean.expand(*sample_shape, *self.mean.shape)

    def log_prob(self, value):
        return torch.zeros_like(self.mean[..., 0])


def player(head: nn.Module, key: str, kind: type = Still, sees: tuple[str, ...] = ()) -> ProbabilisticActor:
    module = TensorDictModule(head, ["observation", *sees], ["loc", "scale"])
    return ProbabilisticActor(module, in_keys=["loc", "scale"], out_keys=[key], distribution_class=kind)
