"""Search and writes of a priority tree as compiled loops, for CPUs where numba is installed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


def search(u: np.ndarray, sums: np.ndarray, levels: tuple[np.ndarray, ...], slot: np.ndarray, leaf: np.ndarray) -> bool:
    """Fills in the slots and leaves at the shares `u`, the very ones that the tensor form of `PriorityTree.find` gives.

    Args:
        u: shares of the total, `[B]` float64.
        sums: running sums of the top, `[M + 1]` float64 behind a leading 0.
        levels: rows of children, the lowest first, each `[G, R]` float64.
        slot: written, `[B]` int64.
        leaf: written, `[B]` float64.

    Returns:
        Whether the total is above 0. If not, nothing was written.
    """
    if not sums[-1] > 0:
        return False
    slot[:] = 0
    mass = np.minimum(u * sums[-1], np.nextafter(sums[-1], 0.0))
    left = sums.shape[0] - 1
    # All rows halve their range at once: with one row after the other most of the time goes into wrong guesses of the
    # branch, and a compiler cannot use vectors.
    while left > 1:
        half = left >> 1
        for i in range(mass.shape[0]):
            slot[i] += half * (sums[slot[i] + half] <= mass[i])
        left -= half
    for i in range(mass.shape[0]):
        node = slot[i]
        rest = max(mass[i] - sums[node], 0.0)
        for level in range(len(levels) - 1, -1, -1):
            children = levels[level][node]
            last = children.shape[0] - 1
            child, running = 0, children[0]
            while running <= rest and child < last:
                child += 1
                running += children[child]
            if running <= rest:
                # Rounding left more mass than the row has: the last child that raises the running sum is taken.
                running = 0.0
                for k in range(last + 1):
                    if running + children[k] > running:
                        child = k
                    running += children[k]
            leaf[i] = children[child]
            rest = max(rest - (running - children[child]), 0.0)
            node = node * (last + 1) + child
        slot[i] = node
    return True


class Kernels(NamedTuple):
    """The loops, compiled or not."""

    search: Callable[..., bool]
    write: Callable[..., None]
    update: Callable[..., float]


@functools.cache
def compiled_kernels() -> Kernels | None:
    """The loops of this module, compiled at their first calls; `None` without numba."""
    try:
        from numba import njit
    except ImportError:
        return None
    return make_kernels(njit)


def make_kernels(compiled: Callable[..., Callable[..., Any]]) -> Kernels:
    """The loops, as `compiled(loop, **options)` makes them."""

    def sum_above(index: np.ndarray, levels: tuple[np.ndarray, ...], top: np.ndarray) -> None:
        radix = levels[0].shape[1]
        for level in range(len(levels)):
            width = radix ** (level + 1)
            for i in range(index.shape[0]):
                group = index[i] // width
                total = levels[level][group].sum()
                if level + 1 < len(levels):
                    levels[level + 1][group // radix, group % radix] = total
                else:
                    top[group] = total

    # The sums of a row may be taken in any order, so that the compiler can use vectors.
    sum_above = compiled(sum_above, nogil=True, fastmath={"reassoc", "nsz"})

    def write(index: np.ndarray, leaf: np.ndarray, levels: tuple[np.ndarray, ...], top: np.ndarray) -> None:
        """Writes leaves and the sums above them, as the tensor form of `PriorityTree.write` does but for rounding.

        Args:
            index: slots, `[B]` int64; of rows with the same slot the last one wins.
            leaf: weights, `[B]` float64.
            levels: rows of children, the lowest first, each `[G, R]` float64; written.
            top: sums of the highest rows, `[M]` float64; written.
        """
        radix = levels[0].shape[1]
        for i in range(index.shape[0]):
            levels[0][index[i] // radix, index[i] % radix] = leaf[i]
        sum_above(index, levels, top)

    def update(
        index: np.ndarray,
        priority: np.ndarray,
        alpha: float,
        eps: float,
        largest: float,
        known: np.ndarray,
        levels: tuple[np.ndarray, ...],
        top: np.ndarray,
    ) -> float:
        """:func:`write` of the leaves `(priority + eps)^alpha`, and of the priorities themselves.

        Args:
            index: as for :func:`write`, like `levels` and `top`.
            priority: `[B]` float32 or float64.
            alpha: the exponent.
            eps: what is added.
            largest: the largest priority that may be.
            known: priority of every slot, float64; written.

        Returns:
            The largest of the priorities, or -1 where one is not in `[0, largest]`, or a slot does not exist. Then
            nothing was written.
        """
        highest = -1.0
        for i in range(index.shape[0]):
            given = float(priority[i])
            if not (0 <= given <= largest and 0 <= index[i] < known.shape[0]):
                return -1.0
            highest = max(highest, given)
        radix = levels[0].shape[1]
        for i in range(index.shape[0]):
            known[index[i]] = priority[i]
            levels[0][index[i] // radix, index[i] % radix] = (known[index[i]] + eps) ** alpha
        sum_above(index, levels, top)
        return highest

    return Kernels(*(compiled(loop, nogil=True) for loop in (search, write, update)))
