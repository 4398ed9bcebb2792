"""What every loss of two players refuses, and which of them it trains."""

from __future__ import annotations

import copy

import pytest
import torch
from contracts import Keys
from game_cases import CASES, CATEGORICAL, DQN, PPO, SAC, close, run

from torchrl_safety.objectives import AvoidBackup, IsaacsPPOLoss

EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.loss.__name__)
TAKING_TURNS = pytest.mark.parametrize("case", [SAC, PPO], ids=lambda case: case.family)


@EACH
def test_a_batch_without_the_disturbance_is_refused_by_name(case):
    with pytest.raises(KeyError, match=r"'disturbance' is missing; present: .*set_keys"):
        run(case.build(), case.batch().exclude("disturbance"))


@EACH
def test_one_terminal_type_holds_for_both_players(case):
    loss = case.build(terminal_type="g")
    problem = "AvoidBackup()" if isinstance(case.backup, AvoidBackup) else "ReachAvoidBackup(terminal_type='g')"
    assert repr(loss.backup) == problem
    estimators = [part for part in loss.modules() if hasattr(part, "backup") and hasattr(part, "step_maps")]
    assert {repr(part.backup) for part in estimators} <= {problem}


@pytest.mark.parametrize("case", [DQN, CATEGORICAL], ids=lambda case: case.family)
def test_a_disturbance_out_of_range_is_refused(case):
    loss, batch = case.build(), case.batch()
    batch["disturbance"][0] = 2
    with pytest.raises(ValueError, match=r"a disturbance lies outside 0\.\.1"):
        loss(batch)


def test_players_that_write_the_same_key_are_refused():
    actor, _, critic = PPO.networks(Keys())
    with pytest.raises(ValueError, match="the players share a key"):
        IsaacsPPOLoss(actor, copy.deepcopy(actor), critic)


def test_settings_of_the_disturbance_alone():
    plain, other = PPO.build(), PPO.build(disturbance_settings={"entropy_coeff": 0.5, "clip_epsilon": 0.1})
    expected, found = run(plain, PPO.batch()), run(other, PPO.batch())
    close(found["loss_entropy_disturbance"], expected["loss_entropy_disturbance"] * 50, 1e-6)
    close(found["loss_entropy_controller"], expected["loss_entropy_controller"])
    for name in ("advantage_norm", "delay_actor"):
        with pytest.raises(ValueError, match=f"{name} is True, which a game cannot take"):
            PPO.build(**{name: True})


@TAKING_TURNS
@pytest.mark.parametrize("active", [(), ("controller",), ("disturbance",), ("disturbance", "controller")])
def test_a_player_that_rests_has_losses_of_zero_without_a_gradient(case, active):
    loss, batch = case.build(), case.batch()
    expected = run(loss, batch.clone())
    loss.active_players = active
    found = run(loss, batch)
    for name in case.terms:
        rests = any(player in name and player not in active for player in ("controller", "disturbance"))
        close(found[name], torch.zeros(()) if rests else expected[name])
        assert found[name].requires_grad != rests
    assert {*loss.out_keys} <= {*found.keys()}


@TAKING_TURNS
def test_the_critic_of_a_resting_player_is_not_asked(case, monkeypatch):
    loss, batch = case.build(active_players=()), case.batch()
    if case is SAC:
        asked = []
        monkeypatch.setattr(
            loss, "_critics", lambda *inputs: asked.append(inputs) or type(loss)._critics(loss, *inputs)
        )
        run(loss, batch)
        assert len(asked) == 2  # of the batch, and of the next states
    else:
        monkeypatch.setattr(loss.disturbance_loss, "forward", lambda _: pytest.fail("the disturbance rests"))
        run(loss, batch)


@TAKING_TURNS
def test_who_may_be_active_is_checked(case):
    for players in ("controller", ("pilot",), ("controller", "pilot")):
        with pytest.raises(ValueError, match="active_players is"):
            case.build(active_players=players)


@pytest.mark.slow
@TAKING_TURNS
def test_a_loss_compiles_for_each_turn(case):
    torch._dynamo.reset()
    loss, batch = case.build(), case.batch()
    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    for active in (("controller",), ("disturbance",)):
        loss.active_players = active
        expected, found = run(loss, batch.clone()), run(compiled, batch.clone())
        for name in case.terms:
            close(found[name], expected[name], 1e-12)
