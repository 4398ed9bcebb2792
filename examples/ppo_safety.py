"""Train PPO or A2C on a safety problem with exact lambda-returns and measure the learned set.

python examples/ppo_safety.py algorithm=ppo|a2c problem=avoid|reach_avoid env=double_integrator|dubins_car seed=0

Every option stands in examples/configs/ppo_safety.yaml. The loop in `train` is meant to be copied.
"""

from __future__ import annotations

from pathlib import Path

import hydra
import torch
from control_tasks import NATIVE, ExactSet, make_env
from launch import check_shared, command_line, make_gamma, make_run, start
from omegaconf import DictConfig
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator

from torchrl_safety.modules import AngleEncoding
from torchrl_safety.objectives import ReachAvoidA2CLoss, ReachAvoidPPOLoss, SafetyA2CLoss, SafetyPPOLoss
from torchrl_safety.trainers import check_options

LOSSES = {
    "ppo": {"avoid": SafetyPPOLoss, "reach_avoid": ReachAvoidPPOLoss},
    "a2c": {"avoid": SafetyA2CLoss, "reach_avoid": ReachAvoidA2CLoss},
}
KEPT = "algorithm env problem seed num_envs steps hidden"  # on a resume


def check(cfg: DictConfig) -> None:
    check_options(
        cfg,
        choices={"algorithm": LOSSES},
        whole="steps epochs minibatch",
        positive="lr.start lr.end entropy.start entropy.end clip",
        shares="lmbda",
    )
    check_shared(cfg, problems=LOSSES[cfg.algorithm], envs=NATIVE)
    if cfg.minibatch > cfg.num_envs * cfg.steps:
        raise ValueError(
            f"minibatch={cfg.minibatch} is more than a batch of num_envs={cfg.num_envs} times steps={cfg.steps} holds"
        )


@hydra.main(version_base="1.3", config_path="configs", config_name="ppo_safety")
def main(cfg: DictConfig) -> None:
    start(cfg, train, kept=KEPT.split())


def train(cfg: DictConfig, folder: Path, saved: Path | None) -> None:
    check(cfg)
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    env = make_env(cfg, cfg.num_envs)
    size = env.observation_spec["observation"].shape[-1]

    def perceptron(outputs: int) -> nn.Module:
        layers = {"num_cells": list(cfg.hidden), "activation_class": nn.Tanh, "device": cfg.device}
        if not env.angles:
            return MLP(in_features=size, out_features=outputs, **layers)
        encoder = AngleEncoding(size, env.angles)
        return nn.Sequential(encoder, MLP(in_features=encoder.out_features, out_features=outputs, **layers))

    actor = ProbabilisticActor(
        TensorDictModule(perceptron(env.action_spec.space.n), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(perceptron(1), in_keys=["observation"])
    settings = {"clip_epsilon": cfg.clip, "normalize_advantage": True} if cfg.algorithm == "ppo" else {}
    loss = LOSSES[cfg.algorithm][cfg.problem.name](
        actor,
        critic,
        lmbda=cfg.lmbda,
        bootstrap_on_truncation=True,
        entropy_coeff=cfg.entropy.start,
        **settings,
    )

    def value(states: torch.Tensor) -> torch.Tensor:
        return critic(TensorDict({"observation": states}, states.shape[:-1]))["state_value"]

    batch_frames = cfg.num_envs * cfg.steps
    minibatches = -(-batch_frames // cfg.minibatch)
    updates = -(-cfg.frames // batch_frames) * cfg.epochs * minibatches
    optimizer = torch.optim.Adam(loss.parameters(), cfg.lr.start, fused=True)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, (cfg.lr.end / cfg.lr.start) ** (1 / updates))
    gamma = make_gamma(cfg)
    measure = ExactSet(cfg, loss.backup)
    facts = {"algorithm": cfg.algorithm, "env": cfg.env.name, "problem": cfg.problem.name, "seed": cfg.seed}
    components = {"loss": loss, "optimizer": optimizer, "decay": decay, "gamma": gamma, "env": env}
    carried = [key for key in env.reset().keys(True, True) if key != "action"]
    learned = ["observation", "action", "action_log_prob", "advantage", "value_target"]

    with make_run(cfg, folder, saved, state=env.reset(), **components) as run:
        while run.frames < cfg.frames:
            steps = []
            with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
                for _ in range(cfg.steps):
                    transition, run.state = env.step_and_maybe_reset(actor(run.state.select(*carried)))
                    steps.append(transition)
            batch = torch.stack(steps, 1)
            run.advance(batch_frames)
            loss.gamma = gamma.step(run.frames)
            share = min(run.frames / cfg.frames, 1.0)
            loss.entropy_coeff = cfg.entropy.start * (cfg.entropy.end / cfg.entropy.start) ** share
            for _ in range(cfg.epochs):
                with torch.no_grad():  # anew in each epoch: the targets follow the critic
                    loss.value_estimator(batch, params=loss.critic_network_params)
                flat = batch.select(*learned).reshape(-1)
                for rows in torch.randperm(len(flat)).split(cfg.minibatch):
                    losses = loss(flat[rows])
                    optimizer.zero_grad()
                    (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                    torch.nn.utils.clip_grad_norm_(loss.parameters(), cfg.max_grad_norm)
                    optimizer.step()
                    decay.step()
                    run.count_update()
            if run.due(cfg.evaluations):
                names = ("loss_objective", "loss_critic", "entropy")
                run.report(
                    measure(actor, value).scores, gamma=gamma.gamma, **{name: losses[name].item() for name in names}
                )
            run.save_if_due()
        found = measure(actor, value)
        title = f"{facts['algorithm']}, {cfg.env.name}, {cfg.problem.name}, seed {cfg.seed}: "
        run.finish(
            found.scores,
            draw=lambda: {"value_map": measure.picture(found, title)},
            **facts,
        )


if __name__ == "__main__":
    command_line(main)
