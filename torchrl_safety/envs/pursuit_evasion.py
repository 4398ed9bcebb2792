"""Two identical cars of which one pursues the other, in the coordinates of the evader: Air3D."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_safety.envs.base import NativeEnv
from torchrl_safety.envs.motion import arc_step, wrap_angle
from torchrl_safety.envs.settings import action_levels, check_positive

__all__ = ["PursuitEvasionEnv"]


class PursuitEvasionEnv(NativeEnv):
    r"""The game of two identical vehicles: a car (controller) evades another (disturbance) of the same speed.

    The state (x, y, ψ) is the pose of the pursuer as the evader sees it, x ahead, y to the left, ψ its heading minus
    the evader's, with :math:`|u|, |d| \le w`:

    :math:`x' = -v + v \cos ψ + u y`, :math:`y' = v \sin ψ - u x`, :math:`ψ' = d - u`.

    Captured is who comes closer than R, :math:`g = |(x, y)| - R`; on `"reach_avoid"` the evader wants to get away to
    a distance E, :math:`l = |(x, y)| - E`. Turn rates are held over a step, in which both cars move on arcs, exactly.
    ψ is wrapped to [-π, π). Discrete actions 0, 1, 2 stand for a turn by -w (right), 0 and w (left), of the evader
    under `"action"` and of the pursuer under `"disturbance"`. See :class:`~torchrl_safety.envs.base.NativeEnv` for
    keys and the remaining arguments. Source of the avoid game and its constants: Mitchell, Bayen and Tomlin 2005, "A
    time-dependent Hamilton-Jacobi formulation of reachable sets for continuous dynamic games". It depends on
    v / (w R) alone: lengths scale with R, times with 1/w. No exact value is implemented; the escape problem is this
    package's own.

    Args:
        num_envs: batch size N.
        problem: `"avoid"` (not to be captured) or `"reach_avoid"` (to escape).
        discrete: Categorical actions if true, Bounded ones if false.
        dt: length of a step in seconds, > 0.
        speed: v of both, > 0.
        max_turn_rate: w of both in rad/s, > 0.
        capture_radius: R, > 0.
        escape_radius: E, > R; None is 2 R. Only reach-avoid reads it.
        start_low: least (x, y, ψ) of the box from which starts are drawn uniformly; None is (-1.2 R, -2 R, -π).
        start_high: greatest (x, y, ψ) of that box; None is (4 R, 2 R, π).
        **settings: `end_criterion`, `max_steps`, `state_key`, `generator`, `seed`, `dtype`, `device`.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> env = PursuitEvasionEnv(num_envs=2, seed=0, max_steps=100)
        >>> env.rollout(5, break_when_any_done=False)["disturbance"].shape
        torch.Size([2, 5])
        >>> env.safety_margin(torch.tensor([3.0, 4.5, 0.0])) > 0
        tensor([True])
    """

    angles = (2,)

    def __init__(
        self,
        num_envs: int = 1,
        *,
        problem: str = "avoid",
        discrete: bool = True,
        dt: float = 0.05,
        speed: float = 5.0,
        max_turn_rate: float = 1.0,
        capture_radius: float = 5.0,
        escape_radius: float | None = None,
        start_low: Sequence[float] | None = None,
        start_high: Sequence[float] | None = None,
        **settings: Any,
    ) -> None:
        check_positive(dt=dt, speed=speed, max_turn_rate=max_turn_rate, capture_radius=capture_radius)
        escape_radius = 2 * capture_radius if escape_radius is None else escape_radius
        if not capture_radius < escape_radius < math.inf:
            raise ValueError(
                f"escape_radius={escape_radius} must be finite and above capture_radius={capture_radius}: "
                "nobody escapes while captured"
            )
        turns = action_levels(max_turn_rate)
        super().__init__(
            num_envs,
            state_dim=3,
            control_table=turns,
            disturbance_table=turns,
            problem=problem,
            discrete=discrete,
            **settings,
        )
        self.dt = dt
        self.speed = speed
        self.max_turn_rate = max_turn_rate
        self.capture_radius = capture_radius
        self.escape_radius = escape_radius
        self._set_start_box(
            "x, y, ψ",
            (-1.2 * capture_radius, -2 * capture_radius, -math.pi) if start_low is None else start_low,
            (4 * capture_radius, 2 * capture_radius, math.pi) if start_high is None else start_high,
        )

    def dynamics(self, state: Tensor, control: Tensor, disturbance: Tensor | None = None) -> Tensor:
        """The state `[*B, 3]` after held turn rates `[*B, 1]` of evader and pursuer, who drives straight if None."""
        disturbance = torch.zeros_like(control) if disturbance is None else disturbance
        origin = torch.zeros_like(state)
        evader, pursuer = (
            arc_step(pose, turn_rate, speed=self.speed, dt=self.dt)
            for pose, turn_rate in ((origin, control), (state, disturbance))
        )
        x, y, heading = (pursuer - evader).split(1, dim=-1)
        cosine, sine = evader[..., 2:].cos(), evader[..., 2:].sin()
        return torch.cat((x * cosine + y * sine, y * cosine - x * sine, wrap_angle(heading)), dim=-1)

    def safety_margin(self, state: Tensor) -> Tensor:
        """`g = |(x, y)| - R` `[*B, 1]`."""
        return torch.linalg.vector_norm(state[..., :2], dim=-1, keepdim=True) - self.capture_radius

    def target_margin(self, state: Tensor) -> Tensor:
        """`l = |(x, y)| - E` `[*B, 1]`."""
        return torch.linalg.vector_norm(state[..., :2], dim=-1, keepdim=True) - self.escape_radius

    def sample_states(self, n: int, generator: torch.Generator) -> Tensor:
        """`n` states `[n, 3]`, uniform in the start box, with headings in [-π, π)."""
        states = self.uniform(self._start_low, self._start_high, n, generator)
        states[:, 2] = wrap_angle(states[:, 2])
        return states
