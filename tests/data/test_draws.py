"""Laws of drawing: which states of an episode give its steps their goals, and how likely each is."""

from __future__ import annotations

import functools
import math
from collections import Counter

import pytest
import torch
from line_goals import not_by_chance

from torchrl_safety.data.draws import draw_distinct, draw_goals


@pytest.mark.parametrize("num_goals", range(1, 9))
@pytest.mark.parametrize("strategy", ["final", "episode", "future"])
def test_each_step_gets_as_many_distinct_goals_as_it_can(strategy, num_goals):
    rng = torch.Generator().manual_seed(0)
    for length in range(1, 7):
        seen = {t: Counter() for t in range(length)}
        for _ in range(60):
            step, state = (each.tolist() for each in draw_goals(strategy, length, num_goals, rng))
            assert step == sorted(step)
            for t in range(length):
                drawn = [k for s, k in zip(step, state) if s == t]
                offered = {"final": 1, "episode": length + 1, "future": length - t}[strategy]
                assert len(drawn) == len(set(drawn)) == min(offered, 1 if strategy == "final" else num_goals)
                seen[t].update(drawn)
        for t, counts in seen.items():
            whole = {"final": {length}, "episode": set(range(length + 1)), "future": set(range(t + 1, length + 1))}
            assert set(counts) == whole[strategy]


def test_every_set_of_goals_is_equally_likely():
    rng = torch.Generator().manual_seed(1)
    for count, num_draws in ((5, 1), (5, 3), (6, 2), (7, 7)):
        low = torch.arange(100_000)
        row, value = draw_distinct(low, torch.full_like(low, count), num_draws, rng)
        sets = (value - row).reshape(-1, num_draws).sort(-1).values
        counts = Counter(map(tuple, sets.tolist()))
        assert sum(counts.values()) == 100_000
        assert not not_by_chance(counts, math.comb(count, num_draws))


def test_the_check_of_uniformity_can_fail():
    assert not_by_chance(Counter({0: 50_500, 1: 49_500 - 1_500, 2: 50_000}), 3)
    assert not not_by_chance(Counter({0: 50_100, 1: 49_900, 2: 50_000}), 3)


def test_draws_repeat_with_their_generator_and_do_not_touch_the_global_one():
    make = functools.partial(draw_goals, "episode", 50, 4)
    torch.manual_seed(3)
    first = make(torch.Generator().manual_seed(5))
    drawn = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(3), drawn)
    second = make(torch.Generator().manual_seed(5))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("last", 3, 4), "strategy must be one of .* got 'last'"),
        (("random", 3, 4), "'random' takes goals of any episode"),
        (("final", 0, 4), "length must be an integer of at least 1, got 0"),
        (("final", 3, 0), "num_goal_samples must be an integer of at least 1, got 0"),
        (("final", 3, True), "num_goal_samples must be .* got True"),
    ],
)
def test_a_draw_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        draw_goals(*arguments)
