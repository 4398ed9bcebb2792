"""Train a controller against a disturbance that learns to be the worst, and measure the set that it can defend.

python examples/game_safety.py game=isaacs|gameplay algo=dqn|sac|ppo env=double_integrator seed=0 resume=PATH
python examples/game_safety.py evaluate=PATH  # of a finished run, against its worst opponents once more

Every option stands in examples/configs/game_safety.yaml. The loop in `train` is meant to be
copied; that of algo=ppo is in game_on_policy.py.
"""

from __future__ import annotations

from pathlib import Path

import game_on_policy
import hydra
import torch
from control_tasks import GAMES
from game_learners import Learner, down_to, load, make_learner, save
from game_measures import conclude, make_arena, make_measure
from launch import check_replay, check_shared, command_line, make_gamma, make_run, start
from omegaconf import DictConfig
from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage
from torchrl.envs import EnvBase, ExplorationType, set_exploration_type
from torchrl.objectives import SoftUpdate

from torchrl_safety.data import LeanReplayBuffer, NStepTransform
from torchrl_safety.envs.base import END_CRITERIA
from torchrl_safety.modules import reset_noise
from torchrl_safety.trainers import League, UpdatePeriods, check_options, parameter_groups

KEPT = "env problem algo seed num_envs n_steps buffer_size hidden failure_depth"
PLAYERS = ("action", "disturbance")


WANTED = {
    "dqn": {
        "choices": {"algo.dueling": ("mean", "max", None)},
        "flags": "algo.categorical algo.noisy algo.double",
        "whole": "algo.atoms",
        "positive": "lr.critic",
    },
    "sac": {
        "choices": {"algo.pessimism": ("per_player", "min")},
        "flags": "algo.second_mover algo.entropy_in_target algo.periods.alternating",
        "whole": "algo.critics algo.periods.controller algo.periods.disturbance",
        "positive": "lr.controller lr.disturbance lr.critic lr.alpha algo.alpha.start algo.alpha.min",
        "limits": "algo.alpha.max",
        "numbers": "algo.target_entropy.controller algo.target_entropy.disturbance",
    },
    "ppo": {
        "flags": "algo.second_mover algo.periods.alternating",
        "whole": "algo.steps algo.epochs algo.minibatch algo.periods.controller algo.periods.disturbance",
        "shares": "algo.lmbda",
        "positive": "lr.controller lr.disturbance lr.critic algo.clip",
        "amounts": "algo.entropy",
    },
}
"""Algorithm -> the kinds of the options that it alone has."""


def check(cfg: DictConfig) -> None:
    check_shared(cfg, problems=("avoid", "reach_avoid"), envs=GAMES)
    check_options(cfg, choices={"algo.name": WANTED}, flags="compile", shares="lr.final", positive="lr.final")
    check_options(cfg, limits="failure_depth")
    check_options(cfg, numbers="problem.level", intervals="problem.support")
    check_options(
        cfg,
        shares="league.share",
        whole="league.envs league.controllers league.disturbances league.frames_per_step league.interval",
        amounts="league.rationality",
    )
    if "plane" in cfg.env:
        check_options(
            cfg,
            choices={"env.end_criterion": END_CRITERIA},
            corners="env.plane.low env.plane.high env.plane.through",
            nodes="env.plane.nodes",
            labels="env.plane.labels",
        )
    if "scale" in cfg.env and not (len(cfg.env.scale) == len(cfg.env.plane.through) and min(cfg.env.scale) > 0):
        raise ValueError(f"env.scale={cfg.env.scale} must have a positive number for each entry of the state")
    if cfg.solution is not None and cfg.env.name != "pursuit_evasion":
        raise ValueError(f"solution={cfg.solution} is one of env=pursuit_evasion, not of {cfg.env.name}; leave it out")
    check_options(
        cfg, numbers="response.level", counts="response.frames", whole="response.envs response.starts response.restarts"
    )
    if cfg.response.sequences is not None:
        check_options(cfg, whole=" ".join(f"response.sequences.{key}" for key in ("decisions", "hold", "states")))
    check_options(cfg, **WANTED[cfg.algo.name])
    if cfg.algo.name == "ppo":
        if cfg.algo.minibatch > cfg.num_envs * cfg.algo.steps:
            raise ValueError(
                f"algo.minibatch={cfg.algo.minibatch} is more than a batch of num_envs={cfg.num_envs} times "
                f"algo.steps={cfg.algo.steps}; lower it"
            )
        if cfg.league.share:
            raise ValueError(
                f"league.share is {cfg.league.share}, but PPO learns from what its own players did; set it to 0"
            )
        return
    check_options(
        cfg,
        whole="batch_size n_steps buffer_size warmup_frames",
        shares="random_actions.start random_actions.end random_actions.fraction tau",
        positive="tau",
    )
    check_replay(cfg)


@hydra.main(version_base="1.3", config_path="configs", config_name="game_safety")
def main(cfg: DictConfig) -> None:
    start(cfg, train, kept=KEPT.split(), show=show)


def train(cfg: DictConfig, folder: Path, saved: Path | None) -> None:
    check(cfg)
    if cfg.algo.name == "ppo":
        return game_on_policy.train(cfg, folder, saved)
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    env = make_arena(cfg, cfg.num_envs)
    learner = make_learner(cfg, env)
    loss, policy, value, rates = learner.loss, learner.policy, learner.value, learner.rates
    league = make_league(cfg, learner)
    compute = torch.compile(loss, fullgraph=True) if cfg.compile else loss
    backup = loss.backup

    updates = (cfg.frames - cfg.warmup_frames) // cfg.num_envs + 1
    buffer = LeanReplayBuffer(
        storage=LazyTensorStorage(cfg.buffer_size, device=cfg.device),
        transform=NStepTransform(cfg.n_steps, signals=backup.signals, num_envs=cfg.num_envs),
        batch_size=cfg.batch_size,
    )
    stored = ["observation", *PLAYERS, *(("next", key) for key in ("observation", "done", "terminated", "truncated"))]
    stored += [("next", signal) for signal in backup.signals]

    parameters = list(loss.parameters())
    optimizer = torch.optim.Adam(parameter_groups(loss, rates), fused=True)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, cfg.lr.final ** (1 / updates))
    target = SoftUpdate(loss, tau=cfg.tau)
    gamma = make_gamma(cfg)
    turns = UpdatePeriods(loss, **cfg.algo.periods) if cfg.algo.name == "sac" else None
    measure = make_measure(cfg, backup)
    facts = {"algorithm": cfg.algo.name, "env": cfg.env.name, "problem": cfg.problem.name, "seed": cfg.seed}
    components = {"loss": loss, "optimizer": optimizer, "decay": decay, "gamma": gamma, "buffer": buffer, "env": env}
    components |= {name: part for name, part in (("turns", turns), ("league", league)) if part is not None}

    with make_run(cfg, folder, saved, state=env.reset(), **components) as run:
        standing: dict[str, float] = {}  # of the league
        while run.frames < cfg.frames:
            acting = explore(env, policy, run.state, share=at_random(cfg, run.frames))
            if league is not None and run.frames >= cfg.warmup_frames:
                if (told := league.step(run.frames)) is not None:
                    standing = told
                guests = int(cfg.league.share * cfg.num_envs)  # environments in which a past disturbance plays
                acting["disturbance"][:guests] = league.opponent(acting.clone())["disturbance"][:guests]
            transition, run.state = env.step_and_maybe_reset(acting)
            buffer.extend(down_to(cfg.failure_depth, transition.select(*stored)))
            run.advance(cfg.num_envs)
            loss.gamma = gamma.step(run.frames)
            if run.frames >= cfg.warmup_frames and len(buffer) >= cfg.batch_size:
                if turns is not None:
                    turns.step()
                reset_noise(loss)
                losses = compute(buffer.sample())
                optimizer.zero_grad()
                sum(term for name, term in losses.items() if name.startswith("loss")).backward()
                torch.nn.utils.clip_grad_norm_(parameters, cfg.max_grad_norm)
                optimizer.step()
                decay.step()
                target.step()
                run.count_update()
            if run.updates and run.due(cfg.evaluations):
                run.report(
                    measure(policy, value).scores,
                    gamma=gamma.gamma,
                    **standing,
                    **{key: term.item() for key, term in losses.items()},
                )
            run.save_if_due()
        save(folder, learner, league)
        scores, draw = conclude(cfg, learner, measure, league)
        run.finish(scores, draw=draw, **facts)


def show(cfg: DictConfig, folder: Path) -> None:
    """Measure what a finished run left in `folder`, and draw the pictures there anew."""
    check(cfg)
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    learner = make_learner(cfg, make_arena(cfg, 1))
    league = make_league(cfg, learner)
    load(folder, learner, league, cfg.device)
    scores, draw = conclude(cfg, learner, make_measure(cfg, learner.loss.backup), league)
    for name, score in scores.items():
        if score is not None:
            print(f"{name:<34}{score:>10,}" if isinstance(score, int) else f"{name:<34}{score:>10.4f}")
    for name, figure in draw().items():
        figure.savefig(folder / f"{name}.png", dpi=120)


def make_league(cfg: DictConfig, learner: Learner) -> League | None:
    """Past players, against which a share of the data is collected."""
    if not cfg.league.share:
        return None
    settings = {key: value for key, value in cfg.league.items() if key not in ("share", "envs")}
    return League(
        make_arena(cfg, cfg.league.envs),
        learner.controller,
        learner.disturbance,
        max_steps=cfg.rollout_steps,
        problem=cfg.problem.name,
        init_key="step_count",
        **settings,
    )


def at_random(cfg: DictConfig, frames: int) -> float:
    """The share of random actions: all of them before the first update, then fewer and fewer."""
    schedule = cfg.random_actions
    if frames < cfg.warmup_frames:
        return 1.0
    passed = min(frames / (schedule.fraction * cfg.frames), 1.0) if schedule.fraction else 1.0
    return schedule.start + passed * (schedule.end - schedule.start)


def explore(env: EnvBase, policy: torch.nn.Module, state: TensorDictBase, *, share: float) -> TensorDictBase:
    """The state with the actions of both players in it, each of them a random one in a `share` of the cases."""
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        reset_noise(policy)
        acting = policy(state)
    for player in PLAYERS:
        action = acting[player]
        random = torch.rand(state.batch_size, device=env.device) < share
        random = random.reshape(*state.batch_size, *[1] * (action.ndim - state.ndim))
        acting[player] = torch.where(random, env.full_action_spec[player].rand(), action)
    return acting


if __name__ == "__main__":
    command_line(main)
