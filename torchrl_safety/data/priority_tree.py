"""A k-ary sum, min and max tree in plain tensor operations."""

from __future__ import annotations

import torch
from torch import Tensor

# 64 children a node and one flat array of at most 16384 nodes on top were the fastest of the shapes measured
# (`benchmarks/bench_replay.py`): up to a million leaves there is a single level of gathers.
_SHIFT = 6
_RADIX = 1 << _SHIFT
_MAX_TOP = 1 << 14


class PriorityTree:
    r"""Weights in slots, drawn in proportion, with their total, smallest and largest.

    .. math:: P(j) = \ell_j \,/\, \textstyle\sum_i \ell_i, \qquad
        \mathrm{find}(u) = \min\{j : \ell_0 + \dots + \ell_j > u \textstyle\sum_i \ell_i\}

    The sum tree of Schaul et al. 2015, "Prioritized Experience Replay", appendix B.2.1, with 64 children a node.
    A write recomputes the sums above it from their children, so that rounding errors do not add up. A leaf of 0 is an
    empty slot: it is never drawn and does not count for :attr:`min`. Nothing here waits for an accelerator; there, a
    wrong index or an empty tree stops the program by a device-side assertion instead of an exception.

    Args:
        capacity: number of slots, at least 1.
        device: where the tree lives; the default device when `None`.

    Raises:
        ValueError: if `capacity` is not a positive integer.

    Examples:
        >>> import torch
        >>> tree = PriorityTree(4)
        >>> tree.set(torch.tensor([0, 2, 2]), torch.tensor([1.0, 9.0, 3.0]))
        >>> tree.get(torch.tensor([0, 1, 2])).tolist()
        [1.0, 0.0, 3.0]
        >>> tree.total.item(), tree.min.item(), tree.max.item()
        (4.0, 1.0, 3.0)
        >>> tree.sample(torch.tensor([0.0, 0.24, 0.25, 0.99])).tolist()
        [0, 0, 2, 2]
    """

    def __init__(self, capacity: int, *, device: torch.device | str | int | None = None) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ValueError(f"capacity must be a positive integer, got {capacity!r}: pass the size of the buffer.")
        self.capacity = capacity
        self._rows: list[Tensor] = []
        # One slot more than asked: masked writes put their zero there.
        nodes = capacity + 1
        while not self._rows or nodes > _MAX_TOP:
            nodes = -(-nodes // _RADIX)
            self._rows.append(torch.zeros(nodes, _RADIX, dtype=torch.float64, device=device))
        self.device = self._rows[0].device
        self._top = torch.zeros(nodes, dtype=torch.float64, device=self.device)
        # Running sums of `_top` behind a leading zero; made again at the first read after a write.
        self._cumulative = torch.zeros(nodes + 1, dtype=torch.float64, device=self.device)
        self._cumulative_is_old = False
        self._zero = torch.zeros((), dtype=torch.float64, device=self.device)
        self._last_writer = torch.zeros(self._rows[0].numel(), dtype=torch.long, device=self.device)
        # Smallest and largest leaf of each lowest node, brought up to date when asked for. `None`: all are old.
        self._group_min = torch.full((self._rows[0].shape[0],), torch.inf, dtype=torch.float64, device=self.device)
        self._group_max = torch.zeros_like(self._group_min)
        self._old_groups: list[Tensor] | None = []
        self._num_old = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}(capacity={self.capacity}, device={self.device})"

    @property
    def total(self) -> Tensor:
        """Sum of the leaves, `[]` float64."""
        return self._running_sums().select(0, -1).clone()

    @property
    def min(self) -> Tensor:
        """Smallest leaf above 0, `[]` float64; `inf` when there is none."""
        self._update_extremes()
        return self._group_min.amin()

    @property
    def max(self) -> Tensor:
        """Largest leaf, `[]` float64; 0 when there is none above 0."""
        self._update_extremes()
        return self._group_max.amax()

    def set(self, index: Tensor, leaf: Tensor | float, *, where: Tensor | None = None) -> None:
        """Write `leaf` into the slots `index`; of rows with the same slot the last one wins.

        Args:
            index: slots, int64 `[B]`, each in `[0, capacity)` where it is written.
            leaf: weights, finite and not negative, `[B]` or one for all.
            where: bool `[B]`; rows where it is False write nothing. All rows when `None`.

        Raises:
            IndexError: if a slot lies outside the tree (on a CPU).
        """
        index = torch.as_tensor(index, dtype=torch.long, device=self.device).reshape(-1)
        if not index.numel():
            return
        if isinstance(leaf, Tensor):
            leaf = leaf.to(device=self.device, dtype=torch.float64).reshape(-1).expand(index.shape)
        else:
            # A number sent to an accelerator by `as_tensor` would be waited for.
            leaf = torch.full(index.shape, leaf, dtype=torch.float64, device=self.device)
        if where is not None:
            index = torch.where(where, index, self.capacity)
            leaf = torch.where(where, leaf, 0.0)
        self._check_index(index, self.capacity + (where is not None))
        leaves = self._rows[0].view(-1)
        leaves.scatter_(0, index, _last_of_each_slot(index, leaf, self._last_writer))
        node = index
        for rows, above in zip(self._rows, [*self._rows[1:], self._top]):
            node, above = node >> _SHIFT, above.view(-1)
            if node.numel() < rows.shape[0]:
                above.scatter_(0, node, rows.index_select(0, node).sum(1))
            else:
                torch.sum(rows, 1, out=above.narrow(0, 0, rows.shape[0]))
        self._cumulative_is_old = True
        self._remember_groups(index >> _SHIFT)

    def get(self, index: Tensor) -> Tensor:
        """Leaves of the slots `index` `[B]`, as float64 `[B]`.

        Raises:
            IndexError: if a slot lies outside the tree (on a CPU).
        """
        index = torch.as_tensor(index, dtype=torch.long, device=self.device)
        self._check_index(index, self.capacity)
        return self._rows[0].view(-1).index_select(0, index.reshape(-1)).view(index.shape)

    def sample(self, n: int | Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw slots in proportion to their leaves, with replacement.

        Args:
            n: how many draws, or the uniform numbers in `[0, 1)` to use for them, `[B]`.
            generator: source of the uniform numbers, where `n` is a count; torch's global one when `None`.

        Returns:
            Slots, int64 `[B]`.

        Raises:
            RuntimeError: if all leaves are 0 (on a CPU).
        """
        if not isinstance(n, Tensor):
            origin = self.device if generator is None else generator.device
            n = torch.rand(n, dtype=torch.float64, device=origin, generator=generator)
        return self.find(n)[0]

    def find(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Slots and leaves at the shares `u` of the total.

        Args:
            u: shares, `[B]` in `[0, 1)`.

        Returns:
            Slots, int64 `[B]`, and their leaves, float64 `[B]`.

        Raises:
            RuntimeError: if all leaves are 0 (on a CPU).
        """
        sums = self._running_sums()
        total = sums.narrow(0, self._top.numel(), 1)
        self._check_total(total)
        # In each row the rest of the mass is kept below the row's own running total, which rounding can put under the
        # sum of which it is a part. So the running sum rises at the child found: it is not empty.
        mass = u.to(dtype=torch.float64, device=self.device, non_blocking=True) * total
        mass = torch.minimum(mass, torch.nextafter(total, self._zero))
        node = torch.searchsorted(sums, mass, right=True).sub_(1)
        if self.device.type != "cpu":
            node = torch.where(self._top.index_select(0, node) > 0, node, self._top.argmax())
        mass = (mass - sums.index_select(0, node)).clamp_min_(0).unsqueeze(1)
        for rows in reversed(self._rows):
            row = rows.index_select(0, node)
            running = row.cumsum(1)
            mass = torch.minimum(mass, torch.nextafter(running.narrow(1, _RADIX - 1, 1), self._zero))
            child = torch.searchsorted(running, mass, right=True)
            if self.device.type != "cpu":
                child = _never_empty(row, child)
            value = row.gather(1, child)
            node = (node << _SHIFT).add_(child.squeeze(1))
            if rows is not self._rows[0]:
                mass = (mass - (running.gather(1, child) - value)).clamp_min_(0)
        return node, value.squeeze(1)

    def clear(self) -> None:
        """Make every slot empty."""
        for tensor in (*self._rows, self._top):
            tensor.zero_()
        self._cumulative_is_old = True
        self._old_groups = None

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all sums, so that a loaded tree draws the very same slots."""
        state = {f"level_{i}": rows.clone() for i, rows in enumerate(self._rows)}
        return {"capacity": torch.tensor(self.capacity), **state, "top": self._top.clone()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Take over a state; its device may differ.

        Raises:
            ValueError: if the state is one of a tree of another capacity.
        """
        if int(state_dict["capacity"]) != self.capacity:
            raise ValueError(
                f"the state holds a tree of capacity {int(state_dict['capacity'])}, this one has capacity "
                f"{self.capacity}: build it with the capacity that was saved."
            )
        for i, rows in enumerate(self._rows):
            rows.copy_(state_dict[f"level_{i}"])
        self._top.copy_(state_dict["top"])
        self._cumulative_is_old = True
        self._old_groups = None

    def _running_sums(self) -> Tensor:
        if self._cumulative_is_old:
            torch.cumsum(self._top, 0, out=self._cumulative.narrow(0, 1, self._top.numel()))
            self._cumulative_is_old = False
        return self._cumulative

    def _remember_groups(self, group: Tensor) -> None:
        if self._old_groups is None:
            return
        self._old_groups.append(group)
        self._num_old += group.numel()
        if self._num_old >= self._group_min.numel():
            self._old_groups = None

    def _update_extremes(self) -> None:
        if self._old_groups == []:
            return
        if self._old_groups is None:
            rows = self._rows[0]
            self._group_max = rows.amax(1)
            self._group_min = torch.where(rows > 0, rows, torch.inf).amin(1)
        else:
            group = torch.cat(self._old_groups)
            rows = self._rows[0].index_select(0, group)
            self._group_max.scatter_(0, group, rows.amax(1))
            self._group_min.scatter_(0, group, torch.where(rows > 0, rows, torch.inf).amin(1))
        self._old_groups, self._num_old = [], 0

    def _check_index(self, index: Tensor, bound: int) -> None:
        # The largest and the smallest on an accelerator would be a wait; its kernels assert the bounds.
        if index.device.type != "cpu" or not index.numel():
            return
        lowest, highest = index.aminmax()
        if lowest.item() < 0 or highest.item() >= bound:
            bad = lowest.item() if lowest.item() < 0 else highest.item()
            raise IndexError(f"slot {bad} is outside the tree: pass slots in [0, {self.capacity}).")

    def _check_total(self, total: Tensor) -> None:
        if total.device.type == "cuda":
            torch._assert_async(total > 0)
        elif not total.item() > 0:
            raise RuntimeError("all leaves are 0, so nothing can be drawn: set a positive leaf first.")


def _last_of_each_slot(index: Tensor, leaf: Tensor, last_writer: Tensor) -> Tensor:
    """`leaf` `[B]` with every row replaced by the last row of its slot; `last_writer` is scratch, one int a slot."""
    position = torch.arange(index.numel(), device=index.device)
    last_writer.scatter_reduce_(0, index, position, "amax", include_self=False)
    return leaf.index_select(0, last_writer.index_select(0, index))


def _never_empty(row: Tensor, child: Tensor) -> Tensor:
    """`child` `[B, 1]`, or the largest of its `row` `[B, k]` where the child is empty.

    A parallel running sum rounds each entry on its own and so can rise at an empty child. The sequential one cannot.
    """
    return torch.where(row.gather(1, child) > 0, child, row.argmax(1, keepdim=True))
