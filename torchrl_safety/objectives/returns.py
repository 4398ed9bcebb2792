"""Multi-step targets as compositions of clamped affine maps."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_safety.objectives.clamped_affine import ClampedAffine, affine, check_factor, suffix_values


def _check_time(name: str, tensor: Tensor, step_map: ClampedAffine) -> None:
    if tensor.shape != step_map.slope.shape:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}, the step map {list(step_map.slope.shape)}: "
            f"they must agree; pass {name} as `[*B, T, 1]`"
        )


def n_step_return(
    step_map: ClampedAffine, next_value: Tensor, *, valid: Tensor | None = None, time_dim: int = -2
) -> Tensor:
    r"""The n-step target :math:`(F_0 \circ F_1 \circ \dots \circ F_{k-1})(V(s_k))`.

    Composing the maps is the multi-step form of any Bellman operator; for :math:`F(v) = r + \gamma v` it
    is the n-step return of Sutton and Barto (2018), eq. 7.1.

    Args:
        step_map: one map per step, fields `[*B, T, 1]`.
        next_value: value of the state after the last valid step, `[*B, 1]` (or `[*B, N]` atoms).
        valid: bool `[*B, T, 1]`; false steps are skipped. All steps count when it is absent.
        time_dim: position of `T`.

    Returns:
        The target, of the shape of `next_value`.

    Raises:
        ValueError: if shapes disagree.

    Example:
        >>> import torch
        >>> from torchrl_safety.objectives import AvoidBackup, n_step_return
        >>> margin = torch.tensor([[0.5], [0.2], [-0.1]])
        >>> ended = torch.tensor([[False], [False], [True]])
        >>> maps = AvoidBackup().step_map({"safety_margin": margin}, gamma=1.0, terminated=ended)
        >>> n_step_return(maps, torch.zeros(1))
        tensor([-0.1000])
    """
    return skip_invalid(step_map, valid).in_turn(next_value, time_dim)


def skip_invalid(step_map: ClampedAffine, valid: Tensor | None) -> ClampedAffine:
    """`step_map` with the identity in the place of every step that `valid` marks false."""
    if valid is None:
        return step_map
    _check_time("valid", valid, step_map)
    counted = valid.bool()
    slope, offset, low, high = (
        torch.where(counted, part, neutral) for part, neutral in zip(step_map.parts, (1.0, 0.0, -torch.inf, torch.inf))
    )
    return ClampedAffine.of((slope, offset, low, high))


def lambda_return(
    step_map: ClampedAffine,
    next_value: Tensor,
    *,
    lmbda: float | Tensor,
    done: Tensor | None = None,
    time_dim: int = -2,
) -> Tensor:
    r"""The :math:`\lambda`-return :math:`G_t = F_t\big((1-\lambda) V_{t+1} + \lambda G_{t+1}\big)` of any backup.

    The mixing happens inside the operator, so the bounds of the operator hold for every target: avoid
    :math:`G \le g`, reach-avoid :math:`\min(l, g) \le G \le g`. With :math:`F(v) = r + \gamma v` it is
    TD(:math:`\lambda`) (Sutton and Barto 2018, eq. 12.18). :math:`\lambda = 0` is TD(0),
    :math:`\lambda = 1` the Monte-Carlo value of the segment.

    Args:
        step_map: one map per step, fields `[*B, T, 1]`.
        next_value: :math:`V(s_{t+1})`, the value of the true next observation of each step, `[*B, T, 1]`.
        lmbda: :math:`\lambda \in [0, 1]`.
        done: bool `[*B, T, 1]`, true where nothing of this segment follows (terminated or truncated):
            there :math:`G_t = F_t(V_{t+1})`, as at the last step of the segment.
        time_dim: position of `T`.

    Returns:
        :math:`G_t` for every step, `[*B, T, 1]`.

    Raises:
        ValueError: if shapes disagree, or a number `lmbda` lies outside [0, 1].

    Example:
        >>> import torch
        >>> from torchrl_safety.objectives import AvoidBackup, lambda_return
        >>> margin = torch.tensor([[1.0], [1.0], [1.0], [-1.0]])
        >>> ended = torch.tensor([[False], [False], [False], [True]])
        >>> maps = AvoidBackup().step_map({"safety_margin": margin}, gamma=0.999, terminated=ended)
        >>> lambda_return(maps, torch.full((4, 1), 3.0), lmbda=0.95)[0]
        tensor([-0.4249])
    """
    _check_time("next_value", next_value, step_map)
    check_factor("lmbda", lmbda, step_map.slope.shape)
    if done is not None:
        _check_time("done", done, step_map)
    if next_value.shape[time_dim] <= 1:
        return step_map(next_value)
    slope, offset, low, high = step_map.parts
    # Bytes, since they turn into floats five times as fast as bools do.
    goes_on = torch.ones_like(slope) if done is None else (~done.bool()).view(torch.uint8).to(slope.dtype)
    follow = goes_on * lmbda
    follow.select(time_dim, -1).zero_()
    # F((1 - follow) V + follow G) as a map of G.
    mixed = (slope * follow, affine(slope, offset, (1 - follow) * next_value), low, high)
    slope, offset, low, high = (part.movedim(time_dim, 0).contiguous() for part in mixed)
    values = suffix_values((slope, offset, low, high), next_value.select(time_dim, -1))
    return values.movedim(0, time_dim)
