"""A model car between the walls of a track and six boxes, pushed about by a bounded disturbance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchrl_safety.envs.base import NativeEnv
from torchrl_safety.envs.motion import runge_kutta_step, wrap_angle
from torchrl_safety.envs.settings import action_levels, check_positive

__all__ = ["BicycleEnv"]

_BOXES = (
    (2.0, -0.4, 0.25, 0.1),
    (5.0, 0.4, 0.25, 0.1),
    (8.0, 0.1, 0.25, 0.1),
    (11.0, -0.1, 0.25, 0.1),
    (14.0, -0.4, 0.25, 0.1),
    (14.0, 0.4, 0.25, 0.1),
)


class BicycleEnv(NativeEnv):
    r"""A kinematic bicycle on a straight track with boxes: the car of ISAACS, against every disturbance in a cube.

    The state (x, y, v, ψ, δ) is the middle of the rear axle in m, the speed in m/s, heading and steering angle in rad;
    the control is (a, ω), the disturbance :math:`d_{0..4}` acts on every entry, :math:`|d_i| \le D`:

    :math:`x' = v \cos ψ + d_0`, :math:`y' = v \sin ψ + d_1`, :math:`v' = a + d_2`,
    :math:`ψ' = v \tan(δ) / L + d_3`, :math:`δ' = ω + d_4`.

    Speed and steering have stops: where :math:`v'` or :math:`δ'` would pass one within the step, it is reduced so that
    the stop is met at its end. Control and disturbance are held over a step, which one Runge-Kutta step of order 4
    integrates; ψ is wrapped to [-π, π).

    The body is the rectangle from the rear axle to `length` ahead, `width` wide. With the gap of two rectangles
    between them, the largest along the normals of their sides (negative where they overlap, by the least shift that
    parts them; never more than their distance), g is the least of the gaps to the two walls :math:`|y| = W` and to the
    boxes. The road goes on behind the boxes; a car that drives along it cannot turn round. On `"reach_avoid"` the car
    has to cross a line, :math:`l = x - x_{finish}`.

    Discrete actions are the nine pairs of -a, 0, a and -ω, 0, ω, the second varying faster (4 is none); discrete
    disturbances are none (0) and the 32 corners of the cube, among which the worst lies. See
    :class:`~torchrl_safety.envs.base.NativeEnv` for keys and the remaining arguments. Dynamics, track and limits: Hsu
    et al. 2023, "ISAACS: Iterative Soft Adversarial Actor-Critic for Safety", and its code, which solves D = .1 on a
    grid, trains with D = .4 and starts at x in [0, 1]. No exact value is known.

    Args:
        num_envs: batch size N.
        problem: `"avoid"` or `"reach_avoid"`.
        discrete: Categorical actions if true, Bounded ones if false.
        dt: length of a step in seconds, > 0.
        max_acceleration: largest \|a\| in m/s², > 0.
        max_steering_rate: largest \|ω\| in rad/s, > 0.
        max_disturbance: D >= 0, in m/s, m/s, m/s², rad/s, rad/s; 0 leaves out the `"disturbance"` key.
        wheelbase: L in m, > 0.
        min_speed: least v, >= 0.
        max_speed: greatest v, above the least.
        max_steering: greatest \|δ\|, in (0, π/2).
        half_width: W, from the middle of the road to a wall, in m, > 0.
        boxes: obstacles (x, y, half length, half width) `[K, 4]`, in m, parallel to the road.
        length: of the body in m, > 0.
        width: of the body in m, > 0.
        finish: x of the line to cross; only reach-avoid reads it.
        start_low: least (x, y, v, ψ, δ) of the box from which starts are drawn uniformly; None is x = 0, y = -W, ψ =
            -π/2 and the lower stops, so that some starts have failed.
        start_high: greatest (x, y, v, ψ, δ) of that box; None is x = 1 behind the last box, W, π/2 and the upper stops.
        **settings: `end_criterion`, `max_steps`, `state_key`, `generator`, `seed`, `dtype`, `device`.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> env = BicycleEnv(num_envs=2, discrete=False, seed=0, max_steps=100)
        >>> env.rollout(5, break_when_any_done=False)["disturbance"].shape
        torch.Size([2, 5, 5])
        >>> env.safety_margin(torch.tensor([1.0, -0.4, 1.0, 0.0, 0.0]))  # .1 from the wall, .25 from the first box
        tensor([0.1000])
    """

    angles = (3,)

    def __init__(
        self,
        num_envs: int = 1,
        *,
        problem: str = "avoid",
        discrete: bool = True,
        dt: float = 0.1,
        max_acceleration: float = 3.5,
        max_steering_rate: float = 5.0,
        max_disturbance: float = 0.1,
        wheelbase: float = 0.257,
        min_speed: float = 0.4,
        max_speed: float = 2.0,
        max_steering: float = 0.35,
        half_width: float = 0.6,
        boxes: Sequence[Sequence[float]] = _BOXES,
        length: float = 0.5,
        width: float = 0.2,
        finish: float = 20.0,
        start_low: Sequence[float] | None = None,
        start_high: Sequence[float] | None = None,
        **settings: Any,
    ) -> None:
        check_positive(
            dt=dt,
            max_acceleration=max_acceleration,
            max_steering_rate=max_steering_rate,
            wheelbase=wheelbase,
            half_width=half_width,
            length=length,
            width=width,
        )
        _check_limits(max_disturbance, min_speed, max_speed, max_steering, finish)
        obstacles = _check_boxes(boxes)
        super().__init__(
            num_envs,
            state_dim=5,
            control_table=action_levels(max_acceleration, max_steering_rate),
            disturbance_table=_corners(max_disturbance, 5) if max_disturbance > 0 else None,
            problem=problem,
            discrete=discrete,
            **settings,
        )
        self.dt = dt
        self.max_acceleration = max_acceleration
        self.max_steering_rate = max_steering_rate
        self.max_disturbance = max_disturbance
        self.wheelbase = wheelbase
        self.min_speed = min_speed
        self.max_speed = max_speed
        self.max_steering = max_steering
        self.half_width = half_width
        self.length = length
        self.width = width
        self.finish = finish
        self.register_buffer("_boxes", obstacles.to(device=self.device, dtype=self.dtype), persistent=False)
        last = max((float(box[0]) for box in obstacles), default=0.0)
        lower = (0.0, -half_width, min_speed, -math.pi / 2, -max_steering)
        upper = (last + 1, half_width, max_speed, math.pi / 2, max_steering)
        self._set_start_box(
            "x, y, v, ψ, δ", lower if start_low is None else start_low, upper if start_high is None else start_high
        )

    def dynamics(self, state: Tensor, control: Tensor, disturbance: Tensor | None = None) -> Tensor:
        """The state `[*B, 5]` after one held control `[*B, 2]` and disturbance `[*B, 5]`, none if None."""
        disturbance = torch.zeros_like(state) if disturbance is None else disturbance
        acceleration, steering_rate = control.unbind(-1)
        _, _, speed, _, steering = state.unbind(-1)
        ahead, aside, faster, turning, steered = disturbance.unbind(-1)
        next_speed = torch.add(speed, acceleration + faster, alpha=self.dt).clamp(self.min_speed, self.max_speed)
        next_steering = torch.add(steering, steering_rate + steered, alpha=self.dt)
        next_steering = next_steering.clamp(-self.max_steering, self.max_steering)
        rates = ((next_speed - speed) / self.dt, turning, (next_steering - steering) / self.dt)
        slope = partial(self._slope, push=torch.stack((ahead, aside, *rates), dim=-1))
        x, y, _, heading, _ = runge_kutta_step(slope, state, self.dt).unbind(-1)
        return torch.stack((x, y, next_speed, wrap_angle(heading), next_steering), dim=-1)

    def _slope(self, state: Tensor, push: Tensor) -> Tensor:
        _, _, speed, heading, steering = state.unbind(-1)
        still = torch.zeros_like(speed)
        turn = speed * steering.tan() / self.wheelbase
        return torch.stack((speed * heading.cos(), speed * heading.sin(), still, turn, still), dim=-1) + push

    def safety_margin(self, state: Tensor) -> Tensor:
        """`g` `[*B, 1]`, the least gap between the body and walls or boxes, in m."""
        x, y, _, heading, _ = state.split(1, dim=-1)
        cosine, sine = heading.cos(), heading.sin()
        half_length, half_width = self.length / 2, self.width / 2
        x, y = x + half_length * cosine, y + half_length * sine  # the middle of the body
        along, across = cosine.abs(), sine.abs()
        reach_x, reach_y = half_length * along + half_width * across, half_length * across + half_width * along
        walls = self.half_width - y.abs() - reach_y
        box_x, box_y, box_length, box_width = self._boxes.to(state.dtype).unbind(-1)
        away_x, away_y = box_x - x, box_y - y
        gaps = torch.stack(
            (
                away_x.abs() - reach_x - box_length,
                away_y.abs() - reach_y - box_width,
                (away_x * cosine + away_y * sine).abs() - half_length - box_length * along - box_width * across,
                (away_y * cosine - away_x * sine).abs() - half_width - box_length * across - box_width * along,
            )
        )
        return torch.cat((walls, gaps.amax(0)), dim=-1).amin(dim=-1, keepdim=True)

    def target_margin(self, state: Tensor) -> Tensor:
        """`l = x - x_finish` `[*B, 1]`, in m."""
        return state[..., :1] - self.finish

    def sample_states(self, n: int, generator: torch.Generator) -> Tensor:
        """`n` states `[n, 5]`, uniform in the start box, with headings in [-π, π)."""
        states = self.uniform(self._start_low, self._start_high, n, generator)
        states[:, 3] = wrap_angle(states[:, 3])
        return states


def _corners(bound: float, dim: int) -> Tensor:
    """The origin, then every corner of the cube of this half side, `[1 + 2^dim, dim]`."""
    corners = list(itertools.product((-bound, bound), repeat=dim))
    return torch.tensor([(0.0,) * dim, *corners], dtype=torch.float64, device="cpu")


def _check_limits(
    max_disturbance: float, min_speed: float, max_speed: float, max_steering: float, finish: float
) -> None:
    if not 0 <= max_disturbance < math.inf:
        raise ValueError(f"max_disturbance={max_disturbance} must be finite and at least 0, which leaves it out")
    if not 0 <= min_speed < max_speed < math.inf:
        raise ValueError(
            f"min_speed={min_speed} and max_speed={max_speed} must be finite with 0 <= min_speed < max_speed"
        )
    if not 0 < max_steering < math.pi / 2:
        raise ValueError(f"max_steering={max_steering} must lie in (0, π/2), in radians")
    if not math.isfinite(finish):
        raise ValueError(f"finish={finish} must be finite, the x of the line to cross")


def _check_boxes(boxes: Sequence[Sequence[float]]) -> Tensor:
    obstacles = torch.tensor(boxes, dtype=torch.float64, device="cpu")
    if not len(boxes):
        return obstacles.reshape(0, 4)
    if (
        obstacles.ndim != 2
        or obstacles.shape[1] != 4
        or not obstacles.isfinite().all()
        or (obstacles[:, 2:] <= 0).any()
    ):
        raise ValueError(f"boxes={boxes} must be finite rows (x, y, half length, half width) with positive halves")
    return obstacles
