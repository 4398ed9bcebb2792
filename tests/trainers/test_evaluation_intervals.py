"""Rates of episodes and their intervals, against exact binomial tests."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from scipy.stats import binomtest
from script_env import ScriptEnv, starts_of, still

from torchrl_safety.trainers import binomial_interval, evaluate


def test_an_interval_is_that_of_scipys_exact_test():
    for total in (1, 2, 7, 100, 1000):
        for count in {0, 1, total // 3, total - 1, total}:
            for confidence in (0.5, 0.95, 0.999):
                expected = binomtest(count, total).proportion_ci(confidence, method="exact")
                assert binomial_interval(count, total, confidence=confidence) == pytest.approx(expected, abs=1e-9)


def test_at_the_ends_of_an_interval_so_extreme_a_count_has_half_of_the_remaining_probability():
    def probability(counts, total, p):
        return float(sum(math.comb(total, k) * p**k * (1 - p) ** (total - k) for k in counts))

    for total in range(1, 8):
        for count in range(total + 1):
            low, high = map(Fraction, binomial_interval(count, total, confidence=0.9))
            if count:
                assert probability(range(count, total + 1), total, low) == pytest.approx(0.05)
            if count < total:
                assert probability(range(count + 1), total, high) == pytest.approx(0.05)
    assert binomial_interval(0, 3)[0] == 0.0
    assert binomial_interval(3, 3)[1] == 1.0


def test_an_interval_covers_the_true_rate_with_its_confidence_at_every_rate():
    for total in (1, 5, 12):
        intervals = [binomial_interval(k, total, confidence=0.8) for k in range(total + 1)]
        for rate in (0.0, 0.05, 0.3, 0.5, 0.91, 1.0):
            mass = [math.comb(total, k) * rate**k * (1 - rate) ** (total - k) for k in range(total + 1)]
            covered = sum(m for m, (low, high) in zip(mass, intervals) if low <= rate <= high)
            assert covered >= 0.8 - 1e-12


def test_the_rates_come_with_their_intervals():
    g = torch.zeros(10, 2)
    g[:3, 1] = -1
    env = ScriptEnv(g, g, torch.zeros(10, 1).long(), batch=(4,))
    found = evaluate(env, still, starts=starts_of(10), max_steps=1, confidence=0.8)
    assert found.safe_interval == binomial_interval(7, 10, confidence=0.8)
    assert found.success_interval == binomial_interval(10, 10, confidence=0.8)
    assert found.scores == {
        "mean_return": None,
        "std_return": None,
        "safe_rate": 0.7,
        "safe_rate_low": found.safe_interval[0],
        "safe_rate_high": found.safe_interval[1],
        "success_rate": 1.0,
        "success_rate_low": found.success_interval[0],
        "success_rate_high": 1.0,
        "episodes": 10,
        "mean_length": 1.0,
        "seconds": found.seconds,
    }
    assert found.seconds > 0


@pytest.mark.parametrize(("count", "total"), [(-1, 3), (4, 3), (0, 0)])
def test_an_interval_of_no_count_is_refused(count, total):
    with pytest.raises(ValueError, match=f"count={count} of total={total}"):
        binomial_interval(count, total)
