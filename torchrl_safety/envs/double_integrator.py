"""The double integrator with a wall on each side, and its exact safe set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_safety.envs.base import NativeEnv
from torchrl_safety.envs.settings import action_levels, check_positive, check_share

__all__ = ["DoubleIntegratorEnv"]


class DoubleIntegratorEnv(NativeEnv):
    r"""A unit mass on a line, `x' = v`, `v' = u + d`, that must stay in `|x| <= 1`.

    The control is held over a step and the motion integrated exactly:
    :math:`x \mathrel{+}= v\,dt + (u + d)\,dt^2/2`, :math:`v \mathrel{+}= (u + d)\,dt`. Margins are
    :math:`g = 1 - |x|` and :math:`l = r - \max(|x|, |v|)`. Discrete actions 0, 1, 2 stand for `-a`, 0, `a`, and
    for `-D`, 0, `D` under `"disturbance"`. See :class:`~torchrl_safety.envs.base.NativeEnv` for keys and the
    remaining arguments; the exact set is the classical one of time-optimal braking (Fisac et al. 2019, section IV).

    Args:
        num_envs: batch size N.
        problem: `"avoid"` or `"reach_avoid"`.
        discrete: Categorical actions if true, Bounded ones if false.
        dt: length of a step in seconds, > 0.
        max_control: a, the largest |u|, > 0.
        max_disturbance: D, the largest |d|, 0 <= D < a; 0 leaves out the `"disturbance"` key.
        target_radius: r of the target margin, in (0, 1].
        start_low: least (x, v) of the box from which starts are drawn uniformly.
        start_high: greatest (x, v) of that box.
        **settings: `end_criterion`, `max_steps`, `state_key`, `generator`, `seed`, `dtype`, `device`.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> env = DoubleIntegratorEnv(num_envs=2, seed=0, max_steps=100)
        >>> env.rollout(5, break_when_any_done=False)["next", "safety_margin"].shape
        torch.Size([2, 5, 1])
        >>> env.exact_safe(torch.tensor([[0.0, 1.4], [0.5, 1.4]]))
        tensor([ True, False])
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        problem: str = "avoid",
        discrete: bool = True,
        dt: float = 0.05,
        max_control: float = 1.0,
        max_disturbance: float = 0.0,
        target_radius: float = 0.2,
        start_low: Sequence[float] = (-1.0, -2.2),
        start_high: Sequence[float] = (1.0, 2.2),
        **settings: Any,
    ) -> None:
        check_positive(dt=dt, max_control=max_control)
        if not 0 <= max_disturbance < max_control:
            raise ValueError(
                f"max_disturbance={max_disturbance} must lie in [0, max_control={max_control}): a disturbance as "
                "strong as the control leaves nothing safe"
            )
        if not 0 < target_radius <= 1:
            raise ValueError(f"target_radius={target_radius} must lie in (0, 1]: the target lies inside the walls")
        super().__init__(
            num_envs,
            state_dim=2,
            control_table=action_levels(max_control),
            disturbance_table=action_levels(max_disturbance) if max_disturbance > 0 else None,
            problem=problem,
            discrete=discrete,
            **settings,
        )
        self.dt = dt
        self.max_control = max_control
        self.max_disturbance = max_disturbance
        self.target_radius = target_radius
        self._set_start_box("x, v", start_low, start_high)

    def dynamics(self, state: Tensor, control: Tensor, disturbance: Tensor | None = None) -> Tensor:
        """The state `[*B, 2]` after one held control `[*B, 1]` and disturbance `[*B, 1]`."""
        push = control if disturbance is None else control + disturbance
        position, velocity = state.split(1, dim=-1)
        next_position = position.add(velocity, alpha=self.dt).add(push, alpha=self.dt**2 / 2)
        return torch.cat((next_position, velocity.add(push, alpha=self.dt)), dim=-1)

    def safety_margin(self, state: Tensor) -> Tensor:
        """`g = 1 - |x|` `[*B, 1]`."""
        return 1 - state[..., :1].abs()

    def target_margin(self, state: Tensor) -> Tensor:
        """`l = r - max(|x|, |v|)` `[*B, 1]`."""
        return self.target_radius - state.abs().amax(dim=-1, keepdim=True)

    def sample_states(self, n: int, generator: torch.Generator) -> Tensor:
        """`n` states `[n, 2]`, uniform in the start box."""
        return self.uniform(self._start_low, self._start_high, n, generator)

    def exact_value(self, state: Tensor) -> Tensor:
        r"""The undiscounted value `[*B]` in continuous time, with `a - D` as braking power `b`.

        Avoid: :math:`V = \min(1 - x - s_+^2/2b,\; 1 + x - s_-^2/2b)`, :math:`s_\pm = \max(\pm v, 0)`.
        Reach-avoid: brake, then walk to the origin, :math:`\min(V_{avoid}, r)`, or stop the clock on the way to
        the wall, at the braking state with the least :math:`\max(|x|, |v|)`; the better of the two.
        The second never decides a sign as long as the target lies in the avoid kernel, as r = .2 does.

        Args:
            state: `[*B, 2]`, any batch shape, dtype and device; integers count in the env's dtype.

        Returns:
            `[*B]`; >= 0 exactly on the solution set.

        Example:
            >>> DoubleIntegratorEnv().exact_value(torch.tensor([0.5, 1.0]))
            tensor(0.)
        """
        state = self._floating(state)
        twice_braking = 2 * (self.max_control - self.max_disturbance)
        position, velocity = state.unbind(-1)
        ahead = torch.where(velocity < 0, -position, position)  # the walls and the controls are symmetric
        turning_point = ahead + velocity.square() / twice_braking
        value = 1 - torch.maximum(turning_point, -ahead)
        if self.problem == "avoid":
            return value
        stopped = torch.minimum(self.target_radius - self.least_distance(state), 1 - position.abs())
        return torch.maximum(value.clamp(max=self.target_radius), stopped)

    def least_distance(self, state: Tensor) -> Tensor:
        r"""The least :math:`\max(|x|, |v|)` `[*B]` on the way of a state `[*B, 2]` that brakes until it turns."""
        braking = self.max_control - self.max_disturbance
        position, velocity = state.unbind(-1)
        ahead = torch.where(velocity < 0, -position, position)
        turning_point = ahead + velocity.square() / (2 * braking)
        # Beyond the origin, where the position equals the speed that braking has left.
        meeting = (braking * (braking + 2 * turning_point.clamp(min=0))).sqrt() - braking
        return torch.maximum(ahead, meeting)

    def exact_safe(self, state: Tensor) -> Tensor:
        """Whether states `[*B, 2]` lie in the solution set, bool `[*B]`: :meth:`exact_value` >= 0."""
        return self.exact_value(state) >= 0

    def well_inside(self, state: Tensor, share: float = 0.95) -> Tensor:
        """Whether states lie in the solution set shrunk by `share`, from where a good policy does not fail.

        Args:
            state: `[*B, 2]`.
            share: in (0, 1], of position and velocity alike; 1 is :meth:`exact_safe`.

        Returns:
            bool `[*B]`.

        Raises:
            ValueError: a share out of its range.

        Example:
            >>> DoubleIntegratorEnv().well_inside(torch.tensor([[0.94, 0.0], [0.96, 0.0]]))
            tensor([ True, False])
        """
        check_share(share, "the part of the set that is kept")
        return self.exact_safe(state / share)
