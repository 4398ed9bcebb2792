"""Leaves of rank-based prioritization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RankTable:
    r"""Ranks of priorities among those that the buffer held when it was last sorted.

    .. math:: \mathrm{rank}(p) = 1 + |\{i : p_i > p\}|, \qquad \ell = \mathrm{rank}(p)^{-\alpha}

    Schaul et al. 2015, "Prioritized Experience Replay", section 3.3, with its array that is sorted now and then. Equal
    priorities share their best rank, so that it does not matter in which slot an item lies.

    Args:
        sort_interval: draws after which a changed buffer is sorted again, at least 1; 1 keeps the ranks exact. It is
            also sorted once more rows have changed than there were in the last sort.

    Raises:
        ValueError: if `sort_interval` is less than 1.

    Examples:
        >>> import torch
        >>> ranks = RankTable(sort_interval=1)
        >>> ranks.sort(torch.tensor([0.3, 2.0, 0.3, 0.1]), alpha=1.0).tolist()
        [0.5, 1.0, 0.5, 0.25]
        >>> ranks.leaf(torch.tensor([3.0, 0.3]), alpha=1.0).tolist()
        [1.0, 0.5]
    """

    def __init__(self, *, sort_interval: int) -> None:
        if not sort_interval >= 1:
            raise ValueError(f"sort_interval must be at least 1, got {sort_interval}: pass a number of draws.")
        self.sort_interval = sort_interval
        self._ascending = torch.zeros(0, dtype=torch.float64)
        self._num_changed = 0
        self._num_draws = 0

    def changed(self, num_rows: int) -> None:
        """So many rows got another priority."""
        self._num_changed += num_rows

    def is_due(self) -> bool:
        """Called once before each draw: whether the buffer is to be sorted first."""
        self._num_draws += 1
        if not self._num_changed:
            return False
        return self._num_draws > self.sort_interval or self._num_changed > self._ascending.numel()

    def sort(self, priority: Tensor, *, alpha: float) -> Tensor:
        """Take the ranks from `priority` `[N]`; returns their leaves, `[N]` float64."""
        self._ascending, order = priority.sort()
        self._num_changed, self._num_draws = 0, 1
        # Found in rising order, which is several times faster in a large buffer.
        leaf = self.leaf(self._ascending, alpha=alpha)
        return torch.empty_like(leaf).scatter_(0, order, leaf)

    def leaf(self, priority: Tensor, *, alpha: float) -> Tensor:
        """Leaves of items with the priorities `[B]`, `[B]` float64."""
        # On the device that the priorities have moved to since.
        self._ascending = self._ascending.to(device=priority.device, dtype=priority.dtype)
        num_larger = self._ascending.numel() - torch.searchsorted(self._ascending, priority.contiguous(), right=True)
        return (1.0 + num_larger).double().pow_(-alpha)

    def clear(self) -> None:
        """Forget all items."""
        self._ascending = self._ascending[:0].clone()
        self._num_changed, self._num_draws = 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Copies of the last sort and the counts since."""
        return {
            "ascending": self._ascending.clone(),
            "num_changed": self._num_changed,
            "num_draws": self._num_draws,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state."""
        self._ascending = state_dict["ascending"].to(self._ascending.device, copy=True)
        self._num_changed = state_dict["num_changed"]
        self._num_draws = state_dict["num_draws"]
