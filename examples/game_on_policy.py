"""The loop of game_safety.py with algo=ppo: both players learn from the same steps, one from negated advantages."""

from __future__ import annotations

from pathlib import Path

import torch
from game_learners import down_to, make_learner, save
from game_measures import conclude, make_arena, make_measure
from launch import make_gamma, make_run
from omegaconf import DictConfig
from torchrl.envs import ExplorationType, set_exploration_type

from torchrl_safety.trainers import UpdatePeriods, parameter_groups

LEARNED = [
    "observation", "action", "disturbance", "action_log_prob", "disturbance_log_prob", "advantage", "value_target",
]  # fmt: skip


def train(cfg: DictConfig, folder: Path, saved: Path | None) -> None:
    """Train and measure; the options are checked."""
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    env = make_arena(cfg, cfg.num_envs)
    learner = make_learner(cfg, env)
    loss, policy, value = learner.loss, learner.policy, learner.value
    compute = torch.compile(loss, fullgraph=True) if cfg.compile else loss

    batch_frames = cfg.num_envs * cfg.algo.steps
    updates = -(-cfg.frames // batch_frames) * cfg.algo.epochs * -(-batch_frames // cfg.algo.minibatch)
    optimizer = torch.optim.Adam(parameter_groups(loss, learner.rates), fused=True)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, cfg.lr.final ** (1 / updates))
    gamma = make_gamma(cfg)
    turns = UpdatePeriods(loss, **cfg.algo.periods)
    measure = make_measure(cfg, loss.backup)
    facts = {"algorithm": "ppo", "env": cfg.env.name, "problem": cfg.problem.name, "seed": cfg.seed}
    carried = [key for key in env.reset().keys(True, True) if key not in ("action", "disturbance")]

    components = {"loss": loss, "optimizer": optimizer, "decay": decay, "gamma": gamma, "turns": turns, "env": env}
    with make_run(cfg, folder, saved, state=env.reset(), **components) as run:
        while run.frames < cfg.frames:
            steps = []
            with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
                for _ in range(cfg.algo.steps):
                    transition, run.state = env.step_and_maybe_reset(policy(run.state.select(*carried)))
                    steps.append(down_to(cfg.failure_depth, transition))
            batch = torch.stack(steps, 1)
            run.advance(batch_frames)
            loss.gamma = gamma.step(run.frames)
            for _ in range(cfg.algo.epochs):
                turns.step()
                with torch.no_grad():  # anew in each epoch: the targets follow the critic
                    loss.value_estimator(batch, params=loss.critic_network_params)
                flat = batch.select(*LEARNED).reshape(-1)
                for rows in torch.randperm(len(flat)).split(cfg.algo.minibatch):
                    losses = compute(flat[rows])
                    optimizer.zero_grad()
                    sum(term for name, term in losses.items() if name.startswith("loss")).backward()
                    torch.nn.utils.clip_grad_norm_(loss.parameters(), cfg.max_grad_norm)
                    optimizer.step()
                    decay.step()
                    run.count_update()
            if run.due(cfg.evaluations):
                terms = {name: term.item() for name, term in losses.items() if name.startswith("loss")}
                run.report(measure(policy, value).scores, gamma=gamma.gamma, **terms)
            run.save_if_due()
        save(folder, learner)
        scores, draw = conclude(cfg, learner, measure)
        run.finish(scores, draw=draw, **facts)
