"""A pendulum with weak torque that must stay near upright, and its exact safe set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchrl_safety.envs.base import NativeEnv
from torchrl_safety.envs.motion import runge_kutta_step
from torchrl_safety.envs.settings import action_levels, check_positive, check_share

__all__ = ["PendulumEnv"]


class PendulumEnv(NativeEnv):
    r"""A pendulum about its upright rest, `θ'' = A sin θ + u`, `|u| <= U`, that must stay in `|θ| <= θm`.

    The state is `(θ, ω)` in rad and rad/s, θ = 0 upright and never wrapped, `u` an angular acceleration (torque
    over inertia). The control is held over a step, which one step of the classical Runge-Kutta method of order 4
    integrates: semi-implicit Euler, as in Gymnasium's pendulum, moves the kernel visibly. Margins are
    :math:`g = θ_m - |θ|` and :math:`l = r - \max(|θ|, |ω|)`. Discrete actions 0, 1, 2 stand for `-U`, 0, `U`. See
    :class:`~torchrl_safety.envs.base.NativeEnv` for keys and the remaining arguments.

    With the defaults gravity beats the control beyond :math:`\arcsin(U/A) = .305 < θ_m`: a pendulum that leans
    further is safe only while it swings back fast enough. The kernel fills about a third of the default start box.

    Args:
        num_envs: batch size N.
        problem: `"avoid"` or `"reach_avoid"`: come to the upright rest.
        discrete: Categorical actions if true, Bounded ones if false.
        dt: length of a step in seconds, in (0, 1/√A], the time in which a fall grows e-fold.
        gravity: A, gravity over length, in 1/s², > 0.
        max_control: U, the largest |u|, in rad/s², > 0.
        max_angle: θm, the largest safe |θ| in rad, in (0, π/2].
        target_radius: r of the target margin, > 0; on `"reach_avoid"` the target must lie in the kernel.
        start_low: least (θ, ω) of the box from which starts are drawn uniformly; None for one around the kernel.
        start_high: greatest (θ, ω) of that box; None is the mirror image of `start_low`.
        **settings: `end_criterion`, `max_steps`, `state_key`, `generator`, `seed`, `dtype`, `device`.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> env = PendulumEnv(num_envs=2, seed=0, max_steps=100)
        >>> env.rollout(5, break_when_any_done=False)["next", "safety_margin"].shape
        torch.Size([2, 5, 1])
        >>> env.exact_safe(torch.tensor([[0.4, -1.0], [0.4, 0.0]]))
        tensor([ True, False])
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        problem: str = "avoid",
        discrete: bool = True,
        dt: float = 0.05,
        gravity: float = 10.0,
        max_control: float = 3.0,
        max_angle: float = 0.5,
        target_radius: float = 0.2,
        start_low: Sequence[float] | None = None,
        start_high: Sequence[float] | None = None,
        **settings: Any,
    ) -> None:
        check_positive(gravity=gravity, max_control=max_control)
        if not 0 < dt <= 1 / math.sqrt(gravity):
            raise ValueError(f"dt={dt} must lie in (0, {1 / math.sqrt(gravity):.4g}], 1/√gravity: take smaller steps")
        if not 0 < max_angle <= math.pi / 2:
            raise ValueError(f"max_angle={max_angle} must lie in (0, π/2], in radians")
        kernel = _Kernel(gravity, max_control, max_angle)
        fastest = float(kernel.barrier(torch.tensor(-max_angle, dtype=torch.float64, device="cpu")))
        _check_target(kernel, problem, target_radius)
        if start_low is None:
            start_low = (-max_angle, -1.05 * fastest) if start_high is None else [-end for end in start_high]
        start_high = [-end for end in start_low] if start_high is None else start_high
        super().__init__(
            num_envs,
            state_dim=2,
            control_table=action_levels(max_control),
            problem=problem,
            discrete=discrete,
            **settings,
        )
        self.dt = dt
        self.gravity = gravity
        self.max_control = max_control
        self.max_angle = max_angle
        self.target_radius = target_radius
        self._kernel = kernel
        self._set_start_box("θ, ω", start_low, start_high)

    def dynamics(self, state: Tensor, control: Tensor, disturbance: Tensor | None = None) -> Tensor:
        """The state `[*B, 2]` after one held control `[*B, 1]`, by one Runge-Kutta step; there is no disturbance."""
        return runge_kutta_step(partial(self._slope, control=control), state, self.dt)

    def _slope(self, state: Tensor, control: Tensor) -> Tensor:
        angle, velocity = state.split(1, dim=-1)
        return torch.cat((velocity, torch.add(control, angle.sin(), alpha=self.gravity)), dim=-1)

    def safety_margin(self, state: Tensor) -> Tensor:
        """`g = θm - |θ|` `[*B, 1]`."""
        return self.max_angle - state[..., :1].abs()

    def target_margin(self, state: Tensor) -> Tensor:
        """`l = r - max(|θ|, |ω|)` `[*B, 1]`."""
        return self.target_radius - state.abs().amax(dim=-1, keepdim=True)

    def sample_states(self, n: int, generator: torch.Generator) -> Tensor:
        """`n` states `[n, 2]`, uniform in the start box."""
        return self.uniform(self._start_low, self._start_high, n, generator)

    def exact_safe(self, state: Tensor) -> Tensor:
        r"""Whether states `[*B, 2]` lie in the solution set in continuous time, bool `[*B]`.

        Under `u = -U` the energy :math:`ω^2/2 + Φ(θ)`, :math:`Φ = A \cos θ + U θ`, is constant. Let
        :math:`θ^* = \arcsin(U/A)` if :math:`U < A \sin θ_m`, the lean at which full control balances gravity, else
        :math:`θ_m`. The kernel is :math:`|θ| \le θ_m`, :math:`-h(-θ) \le ω \le h(θ)` with
        :math:`h(θ) = \mathrm{sgn}(θ^* - θ) \sqrt{2(Φ(θ^*) - Φ(θ))}`: what comes to rest at :math:`θ^*` under full
        braking. From its interior the target is reached, so the reach-avoid set is the same but for its boundary.

        Args:
            state: `[*B, 2]`, any batch shape, dtype and device; integers count in the env's dtype.

        Returns:
            bool `[*B]`.

        Example:
            >>> PendulumEnv().exact_safe(torch.tensor([[0.0, 0.9], [0.0, 1.0]]))
            tensor([ True, False])
        """
        state = self._floating(state)
        return self._kernel.contains(*state.unbind(-1))

    def well_inside(self, state: Tensor, share: float = 0.95) -> Tensor:
        """Whether `share` of the control can keep states `[*B, 2]` within `share` of the angle, bool `[*B]`.

        This is the exact set shrunk to `share` of its size about its centre where `sin θ` is close to `θ`, and lies in
        the exact set everywhere, which the plainly shrunk set does not where the control is very weak.

        Raises:
            ValueError: `share` outside (0, 1].
        """
        check_share(share, "the part of the control and of the angle to be used")
        state = self._floating(state)
        kernel = _Kernel(self.gravity, share * self.max_control, share * self.max_angle)
        return kernel.contains(*state.unbind(-1))


class _Kernel:
    """The viability kernel of the pendulum; see :meth:`PendulumEnv.exact_safe`."""

    def __init__(self, gravity: float, max_control: float, max_angle: float) -> None:
        self.gravity = gravity
        self.max_control = max_control
        self.max_angle = max_angle
        balances = max_control < gravity * math.sin(max_angle)
        self.last_rest = math.asin(max_control / gravity) if balances else max_angle

    def barrier(self, angle: Tensor) -> Tensor:
        """h, the largest safe velocity at each angle, of the angles' shape."""
        # Φ(θ*) - Φ(θ) with cosines turned into sines: their difference loses half the digits close to θ*.
        mean, lag = (self.last_rest + angle) / 2, self.last_rest - angle
        energy = self.max_control * lag - 2 * self.gravity * mean.sin() * (lag / 2).sin()
        return lag.sign() * (2 * energy.clamp(min=0)).sqrt()

    def contains(self, angle: Tensor, velocity: Tensor) -> Tensor:
        """Whether `(angle, velocity)` is in the kernel, bool of their shape."""
        return (angle.abs() <= self.max_angle) & (velocity <= self.barrier(angle)) & (-velocity <= self.barrier(-angle))


def _check_target(kernel: _Kernel, problem: str, radius: float) -> None:
    check_positive(target_radius=radius)
    corner = torch.tensor(radius, dtype=torch.float64, device="cpu")
    if problem == "reach_avoid" and not kernel.contains(corner, corner):
        raise ValueError(
            f"target_radius={radius} is too large: the state ({radius}, {radius}) of the target fails under "
            f"max_control={kernel.max_control}, gravity={kernel.gravity}, max_angle={kernel.max_angle}; take it smaller"
        )
