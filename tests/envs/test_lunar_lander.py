"""LunarLander's margins: distances recomputed from corners, terrain that is drawn, and what a good pilot reaches."""

from __future__ import annotations

import math

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.box2d.lunar_lander import heuristic
from torchrl.envs.utils import check_env_specs

from torchrl_safety.envs import LunarLanderEnv, check_safety_env
from torchrl_safety.envs.lunar_lander import lunar_lander_safety_margin, lunar_lander_target_margin

# The corners of what is safe, in metres from the middle of the pad, for the observed point of the lander.
FLOOR = -8 / 30
SAFE = np.array(
    [(-2, FLOOR), (2, FLOOR), (10, FLOOR + 0.55 * 8), (10, 12), (-10, 12), (-10, FLOOR + 0.55 * 8)], dtype=float
)
UNIT = np.array([10, 20 / 3])


class Flying:
    """Stands for an environment in which nothing has touched the ground."""

    game_over = False

    @property
    def unwrapped(self):
        return self


def distance_to_the_edges(point: np.ndarray, corners: np.ndarray) -> float:
    best = math.inf
    for start, end in zip(corners, np.roll(corners, -1, axis=0)):
        along = np.clip((point - start) @ (end - start) / ((end - start) @ (end - start)), 0, 1)
        best = min(best, float(np.linalg.norm(point - start - along * (end - start))))
    return best


def is_inside(point: np.ndarray, corners: np.ndarray) -> bool:
    edges = np.roll(corners, -1, axis=0) - corners
    to = point - corners
    return bool((edges[:, 0] * to[:, 1] - edges[:, 1] * to[:, 0] >= 0).all())


def observed(point) -> np.ndarray:
    return np.concatenate([np.asarray(point) / UNIT, np.zeros(6)])


def test_the_safety_margin_is_the_distance_to_the_edges_of_the_safe_polygon():
    points = np.random.default_rng(0).uniform([-12, -2], [12, 14], (400, 2))
    inside = np.array([is_inside(point, SAFE) for point in points])
    assert 100 < inside.sum() < 350
    for point, safe in zip(points, inside):
        margin = lunar_lander_safety_margin(Flying(), observed(point), {})
        assert (margin >= 0) == safe
        if safe:
            assert margin == pytest.approx(distance_to_the_edges(point, SAFE))
        else:
            assert -distance_to_the_edges(point, SAFE) <= margin + 1e-9


def test_the_target_margin_is_the_distance_into_the_box_between_the_flags():
    for point in np.random.default_rng(1).uniform([-4, -1], [4, 3], (100, 2)):
        inside = abs(point[0]) <= 2 and point[1] <= 1
        box = np.array([(-2, -99), (2, -99), (2, 1), (-2, 1)], dtype=float)
        margin = lunar_lander_target_margin(None, observed(point), {})
        assert (margin >= 0) == inside
        if inside:
            assert margin == pytest.approx(distance_to_the_edges(point, box))


def test_no_terrain_that_is_drawn_rises_above_the_valley():
    env = gymnasium.make("LunarLander-v3").unwrapped
    highest = np.full(11, -math.inf)
    for seed in range(300):
        env.reset(seed=seed)
        corners = np.array([*(left for left, *_ in env.sky_polys), env.sky_polys[-1][1]])
        highest = np.maximum(highest, corners[:, 1] - env.helipad_y)
        x = np.abs(corners[:, 0] - 10)
    assert (env.helipad_x1, env.helipad_x2) == (8, 12)
    assert (highest <= np.maximum(0.55 * (x - 2), 0)).all()
    assert highest.max() > 0.9 * 3.27  # of 0.33 (3 H / 2) - H / 4


def test_a_lander_at_rest_on_the_pad_is_in_the_target_and_as_high_as_the_floor_says():
    env = gymnasium.make("LunarLander-v3").unwrapped
    observation, _ = env.reset(seed=0)
    while not (observation[6] and observation[7]):
        observation, *_ = env.step(heuristic(env, observation))
    for _ in range(20):
        observation, *_ = env.step(0)
    assert lunar_lander_target_margin(env, observation, {}) > 0.5
    underside = min((env.lander.GetWorldPoint((side * 17 / 30, -10 / 30)))[1] for side in (-1, 1)) - env.helipad_y
    assert lunar_lander_safety_margin(env, observation, {}) == pytest.approx(underside, abs=0.1)


def test_a_touch_of_the_ground_is_a_failure_whatever_the_distance():
    env = LunarLanderEnv(4, problem="avoid", end_criterion="env", seed=0)
    state, crashes = env.reset(), 0
    for _ in range(300):
        state["action"] = torch.zeros(4, dtype=torch.int64)
        touched = [core.unwrapped.game_over for core in env.envs]
        assert not any(touched)
        transition, state = env.step_and_maybe_reset(state)
        after = transition["next"]
        at_an_edge = after["observation"][:, 0].abs() >= 1
        failed = after["terminated"].squeeze(-1)
        assert (after["safety_margin"][failed & ~at_an_edge] <= -1).all()
        assert (after["safety_margin"][at_an_edge] <= 0).all()
        crashes += int((failed & ~at_an_edge).sum())
    assert crashes > 5


@pytest.mark.parametrize("continuous", [False, True])
def test_gymnasiums_heuristic_reaches_the_target_without_a_failure(continuous):
    env = LunarLanderEnv(1, problem="reach_avoid", end_criterion="reach_avoid", seed=100, continuous=continuous)
    state, reached, episodes = env.reset(), 0, 0
    while episodes < 40:
        action = heuristic(env.envs[0], state["observation"][0].numpy())
        state["action"] = torch.as_tensor(action).to(env.action_spec.dtype).reshape(env.action_spec.shape)
        transition, state = env.step_and_maybe_reset(state)
        after = transition["next"]
        if after["done"].item():
            episodes += 1
            reached += after["target_margin"].item() >= 0 and after["safety_margin"].item() >= 0
    assert reached >= 38


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("problem", ["return", "avoid", "reach_avoid"])
def test_a_problem_brings_its_margins(problem, continuous):
    env = LunarLanderEnv(2, problem=problem, continuous=continuous, max_steps=50)
    margins = {"return": set(), "avoid": {"safety_margin"}, "reach_avoid": {"safety_margin", "target_margin"}}[problem]
    assert set(env.observation_spec.keys()) == {"observation"} | margins
    check_env_specs(env)
    if margins:
        check_safety_env(env)


def test_an_unknown_problem_is_refused():
    with pytest.raises(ValueError, match="problem='reach' is unknown"):
        LunarLanderEnv(problem="reach")
