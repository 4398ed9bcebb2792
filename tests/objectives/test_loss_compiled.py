"""Compiled losses give the numbers of those that are not."""

from __future__ import annotations

import pytest
import torch
from contracts import LOSSES
from loss_cases import CATEGORICAL, EVERY, OFF_POLICY, close, losses, run, same, windows_of

from torchrl_safety.objectives import ReachAvoidBackup


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in ("DQN", "categorical DQN", "PPO") else pytest.mark.slow)
        for family in dict.fromkeys(case.family for case in LOSSES)
    ],
)
def test_compiles_without_graph_breaks_to_the_same_numbers(family):
    case = next(case for case in reversed(LOSSES) if case.family == family)
    compiles_to_the_same_numbers(case, case.build(backup=ReachAvoidBackup()), case.batch())


@pytest.mark.slow
@EVERY
def test_every_loss_compiles_without_graph_breaks(case):
    compiles_to_the_same_numbers(case, case.build(), case.batch())


@pytest.mark.slow
@losses(*OFF_POLICY, *CATEGORICAL)
@pytest.mark.parametrize("n_step", ["last", "best"])
def test_every_loss_compiles_on_windows_without_graph_breaks(case, n_step):
    if case.game and n_step == "best":
        with pytest.raises(ValueError, match="single player only"):
            case.build(n_step=n_step)
        return
    compiles_to_the_same_numbers(case, case.build(n_step=n_step), windows_of(case, 3))


def compiles_to_the_same_numbers(case, loss, batch):
    torch._dynamo.reset()
    graphs = []
    compiled = torch.compile(loss, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for gamma in (0.9, 0.9, 0.5):
        known = len(graphs)
        loss.gamma = gamma
        gradients, results = [], []
        for call in (loss, compiled):
            loss.zero_grad()
            results.append(run(call, batch.clone()))
            sum(results[-1][term] for term in case.terms).backward()
            gradients.append([parameter.grad for parameter in loss.parameters()])
        same(*results)
        for one, other in zip(*gradients):
            close(one, other, 1e-12)
    assert len(graphs) == known, "a schedule of the discount compiles the loss again"


@pytest.mark.slow
@losses("SAC", "discrete SAC")
def test_a_temperature_below_its_limit_is_lifted_under_ahead_of_time_autograd(case):
    torch._dynamo.reset()
    loss, batch = case.build(backup=ReachAvoidBackup(), alpha_init=1e-4, min_alpha=1e-3), case.batch()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager_decomp_partition")
    result = run(compiled, batch.clone())
    sum(result[term] for term in case.terms).backward()  # refused where the parameter is written past autograd
    close(result["alpha"], torch.tensor(1e-3), 1e-6)
    close(loss.log_alpha.exp(), torch.tensor(1e-3), 1e-6)
