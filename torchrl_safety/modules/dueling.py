"""The dueling aggregation of a state value and advantages."""

from __future__ import annotations

from torch import Tensor, nn


class DuelingHead(nn.Module):
    r"""Join a value and advantages: :math:`Q = V + A - \mathrm{mean}_a A`, or :math:`- \max_a A`.

    Subtracting the mean (or maximum) makes the split identifiable. In a categorical network the same is done for
    the logits of each atom. Source: Wang et al. 2016, eq. 8 and 9.

    Args:
        mode: ``"mean"`` or ``"max"``.
        action_dim: dimension of `advantage` that runs over the actions.

    Raises:
        ValueError: for another `mode`.

    Example:
        >>> import torch
        >>> from torchrl_safety.modules import DuelingHead
        >>> DuelingHead("mean")(torch.tensor([[5.0]]), torch.tensor([[1.0, 3.0]]))
        tensor([[4., 6.]])
    """

    def __init__(self, mode: str = "mean", *, action_dim: int = -1) -> None:
        super().__init__()
        if mode not in ("mean", "max"):
            raise ValueError(f"dueling mode is {mode!r}; choose one of ['mean', 'max']")
        self.mode, self.action_dim = mode, action_dim

    def forward(self, value: Tensor, advantage: Tensor) -> Tensor:
        """`value` has size 1 where `advantage` has one entry per action."""
        reduce = advantage.mean if self.mode == "mean" else advantage.amax
        return value + advantage - reduce(self.action_dim, keepdim=True)

    def extra_repr(self) -> str:
        return f"mode={self.mode!r}, action_dim={self.action_dim}"
