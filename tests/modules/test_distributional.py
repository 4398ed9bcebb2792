"""Quantiles, conditional values at risk and statistics of categorical distributions, against loops over floats."""

from __future__ import annotations

import math

import pytest
import torch
from contracts import LAWS
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from torchrl_safety.modules import (
    RainbowNetwork,
    categorical_cvar,
    categorical_quantile,
    distribution_statistics,
)

LEVELS = (1e-4, 0.05, 0.1, 0.25, 0.5, 0.75, 0.95, 1.0)
SUPPORT = torch.linspace(-2, 1, 13, dtype=torch.float64)
every_measure = pytest.mark.parametrize("measure", [categorical_quantile, categorical_cvar])


def masses(*shape: int, seed: int = 0, peak: float = 3.0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return (peak * torch.randn(*shape, 13, generator=source, dtype=torch.float64)).softmax(-1)


def quantile_by_hand(probs: list[float], atoms: list[float], level: float) -> float:
    return next(z for j, z in enumerate(atoms) if math.fsum(probs[: j + 1]) >= level - 1e-12)


def cvar_by_hand(probs: list[float], atoms: list[float], level: float) -> float:
    """Fill a glass of size `level` from the worst atom upwards."""
    room, filled = level, []
    for p, z in zip(probs, atoms):
        filled.append(min(p, room) * z)
        room = max(room - p, 0.0)
    return math.fsum(filled) / level


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 3), (0,)])
def test_quantile_and_cvar_are_those_of_a_loop_over_the_atoms(level, shape):
    probs, atoms = masses(*shape), SUPPORT.tolist()
    for measure, by_hand in ((categorical_quantile, quantile_by_hand), (categorical_cvar, cvar_by_hand)):
        found = measure(probs, SUPPORT, level)
        assert found.shape == shape
        assert found.dtype == torch.float64
        expected = [by_hand(row, atoms, level) for row in probs.reshape(-1, 13).tolist()]
        assert_close(found.flatten(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-11)


@given(seed=st.integers(0, 2**31), level=st.floats(1e-3, 1))
@LAWS
def test_cvar_is_the_largest_shortfall_below_a_threshold(seed, level):
    """Its dual (Rockafellar and Uryasev 2002): max over c of c - E[(c - Z)+] / level, attained at an atom."""
    probs = masses(4, seed=seed)
    shortfall = (SUPPORT[:, None] - SUPPORT).clamp_min(0)  # [c, z]
    dual = (SUPPORT - probs @ shortfall.T / level).amax(-1)
    assert_close(categorical_cvar(probs, SUPPORT, level), dual, rtol=0, atol=1e-9)


@given(seed=st.integers(0, 2**31))
@LAWS
def test_the_whole_distribution_has_its_mean_as_cvar_and_its_largest_atom_as_quantile(seed):
    probs = masses(4, seed=seed)
    assert_close(categorical_cvar(probs, SUPPORT, 1.0), probs @ SUPPORT)
    assert (categorical_quantile(probs, SUPPORT, 1.0) == 1.0).all()


@every_measure
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(seed=st.integers(0, 2**31), levels=st.tuples(st.floats(1e-3, 1), st.floats(1e-3, 1)))
@LAWS
def test_a_larger_share_is_never_worth_less(measure, dtype, seed, levels):
    probs, support = masses(4, seed=seed).to(dtype), SUPPORT.to(dtype)
    low, high = (measure(probs, support, level) for level in sorted(levels))
    assert (low <= high + 32 * torch.finfo(dtype).eps).all()


@given(seed=st.integers(0, 2**31), level=st.floats(1e-3, 1))
@LAWS
def test_cvar_is_never_above_the_quantile_nor_the_mean(seed, level):
    probs = masses(4, seed=seed)
    cvar = categorical_cvar(probs, SUPPORT, level)
    assert (cvar <= categorical_quantile(probs, SUPPORT, level) + 1e-9).all()
    assert (cvar <= probs @ SUPPORT + 1e-9).all()
    assert (cvar >= SUPPORT[0] - 1e-9).all()


@every_measure
@pytest.mark.parametrize("level", LEVELS)
def test_a_sure_value_is_its_own_measure_at_every_level(measure, level):
    assert_close(measure(torch.eye(13, dtype=torch.float64), SUPPORT, level), SUPPORT)


@every_measure
def test_it_moves_and_scales_with_the_values(measure):
    probs = masses(5)
    assert_close(measure(probs, 3 * SUPPORT + 2, 0.1), 3 * measure(probs, SUPPORT, 0.1) + 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("atoms", [3, 7, 10, 51])
def test_an_atom_whose_mass_ends_at_the_level_is_the_quantile_whatever_the_rounding(dtype, atoms):
    probs, support = torch.full((atoms,), 1 / atoms, dtype=dtype), torch.arange(atoms, dtype=dtype)
    found = [categorical_quantile(probs, support, (j + 1) / atoms).item() for j in range(atoms)]
    assert found == [*range(atoms)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_atom_without_mass_is_no_quantile_however_small_the_level(dtype):
    probs, support = torch.tensor([0.0, 0.5, 0.5], dtype=dtype), torch.tensor([-1.0, 0.0, 1.0], dtype=dtype)
    assert categorical_quantile(probs, support, 1e-12).item() == 0.0
    assert categorical_cvar(probs, support, 1e-12).item() == 0.0


def test_masses_that_were_rounded_and_sum_to_less_than_one_still_end_at_the_last_atom():
    probs = torch.tensor([0.333, 0.333, 0.333], dtype=torch.float64)
    assert categorical_quantile(probs, torch.arange(3.0, dtype=torch.float64), 1.0).item() == 2.0
    assert_close(categorical_cvar(probs, torch.arange(3.0, dtype=torch.float64), 1.0).item(), 1.0)


@every_measure
def test_rows_may_have_supports_of_their_own(measure):
    probs, supports = masses(5), SUPPORT * torch.arange(1, 6, dtype=torch.float64)[:, None]
    for row, support, found in zip(probs, supports, measure(probs, supports, 0.3)):
        assert_close(found, measure(row, support, 0.3))


def test_cvar_has_the_gradient_of_finite_differences():
    probs = masses(3).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: categorical_cvar(p, SUPPORT, 0.3), [probs])


@every_measure
def test_it_compiles_without_graph_breaks_and_can_be_vmapped(measure):
    probs = masses(4, 3)
    expected = measure(probs, SUPPORT, 0.1)
    torch.compiler.reset()
    assert_close(torch.compile(measure, fullgraph=True, backend="eager")(probs, SUPPORT, 0.1), expected)
    assert_close(torch.vmap(lambda p: measure(p, SUPPORT, 0.1))(probs), expected)


@every_measure
@pytest.mark.parametrize("level", [0.0, -0.1, 1.01, math.nan, math.inf])
def test_a_level_that_is_no_share_is_refused(measure, level):
    with pytest.raises(ValueError, match=rf"level is {level}; it must lie in \(0, 1\]"):
        measure(masses(2), SUPPORT, level)


@every_measure
@pytest.mark.parametrize("shape", [(), (12,), (3, 13), (13, 1)])
def test_a_support_that_does_not_fit_is_refused(measure, shape):
    with pytest.raises(ValueError, match=r"the support .* does not fit probs \[2, 13\]"):
        measure(masses(2), torch.zeros(shape), 0.1)


# --- of a network ---


def test_a_network_measures_its_logits_over_its_own_support():
    network = RainbowNetwork(2, 3, support=(-2.0, 1.0), atoms=13, dtype=torch.float64)
    logits = network.logits(torch.rand(5, 2, dtype=torch.float64))
    assert_close(network.quantile(logits, 0.1), categorical_quantile(logits.softmax(-1), SUPPORT, 0.1))
    assert_close(network.cvar(logits, 0.1), categorical_cvar(logits.softmax(-1), SUPPORT, 0.1))
    assert_close(network.cvar(logits, 1.0), logits.softmax(-1) @ SUPPORT)


def test_a_scalar_network_has_no_distribution_to_measure():
    network = RainbowNetwork(2, 3, support=None)
    for measure in (network.quantile, network.cvar):
        with pytest.raises(ValueError, match=r"scalar values without a distribution.*support=\(vmin, vmax\)"):
            measure(torch.zeros(3), 0.1)


# --- statistics ---


@pytest.mark.parametrize("shape", [(13,), (5, 13), (5, 3, 13)])
def test_statistics_are_means_over_the_rows_of_a_loop(shape):
    logits = torch.randn(*shape, dtype=torch.float64)
    found = distribution_statistics(logits, SUPPORT)
    rows = logits.softmax(-1).reshape(-1, 13).tolist()
    atoms = SUPPORT.tolist()

    def deviation(row: list[float]) -> float:
        mean = sum(p * z for p, z in zip(row, atoms))
        return math.sqrt(sum(p * (z - mean) ** 2 for p, z in zip(row, atoms)))

    expected = {
        "entropy": [-sum(p * math.log(p) for p in row) for row in rows],
        "std": [deviation(row) for row in rows],
        **{f"quantile_{a}": [quantile_by_hand(row, atoms, a) for row in rows] for a in (0.05, 0.5, 0.95)},
    }
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].item() == pytest.approx(sum(values) / len(values)), name
        assert found[name].shape == ()


def test_a_collapsed_distribution_has_no_entropy_and_an_untrained_one_the_largest():
    sure = torch.full((4, 13), -torch.inf, dtype=torch.float64)
    sure[:, 2] = 0
    found = distribution_statistics(sure, SUPPORT)
    assert (found["entropy"].item(), found["std"].item()) == (0.0, 0.0)
    flat = distribution_statistics(torch.zeros(4, 13, dtype=torch.float64, requires_grad=True), SUPPORT)
    assert flat["entropy"].item() == pytest.approx(math.log(13))
    assert not flat["entropy"].requires_grad


def test_statistics_read_nothing_back_from_an_accelerator():
    """A meta tensor has no values that a host could read."""
    found = distribution_statistics(torch.zeros(4, 3, 13, device="meta"), torch.zeros(13, device="meta"))
    assert {value.device.type for value in found.values()} == {"meta"}


def test_no_atom_is_read_from_masses_that_are_no_numbers():
    """With a support that begins at 0, the smallest atom would read as safe."""
    probs = torch.tensor([[0.5, 0.5], [math.nan, math.nan]])
    found = categorical_quantile(probs, torch.tensor([0.0, 1.0]), 0.9)
    assert found[0] == 1
    assert found[1].isnan()
