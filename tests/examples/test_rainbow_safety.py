"""What the main example alone has: a support that may be too narrow."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from runs import module


@pytest.mark.parametrize(
    ("shares", "warnings"),
    [([0.02] * 8, 1), ([0.02, 0.0, 0.02, 0.02, 0.02, 0.02, 0.0, 0.02, 0.02, 0.02], 1), ([0.02, 0.02, 0.0] * 4, 0)],
)
def test_mass_that_stays_beyond_the_support_is_told_once(shares, warnings):
    """MATH §4: one warning when the clipped share stays above 1 %."""
    warn_of_clipping = module("rainbow_safety")["warn_of_clipping"]
    said, rows = [], []
    for share in shares:
        rows.append({"clipped_mass": share})
        warn_of_clipping(SimpleNamespace(rows=rows, warn=said.append))
    assert len(said) == warnings
    assert all("widen problem.support" in text for text in said)


def test_scalar_values_have_no_support_to_warn_of():
    warn_of_clipping = module("rainbow_safety")["warn_of_clipping"]
    warn_of_clipping(SimpleNamespace(rows=[{"loss": 1.0}] * 5, warn=pytest.fail))
