"""Projection of a categorical distribution onto a fixed support."""

from __future__ import annotations

import torch
from torch import Tensor


def project_categorical(atoms: Tensor, probs: Tensor, support: Tensor) -> Tensor:
    r"""Project mass `probs` at the places `atoms` onto the evenly spaced `support` (Bellemare et al. 2017, eq. 7).

    With :math:`b_j = (\mathrm{clamp}(x_j) - v_{min}) / \Delta z`, atom :math:`j` gives :math:`p_j (1 - (b_j - l))`
    to node :math:`l = \lfloor b_j \rfloor` (at most :math:`N - 2`) and :math:`p_j (b_j - l)` to node :math:`l + 1`.
    The total mass is kept, also where :math:`b_j` is an integer or its rounding passes :math:`N - 1`.

    Args:
        atoms: images of the atoms under a backup, `[*B, M]`, in the unit of the value.
        probs: their mass, `[*B, M]`, summing to 1.
        support: the nodes, `[N]`, or `[*B, N]` where rows differ; increasing and evenly spaced, `N >= 2`.

    Returns:
        The mass at each node, `[*B, N]`.

    Raises:
        ValueError: if `atoms` and `probs` differ in shape, or the support fits neither shape or has one node.

    Example:
        >>> import torch
        >>> from torchrl_safety.objectives import project_categorical
        >>> support = torch.linspace(0, 1, 3)
        >>> project_categorical(torch.tensor([[0.25, 2.0]]), torch.tensor([[0.5, 0.5]]), support)
        tensor([[0.2500, 0.2500, 0.5000]])
    """
    if atoms.shape != probs.shape:
        raise ValueError(f"atoms {list(atoms.shape)} and probs {list(probs.shape)} must have the same shape `[*B, M]`")
    nodes = support.shape[-1] if support.dim() else 0
    if nodes < 2 or support.shape[:-1] not in ((), atoms.shape[:-1]):
        raise ValueError(
            f"support must be `[N]` with N >= 2 nodes, or `[*B, N]` beside atoms {list(atoms.shape)}, "
            f"got shape {list(support.shape)}"
        )
    return project_positions(node_positions(atoms, support), probs, nodes)


def node_positions(atoms: Tensor, support: Tensor) -> Tensor:
    """Where `atoms` `[*B, M]` lie among the nodes of a support: 0 at the first, N - 1 at the last, and beyond."""
    low, high = support[..., :1], support[..., -1:]
    return (atoms - low) * ((support.shape[-1] - 1) / (high - low))


def project_positions(positions: Tensor, probs: Tensor, nodes: int) -> Tensor:
    """:func:`project_categorical` of mass at :func:`node_positions` of a support with so many `nodes`."""
    positions = positions.clamp(0, nodes - 1)
    lower = positions.floor().clamp(max=nodes - 2)
    upper_mass = probs * (positions - lower)
    index = lower.long()
    mass = torch.zeros(*positions.shape[:-1], nodes, dtype=upper_mass.dtype, device=positions.device)
    return mass.scatter_add(-1, index, probs - upper_mass).scatter_add_(-1, index + 1, upper_mass)
