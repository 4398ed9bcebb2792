"""The league: past controllers and disturbances, the scores of every pair, and opponents drawn from them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_safety.objectives.signals import read
from torchrl_safety.trainers.matches import Arena, CrossPlay, act_as, check_reads, frozen, simple_disturbances


@dataclass(frozen=True)
class Member:
    """A player of a league, which does not learn."""

    number: int
    """Never given twice."""
    name: str
    frames: int
    """Those of training, when it was taken; 0 for a fixed one."""
    policy: TensorDictModuleBase
    is_fixed: bool = False


class League:
    r"""Keeps the best controllers and disturbances of a training run, and draws opponents among the disturbances.

    A step of the league takes a snapshot of the two players in training, lets the pairs meet that have played least,
    and evicts the weakest member of a side that is full. With :math:`w_{ij}` the rate at which controller i wins
    against disturbance j (it stays safe, or reaches the target safely), the scores are

    .. math:: c_i = \frac1D \sum_j w_{ij}, \qquad d_j = 1 - \frac1C \sum_i w_{ij},

    and an opponent is drawn with probability :math:`\propto \exp(\beta d_j)` at the start of each episode, for each
    environment on its own. Members do not change, so the counts of a pair add up over the steps. Source: Hsu et al.
    2022 (ISAACS), section V (the leaderboard and its softmax).

    Call :meth:`step` with the number of frames, as a schedule (:class:`~torchrl_safety.trainers.ScheduleHook` does so
    in TorchRL's Trainer), and let :attr:`opponent` act for the disturbance where data are collected.

    Args:
        env: a batch of two-player environments for the matches alone: it is seeded before each step of the league.
        controller: the policy in training; writes the action.
        disturbance: the policy in training; writes the disturbance, and may read the controller's action.
        max_steps: the most steps of an episode of a match.
        controllers: most snapshots of the controller that are kept.
        disturbances: most snapshots of the disturbance that are kept, beside the fixed ones.
        fixed: disturbances by name that always stay; None for `"zero"` and `"random"`.
        problem: `"avoid"` or `"reach_avoid"`, what counts as a win of the controller.
        rationality: :math:`\beta \ge 0`; 0 draws uniformly.
        frames_per_step: the most frames that a step of the league may take.
        interval: frames of training from one step to the next; None for ten times `frames_per_step`.
        init_key: what tells :attr:`opponent` that an episode starts: a flag (TorchRL's `InitTracker` writes it), or a
            count of steps that is 0 there, such as `"step_count"`.
        generator: draws opponents, the random disturbance and the seeds of the matches; its device is that of the
            environment. None makes one that follows torch's global one.
        **keys: `action_key`, `disturbance_key`, `safety_margin`, `target_margin`.

    Raises:
        ValueError: a setting out of range, too few frames for each pair to meet once, an environment without one of
            the actions, or a player that reads what the environment does not write.

    Example:
        >>> from torchrl_safety.envs import DoubleIntegratorEnv
        >>> from torchrl_safety.modules import RainbowNetwork, TwoPlayerPolicy, greedy_policy
        >>> from torchrl_safety.trainers import League
        >>> controller = greedy_policy(RainbowNetwork(2, 3, support=(-1.0, 1.0)))
        >>> disturbance = greedy_policy(RainbowNetwork(2, 3, support=(-1.0, 1.0)), action_key="disturbance")
        >>> matches = DoubleIntegratorEnv(64, max_disturbance=0.5)
        >>> league = League(matches, controller, disturbance, max_steps=50, frames_per_step=6400, init_key="step_count")
        >>> collected = DoubleIntegratorEnv(32, max_disturbance=0.5, max_steps=50)
        >>> data = collected.rollout(100, TwoPlayerPolicy(controller, league.opponent), break_when_any_done=False)
        >>> report = league.step(64_000)
        >>> league.matrix.controllers, league.matrix.disturbances
        (('controller 64000',), ('zero', 'random', 'disturbance 64000'))
    """

    def __init__(
        self,
        env: EnvBase,
        controller: TensorDictModuleBase,
        disturbance: TensorDictModuleBase,
        *,
        max_steps: int,
        controllers: int = 5,
        disturbances: int = 5,
        fixed: Mapping[str, TensorDictModuleBase] | None = None,
        problem: str = "avoid",
        rationality: float = 3.0,
        frames_per_step: int = 250_000,
        interval: int | None = None,
        init_key: NestedKey = "is_init",
        generator: torch.Generator | None = None,
        **keys: NestedKey,
    ) -> None:
        interval = 10 * frames_per_step if interval is None else interval
        counts = {"max_steps": max_steps, "controllers": controllers, "disturbances": disturbances}
        for name, value in {**counts, "frames_per_step": frames_per_step, "interval": interval}.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if not 0 <= rationality < math.inf:
            raise ValueError(f"rationality is {rationality}; it must be at least 0 (uniform draws) and finite")
        self.arena = Arena(env, max_steps=max_steps, problem=problem, **keys)
        self.rationality, self.frames_per_step, self.interval = rationality, frames_per_step, interval
        self.generator = _make_generator(generator, env.device)
        key = self.arena.disturbance_key
        if fixed is None:
            fixed = simple_disturbances(env, disturbance_key=key, generator=self.generator)
        known = [*env.full_observation_spec.keys(True, True), *env.full_done_spec.keys(True, True)]
        check_reads("controller", controller, known, self.arena.action_key)
        for name, player in {"disturbance": disturbance, **fixed}.items():
            check_reads(name, player, [*known, self.arena.action_key], key)
        most = (controllers + 1) * (disturbances + 1 + len(fixed))
        rounds = frames_per_step // (env.numel() * max_steps)
        if rounds * env.numel() < most:
            raise ValueError(
                f"frames_per_step is {frames_per_step}, enough for {rounds * env.numel()} episodes of max_steps="
                f"{max_steps} in {env.numel()} environments, but {most} pairs must meet: give at least "
                f"{math.ceil(most / env.numel()) * env.numel() * max_steps}"
            )
        self._training = {"controller": controller, "disturbance": disturbance}
        self._most = {"controller": controllers, "disturbance": disturbances}
        self._members: dict[str, list[Member]] = {
            "controller": [],
            "disturbance": [Member(i, name, 0, fixed[name], True) for i, name in enumerate(fixed)],
        }
        self._retired: list[Member] = []
        self._count, self._frames = len(fixed), 0
        self._won = torch.zeros(0, len(fixed), dtype=torch.int64, device="cpu")
        self._played = self._won.clone()
        self.opponent = LeagueOpponent(self, init_key)

    @property
    def controllers(self) -> dict[str, TensorDictModuleBase]:
        """The controllers by name, oldest first."""
        return {member.name: member.policy for member in self._members["controller"]}

    @property
    def disturbances(self) -> dict[str, TensorDictModuleBase]:
        """The disturbances by name, the fixed ones first."""
        return {member.name: member.policy for member in self._members["disturbance"]}

    @property
    def matrix(self) -> CrossPlay:
        """What every pair has played so far."""
        return CrossPlay(tuple(self.controllers), tuple(self.disturbances), self._won.clone(), self._played.clone())

    @property
    def controller_scores(self) -> Tensor:
        """Mean rate of each controller's wins over the disturbances, float64 `[C]`."""
        return (self._won.double() / self._played).mean(1)

    @property
    def disturbance_scores(self) -> Tensor:
        """Mean rate at which the controllers fail against each disturbance, float64 `[D]`; 0 before the first match."""
        if not len(self._won):
            return torch.zeros(self._won.shape[1], dtype=torch.float64, device="cpu")
        return 1 - (self._won.double() / self._played).mean(0)

    @property
    def probabilities(self) -> Tensor:
        """Those with which each disturbance is drawn, float64 `[D]`."""
        return (self.rationality * self.disturbance_scores).softmax(0)

    def step(self, frames: int) -> dict[str, float] | None:
        """:meth:`update` if the number of frames has passed a multiple of the interval since the last call."""
        if frames // self.interval <= self._frames // self.interval:
            return None
        return self.update(frames)

    def update(self, frames: int) -> dict[str, float]:
        """Take snapshots of the players, let the pairs meet, and evict the weakest.

        Args:
            frames: those of training so far.

        Returns:
            numbers for a log: the scores of the snapshots and the best scores of each side, and `match_frames` and
            `match_seconds` that the step took.
        """
        began, self._frames = time.perf_counter(), frames
        for side in self._members:
            self._add(side, frames)
        spent = self._play()
        scores = {"controller": self.controller_scores, "disturbance": self.disturbance_scores}
        report = {f"present_{side}": float(found[-1]) for side, found in scores.items()}
        report |= {f"best_{side}": float(found.max()) for side, found in scores.items()}
        for side, found in scores.items():
            self._evict_weakest(side, found)
        self.opponent.renew()
        return {**report, "match_frames": spent, "match_seconds": time.perf_counter() - began}

    def _add(self, side: str, frames: int) -> None:
        policy = frozen(self._training[side])
        self._members[side].append(Member(self._count, f"{side} {frames}", frames, policy))
        self._count += 1
        # One more row of controllers, or column of disturbances.
        pad = (0, 0, 0, 1) if side == "controller" else (0, 1)
        self._won, self._played = (torch.nn.functional.pad(counts, pad) for counts in (self._won, self._played))

    def _play(self) -> int:
        env, spent = self.arena.env, 0
        whole_round = env.numel() * self.arena.max_steps
        env.set_seed(int(torch.randint(2**31, (), generator=self.generator, device=self.generator.device)))
        players = [[member.policy for member in members] for members in self._members.values()]
        while spent + whole_round <= self.frames_per_step:
            spent += self.arena.play_round(players[0], players[1], self._won, self._played)
        return spent

    def _evict_weakest(self, side: str, scores: Tensor) -> None:
        members = self._members[side]
        fixed = torch.tensor([member.is_fixed for member in members], device=scores.device)
        if len(members) - int(fixed.sum()) <= self._most[side]:
            return
        weakest = int(scores.masked_fill(fixed, math.inf).argmin())
        kept = [i for i in range(len(members)) if i != weakest]
        evicted = members.pop(weakest)
        if side == "disturbance":
            self._retired.append(evicted)
        for name in ("_won", "_played"):
            counts = getattr(self, name)
            setattr(self, name, counts[kept] if side == "controller" else counts[:, kept])

    def opponents(self) -> dict[int, TensorDictModuleBase]:
        """The disturbances that are drawn or still at play, by number."""
        return {each.number: each.policy for each in (*self._members["disturbance"], *self._retired)}

    def state_dict(self) -> dict[str, Any]:
        """Everything but the fixed disturbances, as tensors and plain values."""
        sides = {**self._members, "retired": self._retired}
        return {
            "frames": self._frames,
            "count": self._count,
            "fixed": [member.name for member in self._members["disturbance"] if member.is_fixed],
            "won": self._won.clone(),
            "played": self._played.clone(),
            "generator": self.generator.get_state(),
            "drawn": self.opponent.drawn,
            "members": {
                side: [
                    {"number": each.number, "frames": each.frames, "policy": dict(each.policy.state_dict())}
                    for each in members
                    if not each.is_fixed
                ]
                for side, members in sides.items()
            },
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved league.

        Raises:
            ValueError: if the saved one has other fixed disturbances.
        """
        fixed = [member for member in self._members["disturbance"] if member.is_fixed]
        if state_dict["fixed"] != [member.name for member in fixed]:
            raise ValueError(
                f"the saved league has the fixed disturbances {state_dict['fixed']}, this one "
                f"{[member.name for member in fixed]}: build it with the same"
            )
        found = state_dict["members"]
        self._members = {
            "controller": [self._restored("controller", saved) for saved in found["controller"]],
            "disturbance": [*fixed, *(self._restored("disturbance", saved) for saved in found["disturbance"])],
        }
        self._retired = [self._restored("disturbance", saved) for saved in found["retired"]]
        self._frames, self._count = int(state_dict["frames"]), int(state_dict["count"])
        self._won, self._played = state_dict["won"].cpu().clone(), state_dict["played"].cpu().clone()
        self.generator.set_state(state_dict["generator"].cpu())
        drawn = state_dict["drawn"]
        self.opponent.drawn = None if drawn is None else drawn.to(self.arena.env.device, copy=True)
        self.opponent.renew()

    def _restored(self, side: str, saved: Mapping[str, Any]) -> Member:
        policy = frozen(self._training[side])
        policy.load_state_dict(saved["policy"])
        return Member(saved["number"], f"{side} {saved['frames']}", saved["frames"], policy)

    def release(self, at_play: Tensor | None) -> None:
        """Forget the evicted disturbances that play in no episode any more."""
        numbers = set() if at_play is None else set(at_play.reshape(-1).tolist())
        self._retired = [member for member in self._retired if member.number in numbers]


class LeagueOpponent(TensorDictModuleBase):
    """The disturbance that a :class:`League` sends: in each environment its own, drawn when an episode starts there.

    It stays until the episode ends, even where the league has evicted it since. Writes the disturbance and, as
    `"opponent"` int64 `[*B]`, the number of the member that acts. Members act in the exploration type in force, without
    gradients. It keeps what it drew, so one opponent serves one batch of environments; its state is in that of the
    league.

    Args:
        league: where it comes from.
        init_key: key `[*B, 1]` that tells where an episode starts, a flag or a count of steps that is 0 there.
    """

    def __init__(self, league: League, init_key: NestedKey) -> None:
        super().__init__()
        key = league.arena.disturbance_key
        read_by = dict.fromkeys(name for policy in league.opponents().values() for name in policy.in_keys)
        read_by |= dict.fromkeys(league._training["disturbance"].in_keys)
        self.in_keys = [*read_by, init_key]
        self.out_keys = [key, "opponent"]
        self.league, self.init_key, self.key = league, init_key, key
        self.drawn: Tensor | None = None
        self.renew()

    def renew(self) -> None:
        """Take the members and probabilities that the league has now; what was drawn stays."""
        self.league.release(self.drawn)
        device = self.league.arena.env.device
        self._players = self.league.opponents()
        members = self.league._members["disturbance"]
        self._numbers = torch.tensor([member.number for member in members], device=device)
        self._probabilities = self.league.probabilities.to(device, torch.float32)

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        shape = tensordict.batch_size
        remedy = "wrap the environment in TransformedEnv(env, InitTracker()), or give the league another init_key"
        started = read(tensordict, self.init_key, remedy).reshape(shape)
        started = started if started.dtype == torch.bool else started == 0
        # For everybody, whether started or not: to look first would be to wait for an accelerator.
        fresh = self._probabilities.multinomial(shape.numel(), True, generator=self.league.generator)
        fresh = self._numbers[fresh].reshape(shape)
        if self.drawn is None:
            self.drawn = fresh
        elif self.drawn.shape != shape:
            raise ValueError(
                f"the opponent plays in a batch of {list(self.drawn.shape)} environments and got one of {list(shape)}: "
                "evaluate with a member, such as league.disturbances['zero']"
            )
        else:
            self.drawn = torch.where(started, fresh, self.drawn)
        action = act_as(self._players, self.drawn, tensordict, self.key)
        return tensordict.set(self.key, action).set("opponent", self.drawn)


def _make_generator(generator: torch.Generator | None, device: torch.device | None) -> torch.Generator:
    if not isinstance(generator, torch.Generator | None):
        raise ValueError(f"generator={generator!r} must be a torch.Generator or None: seed one with manual_seed")
    place = torch.device(device or "cpu")
    if generator is not None and generator.device.type != place.type:
        raise ValueError(f"generator is on {generator.device}, the environment on {place}: opponents are drawn there")
    if generator is None:
        generator = torch.Generator(place)
        generator.manual_seed(int(torch.randint(2**62, (), device="cpu")))
    return generator
