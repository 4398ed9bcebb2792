"""Tables of actions, and checks whose messages name the setting, its value and the remedy."""

from __future__ import annotations

import math

import pytest
import torch

from torchrl_safety.envs.settings import (
    action_levels,
    check_box,
    check_choice,
    check_count,
    check_dtype,
    check_generator,
    check_positive,
    check_share,
)


def test_levels_are_every_combination_of_both_bounds_and_nothing():
    table = action_levels(2.0, 0.5)
    assert table.shape == (9, 2)
    assert table.dtype == torch.float64
    assert sorted(map(tuple, table.tolist())) == [(u, w) for u in (-2.0, 0.0, 2.0) for w in (-0.5, 0.0, 0.5)]
    assert torch.equal(table, -table.flip(0))


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: check_count("copies", 0, "or none"), "copies=0 must be a whole number of at least 1, or none"),
        (lambda: check_count("copies", True, "or none"), "copies=True must be a whole number"),
        (
            lambda: check_choice("color", "red", ("blue", "green")),
            "color='red' is unknown: choose one of 'blue', 'green'",
        ),
        (lambda: check_positive(first=1.0, second=0.0), "second=0.0 must be positive and finite"),
        (lambda: check_positive(first=math.nan), "first=nan must be positive and finite"),
        (lambda: check_positive(first=math.inf), "first=inf must be positive and finite"),
        (lambda: check_share(0.0, "of the cake"), r"share=0.0 must lie in \(0, 1\]: of the cake"),
        (lambda: check_share(math.nan, "of the cake"), "share=nan must lie"),
        (lambda: check_dtype(torch.int32), "dtype=torch.int32 must be a floating-point type"),
        (lambda: check_generator(3, None), "generator=3 must be a torch.Generator"),
        (lambda: check_generator(torch.Generator(), 1), "seed=1 and generator=... exclude each other"),
        (lambda: check_box("x, v", (0.0,), (1.0,)), r"start_low=\(0.0,\) and .* must be finite \(x, v\)"),
        (lambda: check_box("x, v", (0.0, 2.0), (1.0, 1.0)), "with low <= high"),
        (lambda: check_box("x", (math.nan,), (1.0,)), "must be finite"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(check, message):
    with pytest.raises(ValueError, match=message):
        check()


def test_right_settings_pass():
    check_count("copies", 1, "")
    check_choice("color", "red", ("red",))
    check_positive(first=1e-300, second=3)
    check_share(1.0, "")
    check_dtype(torch.float16)
    check_generator(None, 1)
    check_generator(torch.Generator(), None)
    low, high = check_box("x, v", (0, 1.0), torch.tensor([0.0, 1.0]))
    assert low.tolist() == high.tolist() == [0.0, 1.0]
