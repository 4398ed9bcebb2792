"""Which states of an episode give its steps their goals."""

from __future__ import annotations

import torch
from torch import Tensor

STRATEGIES = ("final", "episode", "future", "random")


def check_strategy(strategy: str, num_goal_samples: int) -> None:
    """Raises ValueError unless the strategy is known and the number of goals is a positive integer."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {STRATEGIES}, got {strategy!r}.")
    if isinstance(num_goal_samples, bool) or not isinstance(num_goal_samples, int) or num_goal_samples < 1:
        raise ValueError(f"num_goal_samples must be an integer of at least 1, got {num_goal_samples!r}; 4 is usual.")


def draw_goals(
    strategy: str,
    length: int,
    num_goal_samples: int,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Draws the states of one episode whose measurements become goals of its steps.

    For step t of T, from 0: final :math:`\{T\}`, episode :math:`\min(K, T+1)` of :math:`0..T`, future
    :math:`\min(K, T-t)` of :math:`t+1..T`, each without repetition (Andrychowicz et al. 2017, section 4.5). State k,
    from 0, is the root of step k and the ``"next"`` of step k - 1.

    Args:
        strategy (str): "final", "episode" or "future".
        length (int): number of steps T of the episode.
        num_goal_samples (int): K, goals for each step; "final" has one.
        generator (torch.Generator or None): source of random numbers; torch's global one when None.
        device (device or None): where the result lives.

    Returns:
        Step and state of each pair, both int64 `[M]`, ordered by step.

    Raises:
        ValueError: for a strategy that does not take its goals from the episode, or a number that is not positive.

    Examples:
        >>> step, state = draw_goals("final", 3, 4)
        >>> step.tolist(), state.tolist()
        ([0, 1, 2], [3, 3, 3])
    """
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(f"length must be an integer of at least 1, got {length!r}; an episode has a step.")
    step = torch.arange(length, device=device)
    return draw_goals_of_steps(strategy, step, torch.full_like(step, length), num_goal_samples, generator)


def draw_goals_of_steps(
    strategy: str, step: Tensor, length: Tensor, num_goal_samples: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`draw_goals` for steps `[R]` of episodes of these lengths `[R]`: row and state of each pair, `[M]`."""
    check_strategy(strategy, num_goal_samples)
    if strategy == "final":
        return torch.arange(len(step), device=step.device), length.clone()
    if strategy == "episode":
        return draw_distinct(torch.zeros_like(step), length + 1, num_goal_samples, generator)
    if strategy == "future":
        return draw_distinct(step + 1, length - step, num_goal_samples, generator)
    raise ValueError(f"strategy {strategy!r} takes goals of any episode; use 'final', 'episode' or 'future' here.")


def draw_distinct(
    low: Tensor, count: Tensor, num_draws: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Draws `min(num_draws, count)` distinct integers of `low .. low + count - 1` for each row.

    Robert Floyd's algorithm, over all rows at once: the cost does not grow with `count` (Bentley & Floyd 1987, "A
    sample of brilliance"). Every set is equally likely.

    Returns:
        Row and integer of each draw, int64 `[M]`, ordered by row.
    """
    origin = low.device if generator is None else generator.device
    uniform = torch.rand(len(low), num_draws, dtype=torch.float64, generator=generator, device=origin).to(low.device)
    draws = count.clamp(max=num_draws)
    chosen = torch.full(uniform.shape, -1, dtype=torch.long, device=low.device)
    for i in range(num_draws):
        newest = count - draws + i
        drawn = (uniform[:, i] * (newest + 1)).long().clamp_(max=newest)
        taken = (chosen[:, :i] == drawn.unsqueeze(1)).any(1)
        chosen[:, i] = torch.where(taken, newest, drawn)
    row, column = (torch.arange(num_draws, device=low.device) < draws.unsqueeze(1)).nonzero(as_tuple=True)
    return row, low[row] + chosen[row, column]
