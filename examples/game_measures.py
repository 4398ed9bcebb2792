"""How right a learned game is: its set against an exact one, a grid's or roll-outs, and its worst opponents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from control_tasks import ENDS, ExactSet, make_env
from game_learners import Learner, make_encoder
from matplotlib.figure import Figure
from omegaconf import DictConfig
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.envs import EnvBase, ExplorationType, set_exploration_type

from torchrl_safety.objectives import Backup
from torchrl_safety.trainers import (
    League,
    best_response,
    cross_play,
    evaluate,
    evaluation_mode,
    plot_cross_play,
    plot_value_map,
    set_metrics,
    state_value,
)
from torchrl_safety.trainers.matches import simple_disturbances

Value = Callable[[Tensor], Tensor]
"""Critic values `[*B, 1]` of states `[*B, S]`."""
CHUNK = 4_096
"""The most states that a network is asked about at once: more fit no cache."""
OUTSIDE, INSIDE = 0.05, 0.95
"""How far outside the exact set the disturbance must win, and the share of it where the controller must."""


def make_arena(cfg: DictConfig, num_envs: int, **settings: Any) -> EnvBase:
    """The game of ``cfg.env`` with the kind of actions that ``cfg.algo`` learns."""
    return make_env(cfg, num_envs, discrete=cfg.algo.name != "sac", **settings)


def make_matches(cfg: DictConfig, num_envs: int) -> EnvBase:
    """The same without a clock, where an episode is over as soon as it is decided."""
    return make_arena(cfg, num_envs, max_steps=None, end_criterion=ENDS[cfg.problem.name])


def own_value(env: EnvBase, backup: Backup, value: Value, states: Tensor) -> Tensor:
    """The learned value `[N]` of states `[N, S]` themselves; the set is where it is at least 0."""
    margins = {"safety_margin": env.safety_margin, "target_margin": env.target_margin}
    parts = []
    for part in states.split(CHUNK):
        signals = {name: margins[name](part) for name in backup.signals}
        parts.append(state_value(backup, signals, value(part)).squeeze(-1))
    return torch.cat(parts)


def undecided(env: EnvBase, n: int, seed: int) -> Tensor:
    """Those of `n` states, drawn as the environment draws them, that have not failed and lie outside the target."""
    states = env.sample_states(n, torch.Generator().manual_seed(seed))
    playable = env.safety_margin(states) >= 0
    if env.problem == "reach_avoid":
        playable &= env.target_margin(states) < 0
    return states[playable.squeeze(-1)]


def share(true: Tensor) -> float | None:
    """Of the true entries; None of nothing."""
    return true.double().mean().item() if len(true) else None


class GridSolution(NamedTuple):
    """The value of the pursuit on a grid, by someone else."""

    axes: list[Tensor]
    """Of x, y and ψ in [0, 2π)."""
    value: Tensor
    """`[*grid]`."""

    @classmethod
    def load(cls, path: str | Path, env: EnvBase) -> GridSolution:
        """Reads V, lo and hi of the game with v = R = 5 and w = 1, in the lengths of `env`."""
        if not np.isclose(env.speed, env.max_turn_rate * env.capture_radius):
            raise ValueError(
                f"solution={path} is that of v = w R, but the environment has speed={env.speed}, "
                f"max_turn_rate={env.max_turn_rate} and capture_radius={env.capture_radius}: leave it out"
            )
        scale = env.capture_radius / 5
        try:
            with np.load(path) as file:
                grid, low, high = (file[name] for name in ("V", "lo", "hi"))
        except (ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
            raise ValueError(
                f"solution={path} is no .npz file with the arrays V, lo and hi: give one, or none"
            ) from error
        if grid.ndim != 3 or low.shape != (3,) or high.shape != (3,):
            raise ValueError(
                f"solution={path} has V, lo and hi of shapes {grid.shape}, {low.shape} and {high.shape}: V needs the "
                "axes x, y and ψ, the others an entry for each"
            )
        value = torch.as_tensor(grid, dtype=env.dtype) * scale
        axes = [torch.linspace(low[i], high[i], value.shape[i], dtype=env.dtype) * scale for i in range(2)]
        turn = torch.linspace(low[2], high[2], value.shape[2] + 1, dtype=env.dtype)
        return cls([*axes, turn[:-1]], value)  # ψ is periodic and its last node one spacing before 2π

    def states(self) -> Tensor:
        """The nodes `[*grid, 3]`."""
        return torch.stack(torch.meshgrid(*self.axes, indexing="ij"), -1)


class PlayedSet:
    """The learned set where no exact one is known: who wins from the states in it, and from the others.

    The starts are always the same. The scores: `claimed`, the share of them in the learned set; `safe_rate` and
    `success_rate` of both players' roll-outs from those; `lost_elsewhere`, the share of the other starts from which the
    controller lost. With a solution on a grid also how the set compares with that.
    """

    class Found(NamedTuple):
        scores: dict[str, float | None]
        value: Tensor
        """On the plane that is drawn, `[n, m]`."""

    def __init__(self, cfg: DictConfig, backup: Backup) -> None:
        self.cfg, self.backup, self.level = cfg, backup, cfg.problem.level
        self.env = make_matches(cfg, cfg.rollouts)
        self.starts = undecided(self.env, 20 * cfg.rollouts, cfg.seed)[: cfg.rollouts]
        plane = cfg.env.plane
        through = torch.tensor(list(plane.through), dtype=self.env.dtype)
        counts = [plane.nodes] * 2 if isinstance(plane.nodes, int) else plane.nodes
        self.axes = [torch.linspace(*ends, dtype=self.env.dtype) for ends in zip(plane.low, plane.high, counts)]
        self.solution, self.exact = None, None
        if cfg.solution is not None:
            self.solution = GridSolution.load(cfg.solution, self.env)
            self.axes, nearest = self.solution.axes[:2], (self.solution.axes[2] - through[2]).abs().argmin()
            self.exact, through[2] = self.solution.value[..., nearest], self.solution.axes[2][nearest]
        self.plane = through.repeat(*map(len, self.axes), 1)
        self.plane[..., :2] = torch.stack(torch.meshgrid(*self.axes, indexing="ij"), -1)

    def __call__(self, policy: nn.Module, value: Value) -> PlayedSet.Found:
        with evaluation_mode(policy):
            claimed = self.own(value, self.starts) >= self.level
            drawn = self.own(value, self.plane)
            scores = {} if self.solution is None else self.compare(value)
        played = evaluate(self.env, policy, starts=self.starts, max_steps=self.cfg.rollout_steps)
        won = played.safe if self.cfg.problem.name == "avoid" else played.success
        scores |= {
            "claimed": share(claimed),
            "safe_rate": share(played.safe[claimed]),
            "success_rate": None if played.success is None else share(played.success[claimed]),
            "lost_elsewhere": share(~won[~claimed]),
        }
        return self.Found(scores, drawn)

    def own(self, value: Value, states: Tensor) -> Tensor:
        """The learned value `[*B]` of states `[*B, S]` themselves."""
        return own_value(self.env, self.backup, value, states.flatten(0, -2)).reshape(states.shape[:-1])

    def compare(self, value: Value) -> dict[str, float]:
        """The learned set against the grid's, node by node; `agreement` is the share of equal signs."""
        learned, exact = self.own(value, self.solution.states()) >= self.level, self.solution.value >= 0
        return {**set_metrics(learned, exact)._asdict(), "agreement": (learned == exact).double().mean().item()}

    def picture(self, found: PlayedSet.Found, title: str) -> Figure:
        """The value on the plane of ``cfg.env.plane``, beside the boundary of the grid's set there."""
        axes, labels = tuple(self.axes), tuple(self.cfg.env.plane.labels)
        title += f"{found.scores['claimed']:.1%} claimed"
        return plot_value_map(axes, found.value, exact=self.exact, level=self.level, labels=labels, title=title)


def make_measure(cfg: DictConfig, backup: Backup) -> ExactSet | PlayedSet:
    """What measures a game in the environment of ``cfg.env`` again and again."""
    return ExactSet(cfg, backup, discrete=cfg.algo.name != "sac") if "grid" in cfg.env else PlayedSet(cfg, backup)


class Worst(NamedTuple):
    """How the players fare against the strongest opponents that are at hand."""

    scores: dict[str, Any]
    figures: dict[str, Figure]


def meet_the_worst(cfg: DictConfig, learner: Learner, league: League | None = None) -> Worst:
    """Train a best response to the controller, and let it, the exact and all other disturbances play against it.

    The starts are those from which the controller should win: the exact set shrunk by `INSIDE`, or where there is none
    the learned set at ``response.level``; where that is empty, nobody meets. The scores: `against_…`, its rate of wins
    against each; `lost_outside`, that of the learned disturbance's wins from states whose exact value is below
    -`OUTSIDE`; and where ``response.sequences`` asks for it :func:`confusion`, the learned set against every sequence
    of disturbances.
    """
    settings, backup, problem = cfg.response, learner.loss.backup, cfg.problem.name
    env = make_matches(cfg, settings.starts)
    states = undecided(env, 50 * settings.starts, cfg.seed + 1)
    with evaluation_mode(learner.policy):
        learned = own_value(env, backup, learner.value, states)
    exact = hasattr(env, "exact_value")
    inside = env.well_inside(states, INSIDE) if exact else learned >= settings.level
    starts = states[inside][: settings.starts]
    if not len(starts):  # a controller that claims nothing has nothing to defend
        return Worst({}, {})
    found = best_response(
        make_matches(cfg, settings.envs),
        learner.controller,
        settings.frames,
        max_steps=cfg.rollout_steps,
        problem=problem,
        episodes=len(starts) if settings.restarts > 1 else 1,
        starts=starts,
        restarts=settings.restarts,
        encoder=make_encoder(cfg, env),
    )
    controllers, disturbances = {"controller": learner.controller}, simple_disturbances(env)
    if league is not None:
        controllers, disturbances = {**controllers, **league.controllers}, {**disturbances, **league.disturbances}
    disturbances |= {"trained": learner.disturbance, "best response": found.disturbance}
    if exact:
        disturbances["exact"] = exact_disturbance(env)
    met = cross_play(
        env,
        controllers,
        disturbances,
        episodes=len(starts),
        max_steps=cfg.rollout_steps,
        problem=problem,
        starts=starts,
    )
    rates = met.rates[0].tolist()
    scores: dict[str, Any] = {f"against_{name}".replace(" ", "_"): rate for name, rate in zip(disturbances, rates)}
    if exact:
        outside = states[env.exact_value(states) < -OUTSIDE][: settings.starts]
        scores["lost_outside"] = (
            1 - evaluate(env, learner.policy, starts=outside, max_steps=cfg.rollout_steps).safe_rate
        )
    if settings.sequences is not None:
        few = slice(settings.sequences.states)
        length = {key: settings.sequences[key] for key in ("decisions", "hold")}
        table = make_env(cfg, 1, discrete=True)
        pushes = table.control(torch.arange(table.full_action_spec["disturbance"].n), "disturbance")
        with evaluation_mode(learner.policy):
            withstood = withstands_every_sequence(env, learner.controller, states[few], pushes, **length)
        scores |= confusion(learned[few] >= cfg.problem.level, withstood)
    label = "safe rate" if problem == "avoid" else "success rate"
    picture = plot_cross_play(met.rates, met.controllers, met.disturbances, label=label)
    return Worst(scores, {"cross_play": picture})


def exact_disturbance(env: EnvBase) -> TensorDictModule:
    """The disturbance after which the exact value is least, one step ahead, seeing the control."""
    spec = env.full_action_spec["disturbance"]
    actions = torch.arange(spec.n) if env.discrete else torch.stack((spec.space.low[0], spec.space.high[0]))
    pushes = env.control(actions, "disturbance")

    def act(state: Tensor, action: Tensor) -> Tensor:
        shape = (*state.shape[:-1], len(pushes), -1)
        control = env.control(action)
        after = env.dynamics(*(part.unsqueeze(-2).expand(shape) for part in (state, control)), pushes.expand(shape))
        return actions[env.exact_value(after).argmin(-1)]

    return TensorDictModule(act, ["observation", "action"], ["disturbance"])


@torch.no_grad()
@set_exploration_type(ExplorationType.DETERMINISTIC)
def withstands_every_sequence(
    env: EnvBase, controller: nn.Module, states: Tensor, pushes: Tensor, *, decisions: int, hold: int
) -> Tensor:
    """Whether the controller wins from states `[N, S]` against every open-loop sequence of disturbances, bool `[N]`.

    A sequence has `decisions` of the disturbances `pushes` `[K, C]`, each held for `hold` steps; the controller sees
    every state. What is not
    decided after the last counts as safe, and as not reached. The sequences are the leaves of a tree that is searched
    depth first: a branch ends where an episode does, and a state is done with at the first sequence that beats it.
    """
    reach = env.problem == "reach_avoid"
    lost = env.safety_margin(states).squeeze(-1) < 0
    open_ = ~lost & (env.target_margin(states).squeeze(-1) < 0) if reach else ~lost
    rows = torch.arange(len(states))[open_]
    pending = [(0, rows, states[rows])]
    while pending:
        depth, rows, now = pending.pop()
        now, rows = now[~lost[rows]], rows[~lost[rows]]
        if depth == decisions:
            lost[rows] |= reach
            continue
        if len(rows) * len(pushes) > CHUNK:
            half = len(rows) // 2
            pending += [(depth, rows[half:], now[half:]), (depth, rows[:half], now[:half])]
            continue
        rows, now = (part.repeat_interleave(len(pushes), 0) for part in (rows, now))
        push = pushes.repeat(len(rows) // len(pushes), 1)
        for _ in range(hold):
            action = controller(TensorDict({"observation": now}, now.shape[:1]))["action"]
            now = env.dynamics(now, env.control(action), push)
            failed = env.safety_margin(now).squeeze(-1) < 0
            lost[rows[failed]] = True
            goes_on = ~failed & (env.target_margin(now).squeeze(-1) < 0) if reach else ~failed
            rows, now, push = rows[goes_on], now[goes_on], push[goes_on]
        if len(rows):
            pending.append((depth + 1, rows, now))
    return ~lost


def confusion(claimed: Tensor, withstood: Tensor) -> dict[str, int]:
    """How often the learned set and the outcome agree, bool `[N]` both."""
    return {
        "claimed_withstood": int((claimed & withstood).sum()),
        "claimed_beaten": int((claimed & ~withstood).sum()),
        "unclaimed_withstood": int((~claimed & withstood).sum()),
        "unclaimed_beaten": int((~claimed & ~withstood).sum()),
    }


def conclude(
    cfg: DictConfig, learner: Learner, measure: ExactSet | PlayedSet, league: League | None = None
) -> tuple[dict[str, Any], Callable[[], dict[str, Figure]]]:
    """All scores of a trained learner, and what draws its pictures."""
    found = measure(learner.policy, learner.value)
    worst = meet_the_worst(cfg, learner, league) if cfg.response.frames else Worst({}, {})
    title = f"{cfg.algo.name}, {cfg.env.name}, {cfg.problem.name} game, seed {cfg.seed}: "
    return found.scores | worst.scores, lambda: {"value_map": measure.picture(found, title), **worst.figures}
