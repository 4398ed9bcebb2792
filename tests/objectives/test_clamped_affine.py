"""Laws of the algebra of clamped affine maps, against folds over Python floats."""

from __future__ import annotations

import math

import pytest
import torch
from contracts import LAWS
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from torchrl_safety.objectives import ClampedAffine, clamped_affine

INF = math.inf
FINITE = st.floats(-100, 100, allow_subnormal=False)
SLOPES = st.one_of(st.just(0.0), st.just(1.0), st.floats(0.01, 2))
VALUES = st.one_of(FINITE, st.sampled_from([-INF, INF, 0.0]))


@st.composite
def maps(draw):
    """`(slope, offset, low, high)`; bounds may be infinite or equal."""
    low = draw(st.one_of(st.just(-INF), FINITE))
    gap = draw(st.one_of(st.just(0.0), st.just(INF), st.floats(0, 50, allow_subnormal=False)))
    high = INF if low == -INF and gap == 0 else max(low, 0.0 if low == -INF else low) + gap
    return draw(SLOPES), draw(FINITE), low, high


def as_map(*rows):
    """Maps with fields `[K, 1]` from K rows."""
    return ClampedAffine(*(torch.tensor(column, dtype=torch.float64).unsqueeze(-1) for column in zip(*rows)))


def apply(row, value):
    """One map on one Python float; a zero slope ignores the value."""
    slope, offset, low, high = row
    return min(max((slope * value if slope else 0.0) + offset, low), high)


def fold(rows, value):
    for row in reversed(rows):
        value = apply(row, value)
    return value


def column(*values):
    return torch.tensor(values, dtype=torch.float64).unsqueeze(-1)


def random_rows(length, seed, batch=3):
    """`batch` x `length` rows in which zero slopes, missing bounds and equal bounds all occur."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(4, batch, length, generator=generator, dtype=torch.float64)
    kind = torch.randint(6, (batch, length), generator=generator)
    slope = draw[0].abs() * (kind != 0)
    low = torch.where((kind == 1) | (kind == 5), -INF, draw[2])
    high = torch.where((kind == 2) | (kind == 5), INF, torch.where(kind == 1, 0, draw[2]) + draw[3].abs())
    high = torch.where(kind == 3, low, high)
    return torch.stack([slope, draw[1], low, high], -1).tolist()


def stacked(rows, dim=-2):
    """Maps with fields `[batch, length, 1]` (or the time axis elsewhere) from nested rows."""
    fields = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    return ClampedAffine(*(field.unsqueeze(-1).movedim(1, dim) for field in fields))


@given(maps(), VALUES)
@LAWS
def test_a_map_is_the_clamp_of_an_affine_function(row, value):
    assert as_map(row)(column(value)).item() == pytest.approx(apply(row, value), abs=1e-12)


@given(maps(), maps(), VALUES)
@LAWS
def test_composition_equals_application(outer, inner, value):
    both = as_map(outer) @ as_map(inner)
    assert_close(both(column(value)), as_map(outer)(as_map(inner)(column(value))), rtol=1e-12, atol=1e-9)
    assert both(column(value)).item() == pytest.approx(fold([outer, inner], value), rel=1e-12, abs=1e-9)


@given(maps(), maps(), maps(), VALUES)
@LAWS
def test_composition_is_associative(first, second, third, value):
    a, b, c = (as_map(row) for row in (first, second, third))
    left, right = (a @ b) @ c, a @ (b @ c)
    for one, other in zip(left.parts, right.parts):
        assert_close(one, other, rtol=1e-12, atol=1e-9)
    assert_close(left(column(value)), right(column(value)), rtol=1e-12, atol=1e-9)


@given(maps(), VALUES)
@LAWS
def test_the_identity_is_neutral_on_both_sides(row, value):
    one = as_map(row)
    neutral = ClampedAffine.identity_like(one.slope)
    assert torch.equal(neutral(column(value)), column(value))
    assert torch.equal((one @ neutral)(column(value)), one(column(value)))
    assert torch.equal((neutral @ one)(column(value)), one(column(value)))


@given(maps(), VALUES, VALUES)
@LAWS
def test_a_map_is_monotone(row, one, other):
    low, high = sorted((one, other))
    assert as_map(row)(column(low)).item() <= as_map(row)(column(high)).item()


@given(maps(), FINITE, FINITE)
@LAWS
def test_the_slope_is_a_lipschitz_constant(row, one, other):
    moved = abs(as_map(row)(column(one)) - as_map(row)(column(other))).item()
    assert moved <= row[0] * abs(one - other) + 1e-12 * (1 + 3 * 200)


@given(maps(), VALUES)
@LAWS
def test_the_image_stays_between_the_bounds(row, value):
    assert row[2] <= as_map(row)(column(value)).item() <= row[3]


@pytest.mark.parametrize("after", [math.nan, INF, -INF, 1e308])
def test_a_constant_ignores_its_argument_and_what_is_composed_with_it(after):
    constant = ClampedAffine.constant(column(0.25))
    assert constant(column(after)).item() == 0.25
    inner = ClampedAffine(column(1.0), column(after), column(-INF), column(after))
    for part, expected in zip((constant @ inner).parts, (0.0, 0.25, 0.25, 0.25)):
        assert part.item() == expected


def test_one_map_acts_on_every_entry_of_the_last_dimension():
    step, values = as_map((0.5, 1.0, 0.0, 1.5), (2.0, 0.0, -1.0, INF)), column(-4.0, 0.5, 3.0).T.expand(2, 3)
    assert torch.equal(step(values), torch.tensor([[0.0, 1.25, 1.5], [-1.0, 1.0, 6.0]], dtype=torch.float64))


@pytest.mark.parametrize("length", range(1, 10))
def test_compose_is_a_fold(length):
    rows = random_rows(length, seed=length)
    value = torch.randn(3, 1, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    composed = stacked(rows).compose()
    assert composed.slope.shape == (3, 1)
    expected = [[fold(row, v)] for row, v in zip(rows, value.squeeze(-1).tolist())]
    assert_close(composed(value), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("suffix", [False, True])
@pytest.mark.parametrize("length", range(1, 10))
def test_a_scan_holds_every_fold(length, suffix):
    rows = random_rows(length, seed=10 + length)
    value = torch.randn(3, length, 1, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    partial = stacked(rows).scan(suffix=suffix)(value).squeeze(-1)
    for b in range(3):
        for t in range(length):
            part = rows[b][t:] if suffix else rows[b][: t + 1]
            assert partial[b, t].item() == pytest.approx(fold(part, value[b, t].item()), rel=1e-12, abs=1e-12)


def by_doubling(maps, value):
    last = ClampedAffine.of(maps).scan(0, suffix=True)
    return last(value.expand_as(last.slope))


WAYS = {"in turn": clamped_affine._in_turn, "in blocks": clamped_affine._in_blocks, "doubling": by_doubling}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@every_way
@pytest.mark.parametrize("length", [*range(2, 41), 127])
def test_every_way_to_walk_back_holds_every_fold(way, length):
    rows = random_rows(length, seed=length, batch=2)
    value = torch.randn(2, 1, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    results = way(stacked(rows, dim=0).parts, value)
    assert results.shape == (length, 2, 1)
    for b in range(2):
        expected = value[b].item()
        for t in reversed(range(length)):
            expected = apply(rows[b][t], expected)
            assert results[t, b].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@every_way
@pytest.mark.parametrize("garbage", [math.nan, INF, -INF])
@pytest.mark.parametrize("length", [13, 26, 27])
def test_no_way_back_passes_a_constant(way, garbage, length):
    for stop in range(length):
        parts = torch.rand(4, length, 1, 1, generator=torch.Generator().manual_seed(stop), dtype=torch.float64)
        clean, dirty = parts.clone(), parts.clone()
        clean[3] = dirty[3] = INF
        for maps in (clean, dirty):
            maps[0, stop], maps[1:, stop] = 0, 0.5
        dirty[1:, stop + 1 :] = garbage
        expected = way(tuple(clean), column(1.0))[: stop + 1]
        assert expected.isfinite().all()
        assert torch.equal(way(tuple(dirty), column(garbage))[: stop + 1], expected)


@every_way
def test_a_nan_that_counts_is_seen_all_the_way_back(way):
    rows = [[(0.9, 0.0, -INF, 1.0)] * 27]
    assert way(stacked(rows, dim=0).parts, column(math.nan)).isnan().all()


def test_every_way_back_has_the_same_gradients():
    slope, offset, low, high = stacked(random_rows(27, seed=3), dim=0).parts
    high = high + (low == high)  # equal bounds may share their gradient in any way
    value = torch.randn(3, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (offset, low, high, value)]
    weights = torch.randn(27, 3, 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def gradients(way):
        return torch.autograd.grad((way((slope, *inputs[:3]), value) * weights).sum(), inputs)

    expected = gradients(WAYS["in turn"])
    for way in WAYS.values():
        for one, other in zip(gradients(way), expected):
            assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_gradients_of_slopes_are_finite_beside_infinite_bounds():
    slope, *others = stacked(random_rows(27, seed=3, batch=1), dim=0).parts
    value = torch.randn(1, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    slope.requires_grad_()
    assert torch.autograd.gradcheck(lambda slope: clamped_affine.suffix_values((slope, *others), value), [slope])


@pytest.mark.parametrize("ignored", [math.nan, INF, 3.0])
def test_an_ignored_value_gets_no_gradient_and_spoils_none(ignored):
    fields = [column(x).requires_grad_() for x in (0.0, 0.5, -INF, INF)]
    value = column(ignored).requires_grad_()
    gradients = torch.autograd.grad(ClampedAffine(*fields)(value), [*fields, value])
    assert [gradient.item() for gradient in gradients] == [0.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("length", "width", "way"),
    [
        (1, 1, "in turn"),
        (16, 4096, "in turn"),
        (128, 4096, "in turn"),
        (1000, 1, "in blocks"),
        (1000, 64, "in blocks"),
        (2048, 16, "in blocks"),
        (48, 1024, "in blocks"),
    ],
)
def test_the_way_back_depends_on_the_shape_alone(length, width, way):
    assert clamped_affine._fastest(length, width) is WAYS[way]


@pytest.mark.parametrize("suffix", [False, True])
def test_time_may_stand_in_any_dimension(suffix):
    rows = random_rows(5, seed=0)
    late, early = stacked(rows), stacked(rows, dim=0)
    for expected, part in zip(late.scan(suffix=suffix).parts, early.scan(0, suffix=suffix).parts):
        assert torch.equal(expected, part.movedim(0, 1))
    for expected, part in zip(late.compose().parts, early.compose(0).parts):
        assert torch.equal(expected, part)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_value_through_the_steps_in_turn_is_that_of_their_composition(steps):
    rows, values = stacked(random_rows(steps, seed=3)), torch.linspace(-3, 3, 7, dtype=torch.float64)
    values = values.expand(*rows.slope.shape[:-2], 7)
    torch.testing.assert_close(rows.in_turn(values), rows.compose()(values), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="does not fit a map of shape"):
        rows.in_turn(values.squeeze(0)[..., 0])


def test_an_ended_map_is_a_constant_where_the_mask_says_so():
    step = as_map((1.0, 0.0, -1.0, 1.0), (1.0, 0.0, -1.0, 1.0))
    ended = step.ended(torch.tensor([[False], [True]]), column(9.0, 8.0))
    assert ended(column(0.5, 0.5)).squeeze(-1).tolist() == [0.5, 8.0]
    assert ended(column(0.5, torch.nan)).squeeze(-1).tolist() == [0.5, 8.0]
    for found, expected in zip(ended.parts, ClampedAffine.constant(column(9.0, 8.0)).parts):
        assert found[1] == expected[1]


@pytest.mark.parametrize("shape", [(3,), (3, 1, 1), (1, 3), (2, 1)])
def test_a_value_of_another_shape_is_refused(shape):
    step = ClampedAffine.identity_like(torch.zeros(3, 1))
    with pytest.raises(ValueError, match=r"does not fit a map of shape \[3, 1\].*trailing dimension"):
        step(torch.zeros(shape))


def test_there_is_nothing_to_compose_in_an_empty_window():
    with pytest.raises(ValueError, match="length 0; pass at least one step"):
        ClampedAffine.identity_like(torch.zeros(3, 0, 1)).compose()


def test_an_empty_scan_is_empty():
    assert ClampedAffine.identity_like(torch.zeros(3, 0, 1)).scan().slope.shape == (3, 0, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_maps_keep_their_dtype(dtype):
    step = ClampedAffine.identity_like(torch.zeros(2, 4, 1, dtype=dtype))
    step = step @ ClampedAffine.constant(torch.ones(2, 4, 1, dtype=dtype))
    assert {part.dtype for part in (*step.parts, *step.scan().parts, *step.compose().parts)} == {dtype}
    assert step(torch.zeros(2, 4, 3, dtype=dtype)).dtype == dtype


def test_maps_live_on_any_device():
    step = ClampedAffine.identity_like(torch.zeros(2, 4, 1, device="meta"))
    step = step @ ClampedAffine.constant(torch.zeros(2, 4, 1, device="meta"))
    assert {part.device.type for part in (*step.scan().parts, *step.compose().parts)} == {"meta"}
    assert step.compose()(torch.zeros(2, 7, device="meta")).shape == (2, 7)


def algebra(step, other, value):
    """One of everything that maps with fields `[*B, T, 1]` do, on a value `[*B, 1]`."""
    both = ClampedAffine(*step.parts).after(other)
    ends = both.ended(step.slope > 1, step.slope)
    partial = ends.scan(suffix=True)(ClampedAffine.identity_like(step.offset)(step.offset))
    return partial, both.compose()(value)


def two_random_maps():
    value = torch.randn(3, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return stacked(random_rows(5, seed=0)), stacked(random_rows(5, seed=1)), value


def test_maps_compile_without_graph_breaks():
    torch.compiler.reset()
    compiled = torch.compile(algebra, fullgraph=True, backend="eager")
    for result, expected in zip(compiled(*two_random_maps()), algebra(*two_random_maps())):
        assert_close(result, expected)


def test_maps_can_be_vmapped():
    one, other, value = two_random_maps()

    def of_parts(parts, others, value):
        step, following = ClampedAffine(*parts), ClampedAffine(*others)
        return *algebra(step, following, value), (step @ following).compose()(value)

    results = torch.vmap(of_parts)(one.parts, other.parts, value)
    for result, expected in zip(results, of_parts(one.parts, other.parts, value)):
        assert_close(result, expected)


def test_a_map_is_built_from_four_parts_by_position_or_name():
    one = torch.ones(2, 1)
    by_name = ClampedAffine(slope=one, offset=2 * one, low=3 * one, high=4 * one)
    by_position = ClampedAffine(one, 2 * one, 3 * one, 4 * one)
    assert all(torch.equal(*pair) for pair in zip(by_name.parts, by_position.parts))
    with pytest.raises(TypeError, match=r"ClampedAffine.__init__\(\) missing 1 required positional argument: 'high'"):
        ClampedAffine(one, one, one)
