"""The cart with a pole, for return or as the problem of never losing it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torchrl_safety.envs.gym import SafetyGymEnv
from torchrl_safety.envs.settings import check_choice

__all__ = ["CartPoleEnv", "cartpole_safety_margin"]

HALF_TRACK = 2.4
"""Where the track ends, in metres from its middle."""
LARGEST_ANGLE = math.radians(12)
"""Where the pole counts as fallen."""


def cartpole_safety_margin(env: Any, observation: Any, info: Mapping[str, Any]) -> float:
    r"""The smaller of the shares left of track and angle, :math:`g = \min(1 - |x| / 2.4, 1 - |\theta| / 12°)`.

    At most 1, with the cart in the middle and the pole upright; negative where CartPole terminates.

    Args:
        env: not read.
        observation: (x, x', θ, θ') in m, m/s, rad, rad/s.
        info: not read.

    Example:
        >>> round(cartpole_safety_margin(None, [1.2, 0.0, 0.0, 0.0], {}), 6)
        0.5
    """
    return min(1 - abs(float(observation[0])) / HALF_TRACK, 1 - abs(float(observation[2])) / LARGEST_ANGLE)


class CartPoleEnv(SafetyGymEnv):
    """CartPole-v1 of Gymnasium, for return or with the safety margin of :func:`cartpole_safety_margin`.

    Starts lie near the upright middle, so that the safe set is seen only as far as the policy leaves it. See
    :class:`SafetyGymEnv` for keys and the remaining arguments; Barto, Sutton & Anderson 1983 is the source.

    Args:
        num_envs: N.
        problem: `"return"` or `"avoid"`, which adds `"safety_margin"`.
        **settings: `max_steps`, `end_criterion`, `seed`, `dtype`, `device`, and those of `gymnasium.make`.

    Raises:
        ValueError: an unknown problem, or a setting out of range.

    Example:
        >>> env = CartPoleEnv(2, problem="avoid")
        >>> bool((env.reset()["safety_margin"] > 0.5).all())
        True
    """

    def __init__(self, num_envs: int = 1, *, problem: str = "return", **settings: Any) -> None:
        check_choice("problem", problem, ("return", "avoid"))
        margin = cartpole_safety_margin if problem == "avoid" else None
        super().__init__("CartPole-v1", num_envs, safety_margin=margin, **settings)
        self.problem = problem
