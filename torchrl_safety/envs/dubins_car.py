"""The Dubins car around a disc to avoid, or inside one on the way to another, and its exact values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_safety.envs.base import NativeEnv
from torchrl_safety.envs.motion import arc_step, wrap_angle
from torchrl_safety.envs.settings import action_levels, check_positive, check_share

__all__ = ["DubinsCarEnv"]

# Half the side of the default square of starts; both reach past the discs, so that failed states are seen too.
_START_REACH = {"avoid": 1.2, "reach_avoid": 1.0}


class DubinsCarEnv(NativeEnv):
    r"""A car of constant speed, `x' = v cos θ`, `y' = v sin θ`, `θ' = ω`, `|ω| <= v / ρ`, among discs at the origin.

    Avoid: stay out of the disc of radius :math:`R_0`, :math:`g = |(x, y)| - R_0`. Reach-avoid: reach the disc of
    radius r before leaving that of radius R, :math:`g = R - |(x, y)|`, :math:`l = r - |(x, y)|`. The turn rate is
    held over a step and the arc integrated exactly. Discrete actions 0, 1, 2
    stand for :math:`-v/\rho` (right), 0 and :math:`v/\rho` (left). θ is wrapped to [-π, π). See
    :class:`~torchrl_safety.envs.base.NativeEnv` for keys and the remaining arguments; the reach-avoid problem and
    its constants are those of Hsu et al. 2021, "Safety and Liveness Guarantees through Reach-Avoid Reinforcement
    Learning".

    Args:
        num_envs: batch size N.
        problem: `"avoid"` or `"reach_avoid"`.
        discrete: Categorical actions if true, Bounded ones if false.
        dt: length of a step in seconds, > 0.
        speed: v, > 0.
        turning_radius: ρ, the radius of the tightest turn, > 0.
        obstacle_radius: :math:`R_0` of the disc to stay out of, > 0; only avoid reads it.
        constraint_radius: R of the disc to stay in; only reach-avoid reads it.
        target_radius: r of the disc to reach, in (0, R).
        start_low: least (x, y, θ) of the box from which starts are drawn uniformly; None is (-1.2, -1.2, -π) for
            avoid and (-1, -1, -π) for reach-avoid, where the corners start failed.
        start_high: greatest (x, y, θ) of that box; None is the opposite corner.
        **settings: `end_criterion`, `max_steps`, `state_key`, `generator`, `seed`, `dtype`, `device`.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> env = DubinsCarEnv(num_envs=2, seed=0, max_steps=100)
        >>> env.rollout(5, break_when_any_done=False)["next", "observation"].shape
        torch.Size([2, 5, 3])
        >>> env.exact_safe(torch.tensor([[-0.8, 0.0, 0.0], [-0.8, 0.3, 0.0]]))
        tensor([False,  True])
    """

    angles = (2,)

    def __init__(
        self,
        num_envs: int = 1,
        *,
        problem: str = "avoid",
        discrete: bool = True,
        dt: float = 0.05,
        speed: float = 0.5,
        turning_radius: float = 0.6,
        obstacle_radius: float = 0.5,
        constraint_radius: float = 1.0,
        target_radius: float = 0.5,
        start_low: Sequence[float] | None = None,
        start_high: Sequence[float] | None = None,
        **settings: Any,
    ) -> None:
        check_positive(
            dt=dt,
            speed=speed,
            turning_radius=turning_radius,
            obstacle_radius=obstacle_radius,
            constraint_radius=constraint_radius,
        )
        if not 0 < target_radius < constraint_radius:
            raise ValueError(
                f"target_radius={target_radius} must lie in (0, constraint_radius={constraint_radius}): the target "
                "lies inside the disc that the car must not leave"
            )
        reach = _START_REACH.get(problem, 1.0)
        corner = (reach, reach, math.pi)
        start_low = [-end for end in corner] if start_low is None else start_low
        start_high = corner if start_high is None else start_high
        super().__init__(
            num_envs,
            state_dim=3,
            control_table=action_levels(speed / turning_radius),
            problem=problem,
            discrete=discrete,
            **settings,
        )
        self.dt = dt
        self.speed = speed
        self.turning_radius = turning_radius
        self.obstacle_radius = obstacle_radius
        self.constraint_radius = constraint_radius
        self.target_radius = target_radius
        self._set_start_box("x, y, θ", start_low, start_high)

    def dynamics(self, state: Tensor, control: Tensor, disturbance: Tensor | None = None) -> Tensor:
        """The state `[*B, 3]` after one held turn rate `[*B, 1]`; there is no disturbance."""
        return arc_step(state, control, speed=self.speed, dt=self.dt)

    def safety_margin(self, state: Tensor) -> Tensor:
        """`g = |(x, y)| - R0` (avoid) or `R - |(x, y)|` (reach-avoid), `[*B, 1]`."""
        if self.problem == "avoid":
            return _distance(state) - self.obstacle_radius
        return self.constraint_radius - _distance(state)

    def target_margin(self, state: Tensor) -> Tensor:
        """`l = r - |(x, y)|` `[*B, 1]`."""
        return self.target_radius - _distance(state)

    def sample_states(self, n: int, generator: torch.Generator) -> Tensor:
        """`n` states `[n, 3]`, uniform in the start box, with headings in [-π, π)."""
        states = self.uniform(self._start_low, self._start_high, n, generator)
        states[:, 2] = wrap_angle(states[:, 2])
        return states

    def exact_value(self, state: Tensor) -> Tensor:
        r"""The undiscounted value `[*B]` in continuous time; holds for all radii, speeds and turning radii.

        With :math:`p = |(x, y)|`, :math:`q = x\cos\theta + y\sin\theta` (the car moves away from the origin where
        q >= 0) and :math:`c_\pm = \mathrm{hypot}(q, |x\sin\theta - y\cos\theta| \pm \rho)`, the distances of the
        centres of the tightest turns away from (+) and towards (-) the origin:

        Avoid: :math:`p - R_0` where q >= 0, else :math:`c_+ - \rho - R_0`, turning away.
        Reach-avoid, with :math:`m = (R + r)/2 - \rho`, the margin of driving to the wall, along it and back:
        :math:`\max(r - p, \min(r, m, R - \rho - c_-))` where q >= 0, else
        :math:`\min(r, R - p, \max(m, r - \rho + c_-))`. Its sign gives the sets of Hsu et al. 2021, their type I
        where m >= 0 and type II elsewhere; its values follow from :math:`\{V \ge c\}` being the set of the radii
        R - c and r - c.

        Args:
            state: `[*B, 3]`, any batch shape, dtype and device; integers count in the env's dtype.

        Returns:
            `[*B]`; >= 0 exactly on the solution set.

        Example:
            >>> states = torch.tensor([[0.9, 0.0, 0.0], [0.5, 0.0, 0.0], [-0.9, 0.0, 0.0]])
            >>> DubinsCarEnv(problem="reach_avoid").exact_value(states)
            tensor([-0.4000,  0.0000,  0.1000])
        """
        x, y, heading = self._floating(state).unbind(-1)
        cosine, sine = heading.cos(), heading.sin()
        along = x * cosine + y * sine
        across = (x * sine - y * cosine).abs()
        distance, radius = torch.hypot(x, y), self.turning_radius
        if self.problem == "avoid":
            turning_away = torch.hypot(along, across + radius) - radius
            return torch.where(along >= 0, distance, turning_away) - self.obstacle_radius
        wall, target = self.constraint_radius, self.target_radius
        by_the_wall = (wall + target) / 2 - radius
        centre = torch.hypot(along, across - radius)  # of the tightest turn towards the origin
        returning = (wall - radius - centre).clamp(max=min(target, by_the_wall))
        hitting = (target - radius + centre).clamp(min=by_the_wall).clamp(max=target)
        return torch.where(
            along >= 0, torch.maximum(target - distance, returning), torch.minimum(wall - distance, hitting)
        )

    def exact_safe(self, state: Tensor) -> Tensor:
        """Whether states `[*B, 3]` lie in the solution set, bool `[*B]`: :meth:`exact_value` >= 0."""
        return self.exact_value(state) >= 0

    def well_inside(self, state: Tensor, share: float = 0.95) -> Tensor:
        """Whether states lie in the solution set with a margin, from where a good policy does not fail.

        Reach-avoid: in the set, and in the set scaled by `share` about the origin (a set that is not star-shaped
        does not contain its scaled copy). Avoid: out of the unsafe set scaled by `1 / share`. Headings stay.

        Args:
            state: `[*B, 3]`.
            share: in (0, 1]; 1 is :meth:`exact_safe`.

        Returns:
            bool `[*B]`.

        Raises:
            ValueError: a share out of its range.

        Example:
            >>> env = DubinsCarEnv(problem="reach_avoid")
            >>> env.well_inside(torch.tensor([[-0.94, 0.0, 0.0], [-0.96, 0.0, 0.0]]))
            tensor([ True, False])
        """
        check_share(share, "the part of the set that is kept")
        state = self._floating(state)
        scale = share if self.problem == "avoid" else 1 / share
        scaled = torch.cat((state[..., :2] * scale, state[..., 2:]), dim=-1)
        return self.exact_safe(state) & self.exact_safe(scaled)


def _distance(state: Tensor) -> Tensor:
    return torch.linalg.vector_norm(state[..., :2], dim=-1, keepdim=True)
