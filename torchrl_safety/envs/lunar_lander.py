"""LunarLander-v3 for return, as the problem not to crash, and as that to reach the pad without crashing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torchrl_safety.envs.gym import SafetyGymEnv
from torchrl_safety.envs.settings import check_choice

__all__ = ["LunarLanderEnv", "lunar_lander_safety_margin", "lunar_lander_target_margin"]

# Metres in a unit of the observed x and y: half the width and half the height of the viewport.
UNIT_X, UNIT_Y = 10.0, 20 / 3
HALF_VIEW = 10.0
"""Where the viewport, and with it the episode, ends on the left and right."""
CEILING = 12.0
"""The highest y: 2.6 m above the starts, which lie on the viewport's upper edge and are often pushed upwards."""
HALF_PAD = 2.0
"""Where the flags stand."""
BELLY = 8 / 30
"""From the body's underside down to what the lander stands on, where it stands upright (y = 0)."""
SLOPE = 0.55
"""Of a line from each flag that no terrain rises above: nodes, 2 m apart, reach 1.07, 2.17, 3.27, 3.27 m at most."""
TARGET_HEIGHT = 1.0
"""Upper end of the target, above the height at which the lander stands."""
CRASH = -1.0
"""The largest g once the body has touched the ground."""


def lunar_lander_safety_margin(env: Any, observation: Any, info: Mapping[str, Any]) -> float:
    r"""Distance to the failure set in metres, from what is observed; at most -1 once the body has touched the ground.

    .. math:: g = \min\Bigl(10 - |x|,\; 12 - y,\; y + 0.27,\;
        \frac{y + 0.27 - 0.55 (|x| - 2)}{\sqrt{1 + 0.55^2}}\Bigr)

    with x and y in metres from the middle of the pad, where the lander stands at y = 0. It fails by leaving the
    viewport (its upper edge is raised, as starts lie on the original one) and by coming under the highest terrain that
    can be drawn. The terrain of an episode is drawn anew and not observed: the worst of all, a valley that rises by
    0.55 on either side of the pad, takes its place, which makes g conservative beside the pad and a function of the
    observation but for the crash.

    Args:
        env: the Gymnasium environment, which knows of a crash.
        observation: `[8]`.
        info: not read.

    Example:
        >>> import gymnasium
        >>> env = gymnasium.make("LunarLander-v3")
        >>> observation, info = env.reset(seed=0)
        >>> lunar_lander_safety_margin(env, observation, info) > 2
        True
    """
    x, y = abs(float(observation[0])) * UNIT_X, float(observation[1]) * UNIT_Y
    height = y + BELLY
    margin = min(HALF_VIEW - x, CEILING - y, height, (height - SLOPE * (x - HALF_PAD)) / math.hypot(1, SLOPE))
    return min(margin, CRASH) if env.unwrapped.game_over else margin


def lunar_lander_target_margin(env: Any, observation: Any, info: Mapping[str, Any]) -> float:
    r"""Distance in metres into the box between the flags and up to 1 m, :math:`l = \min(2 - |x|, 1 - y)`.

    x and y are as in :func:`lunar_lander_safety_margin`; what bounds the box from below is the ground, which is a
    failure. Outside of it, l is minus the larger of the two distances.

    Args:
        env: not read.
        observation: `[8]`.
        info: not read.

    Example:
        >>> lunar_lander_target_margin(None, [0.1, 0.0] + 6 * [0.0], {})
        1.0
    """
    return min(HALF_PAD - abs(float(observation[0])) * UNIT_X, TARGET_HEIGHT - float(observation[1]) * UNIT_Y)


class LunarLanderEnv(SafetyGymEnv):
    """LunarLander-v3 of Gymnasium, for return or with margins in metres, needs the extra `gym`.

    The problem is that of Hsu, Rubies-Royo, Tomlin & Fisac, "Safety and Liveness Guarantees through Reach-Avoid
    Reinforcement Learning", RSS 2021: reach the pad between the flags, and before that neither leave the viewport nor
    touch the terrain. The margins are :func:`lunar_lander_safety_margin`, at most 6.2 m, and
    :func:`lunar_lander_target_margin`, between -11 and 1.3 m. Gymnasium's own heuristic reaches the target without a
    failure in 99.6 % of 500 episodes. Coming to rest ends an episode too. See :class:`SafetyGymEnv` for keys and the
    remaining arguments.

    Args:
        num_envs: N.
        problem: `"return"`, `"avoid"` (adds `"safety_margin"`) or `"reach_avoid"` (adds `"target_margin"` too).
        **settings: `max_steps`, `end_criterion`, `seed`, `dtype`, `device`, and those of `gymnasium.make`:
            `continuous`, `gravity`, `enable_wind`, `wind_power`, `turbulence_power`.

    Raises:
        ImportError: Box2D is not installed.
        ValueError: an unknown problem, or a setting out of range.

    Example:
        >>> env = LunarLanderEnv(2, problem="reach_avoid")
        >>> start = env.reset()
        >>> bool((start["safety_margin"] > 2).all()), bool((start["target_margin"] < 0).all())
        (True, True)
    """

    def __init__(self, num_envs: int = 1, *, problem: str = "return", **settings: Any) -> None:
        check_choice("problem", problem, ("return", "avoid", "reach_avoid"))
        super().__init__(
            "LunarLander-v3",
            num_envs,
            safety_margin=None if problem == "return" else lunar_lander_safety_margin,
            target_margin=lunar_lander_target_margin if problem == "reach_avoid" else None,
            **settings,
        )
        self.problem = problem
