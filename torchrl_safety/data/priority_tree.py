"""A k-ary sum, min and max tree in plain tensor operations."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from torchrl_safety.data.priority_kernels import Kernels, compiled_kernels

# 64 children a node were the fastest (`benchmarks/bench_replay.py`). What stands above the rows is one flat array, of
# which each draw after a write takes the running sums: for tensor operations that costs less than a level of gathers up
# to so many nodes, while the compiled loops pass a level in no time.
_SHIFT = 6
_RADIX = 1 << _SHIFT
_MAX_TOP = 1 << 14
_MAX_TOP_COMPILED = 1 << 11
# From so many rows on it pays to look for neighbours, such as those of an `extend`, and to visit each group once.
_MANY_ROWS = 512
_NO_LEAF = "all leaves are 0, so nothing can be drawn: set a positive leaf first."


class PriorityTree:
    r"""Weights in slots, drawn in proportion, with their total, smallest and largest.

    .. math:: P(j) = \ell_j \,/\, \textstyle\sum_i \ell_i, \qquad
        \mathrm{find}(u) = \min\{j : \ell_0 + \dots + \ell_j > u \textstyle\sum_i \ell_i\}

    The sum tree of Schaul et al. 2015, "Prioritized Experience Replay", appendix B.2.1, with 64 children a node.
    A write recomputes the sums above it from their children, so that rounding errors do not add up. A leaf of 0 is an
    empty slot: it is never drawn and does not count for :attr:`min`. Nothing here waits for an accelerator; there, a
    wrong index or an empty tree stops the program by a device-side assertion instead of an exception. On a CPU with
    numba installed search and writes are compiled loops; the search finds the very same slots.

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
        # One slot more than asked: masked writes put their zero there.
        nodes = -(-(capacity + 1) // _RADIX)
        self._rows = [torch.zeros(nodes, _RADIX, dtype=torch.float64, device=device)]
        self.device = self._rows[0].device
        while nodes > (_MAX_TOP if self.kernels() is None else _MAX_TOP_COMPILED):
            nodes = -(-nodes // _RADIX)
            self._rows.append(torch.zeros(nodes, _RADIX, dtype=torch.float64, device=device))
        self._top = torch.zeros(nodes, dtype=torch.float64, device=self.device)
        # Running sums of `_top` behind a leading zero; made again at the first read after a write.
        self._cumulative = torch.zeros(nodes + 1, dtype=torch.float64, device=self.device)
        self._cumulative_is_old = False
        self._zero = torch.zeros((), dtype=torch.float64, device=self.device)
        self._smallest = GroupExtreme(self._rows[0], largest=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(capacity={self.capacity}, device={self.device})"

    @property
    def total(self) -> Tensor:
        """Sum of the leaves, `[]` float64."""
        return self._running_sums().select(0, -1).clone()

    @property
    def min(self) -> Tensor:
        """Smallest leaf above 0, `[]` float64; `inf` when there is none."""
        return self._smallest.read(self._rows[0])

    @property
    def max(self) -> Tensor:
        """Largest leaf, `[]` float64; 0 when there is none above 0. All leaves are read."""
        return self._rows[0].amax()

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
        if index.device.type != "cpu":
            leaf = leaf.index_select(0, last_row_of_each_slot(index))
        self.write(index, leaf)

    def write(self, index: Tensor, leaf: Tensor) -> None:
        """:meth:`set` for rows known to be right: int64 and float64 `[B]` on the tree's device, with slots in range.

        Rows with the same slot hold the same leaf, save on a CPU, where rows are written in their order. A leaf for
        no slot is a 0 for the slot `capacity`.
        """
        node = group_of(index)
        self.written(node)
        if index.numel() <= _MANY_ROWS and (kernels := self.kernels()) is not None:
            kernels.write(index.numpy(), leaf.numpy(), *self.arrays())
            return
        self._rows[0].view(-1).scatter_(0, index, leaf)
        for level, (rows, above) in enumerate(self._levels()):
            if level:
                node = group_of(node)
            if node.numel() < rows.shape[0]:
                above.scatter_(0, node, rows.index_select(0, node).sum(1))
            else:
                torch.sum(rows, 1, out=above.narrow(0, 0, rows.shape[0]))

    def kernels(self) -> Kernels | None:
        """The compiled loops, where there are some and the tree lies on a CPU."""
        return compiled_kernels() if self.device.type == "cpu" else None

    def arrays(self) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """The memory of the tree, as the loops take it: rows of each level, the lowest first, and the nodes on top."""
        return tuple([rows.numpy() for rows in self._rows]), self._top.numpy()

    def written(self, group: Tensor) -> None:
        """Takes note that leaves of these groups of 64, `[B]`, are new, with all sums above them."""
        self._smallest.forget(group)
        self._cumulative_is_old = True

    def write_run(self, run: slice, leaf: float) -> None:
        """:meth:`write` of one leaf into the neighbouring slots `run` on a CPU."""
        self._rows[0].view(-1)[run].fill_(leaf)
        self._smallest.forget(groups_of(run))
        for rows, above in self._levels():
            run = groups_of(run)
            torch.sum(rows[run], 1, out=above[run])
        self._cumulative_is_old = True

    def fill(self, leaf: Tensor) -> None:
        """Write all slots at once: `leaf` float64 `[capacity]`, finite and not negative."""
        self._rows[0].view(-1).narrow(0, 0, self.capacity).zero_().add_(leaf)
        self._sum_all()
        self._forget_all()

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
        kernels = self.kernels() if u.device.type == "cpu" else None
        if kernels is None:
            return self._find_by_tensors(u.to(dtype=torch.float64, device=self.device, non_blocking=True), sums)
        u = u.double()
        slot, leaf = torch.empty_like(u, dtype=torch.long), torch.empty_like(u)
        levels, _ = self.arrays()
        if not kernels.search(u.numpy(), sums.numpy(), levels, slot.numpy(), leaf.numpy()):
            raise RuntimeError(_NO_LEAF)
        return slot, leaf

    def _find_by_tensors(self, u: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        total = sums.select(0, -1)
        if total.device.type == "cpu":
            number = total.item()
            if not number > 0:
                raise RuntimeError(_NO_LEAF)
            mass = (u * number).clamp_(max=math.nextafter(number, 0.0))
        else:
            if total.device.type == "cuda":
                torch._assert_async(total > 0)
            mass = torch.minimum(u * total, torch.nextafter(total, self._zero))
        node = torch.searchsorted(sums.narrow(0, 1, self._top.numel()), mass, right=True)
        if self.device.type != "cpu":
            node = torch.where(self._top.index_select(0, node) > 0, node, self._top.argmax())
            mass = torch.maximum(mass, sums.index_select(0, node))
        mass = mass - sums.index_select(0, node)
        for rows in reversed(self._rows):
            row = rows.index_select(0, node)
            running = row.cumsum(1)
            child = _child_at(running, mass.unsqueeze(1))
            if self.device.type != "cpu":
                child = _never_empty(row, child)
            node = torch.add(child.squeeze(1), node, alpha=_RADIX)
            if rows is not self._rows[0]:
                start = (running.gather(1, child) - row.gather(1, child)).squeeze(1)
                mass = (mass - start).clamp_min_(0)
        return node, self._rows[0].view(-1).index_select(0, node)

    def clear(self) -> None:
        """Make every slot empty."""
        for tensor in (*self._rows, self._top):
            tensor.zero_()
        self._forget_all()

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all sums, so that a loaded tree draws the very same slots."""
        state = {f"level_{i}": rows.clone() for i, rows in enumerate(self._rows)}
        return {"capacity": torch.tensor(self.capacity), **state, "top": self._top.clone()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Take over a state; its device may differ, and whether it comes from compiled loops.

        Raises:
            ValueError: if the state is one of a tree of another capacity.
        """
        if int(state_dict["capacity"]) != self.capacity:
            raise ValueError(
                f"the state holds a tree of capacity {int(state_dict['capacity'])}, this one has capacity "
                f"{self.capacity}: build it with the capacity that was saved."
            )
        if state_dict["top"].shape == self._top.shape:
            for i, rows in enumerate(self._rows):
                rows.copy_(state_dict[f"level_{i}"])
            self._top.copy_(state_dict["top"])
        else:
            self._rows[0].copy_(state_dict["level_0"])
            self._sum_all()
        self._forget_all()

    def _sum_all(self) -> None:
        for rows, above in self._levels():
            torch.sum(rows, 1, out=above.narrow(0, 0, rows.shape[0]))

    def _levels(self) -> list[tuple[Tensor, Tensor]]:
        """Rows of children, the lowest first, each with the flat nodes above it."""
        return list(zip(self._rows, [*(rows.view(-1) for rows in self._rows[1:]), self._top]))

    def _running_sums(self) -> Tensor:
        if self._cumulative_is_old:
            torch.cumsum(self._top, 0, out=self._cumulative.narrow(0, 1, self._top.numel()))
            self._cumulative_is_old = False
        return self._cumulative

    def _forget_all(self) -> None:
        self._cumulative_is_old = True
        self._smallest.forget_all()

    def _check_index(self, index: Tensor, bound: int) -> None:
        # The largest and the smallest on an accelerator would be a wait; its kernels assert the bounds.
        if index.device.type != "cpu" or not index.numel():
            return
        lowest, highest = index.aminmax()
        if lowest.item() < 0 or highest.item() >= bound:
            bad = lowest.item() if lowest.item() < 0 else highest.item()
            raise IndexError(f"slot {bad} is outside the tree: pass slots in [0, {self.capacity}).")


class GroupExtreme:
    """Largest entry, or smallest above 0, of rows `[G, R]`, of which only those written since are read again.

    The rows belong to the caller, who says :meth:`forget` with each write.

    Args:
        rows: the rows, float64; their values are not read yet.
        largest: whether the largest entry is wanted, or the smallest above 0.
    """

    def __init__(self, rows: Tensor, *, largest: bool) -> None:
        self._largest = largest
        self._extreme = torch.zeros_like(rows.select(1, 0))
        # `None`: all are old.
        self._old: list[Tensor | slice] | None = None
        self._num_old = 0

    def forget(self, group: Tensor | slice) -> None:
        """The rows `group`, int64 `[B]` or a run, were written."""
        if self._old is None:
            return
        self._old.append(group)
        self._num_old += group.stop - group.start if isinstance(group, slice) else group.numel()
        if self._num_old >= self._extreme.numel():
            self._old = None

    def forget_all(self) -> None:
        """Every row was written."""
        self._old = None

    def read(self, rows: Tensor) -> Tensor:
        """The extreme of the rows as they are now, `[]`; `inf` when there is no smallest above 0."""
        if self._old is None:
            self._of_each(rows, out=self._extreme)
        elif self._old:
            scattered = []
            for group in self._old:
                if isinstance(group, slice):
                    self._of_each(rows[group], out=self._extreme[group])
                else:
                    scattered.append(group)
            if scattered:
                group = torch.cat(scattered)
                self._extreme.scatter_(0, group, self._of_each(rows.index_select(0, group)))
        self._old, self._num_old = [], 0
        return self._extreme.amax() if self._largest else self._extreme.amin()

    def _of_each(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        if self._largest:
            return torch.amax(rows, 1, out=out)
        return torch.amin(torch.where(rows > 0, rows, torch.inf), 1, out=out)


def groups_of(run: slice) -> slice:
    """The groups of 64 that hold a run of slots."""
    return slice(run.start >> _SHIFT, ((run.stop - 1) >> _SHIFT) + 1)


def group_of(slot: Tensor) -> Tensor:
    """The groups of 64 that hold the slots `[B]`, each at least once."""
    group = slot >> _SHIFT
    if group.numel() > _MANY_ROWS and group.device.type == "cpu":
        return group.unique_consecutive()
    return group


def last_row_of_each_slot(index: Tensor) -> Tensor:
    """For each row of `index` `[B]` the last row with the same slot, `[B]`."""
    slot, row = index.sort(stable=True)
    return row.index_select(0, torch.searchsorted(slot, index, right=True).sub_(1))


def _child_at(running: Tensor, mass: Tensor) -> Tensor:
    """The first child, `[B, 1]`, at which the running sum of its row, `[B, k]`, exceeds the `mass` `[B, 1]`.

    The mass is kept below the row's own total, which rounding can put under the sum of which it is a part. So the
    running sum rises at the child found: it is not empty.
    """
    is_cpu = running.device.type == "cpu"
    child = torch.searchsorted(running, mass, right=True) if is_cpu else None
    if child is not None and (not child.numel() or child.amax().item() < _RADIX):
        return child
    total = running.narrow(1, _RADIX - 1, 1)
    return torch.searchsorted(running, torch.minimum(mass, torch.nextafter(total, torch.zeros_like(total))), right=True)


def _never_empty(row: Tensor, child: Tensor) -> Tensor:
    """`child` `[B, 1]`, or the largest of its `row` `[B, k]` where the child is empty.

    A parallel running sum rounds each entry on its own and so can rise at an empty child. The sequential one cannot.
    """
    return torch.where(row.gather(1, child) > 0, child, row.argmax(1, keepdim=True))
