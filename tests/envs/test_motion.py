"""Arcs and Runge-Kutta steps against a stiffly accurate integration, and the range of angles."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from torchrl_safety.envs.motion import arc_step, runge_kutta_step, wrap_angle


def test_an_arc_is_the_motion_of_a_car():
    generator = torch.Generator().manual_seed(0)
    poses = 2 * torch.rand(20, 3, generator=generator, dtype=torch.float64) - 1
    rates = torch.linspace(-3, 3, 20, dtype=torch.float64)[:, None]
    ends = arc_step(poses, rates, speed=0.8, dt=0.7)
    for pose, rate, end in zip(poses.numpy(), rates.numpy()[:, 0], ends.numpy()):
        path = solve_ivp(
            lambda _, s, rate=rate: [0.8 * math.cos(s[2]), 0.8 * math.sin(s[2]), rate],
            (0, 0.7),
            pose,
            rtol=1e-10,
            atol=1e-12,
        )
        expected = path.y[:, -1]
        np.testing.assert_allclose(end[:2], expected[:2], atol=1e-9)
        assert math.remainder(end[2] - expected[2], math.tau) == pytest.approx(0, abs=1e-9)


def test_a_runge_kutta_step_errs_with_the_fifth_power_of_its_length():
    start = torch.tensor([[0.3, -0.4], [1.2, 0.5]], dtype=torch.float64)

    def slope(state):  # a pendulum
        angle, velocity = state.unbind(-1)
        return torch.stack((velocity, 10 * angle.sin()), -1)

    def error(dt: float) -> float:
        exact = [
            solve_ivp(lambda _, s: [s[1], 10 * math.sin(s[0])], (0, dt), row, rtol=1e-12, atol=1e-14).y[:, -1]
            for row in start.numpy()
        ]
        return float((runge_kutta_step(slope, start, dt) - torch.as_tensor(np.array(exact))).abs().max())

    assert error(0.1) < 1e-4
    assert math.log2(error(0.2) / error(0.1)) == pytest.approx(5, abs=0.4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wrapped_angles_lie_in_their_range_and_point_the_same_way(dtype):
    angles = torch.linspace(-20, 20, 401, dtype=dtype)
    wrapped = wrap_angle(angles)
    assert ((wrapped >= -math.pi) & (wrapped < math.pi)).all()
    torch.testing.assert_close(wrapped.sin(), angles.sin(), atol=1e-5, rtol=0)
    torch.testing.assert_close(wrapped.cos(), angles.cos(), atol=1e-5, rtol=0)
    assert torch.equal(wrap_angle(wrapped), wrapped)
