"""Laws of the best response: it does harm where harm can be done, and none where none can."""

from __future__ import annotations

import pytest
import torch
from line_game import LineGameEnv, constant
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from torchrl_safety.envs import DoubleIntegratorEnv
from torchrl_safety.modules import TwoPlayerPolicy, ZeroDisturbance
from torchrl_safety.trainers import League, best_response, evaluate, responses


def respond(env, controller, **settings):
    torch.manual_seed(0)
    options = {"max_steps": 4, "rollout_steps": 4, "minibatch": 128, "hidden": (16,), "episodes": 20}
    found = best_response(env, controller, 4096, **{**options, **settings})
    assert found.disturbance.out_keys == ["disturbance"]
    assert not any(parameter.requires_grad for parameter in found.disturbance.parameters())
    return found, dict(zip(found.cross_play.disturbances, found.cross_play.rates[0].tolist()))


@pytest.mark.parametrize("discrete", [True, False])
def test_it_breaks_a_controller_that_does_nothing(discrete):
    env = LineGameEnv(32, discrete=discrete)
    controller = constant(1)
    if not discrete:
        controller = ZeroDisturbance(env.full_action_spec["action"], out_key="action")
    # Four whole pushes the same way lead beyond the wall, or six of more than half; few draws do.
    _, rates = respond(env, controller, **({} if discrete else {"max_steps": 6, "rollout_steps": 6}))
    assert rates["zero"] == 1.0
    assert rates["random"] > 0.5
    assert rates["best response"] <= 0.1


def test_it_breaks_no_controller_that_nothing_breaks():
    # |x| <= 2 under any disturbance: worked out by hand over the five positions that occur.
    back = TensorDictModule(lambda state: (1 - state[..., 0].sign()).long(), ["observation"], ["action"])
    _, rates = respond(LineGameEnv(32), back, max_steps=50)
    assert set(rates.values()) == {1.0}


def test_in_a_reach_avoid_game_it_keeps_the_controller_from_the_target():
    env = LineGameEnv(32, problem="reach_avoid", end_criterion="reach_avoid")
    helper = {"trained": constant(2, "disturbance")}
    found, rates = respond(env, constant(1), problem="reach_avoid", disturbances=helper)
    assert found.cross_play.disturbances == ("zero", "random", "trained", "best response")
    assert (rates["zero"], rates["trained"]) == (0.0, 1.0)
    assert rates["best response"] == 0.0
    # A control that runs to the target is first held back to x = 1, then pushed past the wall.
    _, rates = respond(env, constant(2), problem="reach_avoid")
    assert (rates["zero"], rates["best response"]) == (1.0, 0.0)


def test_the_players_of_a_league_join_the_comparison():
    env = LineGameEnv(60)
    league = League(env, constant(0), constant(2, "disturbance"), max_steps=4, frames_per_step=480, interval=100)
    league.update(100)
    found, rates = respond(env, constant(1), league=league)
    assert found.cross_play.controllers == ("controller", "controller 100")
    assert list(rates) == ["zero", "random", "disturbance 100", "best response"]
    assert rates["disturbance 100"] == 0.0
    assert found.cross_play.rates[1].tolist() == [0.0] * 4
    row = found.cross_play.table()[0]
    assert (row["disturbance"], row["rate"], row["high"]) == ("zero", 1.0, 1.0)
    assert row["low"] == pytest.approx(0.025 ** (1 / row["episodes"]))


def test_the_controller_does_not_learn():
    controller = constant(1)
    before = controller.module.action.clone()
    respond(LineGameEnv(32), controller)
    assert torch.equal(controller.module.action, before)
    assert controller.module.action.grad is None
    assert controller.module.action.requires_grad


def test_a_budget_below_one_iteration_is_refused():
    with pytest.raises(ValueError, match="budget is 767 frames; it must be a whole number of at least 768"):
        best_response(LineGameEnv(32), constant(1), 767, max_steps=4)


def looking_ahead(max_disturbance: float) -> TensorDictModule:
    """The control whose worst next state has the greatest exact value, of the game or of a single player."""
    env = DoubleIntegratorEnv(1, max_disturbance=max_disturbance)
    controls, pushes = torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([-max_disturbance, max_disturbance])

    def act(state):
        after = env.dynamics(
            state[..., None, None, :],
            controls[:, None, None].expand(3, 2, 1),
            pushes[None, :, None].expand(3, 2, 1),
        )
        return env.exact_value(after).amin(-1).argmax(-1)

    return TensorDictModule(act, ["observation"], ["action"])


@pytest.mark.slow
def test_it_fails_within_the_set_of_one_player_and_not_within_that_of_the_game():
    env = DoubleIntegratorEnv(64, max_disturbance=0.5, seed=0)
    alone, many = DoubleIntegratorEnv(1), DoubleIntegratorEnv(300, max_disturbance=0.5)
    states = env.sample_states(20_000, torch.Generator().manual_seed(1))
    inside = states[env.well_inside(states, 0.95)][:300]
    between = states[alone.well_inside(states, 0.98) & ~env.exact_safe(states)][:300]

    def safe_rate(controller, disturbance, starts):
        return evaluate(many, TwoPlayerPolicy(controller, disturbance), starts=starts, max_steps=200).safe_rate

    torch.manual_seed(0)
    naive, robust = looking_ahead(0.0), looking_ahead(0.5)
    against_naive = best_response(env, naive, 60_000, max_steps=96, episodes=8).disturbance
    against_robust = best_response(env, robust, 30_000, max_steps=96, episodes=8).disturbance
    zero = ZeroDisturbance(env.full_action_spec["disturbance"], zero_index=1)
    assert safe_rate(naive, zero, between) == 1.0
    assert safe_rate(naive, against_naive, between) <= 0.1
    assert safe_rate(robust, against_robust, inside) == 1.0
    assert safe_rate(robust, against_naive, inside) == 1.0


def test_of_several_trainings_the_disturbance_that_wins_most_is_kept(monkeypatch):
    env, drawn = LineGameEnv(32), iter([1, 2, 1])
    monkeypatch.setattr(responses, "_learner", lambda *_: (constant(next(drawn), "disturbance"), None))
    monkeypatch.setattr(responses, "_train", lambda *_, **__: 5)
    found, rates = respond(env, constant(1), restarts=3)
    assert found.updates == 15
    assert rates["best response"] == rates["zero"] - 1 == 0.0  # the second always pushes
    assert found.disturbance(env.reset())["disturbance"].unique().tolist() == [2]


def test_its_matches_begin_where_they_are_told_to():
    # One push leads beyond the wall at 3.5 from x = 3, and not from 0.
    env, push = LineGameEnv(32), {"trained": constant(2, "disturbance")}
    for x, safe in ((0.0, 1.0), (3.0, 0.0)):
        settings = {"starts": torch.full((3, 1), x), "max_steps": 1, "rollout_steps": 1}
        _, rates = respond(env, constant(1), disturbances=push, **settings)
        assert (rates["zero"], rates["trained"]) == (1.0, safe)


def test_an_encoder_stands_before_both_networks():
    class Blind(torch.nn.Module):
        out_features = 1

        def forward(self, x):
            return 0 * x

    blind = Blind()
    found, rates = respond(LineGameEnv(32), constant(1), encoder=blind)
    # Whatever the state, it pushes the same way, which is enough here.
    layers = [part for part in found.disturbance.modules() if isinstance(part, Blind)]
    assert len(layers) == 1
    assert layers[0] is not blind
    states = {"observation": torch.linspace(-3, 3, 7).unsqueeze(-1)}
    assert len(found.disturbance(TensorDict(states, [7]))["disturbance"].unique()) == 1
    assert rates["best response"] == 0.0


@pytest.mark.parametrize("restarts", [0, 1.5, None])
def test_no_training_at_all_is_refused(restarts):
    with pytest.raises(ValueError, match=f"restarts is {restarts}; at least one disturbance must be trained"):
        respond(LineGameEnv(32), constant(1), restarts=restarts)
