"""Two identical cars: one wants to reach a disc that the other defends by capturing it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_safety.envs.base import NativeEnv
from torchrl_safety.envs.motion import arc_step, wrap_angle
from torchrl_safety.envs.settings import action_levels, check_positive

__all__ = ["AttackDefenseEnv"]


class AttackDefenseEnv(NativeEnv):
    r"""A car (controller) attacks a disc, another (disturbance) captures it first, inside a larger disc.

    The state :math:`(x_a, y_a, θ_a, x_d, y_d, θ_d)` holds the poses of attacker and defender, both of constant speed v
    and turn rates within :math:`\pm v / ρ`. The attacker must reach the disc of radius r about the origin before it
    leaves that of radius R or comes closer than c to the defender. With :math:`p` for positions:

    :math:`g = \min(R - |p_a|,\; |p_a - p_d| - c)`, :math:`l = r - |p_a|`.

    The defender may leave the disc unpunished, unless `defender_stays`: then the attacker has also won when it does,
    :math:`l = \max(r - |p_a|,\; |p_d| - R)`. On `"avoid"` the attacker only has to survive. Turn rates are held over
    a step and arcs integrated exactly; headings are wrapped to [-π, π). Discrete actions 0, 1, 2 stand for a turn by
    :math:`-v/ρ` (right), 0 and :math:`v/ρ` (left), of the attacker under `"action"` and of the defender under
    `"disturbance"`. See :class:`~torchrl_safety.envs.base.NativeEnv` for keys and the remaining arguments. Source:
    Hsu et al. 2021, "Safety and Liveness Guarantees through Reach-Avoid Reinforcement Learning"; no exact value is
    known.

    Args:
        num_envs: batch size N.
        problem: `"reach_avoid"` or `"avoid"`.
        discrete: Categorical actions if true, Bounded ones if false.
        dt: length of a step in seconds, > 0.
        speed: v of both, > 0.
        turning_radius: ρ of both, the radius of the tightest turn, > 0.
        constraint_radius: R of the disc to stay in, > 0.
        target_radius: r of the disc to reach, in (0, R).
        capture_radius: c, > 0.
        defender_stays: whether a defender that leaves the disc has lost.
        start_low: least (x, y, θ, x, y, θ) of the box from which starts are drawn uniformly; None is (-R, -R, -π) for
            both, where corners and close pairs start failed.
        start_high: greatest (x, y, θ, x, y, θ) of that box; None is the opposite corner.
        **settings: `end_criterion`, `max_steps`, `state_key`, `generator`, `seed`, `dtype`, `device`.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> env = AttackDefenseEnv(num_envs=2, seed=0, max_steps=100)
        >>> env.rollout(5, break_when_any_done=False)["next", "target_margin"].shape
        torch.Size([2, 5, 1])
        >>> env.safety_margin(torch.tensor([-0.75, 0.0, 0.0, -0.25, 0.0, 0.0]))
        tensor([0.2500])
    """

    angles = (2, 5)

    def __init__(
        self,
        num_envs: int = 1,
        *,
        problem: str = "reach_avoid",
        discrete: bool = True,
        dt: float = 0.05,
        speed: float = 0.75,
        turning_radius: float = 0.25,
        constraint_radius: float = 1.0,
        target_radius: float = 0.5,
        capture_radius: float = 0.25,
        defender_stays: bool = False,
        start_low: Sequence[float] | None = None,
        start_high: Sequence[float] | None = None,
        **settings: Any,
    ) -> None:
        check_positive(
            dt=dt,
            speed=speed,
            turning_radius=turning_radius,
            constraint_radius=constraint_radius,
            capture_radius=capture_radius,
        )
        if not 0 < target_radius < constraint_radius:
            raise ValueError(
                f"target_radius={target_radius} must lie in (0, constraint_radius={constraint_radius}): the target "
                "lies inside the disc that the attacker must not leave"
            )
        turns = action_levels(speed / turning_radius)
        super().__init__(
            num_envs,
            state_dim=6,
            control_table=turns,
            disturbance_table=turns,
            problem=problem,
            discrete=discrete,
            **settings,
        )
        self.dt = dt
        self.speed = speed
        self.turning_radius = turning_radius
        self.constraint_radius = constraint_radius
        self.target_radius = target_radius
        self.capture_radius = capture_radius
        self.defender_stays = defender_stays
        corner = 2 * (constraint_radius, constraint_radius, math.pi)
        self._set_start_box(
            "x, y, θ, x, y, θ",
            [-end for end in corner] if start_low is None else start_low,
            corner if start_high is None else start_high,
        )

    def dynamics(self, state: Tensor, control: Tensor, disturbance: Tensor | None = None) -> Tensor:
        """The state `[*B, 6]` after held turn rates `[*B, 1]` of attacker and defender, who drives straight if None."""
        disturbance = torch.zeros_like(control) if disturbance is None else disturbance
        attacker, defender = state.split(3, dim=-1)
        moved = [
            arc_step(pose, turn_rate, speed=self.speed, dt=self.dt)
            for pose, turn_rate in ((attacker, control), (defender, disturbance))
        ]
        return torch.cat(moved, dim=-1)

    def safety_margin(self, state: Tensor) -> Tensor:
        """`g = min(R - |p_a|, |p_a - p_d| - c)` `[*B, 1]`."""
        attacker, defender = state[..., :2], state[..., 3:5]
        inside = self.constraint_radius - _length(attacker)
        return torch.minimum(inside, _length(attacker - defender) - self.capture_radius)

    def target_margin(self, state: Tensor) -> Tensor:
        """`l = r - |p_a|`, or the larger of it and `|p_d| - R` if `defender_stays`, `[*B, 1]`."""
        reached = self.target_radius - _length(state[..., :2])
        if not self.defender_stays:
            return reached
        return torch.maximum(reached, _length(state[..., 3:5]) - self.constraint_radius)

    def sample_states(self, n: int, generator: torch.Generator) -> Tensor:
        """`n` states `[n, 6]`, uniform in the start box, with headings in [-π, π)."""
        states = self.uniform(self._start_low, self._start_high, n, generator)
        states[:, self.angles] = wrap_angle(states[:, self.angles])
        return states


def _length(position: Tensor) -> Tensor:
    return torch.linalg.vector_norm(position, dim=-1, keepdim=True)
