"""The double integrator that has to stop at a goal, which is drawn for each episode, between its walls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_safety.envs.base import NativeEnv
from torchrl_safety.envs.double_integrator import DoubleIntegratorEnv

__all__ = ["GoalDoubleIntegratorEnv"]


class GoalDoubleIntegratorEnv(NativeEnv):
    r"""The motion and the walls of :class:`DoubleIntegratorEnv`, and a target around a goal position `x_goal`.

    The state is :math:`(x, v, x_{goal})`. Margins are :math:`g = 1 - |x|` and
    :math:`l = r - \max(|x - x_{goal}|, |v|)`. Starts are uniform in a box, goals in `[-goal_limit, goal_limit]`. For
    hindsight the measurement is entry 0 of `"observation"` and the goal its entry 2. See
    :class:`~torchrl_safety.envs.base.NativeEnv` for keys and the remaining arguments.
    Source: the double integrator of Fisac et al. 2019, section IV, with a target (Hsu et al. 2021).

    Args:
        num_envs: batch size N.
        problem: `"reach_avoid"` or `"avoid"`, which has no target margin.
        discrete: Categorical actions 0, 1, 2 for -a, 0, a if true, Bounded ones if false.
        dt: length of a step in seconds, > 0.
        max_control: a, the largest control, > 0.
        target_radius: r of the target margin, in (0, 1).
        goal_limit: the largest \|x_goal\|, >= 0; r + r²/2a from the walls at least, so that whoever passes the target
            can stop before the wall.
        start_low: least (x, v) of the box of the starts.
        start_high: greatest (x, v) of that box.
        **settings: `end_criterion`, `max_steps`, `state_key`, `generator`, `seed`, `dtype`, `device`.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> env = GoalDoubleIntegratorEnv(2, seed=0, max_steps=100)
        >>> env.rollout(5, break_when_any_done=False)["next", "target_margin"].shape
        torch.Size([2, 5, 1])
        >>> env.exact_value(torch.tensor([[0.0, 0.0, 0.5], [0.5, 1.2, 0.5]]))
        tensor([ 0.2000, -0.2200])
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        problem: str = "reach_avoid",
        discrete: bool = True,
        dt: float = 0.05,
        max_control: float = 1.0,
        target_radius: float = 0.2,
        goal_limit: float = 0.7,
        start_low: Sequence[float] = (-1.0, -2.2),
        start_high: Sequence[float] = (1.0, 2.2),
        **settings: Any,
    ) -> None:
        motion = DoubleIntegratorEnv(
            dt=dt,
            max_control=max_control,
            target_radius=target_radius,
            start_low=start_low,
            start_high=start_high,
            seed=0,  # never drawn from
            **{key: settings[key] for key in ("dtype", "device") if key in settings},
        )
        largest = 1 - target_radius - target_radius**2 / (2 * max_control)
        if not 0 <= goal_limit <= largest:
            raise ValueError(
                f"goal_limit={goal_limit} must lie in [0, {largest:.4g}] with target_radius={target_radius} and "
                f"max_control={max_control}: farther out, some passing the target cannot stop before the wall"
            )
        super().__init__(
            num_envs,
            state_dim=3,
            control_table=motion._action_table,
            problem=problem,
            discrete=discrete,
            **settings,
        )
        self._motion = motion
        self.dt, self.max_control = dt, max_control
        self.target_radius, self.goal_limit = target_radius, goal_limit

    def dynamics(self, state: Tensor, control: Tensor, disturbance: Tensor | None = None) -> Tensor:
        """The state `[*B, 3]` after one held control `[*B, 1]`; the goal stays."""
        moved = self._motion.dynamics(state[..., :2], control, disturbance)
        return torch.cat((moved, state[..., 2:].expand(*moved.shape[:-1], 1)), dim=-1)

    def safety_margin(self, state: Tensor) -> Tensor:
        """`g = 1 - |x|` `[*B, 1]`."""
        return self._motion.safety_margin(state)

    def target_margin(self, state: Tensor) -> Tensor:
        """`l = r - max(|x - x_goal|, |v|)` `[*B, 1]`."""
        return self._motion.target_margin(self._from_goal(state))

    def sample_states(self, n: int, generator: torch.Generator) -> Tensor:
        """`n` states `[n, 3]`, uniform in the start box, with goals uniform between their limits."""
        start = self._motion.sample_states(n, generator)
        limit = start.new_full((1,), self.goal_limit)
        return torch.cat((start, self.uniform(-limit, limit, n, generator)), dim=-1)

    def exact_value(self, state: Tensor) -> Tensor:
        r"""The undiscounted value `[*B]` in continuous time.

        Avoid: that of :class:`DoubleIntegratorEnv`. Reach-avoid: brake, then walk to the goal,
        :math:`\min(V_{avoid}, r)`; or stop the clock on the way to a wall that is hit anyway, at the braking state
        with the least :math:`\max(|x - x_{goal}|, |v|)`. The second never decides a sign.

        Args:
            state: `[*B, 3]` with \|x_goal\| <= `goal_limit`, any batch shape, dtype and device.

        Returns:
            `[*B]`; >= 0 exactly on the solution set.

        Example:
            >>> GoalDoubleIntegratorEnv().exact_value(torch.tensor([-0.5, -1.0, 0.3]))
            tensor(0.)
        """
        state = self._floating(state)
        kept = self._motion.exact_value(state[..., :2])
        if self.problem == "avoid":
            return kept
        nearest = self._motion.least_distance(self._from_goal(state))
        stopped = torch.minimum(self.target_radius - nearest, 1 - state[..., 0].abs())
        return torch.maximum(kept.clamp(max=self.target_radius), stopped)

    def exact_safe(self, state: Tensor) -> Tensor:
        """Whether states `[*B, 3]` lie in the solution set, bool `[*B]`: :meth:`exact_value` >= 0."""
        return self.exact_value(state) >= 0

    def well_inside(self, state: Tensor, share: float = 0.95) -> Tensor:
        """Whether (x, v) lies in the solution set shrunk by `share`, see :meth:`DoubleIntegratorEnv.well_inside`.

        Args:
            state: `[*B, 3]`.
            share: in (0, 1], of position and velocity alike; 1 is :meth:`exact_safe`.

        Returns:
            bool `[*B]`.

        Raises:
            ValueError: a share out of its range.

        Example:
            >>> GoalDoubleIntegratorEnv().well_inside(torch.tensor([[0.94, 0.0, 0.5], [0.96, 0.0, 0.5]]))
            tensor([ True, False])
        """
        return self._motion.well_inside(state[..., :2], share)

    def _from_goal(self, state: Tensor) -> Tensor:
        """Position and velocity `[*B, 2]` relative to the goal at rest."""
        return torch.stack((state[..., 0] - state[..., 2], state[..., 1]), dim=-1)
