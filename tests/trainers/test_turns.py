"""Update periods that really apply: which player's parameters move at which update."""

from __future__ import annotations

import pytest
import torch
from contracts import LOSSES
from torch import nn

from torchrl_safety.trainers import UpdatePeriods

CASES = [case for case in LOSSES if case.family in ("game SAC", "game PPO")][::2]
EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.family)
OF_PLAYERS = {"controller": ("actor_network",), "disturbance": ("disturbance_network", "disturbance_loss")}


def moved_at_each_update(case, updates: int, **periods) -> list[set[str]]:
    """The players whose policies changed at each update of an optimiser with momentum, which drifts if it is let."""
    loss, batch = case.build(), case.batch()
    turns, optimizer = UpdatePeriods(loss, **periods), torch.optim.Adam(loss.parameters(), 1e-2)
    found = []
    for _ in range(updates):
        turns.step()
        before = {name: value.detach().clone() for name, value in loss.named_parameters()}
        optimizer.zero_grad()
        result = loss(batch.clone())
        sum(result[term] for term in case.terms).backward()
        optimizer.step()
        moved = [name for name, value in loss.named_parameters() if not torch.equal(value, before[name])]
        assert any(name.startswith(("qvalue_network", "critic_network")) for name in moved)
        found.append({p for p, prefixes in OF_PLAYERS.items() if any(name.startswith(prefixes) for name in moved)})
    return found


@EACH
def test_a_player_of_period_five_learns_at_one_update_in_five(case):
    found = moved_at_each_update(case, 10, controller=5)
    assert [update for update, moved in enumerate(found) if "controller" in moved] == [4, 9]
    assert all("disturbance" in moved for moved in found)


@EACH
def test_in_alternating_phases_one_player_learns_at_a_time(case):
    found = moved_at_each_update(case, 7, controller=2, disturbance=3, alternating=True)
    assert found == [{"controller"}] * 2 + [{"disturbance"}] * 3 + [{"controller"}] * 2


def test_a_resumed_run_keeps_its_turns():
    loss = CASES[0].build()
    one, other = UpdatePeriods(loss, controller=3), UpdatePeriods(loss, controller=3)
    one.step()
    other.load_state_dict(one.state_dict())
    assert [one.step() for _ in range(5)] == [other.step() for _ in range(5)]
    assert loss.active_players == ("controller", "disturbance")


def test_what_takes_no_turns_is_refused():
    with pytest.raises(ValueError, match="Linear has no players that take turns"):
        UpdatePeriods(nn.Linear(1, 1))
    for period in (0, 1.5):
        with pytest.raises(ValueError, match=f"disturbance is {period}"):
            UpdatePeriods(CASES[0].build(), disturbance=period)
