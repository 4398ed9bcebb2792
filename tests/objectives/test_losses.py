"""Laws of every loss on batches of any shape and dtype."""

from __future__ import annotations

import pytest
import torch
from loss_cases import CATEGORICAL, EVERY, OFF_POLICY, close, losses, run

from torchrl_safety.objectives import AvoidBackup, ReachAvoidBackup


@EVERY
def test_float64_stays_float64_and_float32_agrees(case):
    loss, narrow = case.build(backup=AvoidBackup()), case.build(backup=AvoidBackup(), dtype=torch.float32)
    narrow.load_state_dict(loss.state_dict())
    double, single = run(loss, case.batch()), run(narrow, case.batch(dtype=torch.float32))
    for term in case.terms:
        assert (double[term].dtype, single[term].dtype) == (torch.float64, torch.float32)
        if not case.continuous:  # whose draws differ by type
            close(single[term], double[term], 1e-4)


@EVERY
def test_reductions_are_the_terms_their_sum_and_their_mean(case):
    terms, total, average = (
        run(case.build(backup=ReachAvoidBackup(), reduction=name), case.batch()) for name in ("none", "sum", "mean")
    )
    for name in case.terms:
        assert terms[name].shape == case.batch().shape
        close(total[name], terms[name].sum())
        close(average[name], terms[name].mean())


@EVERY
def test_a_batch_of_one_is_a_batch(case):
    shape = (1, 1) if case.on_policy else (1,)
    result = run(case.build(backup=ReachAvoidBackup()), case.batch(*shape))
    assert all(torch.isfinite(result[name]) for name in case.terms)


@losses(but=("PPO", "game PPO"))
def test_an_empty_batch_has_no_mean(case):
    with pytest.raises(ValueError, match="holds no transition"):
        case.build(backup=AvoidBackup())(case.batch(*((0, 4) if case.on_policy else (0,))))


@EVERY
def test_more_batch_dimensions_are_the_same_rows(case):
    shape = (2, 3, 4) if case.on_policy else (2, 3)
    loss, batch = case.build(backup=ReachAvoidBackup(), reduction="none"), case.batch(*shape)
    flat = batch.reshape(-1, *shape[2:]).clone()
    expected, found = run(loss, flat), run(loss, batch)
    for name in case.terms:
        assert found[name].shape == shape
        close(found[name].flatten(), expected[name].flatten())
    if not case.on_policy:
        assert batch["td_error"].shape[:2] == shape
        close(batch["td_error"].flatten(), flat["td_error"].flatten())


@losses(*OFF_POLICY, *CATEGORICAL)
def test_priorities_are_positive_and_come_from_the_unweighted_error(case):
    loss, batch = case.build(backup=ReachAvoidBackup()), case.batch()
    plain, terms = batch.clone(), run(case.build(backup=ReachAvoidBackup(), reduction="none"), batch.clone())
    run(loss, plain)
    weight = torch.linspace(0, 0.8, 12, dtype=torch.float64)
    batch["priority_weight"] = weight
    result = run(loss, batch)
    assert (plain["td_error"] > 0).all()
    assert torch.equal(plain["td_error"], batch["td_error"])
    assert not batch["td_error"].requires_grad
    for name in case.terms:  # the mean of the weighted losses, not their sum over the sum of the weights
        close(result[name], (weight * terms[name]).sum() / 12)


@losses(but=("PPO", "game PPO"))
def test_a_loss_that_is_not_finite_is_refused_by_every_family(case):
    loss, batch = case.build(), case.batch()
    batch["observation"].view(-1)[0] = torch.nan
    with pytest.raises(ValueError, match="the loss is NaN or inf"):
        loss(batch)


@losses("PPO", "A2C", "game PPO")
def test_a_shuffled_trajectory_is_refused_though_its_dimension_is_still_named_time(case):
    loss, batch = case.build(), case.batch(1, 6)[0]
    batch["next", "observation"][:-1] = batch["observation"][1:]
    batch.names = ["time"]
    in_order = run(loss, batch.clone())
    assert torch.isfinite(in_order[case.critic])
    with pytest.raises(ValueError, match="before the batch is shuffled"):
        loss(batch[torch.tensor([1, 0, 3, 2, 5, 4])])
