"""Train soft actor-critic on a safety problem with continuous controls and measure the learned set.

python examples/sac_safety.py problem=avoid|reach_avoid env=double_integrator|dubins_car seed=0 resume=PATH

Every option stands in examples/configs/sac_safety.yaml. The loop in `train` is meant to be copied.
"""

from __future__ import annotations

from pathlib import Path

import hydra
import torch
from control_tasks import NATIVE, ExactSet, make_env
from launch import check_replay, check_shared, command_line, make_gamma, make_run, start
from omegaconf import DictConfig
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal
from torchrl.objectives import SoftUpdate

from torchrl_safety.data import LeanReplayBuffer, NStepTransform
from torchrl_safety.modules import AngleEncoding
from torchrl_safety.objectives import ReachAvoidSACLoss, SafetySACLoss
from torchrl_safety.trainers import (
    StepGamma,
    TemperatureReset,
    check_options,
    parameter_groups,
)

LOSSES = {"avoid": SafetySACLoss, "reach_avoid": ReachAvoidSACLoss}
KEPT = "env problem seed num_envs n_steps buffer_size hidden critics"  # on a resume


class StateAction(nn.Module):
    """Q(s, a): the encoded observation beside the action, through a multilayer perceptron."""

    def __init__(self, encoder: nn.Module, **settings) -> None:
        super().__init__()
        self.encoder, self.mlp = encoder, MLP(out_features=1, activation_class=nn.ReLU, **settings)

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.mlp(torch.cat([self.encoder(observation), action], -1))


def check(cfg: DictConfig) -> None:
    check_shared(cfg, problems=LOSSES, envs=NATIVE)
    check_options(
        cfg,
        choices={"n_step": ("last", "best")},
        flags="entropy_in_target alpha.reset",
        whole="batch_size n_steps buffer_size warmup_frames critics",
        positive="lr.actor lr.critic lr.alpha lr.final alpha.start alpha.min tau",
        limits="alpha.max",
        shares="random_actions tau lr.final",
        numbers="target_entropy",
    )
    check_replay(cfg)


@hydra.main(version_base="1.3", config_path="configs", config_name="sac_safety")
def main(cfg: DictConfig) -> None:
    start(cfg, train, kept=KEPT.split())


def train(cfg: DictConfig, folder: Path, saved: Path | None) -> None:
    check(cfg)
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    env = make_env(cfg, cfg.num_envs, discrete=False)
    size, controls = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    encoder = AngleEncoding(size, env.angles) if env.angles else nn.Identity()
    features = encoder.out_features if env.angles else size
    layers = {"num_cells": list(cfg.hidden), "device": cfg.device}
    perceptron = MLP(in_features=features, out_features=2 * controls, activation_class=nn.ReLU, **layers)
    head = nn.Sequential(encoder, perceptron, NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(head, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": env.action_spec.space.low[0], "high": env.action_spec.space.high[0]},
        return_log_prob=True,
    )
    critic = TensorDictModule(
        StateAction(encoder, in_features=features + controls, **layers),
        ["observation", "action"],
        ["state_action_value"],
    )
    loss = LOSSES[cfg.problem.name](
        actor,
        critic,
        n_step=cfg.n_step,
        bootstrap_on_truncation=True,
        num_qvalue_nets=cfg.critics,
        entropy_in_target=cfg.entropy_in_target,
        target_entropy=cfg.target_entropy,
        alpha_init=cfg.alpha.start,
        min_alpha=cfg.alpha.min,
        max_alpha=cfg.alpha.max,
    )
    backup = loss.backup

    def best_value(states: torch.Tensor) -> torch.Tensor:
        """The least critic at the policy's mode."""
        tensordict = TensorDict({"observation": states}, states.shape[:-1])
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            return loss.critic_values(actor(tensordict)).amin(0)

    updates = (cfg.frames - cfg.warmup_frames) // cfg.num_envs + 1
    buffer = LeanReplayBuffer(
        storage=LazyTensorStorage(cfg.buffer_size, device=cfg.device),
        transform=NStepTransform(cfg.n_steps, signals=[*backup.signals, "observation"], num_envs=cfg.num_envs),
        batch_size=cfg.batch_size,
    )
    stored = ["observation", "action", *(("next", key) for key in ("observation", "done", "terminated", "truncated"))]
    stored += [("next", signal) for signal in backup.signals]
    kept = [key for key in env.reset().keys(True, True) if key != "action"]

    rates = {"actor_network": cfg.lr.actor, "qvalue_network": cfg.lr.critic, "log_alpha": cfg.lr.alpha}
    parameters = list(loss.parameters())
    optimizer = torch.optim.Adam(parameter_groups(loss, rates), fused=True)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, cfg.lr.final ** (1 / updates))
    target = SoftUpdate(loss, tau=cfg.tau)
    gamma: StepGamma | TemperatureReset = make_gamma(cfg)
    if cfg.alpha.reset:
        gamma = TemperatureReset(gamma, loss, optimizer)
    measure = ExactSet(cfg, backup, discrete=False)
    facts = {"algorithm": "sac", "env": cfg.env.name, "problem": cfg.problem.name, "seed": cfg.seed}
    components = {"loss": loss, "optimizer": optimizer, "decay": decay, "gamma": gamma, "buffer": buffer, "env": env}

    with make_run(cfg, folder, saved, state=env.reset(), **components) as run:
        while run.frames < cfg.frames:
            with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
                acting = actor(run.state.select(*kept))
                share = 1.0 if run.frames < cfg.warmup_frames else cfg.random_actions
                at_random = torch.rand(cfg.num_envs, 1, device=cfg.device) < share
                acting["action"] = torch.where(at_random, env.action_spec.rand(), acting["action"])
                transition, run.state = env.step_and_maybe_reset(acting)
            buffer.extend(transition.select(*stored))
            run.advance(cfg.num_envs)
            loss.gamma = gamma.step(run.frames)
            if run.frames >= cfg.warmup_frames and len(buffer) >= cfg.batch_size:
                losses = loss(buffer.sample())
                optimizer.zero_grad()
                (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()
                torch.nn.utils.clip_grad_norm_(parameters, cfg.max_grad_norm)
                optimizer.step()
                decay.step()
                target.step()
                run.count_update()
            if run.updates and run.due(cfg.evaluations):
                run.report(
                    measure(actor, best_value).scores,
                    gamma=gamma.gamma,
                    **{key: value.item() for key, value in losses.items()},
                )
            run.save_if_due()
        found = measure(actor, best_value)
        title = f"{facts['algorithm']}, {cfg.env.name}, {cfg.problem.name}, seed {cfg.seed}: "
        run.finish(
            found.scores,
            draw=lambda: {"value_map": measure.picture(found, title)},
            **facts,
        )


if __name__ == "__main__":
    command_line(main)
