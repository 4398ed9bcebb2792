"""Risk measures and statistics of a categorical distribution over a support."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def categorical_quantile(probs: Tensor, support: Tensor, level: float) -> Tensor:
    r"""The smallest atom up to which the mass is at least `level`: :math:`q_\alpha = \min\{z_j : F(z_j) \ge \alpha\}`.

    :math:`\{q_\alpha \ge 0\}` is the set where the value is at least 0 with a probability above :math:`1 - \alpha`: a
    conservative reading of a learned safe set.

    Args:
        probs: mass of each atom, `[*B, N]`, summing to 1.
        support: the atoms, `[N]` or `[*B, N]`, increasing, in the unit of the value.
        level: :math:`\alpha` in (0, 1]; 0.5 is the (lower) median, 1 the largest atom with any mass.

    Returns:
        The quantile, `[*B]`, in the unit of the value; NaN where a mass is NaN.

    Raises:
        ValueError: for a `level` outside (0, 1], or a support of another size.

    Example:
        >>> import torch
        >>> from torchrl_safety.modules import categorical_quantile
        >>> categorical_quantile(torch.tensor([0.1, 0.4, 0.5]), torch.tensor([-1.0, 0.0, 1.0]), 0.2)
        tensor(0.)
    """
    _check(probs, support, level)
    cumulative = probs.cumsum(-1)
    # A sum of N masses is exact to this relative error; without it an atom that ends at the level would be passed over.
    reached = level * (1 - probs.shape[-1] * torch.finfo(probs.dtype).eps)
    index = (cumulative < reached).sum(-1, keepdim=True).clamp_max(probs.shape[-1] - 1)
    atom = support.expand_as(probs).gather(-1, index).squeeze(-1)
    return atom.where(~cumulative[..., -1].isnan(), torch.nan)


def categorical_cvar(probs: Tensor, support: Tensor, level: float) -> Tensor:
    r"""The mean of the worst share `level` of the mass, the conditional value at risk.

    :math:`\mathrm{CVaR}_\alpha = \frac1\alpha \sum_j z_j \min(p_j, (\alpha - F(z_{j-1}))^+)`: the boundary atom counts
    with the part of its mass that the share still lacks. Worst means smallest. It rises with :math:`\alpha`, up to the
    mean at 1. It is differentiable in `probs`. Source: Rockafellar and Uryasev 2002, prop. 8 (for losses, the largest).

    Args:
        probs: mass of each atom, `[*B, N]`, summing to 1.
        support: the atoms, `[N]` or `[*B, N]`, increasing, in the unit of the value.
        level: :math:`\alpha` in (0, 1].

    Returns:
        The conditional value at risk, `[*B]`, in the unit of the value.

    Raises:
        ValueError: for a `level` outside (0, 1], or a support of another size.

    Example:
        >>> import torch
        >>> from torchrl_safety.modules import categorical_cvar
        >>> categorical_cvar(torch.tensor([0.1, 0.4, 0.5]), torch.tensor([-1.0, 0.0, 1.0]), 0.2)
        tensor(-0.5000)
    """
    _check(probs, support, level)
    before = probs.cumsum(-1) - probs
    share = torch.minimum(probs, (level - before).clamp_min(0))
    return (share * support).sum(-1) / share.sum(-1)


def distribution_statistics(
    logits: Tensor, support: Tensor, *, levels: Sequence[float] = (0.05, 0.5, 0.95)
) -> dict[str, Tensor]:
    r"""What a log should say of value distributions, averaged over the batch; nothing is read back from the device.

    A collapsed distribution has entropy 0 and standard deviation 0, an untrained one about :math:`\ln N`.

    Args:
        logits: `[*B, N]`; those of all actions, or of the chosen one (see :func:`greedy_policy`).
        support: the atoms, `[N]`, increasing, in the unit of the value.
        levels: of the quantiles, each in (0, 1].

    Returns:
        Scalar tensors without gradient: ``"entropy"`` in nats; ``"std"``, and ``"quantile_0.05"`` and so on, in the
        unit of the value.

    Raises:
        ValueError: for a level outside (0, 1], or a support of another size.

    Example:
        >>> import torch
        >>> from torchrl_safety.modules import distribution_statistics
        >>> found = distribution_statistics(torch.zeros(8, 3, 4), torch.tensor([0.0, 1.0, 2.0, 3.0]), levels=(0.5,))
        >>> found["entropy"], found["quantile_0.5"]
        (tensor(1.3863), tensor(1.))
    """
    probs = logits.detach().softmax(-1)
    quantiles = {f"quantile_{level:g}": categorical_quantile(probs, support, level).mean() for level in levels}
    mean = (probs * support).sum(-1, keepdim=True)
    variance = (probs * (support - mean).square()).sum(-1)
    return {"entropy": torch.special.entr(probs).sum(-1).mean(), "std": variance.sqrt().mean(), **quantiles}


def _check(probs: Tensor, support: Tensor, level: float) -> None:
    if not torch.finfo(probs.dtype).tiny <= level <= 1:
        raise ValueError(f"level is {level}; it must lie in (0, 1], the share of the mass counted from the worst")
    if support.shape not in (probs.shape[-1:], probs.shape):
        raise ValueError(
            f"the support {list(support.shape)} does not fit probs {list(probs.shape)}: give the atoms `[N]` or "
            "`[*B, N]` that the masses `[*B, N]` stand on"
        )
