"""Laws of the discount schedule (γ(f) = min(γ_end, 1 - (1-γ0)·ratio^⌊f/period⌋))."""

from __future__ import annotations

import pytest

from torchrl_safety.trainers import StepGamma


def test_the_defaults_step_at_a_fifth_and_two_fifths_of_the_budget():
    schedule = StepGamma(1000)
    values = {frames: schedule.step(frames) for frames in (0, 199, 200, 399, 400, 999, 5000)}
    assert values == {0: 0.99, 199: 0.99, 200: 0.999, 399: 0.999, 400: 0.9999, 999: 0.9999, 5000: 0.9999}


@pytest.mark.parametrize("period", [0.1, 0.18, 0.2, 1 / 3])
def test_every_multiple_of_the_period_is_a_step_in_spite_of_rounding(period):
    total = 900_000
    schedule = StepGamma(total, gamma_start=0.5, ratio=0.5, period=period, gamma_end=1.0)
    for k in range(1, int(1 / period) + 1):
        assert schedule.step(round(k * period * total)) == pytest.approx(1 - 0.5 ** (k + 1), abs=1e-12)


def test_the_discount_never_decreases_on_resume_with_a_longer_budget():
    first = StepGamma(1000)
    reached = first.step(450)
    longer = StepGamma(100_000)
    longer.load_state_dict(first.state_dict())
    assert longer.step(451) == reached == 0.9999


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"gamma_start": 1.2}, "gamma_start=1.2"),
        ({"gamma_start": 0.99, "gamma_end": 0.9}, "gamma_end=0.9"),
        ({"ratio": 1.0}, "ratio is 1.0"),
        ({"period": 0.0}, "period is 0.0"),
        ({"total_frames": 0}, "total_frames is 0"),
        ({"total_frames": float("nan")}, "total_frames is nan"),
    ],
)
def test_a_setting_out_of_range_is_named_with_its_value(settings, named):
    with pytest.raises(ValueError, match=named):
        StepGamma(**{"total_frames": 1000, **settings})
