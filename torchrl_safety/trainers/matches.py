"""Every controller against every disturbance, many pairs side by side in one batch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heapreplace
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Categorical
from torchrl.envs import EnvBase

from torchrl_safety.modules.players import RandomDisturbance, ZeroDisturbance
from torchrl_safety.objectives.signals import check_choice
from torchrl_safety.trainers.evaluation import binomial_interval, evaluate

PROBLEMS = ("avoid", "reach_avoid")


class CrossPlay(NamedTuple):
    """How often each controller won against each disturbance: stayed safe (avoid), or succeeded (reach-avoid)."""

    controllers: tuple[str, ...]
    """Names of the rows."""
    disturbances: tuple[str, ...]
    """Names of the columns."""
    won: Tensor
    """Episodes that the controller won, int64 `[C, D]`."""
    played: Tensor
    """Episodes, int64 `[C, D]`."""

    @property
    def rates(self) -> Tensor:
        """Share of the episodes that the controller won, `[C, D]`; NaN for a pair that has not met."""
        return self.won / self.played

    def table(self, *, confidence: float = 0.95) -> list[dict[str, Any]]:
        """One row per pair that has met: names, `rate`, the ends `low`, `high` of its exact interval, `episodes`.

        The names are under `controller` and `disturbance`.
        """
        rows = []
        for i, controller in enumerate(self.controllers):
            for j, disturbance in enumerate(self.disturbances):
                won, played = int(self.won[i, j]), int(self.played[i, j])
                if played:
                    low, high = binomial_interval(won, played, confidence=confidence)
                    row = {"controller": controller, "disturbance": disturbance, "rate": won / played}
                    rows.append({**row, "low": low, "high": high, "episodes": played})
        return rows


class Arena:
    """An environment in which pairs of players meet, and what counts as a win of the controller.

    Args:
        env: a batch of two-player environments; its resets put the starts.
        max_steps: the most steps of an episode.
        problem: `"avoid"` (the controller wins by staying safe) or `"reach_avoid"` (by reaching the target safely).
        action_key: of the controller.
        disturbance_key: of the disturbance.
        **keys: `safety_margin` and `target_margin` of :func:`~torchrl_safety.trainers.evaluate`.

    Raises:
        ValueError: an unknown problem, or an environment without one of the actions.
    """

    def __init__(
        self,
        env: EnvBase,
        *,
        max_steps: int,
        problem: str = "avoid",
        action_key: NestedKey = "action",
        disturbance_key: NestedKey = "disturbance",
        **keys: NestedKey,
    ) -> None:
        check_choice("problem", problem, PROBLEMS)
        present = env.full_action_spec.keys(True, True)
        for key in (action_key, disturbance_key):
            if key not in present:
                raise ValueError(
                    f"the environment has the actions {sorted(map(str, present))}, not {key!r}: give one of two "
                    "players, e.g. DoubleIntegratorEnv(max_disturbance=0.5), or name its keys"
                )
        self.env, self.max_steps, self.problem = env, max_steps, problem
        self.action_key, self.disturbance_key, self.keys = action_key, disturbance_key, keys

    def play(
        self,
        controllers: Sequence[TensorDictModuleBase],
        disturbances: Sequence[TensorDictModuleBase],
        pairs: Tensor,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, int]:
        """One episode in each environment, of the pair `c * D + d` that `pairs` `[N]` names for it.

        It begins where the environment's reset puts it, or in the first states `starts` `[N, ...]`.

        Returns:
            whether the controller won, bool `[N]`, and the frames that it took.
        """
        shape, device = self.env.batch_size, pairs.device
        chosen = pairs.to(self.env.device).reshape(shape)
        sides = (
            (self.action_key, dict(enumerate(controllers)), chosen // len(disturbances)),
            (self.disturbance_key, dict(enumerate(disturbances)), chosen % len(disturbances)),
        )

        def policy(tensordict: TensorDictBase) -> TensorDictBase:
            for key, players, index in sides:
                tensordict.set(key, act_as(players, index, tensordict, key))
            return tensordict

        if starts is None:
            begin: dict[str, Any] = {"episodes": self.env.numel(), "state_key": None}
        else:
            begin = {"starts": starts, "state_key": getattr(self.env, "state_key", "observation")}
        found = evaluate(self.env, policy, **begin, max_steps=self.max_steps, **self.keys)
        won = found.safe if self.problem == "avoid" else found.success
        if won is None:
            raise ValueError("problem is 'reach_avoid', but the environment declares no target margin: name its key")
        assert found.lengths is not None
        return won.to(device), self.env.numel() * int(found.lengths.max())

    def play_round(
        self,
        controllers: Sequence[TensorDictModuleBase],
        disturbances: Sequence[TensorDictModuleBase],
        won: Tensor,
        played: Tensor,
        starts: Tensor | None = None,
    ) -> int:
        """One episode in each environment, for the pairs that have played least; adds to the counts `[C, D]`.

        The k-th episode of a pair begins in the k-th of the first states `starts`, again and again, if there are any.

        Returns:
            the frames that it took.
        """
        pairs, before = least_played(played, self.env.numel())
        begin = None if starts is None else starts[before.to(starts.device) % len(starts)]
        wins, frames = self.play(controllers, disturbances, pairs, begin)
        played.view(-1).index_add_(0, pairs, torch.ones_like(pairs))
        won.view(-1).index_add_(0, pairs, wins.to(pairs.dtype))
        return frames


def cross_play(
    env: EnvBase,
    controllers: Mapping[str, TensorDictModuleBase],
    disturbances: Mapping[str, TensorDictModuleBase],
    *,
    episodes: int,
    max_steps: int,
    problem: str = "avoid",
    starts: Tensor | None = None,
    **keys: NestedKey,
) -> CrossPlay:
    r"""Let every controller meet every disturbance in at least `episodes` episodes.

    The pairs play side by side in the batch of the environment, in as many rounds as it takes; safe, success and the
    ways in which an episode ends are those of :func:`~torchrl_safety.trainers.evaluate`. A disturbance may read the
    controller's action, which moves first.

    Args:
        env: a batch of two-player environments.
        controllers: policies by name; each writes the action.
        disturbances: policies by name; each writes the disturbance.
        episodes: the least number of episodes of each pair.
        max_steps: the most steps of an episode.
        problem: `"avoid"` or `"reach_avoid"`, what counts as a win of the controller.
        starts: first states `[N, ...]` of the episodes of each pair, taken in turn, for an environment that can be
            reset to given ones; None for where its own resets put them.
        **keys: `action_key`, `disturbance_key`, `safety_margin`, `target_margin`.

    Raises:
        ValueError: no player on a side, a number of episodes below 1, no start, an unknown problem, or a one-player
            environment.

    Example:
        >>> from torchrl_safety.envs import DoubleIntegratorEnv
        >>> from torchrl_safety.modules import ZeroDisturbance
        >>> from torchrl_safety.trainers import cross_play
        >>> env = DoubleIntegratorEnv(8, max_disturbance=0.5, seed=0)
        >>> idle = ZeroDisturbance(env.full_action_spec["action"], zero_index=1, out_key="action")
        >>> none = ZeroDisturbance(env.full_action_spec["disturbance"], zero_index=1)
        >>> cross_play(env, {"idle": idle}, {"none": none}, episodes=8, max_steps=5).played
        tensor([[8]])
    """
    if not controllers or not disturbances:
        raise ValueError(
            f"{len(controllers)} controllers meet {len(disturbances)} disturbances: give at least one each"
        )
    if not isinstance(episodes, int) or episodes < 1:
        raise ValueError(f"episodes is {episodes!r}; it must be a whole number of at least 1")
    if starts is not None and not len(starts):
        raise ValueError("starts is empty: give at least one first state, `[N, ...]`")
    arena = Arena(env, max_steps=max_steps, problem=problem, **keys)
    won = torch.zeros(len(controllers), len(disturbances), dtype=torch.int64, device="cpu")
    played = torch.zeros_like(won)
    while played.min() < episodes:
        arena.play_round(list(controllers.values()), list(disturbances.values()), won, played, starts)
    return CrossPlay(tuple(controllers), tuple(disturbances), won, played)


def least_played(played: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The entries of `played` that n more go to, each to the one with the least so far, and how many it had before.

    Returns:
        flat indices and numbers, int64 `[n]` both.
    """
    heap = [(count, entry) for entry, count in enumerate(played.reshape(-1).tolist())]
    heapify(heap)
    entries, before = [], []
    for _ in range(n):
        count, entry = heap[0]
        entries.append(entry)
        before.append(count)
        heapreplace(heap, (count + 1, entry))
    chosen, counts = torch.tensor([entries, before], dtype=torch.int64, device=played.device)
    return chosen, counts


def act_as(
    players: Mapping[int, TensorDictModuleBase], index: Tensor, tensordict: TensorDictBase, key: NestedKey
) -> Tensor:
    """What each member of a batch `[*B]` does, played by the player that `index` `[*B]` names for it."""
    action: Tensor | None = None
    for number, player in players.items():
        mine = index == number
        state = tensordict.select(*player.in_keys)
        if index.device.type == "cpu":
            if not mine.any():
                continue
            part = player(state[mine])[key]
            if action is None:
                action = part.new_zeros((*index.shape, *part.shape[1:]))
            action[mine] = part
        else:
            # Everybody plays everything: on an accelerator that is quicker than to wait for the number of rows.
            part = player(state)[key]
            mine = mine.reshape(*index.shape, *(1,) * (part.ndim - index.ndim))
            action = part if action is None else torch.where(mine, part, action)
    assert action is not None
    return action


def frozen(player: TensorDictModuleBase) -> TensorDictModuleBase:
    """A copy of a policy as it is now, in evaluation mode and without gradients."""
    return copy.deepcopy(player).eval().requires_grad_(False)


def simple_disturbances(
    env: EnvBase, *, disturbance_key: NestedKey = "disturbance", generator: torch.Generator | None = None
) -> dict[str, TensorDictModuleBase]:
    """The disturbances `"zero"` and `"random"` of an environment.

    Raises:
        ValueError: if it does not say which index stands for no disturbance, or always disturbs.
    """
    spec = env.full_action_spec[disturbance_key]
    zero_index = None
    if isinstance(spec, Categorical):
        if not hasattr(env, "zero_action"):
            raise ValueError(
                f"{type(env).__name__} has no zero_action() that says which index stands for no disturbance: give the "
                "fixed disturbances, e.g. fixed={'zero': ZeroDisturbance(spec, zero_index=...)}"
            )
        zero_index = int(env.zero_action(disturbance_key).reshape(-1)[0])
    return {
        "zero": ZeroDisturbance(spec, zero_index=zero_index, out_key=disturbance_key),
        "random": RandomDisturbance(spec, out_key=disturbance_key, generator=generator),
    }


def check_reads(name: str, player: TensorDictModuleBase, known: Iterable[NestedKey], key: NestedKey) -> None:
    """Refuse a player that does not stand for itself: one that reads what only another module writes."""
    known = list(known)
    if key not in player.out_keys:
        raise ValueError(f"the {name} writes {player.out_keys}, not {key!r}: name it in its out_keys")
    missing = [each for each in player.in_keys if each not in known]
    if missing:
        raise ValueError(
            f"the {name} reads {missing}, which the environment does not write: give a policy that holds everything it "
            "needs, such as a network and what acts on its values in one TensorDictSequential"
        )
