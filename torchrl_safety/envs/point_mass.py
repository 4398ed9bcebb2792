"""A point that climbs among boxes to a target at the top, Zermelo's problem, and its exact safe set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_safety.envs.base import NativeEnv
from torchrl_safety.envs.settings import action_levels

__all__ = ["PointMassEnv"]


class _Box(NamedTuple):
    """A rectangle that is its own mirror image in x = 0, or stands for itself and its mirror image."""

    x: float
    y: float
    width: float
    height: float

    def distance(self, state: Tensor) -> Tensor:
        """Signed distance `[*B, 1]` in the infinity norm of states `[*B, 2]`, negative inside."""
        x, y = state.split(1, dim=-1)
        return torch.maximum((x.abs() - self.x).abs() - self.width / 2, (y - self.y).abs() - self.height / 2)

    @property
    def bottom(self) -> float:
        return self.y - self.height / 2

    @property
    def top(self) -> float:
        return self.y + self.height / 2


_OUTER = _Box(0.0, 4.0, 4.0, 12.0)
_SIDES = _Box(1.25, 2.0, 1.5, 1.5)  # one on each side, and each touches a wall
_CENTRE = _Box(0.0, 6.0, 1.5, 1.5)
_TARGET = _Box(0.0, 9.25, 1.5, 1.5)
_SPEED = 2.0


class PointMassEnv(NativeEnv):
    r"""A point that always climbs, `x' = u`, `|u| <= 1`, `y' = 2`, past three boxes to a target: Zermelo's problem.

    It lives in :math:`[-2, 2] \times [-2, 10]`. The obstacles are squares of side 1.5 about :math:`(\pm 1.25, 2)`
    and (0, 6), the target one about (0, 9.25). With :math:`d_B` the signed infinity-norm distance to a box B,
    negative inside, :math:`g = \min(-d_{outer}, d_{obstacles})` and :math:`l = -d_{target}`. An Euler step of the
    motion is exact. Margins are read at the ends of steps only, between which a path may cut a corner by less than
    `dt` in x. Discrete actions 0, 1, 2 stand for u = -1, 0, 1. See :class:`~torchrl_safety.envs.base.NativeEnv` for
    keys and remaining arguments; problem and set are those of Hsu et al., RSS 2021.

    A point that always climbs leaves every closed box, so in `problem="avoid"` the top is open: g is then without
    the wall at y = 10, y grows until `max_steps`, and the set is where the obstacles can be passed.

    Args:
        num_envs: batch size N.
        problem: `"reach_avoid"` or `"avoid"`.
        discrete: Categorical actions if true, Bounded ones if false.
        dt: length of a step in seconds, in (0, .25].
        start_low: least (x, y) of the box from which starts are drawn uniformly.
        start_high: greatest (x, y) of that box.
        **settings: `end_criterion`, `max_steps`, `state_key`, `generator`, `seed`, `dtype`, `device`.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> env = PointMassEnv(num_envs=2, seed=0, max_steps=120)
        >>> env.rollout(5, break_when_any_done=False)["next", "target_margin"].shape
        torch.Size([2, 5, 1])
        >>> env.exact_safe(torch.tensor([[0.0, 0.0], [0.0, 5.0]]))
        tensor([ True, False])
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        problem: str = "reach_avoid",
        discrete: bool = True,
        dt: float = 0.05,
        start_low: Sequence[float] = (-2.0, -2.0),
        start_high: Sequence[float] = (2.0, 10.0),
        **settings: Any,
    ) -> None:
        if not 0 < dt <= 0.25:
            raise ValueError(f"dt={dt} must lie in (0, 0.25]: larger steps jump through the boxes, of side 1.5")
        super().__init__(
            num_envs,
            state_dim=2,
            control_table=action_levels(1.0),
            problem=problem,
            discrete=discrete,
            **settings,
        )
        self.dt = dt
        self._set_start_box("x, y", start_low, start_high)

    def dynamics(self, state: Tensor, control: Tensor, disturbance: Tensor | None = None) -> Tensor:
        """The state `[*B, 2]` after one held control `[*B, 1]`; there is no disturbance."""
        x, y = state.split(1, dim=-1)
        return torch.cat((x.add(control, alpha=self.dt), y + _SPEED * self.dt), dim=-1)

    def safety_margin(self, state: Tensor) -> Tensor:
        """`g = min(-d_outer, d_obstacles)` `[*B, 1]`; on `problem="avoid"` without the wall at the top."""
        obstacles = torch.minimum(_SIDES.distance(state), _CENTRE.distance(state))
        if self.problem == "reach_avoid":
            return torch.minimum(obstacles, -_OUTER.distance(state))
        x, y = state.split(1, dim=-1)
        return torch.minimum(obstacles, torch.minimum(_OUTER.width / 2 - x.abs(), y - _OUTER.bottom))

    def target_margin(self, state: Tensor) -> Tensor:
        """`l = -d_target` `[*B, 1]`."""
        return -_TARGET.distance(state)

    def sample_states(self, n: int, generator: torch.Generator) -> Tensor:
        """`n` states `[n, 2]`, uniform in the start box."""
        return self.uniform(self._start_low, self._start_high, n, generator)

    def exact_safe(self, state: Tensor) -> Tensor:
        r"""Whether states `[*B, 2]` lie in the solution set in continuous time, bool `[*B]`.

        The set is what :math:`g \ge 0` leaves when triangles with sides of slope :math:`\pm 2` are taken away: one
        under the box in the centre, one under each box at a side, up to the wall, and, on reach-avoid, the corners
        over which the target cannot be entered any more, :math:`|x| > .75 + (10 - y)/2`. The slits of no width
        between side boxes and walls, through which the value is 0 exactly, are closed: this is the closure of
        :math:`\{V > 0\}`.

        Args:
            state: `[*B, 2]`, any batch shape, dtype and device; integers count in the env's dtype.

        Returns:
            bool `[*B]`.

        Example:
            >>> top_corner = torch.tensor([1.5, 9.0])
            >>> [PointMassEnv(problem=name).exact_safe(top_corner).item() for name in ("reach_avoid", "avoid")]
            [False, True]
        """
        return self._above_level(state, 0.0)

    def well_inside(self, state: Tensor, share: float = 0.95) -> Tensor:
        r"""Whether states `[*B, 2]` have a value of at least :math:`c = .75\,(1 - share)`, bool `[*B]`.

        It is :meth:`exact_safe` of the problem whose boxes are all c wider on every side, whose target and outer
        walls are c narrower; the target's sides are then `share` times as long.

        Raises:
            ValueError: `share` outside [2/3, 1], where neighbouring triangles would overlap.
        """
        if not 2 / 3 <= share <= 1:
            raise ValueError(f"share={share} must lie in [2/3, 1]: below, the triangles under the boxes overlap")
        return self._above_level(state, _TARGET.width / 2 * (1 - share))

    def _above_level(self, state: Tensor, level: float) -> Tensor:
        # The set {V >= level}, for 0 <= level <= .25. The triangles lie in bands of y that do not overlap, so that
        # each obstacle can be judged on its own: the side boxes' from -2 up to their tops, the centre's from there.
        state = self._floating(state)
        x, y = state[..., 0].abs(), state[..., 1]

        def reach(height: float) -> Tensor:
            """How far x moves until this height."""
            return (height - y).clamp(min=0) / _SPEED

        gap = _SIDES.x - _SIDES.width / 2 - level
        past_sides = (y >= _SIDES.top + level) | (x <= gap + reach(_SIDES.bottom - level))
        half = _CENTRE.width / 2 + level
        past_centre = (y >= _CENTRE.top + level) | (x >= half - reach(_CENTRE.bottom - level))
        inside = (x <= _OUTER.width / 2 - level) & (y >= _OUTER.bottom + level) & past_sides & past_centre
        if self.problem == "avoid":
            return inside
        top = _TARGET.top - level
        return inside & (y <= top) & (x <= _TARGET.width / 2 - level + reach(top))
