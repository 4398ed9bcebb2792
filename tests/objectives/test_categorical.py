"""Laws of the categorical projection, against a loop over Python floats and the numeric cases."""

from __future__ import annotations

import math

import pytest
import torch
from contracts import BACKUPS, CASE_BACKUPS, CASES, LAWS, random_signals
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from torchrl_safety.objectives import (
    DiscountedReturnBackup,
    project_categorical,
)

SUPPORTS = [(-170.4, 0.697, 51), (0.0, 1.0, 51), (0.0, 200.0, 11), (-1.0, 1.0, 2), (-10.0, 10.0, 51), (3.0, 4.0, 3)]
every_support = pytest.mark.parametrize("bounds", SUPPORTS, ids=str)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@st.composite
def supports(draw):
    low = draw(st.one_of(st.just(0.0), st.floats(-200, 200, allow_subnormal=False)))
    return low, low + draw(st.floats(0.5, 400)), draw(st.integers(2, 60))


def nodes(bounds, dtype=torch.float64):
    return torch.linspace(*bounds, dtype=dtype)


def probabilities(shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).softmax(-1)


def uniform(low, high, shape, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(shape, generator=generator, dtype=dtype)


def rounding(bounds, dtype):
    """How far rounding may move an atom, in nodes, with some room."""
    low, high, n = bounds
    return 8 * torch.finfo(dtype).eps * (n + max(abs(low), abs(high)) / ((high - low) / (n - 1)))


def project_by_loop(atoms, probs, bounds):
    """Each atom shares its mass between its two neighbours by distance."""
    low, high, n = bounds
    spacing = (high - low) / (n - 1)
    mass = [0.0] * n
    for atom, p in zip(atoms, probs):
        for i in range(n):
            place = min(max(atom, low), high)
            mass[i] += p * max(0.0, 1 - abs(place - (low + i * spacing)) / spacing)
    return mass


@given(supports(), st.integers(0, 2**31))
@LAWS
def test_the_projection_is_the_loop(bounds, seed):
    """MATH §4: mass p (1 - (b - l)) to node l and p (b - l) to node l + 1, b = (image - vmin) / Δz."""
    low, high, _ = bounds
    atoms = uniform(low - (high - low) / 3, high + (high - low) / 3, (3, 9), seed)
    probs = probabilities((3, 9), seed)
    projected = project_categorical(atoms, probs, nodes(bounds))
    expected = [project_by_loop(a, p, bounds) for a, p in zip(atoms.tolist(), probs.tolist())]
    assert_close(projected, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=rounding(bounds, torch.float64))


@every_dtype
@given(bounds=supports(), seed=st.integers(0, 2**31))
@LAWS
def test_the_mass_is_kept_and_never_negative(dtype, bounds, seed):
    """MATH §4: the mass sums to 1."""
    low, high, n = bounds
    atoms = torch.cat([uniform(low - 9, high + 9, (4, 40), seed, dtype), nodes(bounds, dtype).expand(4, n)], -1)
    projected = project_categorical(atoms, probabilities(atoms.shape, seed, dtype), nodes(bounds, dtype))
    assert projected.shape == (4, n)
    assert (projected >= 0).all()
    assert_close(projected.sum(-1), torch.ones(4, dtype=dtype), rtol=0, atol=20 * torch.finfo(dtype).eps)


@every_dtype
@given(bounds=supports(), seed=st.integers(0, 2**31))
@LAWS
def test_the_mean_is_preserved_inside_the_support(dtype, bounds, seed):
    low, high, _ = bounds
    atoms, probs = uniform(low, high, (3, 20), seed, dtype), probabilities((3, 20), seed, dtype)
    support = nodes(bounds, dtype)
    projected = project_categorical(atoms, probs, support)
    size = max(abs(low), abs(high))
    assert_close(
        (projected * support).sum(-1), (probs * atoms).sum(-1), rtol=0, atol=64 * size * torch.finfo(dtype).eps
    )


@every_support
@every_dtype
def test_no_discount_and_no_reward_is_the_identity(bounds, dtype):
    """MATH §4: γ = 1 and r = 0 change nothing."""
    support, probs = nodes(bounds, dtype), probabilities((5, bounds[2]), seed=0, dtype=dtype)
    reward = torch.zeros(5, 1, dtype=dtype)
    step = DiscountedReturnBackup().step_map({"reward": reward}, gamma=1.0, terminated=reward.bool())
    projected = project_categorical(step(support.expand(5, -1)), probs, support)
    assert_close(projected, probs, rtol=0, atol=rounding(bounds, dtype))


@given(bounds=supports(), seed=st.integers(0, 2**31))
@LAWS
def test_projecting_twice_is_projecting_once(bounds, seed):
    support = nodes(bounds)
    once = project_categorical(uniform(-300, 700, (2, 15), seed), probabilities((2, 15), seed), support)
    twice = project_categorical(support.expand_as(once), once, support)
    assert_close(twice, once, rtol=0, atol=rounding(bounds, torch.float64))


@every_support
@every_dtype
def test_an_atom_on_a_node_gives_it_all_its_mass(bounds, dtype):
    support = nodes(bounds, dtype)
    n = len(support)
    projected = project_categorical(support.unsqueeze(-1), torch.ones(n, 1, dtype=dtype), support)
    assert_close(projected, torch.eye(n, dtype=dtype), rtol=0, atol=rounding(bounds, dtype))


@every_dtype
def test_integer_positions_lose_no_mass(dtype):
    """MATH §4: also where b is an integer."""
    support = torch.arange(-4, 5, dtype=dtype)
    projected = project_categorical(support.unsqueeze(-1), torch.ones(9, 1, dtype=dtype), support)
    assert torch.equal(projected, torch.eye(9, dtype=dtype))


@every_support
@every_dtype
def test_atoms_beyond_the_support_land_on_its_ends(bounds, dtype):
    """MATH §4: images are clamped to [vmin, vmax]."""
    low, high, n = bounds
    atoms = torch.tensor([[-math.inf, low - 1e6, low - 1e-3, high + 1e-3, high + 1e6, math.inf]], dtype=dtype)
    probs = torch.tensor([[0.05, 0.15, 0.2, 0.3, 0.1, 0.2]], dtype=dtype)
    expected = torch.zeros(1, n, dtype=dtype)
    expected[0, 0], expected[0, -1] = 0.4, 0.6
    assert_close(
        project_categorical(atoms, probs, nodes(bounds, dtype)), expected, rtol=0, atol=rounding(bounds, dtype)
    )


@given(bounds=supports())
@LAWS
def test_rounding_never_pushes_the_top_atom_out_of_its_row(bounds):
    """MATH §4: b is clamped to [0, N - 1] and l to N - 2."""
    support = nodes(bounds, torch.float32)
    n = len(support)
    atoms = torch.full((3, 2), 1e9)
    atoms[1] = -1e9
    projected = project_categorical(atoms, torch.full((3, 2), 0.5), support)
    ends = torch.zeros(3, n)
    ends[0, -1], ends[1, 0], ends[2, -1] = 1, 1, 1
    assert (projected >= 0).all()
    assert_close(projected, ends, rtol=0, atol=rounding(bounds, torch.float32))


def test_zero_is_a_legal_lower_bound_and_is_not_taken_for_a_missing_one():
    """MATH §4: vmin = 0 is legal."""
    projected = project_categorical(torch.tensor([[-0.5]]), torch.ones(1, 1), torch.linspace(0, 1, 5))
    assert projected.tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["seed"]))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_projections_match_the_cases(case, dtype, tolerance):
    given_case = case["categorical"]
    support = nodes((given_case["vmin"], given_case["vmax"], given_case["atoms"]), dtype)
    probs = torch.tensor(given_case["probs"], dtype=dtype)
    assert set(CASE_BACKUPS) | {"vmin", "vmax", "atoms", "probs"} == set(given_case)
    for name, backup in CASE_BACKUPS.items():
        signals = {n: torch.tensor(case[n][:1], dtype=dtype) for n in backup.signals}
        step = backup.step_map(signals, gamma=case["gamma"], terminated=torch.tensor([False]))
        projected = project_categorical(step(support), probs, support)
        assert projected.dtype == dtype
        error = (projected.double() - torch.tensor(given_case[name], dtype=torch.float64)).abs().max()
        assert error <= tolerance * max(given_case[name]), name


@pytest.mark.parametrize(("backup", "names"), BACKUPS, ids=[repr(b) for b, _ in BACKUPS])
def test_a_terminal_step_is_a_two_node_distribution_at_its_value(backup, names):
    signals, support = random_signals(names, (6, 1)), nodes((-3.0, 3.0, 13))
    step = backup.step_map(signals, gamma=0.9, terminated=torch.ones(6, 1, dtype=torch.bool))
    projected = project_categorical(step(support.expand(6, -1)), probabilities((6, 13), seed=0), support)
    assert ((projected > 1e-12).sum(-1) <= 2).all()
    assert_close((projected * support).sum(-1, keepdim=True), step(torch.zeros(6, 1, dtype=torch.float64)))


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3), (0,), (51,)])
def test_every_batch_shape_is_projected_row_by_row(shape):
    atoms, probs = uniform(-2, 2, (*shape, 7), seed=0), probabilities((*shape, 7), seed=1)
    support = nodes((-1.0, 1.0, 51))
    projected = project_categorical(atoms, probs, support)
    assert projected.shape == (*shape, 51)
    rows = zip(atoms.reshape(-1, 7), probs.reshape(-1, 7), projected.reshape(-1, 51))
    for row_atoms, row_probs, row in rows:
        assert_close(row, project_categorical(row_atoms, row_probs, support))


@pytest.mark.parametrize("shape", [(4,), (2, 3), (0,)])
def test_rows_may_have_supports_of_their_own(shape):
    atoms, probs = uniform(-2, 2, (*shape, 7), seed=0), probabilities((*shape, 7), seed=1)
    supports = nodes((-1.0, 1.0, 5)) * uniform(0.5, 2, (*shape, 1), seed=2) + uniform(-1, 1, (*shape, 1), seed=3)
    projected = project_categorical(atoms, probs, supports)
    assert projected.shape == (*shape, 5)
    rows = zip(*(x.flatten(0, -2) for x in (atoms, probs, supports, projected)))
    for row_atoms, row_probs, support, row in rows:
        assert_close(row, project_categorical(row_atoms, row_probs, support))


@every_dtype
def test_the_dtype_is_kept(dtype):
    projected = project_categorical(
        torch.zeros(2, 3, dtype=dtype), torch.ones(2, 3, dtype=dtype), nodes((-1, 1, 5), dtype)
    )
    assert projected.dtype == dtype


def test_the_projection_lives_on_any_device():
    atoms, support = torch.zeros(2, 3, device="meta"), torch.zeros(5, device="meta")
    projected = project_categorical(atoms, atoms, support)
    assert projected.device.type == "meta"
    assert projected.shape == (2, 5)


def test_the_projection_can_be_vmapped():
    atoms, probs, support = uniform(-2, 2, (4, 3, 7), seed=0), probabilities((4, 3, 7), seed=1), nodes((-1.0, 1.0, 7))
    expected = project_categorical(atoms, probs, support)
    assert_close(torch.vmap(project_categorical, in_dims=(0, 0, None))(atoms, probs, support), expected)
    per_row = torch.vmap(project_categorical)(atoms, probs, support.expand(4, 7))
    assert_close(per_row, expected)


def test_the_projection_compiles_without_graph_breaks():
    atoms, probs, support = uniform(-2, 2, (4, 7), seed=0), probabilities((4, 7), seed=1), nodes((-1.0, 1.0, 5))
    torch.compiler.reset()
    compiled = torch.compile(project_categorical, fullgraph=True, backend="eager")
    assert_close(compiled(atoms, probs, support), project_categorical(atoms, probs, support))


def test_the_projection_differentiates_in_the_mass():
    atoms, probs = uniform(-2, 2, (2, 5), seed=0), probabilities((2, 5), seed=1).requires_grad_()
    support = nodes((-1.0, 1.0, 4))
    assert torch.autograd.gradcheck(lambda p: project_categorical(atoms, p, support), [probs])


@pytest.mark.parametrize("shape", [(3,), (3, 1), (2, 5), (3, 5, 1)])
def test_atoms_and_mass_of_different_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"atoms \[3, 5\] and probs .* must have the same shape"):
        project_categorical(torch.zeros(3, 5), torch.zeros(shape), torch.linspace(0, 1, 5))


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 1), (5, 3), (2, 3, 5)])
def test_a_support_that_is_no_row_of_nodes_is_refused(shape):
    with pytest.raises(ValueError, match=r"support must be `\[N\]` with N >= 2 nodes, or .* \[3, 5\], got shape"):
        project_categorical(torch.zeros(3, 5), torch.zeros(3, 5), torch.zeros(shape))
