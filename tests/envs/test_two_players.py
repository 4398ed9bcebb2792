"""What every environment with a disturbance keeps to: keys, motion, mirror images, draws and errors."""

from __future__ import annotations

import io
import itertools

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs.utils import check_env_specs
from two_player_games import GAMES, Game

from torchrl_safety.envs import DoubleIntegratorEnv, check_safety_env
from torchrl_safety.modules import RandomDisturbance, TwoPlayerPolicy, ZeroDisturbance

EVERY = pytest.mark.parametrize("game", GAMES, ids=lambda game: game.name)
PLAYERS = ("action", "disturbance")


def actions(env, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Uniform controls and disturbances `[n, C]` within their bounds."""
    generator = torch.Generator().manual_seed(1)
    pair = []
    for player in PLAYERS:
        space = env.full_action_spec[player].space
        unit = torch.rand(n, space.low.shape[-1], generator=generator, dtype=env.dtype)
        pair.append(space.low[:1] + unit * (space.high - space.low)[:1])
    return pair[0], pair[1]


@EVERY
def test_every_combination_of_settings_fulfils_its_specs_and_has_no_fault(game: Game):
    for problem, discrete, dtype in itertools.product(
        ("avoid", "reach_avoid"), (True, False), (torch.float32, torch.float64)
    ):
        env = game.build(5, problem=problem, discrete=discrete, max_steps=6, dtype=dtype, seed=0)
        check_env_specs(env, break_when_any_done="both")
        check_safety_env(env, steps=30)
        data = env.rollout(9, break_when_any_done=False)
        for player in PLAYERS:
            spec = env.full_action_spec[player]
            assert data[player].shape == (5, 9, *spec.shape[1:])
            assert data[player].dtype == (torch.int64 if discrete else dtype)
        for part in (data, data["next"]):
            assert torch.equal(part["safety_margin"], env.safety_margin(part["observation"]))
            assert ("target_margin" in part.keys()) == (problem == "reach_avoid")  # noqa: SIM118


@EVERY
def test_a_step_follows_the_equations_of_motion(game: Game):
    env = game.build(40, discrete=False, dtype=torch.float64, seed=0)
    states, (controls, disturbances) = game.states(40), actions(env, 40)
    start = env.reset(TensorDict({"observation": states}, [40]))
    following = env.step(start.update({"action": controls, "disturbance": disturbances}))["next", "observation"]
    for row in range(40):
        u, d = controls[row].numpy(), disturbances[row].numpy()
        path = solve_ivp(
            lambda _, s, u=u, d=d: game.slope(s, u, d), (0, env.dt), states[row].numpy(), rtol=1e-11, atol=1e-12
        )
        error = following[row].numpy() - path.y[:, -1]
        turns = list(env.angles)
        error[turns] = np.remainder(error[turns] + np.pi, 2 * np.pi) - np.pi
        np.testing.assert_allclose(error, 0, atol=1e-9 if game.exact else 3e-5)


@EVERY
def test_a_mirror_image_moves_as_the_mirror_image(game: Game):
    env = game.build(1, problem="reach_avoid", discrete=False, dtype=torch.float64)
    states, (controls, disturbances) = game.states(300), actions(env, 300)
    signs = [torch.tensor(sign, dtype=torch.float64) for sign in game.mirror]
    moved = env.dynamics(states, controls, disturbances)
    reflected = env.dynamics(states * signs[0], controls * signs[1], disturbances * signs[2])
    error = reflected - moved * signs[0]
    turns = list(env.angles)
    error[:, turns] = torch.atan2(error[:, turns].sin(), error[:, turns].cos())
    torch.testing.assert_close(error, torch.zeros_like(error), atol=1e-12, rtol=0)
    for margin in (env.safety_margin, env.target_margin):
        torch.testing.assert_close(margin(states * signs[0]), margin(states), atol=1e-12, rtol=0)


@EVERY
def test_discrete_actions_are_rows_whose_extremes_are_the_bounds(game: Game):
    discrete, continuous = (game.build(1, discrete=kind, dtype=torch.float64) for kind in (True, False))
    for player in PLAYERS:
        table = discrete.control(torch.arange(discrete.full_action_spec[player].n), player)
        space = continuous.full_action_spec[player].space
        assert torch.equal(table.amin(0), space.low[0])
        assert torch.equal(table.amax(0), space.high[0])
        assert torch.equal(table.amin(0), -table.amax(0))
        assert len(table.unique(dim=0)) == len(table)
        for env in (discrete, continuous):
            nothing = env.zero_action(player)
            assert env.full_action_spec[player].is_in(nothing)
            assert not env.control(nothing, player).any()


@EVERY
def test_motion_and_margins_take_any_batch_and_dtype(game: Game):
    env = game.build(1, problem="reach_avoid", discrete=False, dtype=torch.float32)
    states, (controls, disturbances) = game.states(24), actions(env, 24)
    expected = [env.dynamics(states, controls.double(), disturbances.double()), *map(env.safety_margin, [states])]
    for shape, dtype in itertools.product(((24,), (2, 3, 4)), (torch.float32, torch.float64)):
        s, u, d = (part.to(dtype).reshape(*shape, -1) for part in (states, controls, disturbances))
        got = [env.dynamics(s, u, d), env.safety_margin(s)]
        for result, want in zip(got, expected):
            assert result.dtype == dtype
            torch.testing.assert_close(result.double(), want.reshape(*shape, -1), atol=1e-4, rtol=1e-4)
    one = env.dynamics(states[0], controls[0].double(), disturbances[0].double())
    torch.testing.assert_close(one, expected[0][0])


@EVERY
def test_without_a_disturbance_nothing_pushes(game: Game):
    env = game.build(1, discrete=False, dtype=torch.float64)
    states, (controls, disturbances) = game.states(50), actions(env, 50)
    assert torch.equal(env.dynamics(states, controls), env.dynamics(states, controls, torch.zeros_like(disturbances)))
    assert not torch.equal(env.dynamics(states, controls), env.dynamics(states, controls, disturbances))


@EVERY
def test_both_players_have_to_act(game: Game):
    env = game.build(2, seed=0)
    state = env.reset()
    with pytest.raises(KeyError, match=r"'disturbance' is missing, .*let both players act"):
        env.step(state.clone().set("action", env.zero_action("action")))
    with pytest.raises(KeyError, match=r"'action' is missing"):
        env.step(state.clone().set("disturbance", env.zero_action()))
    beyond = torch.full((2,), env.full_action_spec["disturbance"].n)
    with pytest.raises(ValueError, match="disturbance has an index outside 0"):
        env.step(state.set("action", env.zero_action("action")).set("disturbance", beyond))


@EVERY
def test_starts_are_in_their_box_seeded_and_saved(game: Game):
    env = game.build(4000, seed=3)
    states = env.reset()["observation"]
    assert (states >= env._start_low - 1e-5).all()
    assert (states <= env._start_high + 1e-5).all()
    middle, width = (env._start_low + env._start_high) / 2, env._start_high - env._start_low
    assert ((states.mean(0) - middle).abs() < 0.03 * width).all()
    assert torch.equal(game.build(4000, seed=3).reset()["observation"], states)
    file = io.BytesIO()
    torch.save(env.state_dict(), file)
    expected = env.reset()["observation"]
    other = game.build(4000, seed=9)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.reset()["observation"], expected)


@EVERY
def test_a_collector_gathers_both_actions(game: Game):
    collector = Collector(game.build(4, max_steps=5, seed=0), None, frames_per_batch=40, total_frames=40)
    (batch,) = [batch.clone() for batch in collector]
    collector.shutdown()
    assert {"action", "disturbance"} <= set(batch.keys())
    assert torch.equal(batch["next", "terminated"], batch["next", "safety_margin"] < 0)


@EVERY
def test_an_environment_built_for_a_device_does_not_touch_the_default_one(game: Game):
    with torch.device("meta"):  # which holds no numbers
        env = game.build(2, device="cpu", problem="reach_avoid", max_steps=3)
        spec, act = env.full_action_spec["disturbance"], env.zero_action("action")
        players = RandomDisturbance(spec), ZeroDisturbance(spec, zero_index=int(env.zero_action()[0]))
    for player in players:
        policy = TwoPlayerPolicy(TensorDictModule(lambda _, act=act: act, ["observation"], ["action"]), player)
        assert env.rollout(2, policy)["next", "observation"].isfinite().all()


def test_a_player_that_is_not_there_has_no_zero_action():
    with pytest.raises(ValueError, match="player='disturbance' is unknown: choose one of 'action'"):
        DoubleIntegratorEnv().zero_action()
