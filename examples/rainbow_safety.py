"""Train Rainbow on a safety problem and measure the learned set against the exact one.

python examples/rainbow_safety.py problem=avoid|reach_avoid|return env=double_integrator|dubins_car seed=0 resume=PATH

Every option stands in examples/configs/rainbow_safety.yaml. The loop in `train` is meant to be copied.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import hydra
import torch
from control_tasks import ENVS, GYMNASIUM, make_env, make_measure
from launch import check_replay, check_shared, command_line, make_gamma, make_run, start
from omegaconf import DictConfig
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.data import LazyTensorStorage, RandomSampler
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs import EnvBase, ExplorationType, set_exploration_type
from torchrl.modules import EGreedyModule
from torchrl.objectives import HardUpdate, SoftUpdate

from torchrl_safety.data import LeanReplayBuffer, NStepTransform, PrioritizedSampler
from torchrl_safety.modules import (
    AngleEncoding,
    NatureCNN,
    NoisyLinear,
    RainbowNetwork,
    distribution_statistics,
    greedy_policy,
    reset_noise,
)
from torchrl_safety.objectives import (
    AvoidBackup,
    CategoricalDQNLoss,
    DiscountedReturnBackup,
    ReachAvoidBackup,
    SafetyDQNLoss,
)
from torchrl_safety.trainers import TrainingRun, check_options, evaluation_mode

BACKUPS = {"avoid": AvoidBackup, "reach_avoid": ReachAvoidBackup, "return": DiscountedReturnBackup}
MODEL = "model.pt"
KEPT = "env problem seed num_envs n_steps buffer_size prioritized alpha noisy dueling categorical atoms hidden"


def check(cfg: DictConfig) -> None:
    check_shared(cfg, problems=BACKUPS, envs=ENVS)
    if cfg.env.get("support"):  # where the options of a problem look for its range
        check_options(cfg, choices={"env.end_criterion": cfg.env.support})
        if cfg.problem.name not in cfg.env.support[cfg.env.end_criterion]:
            raise ValueError(
                f"env={cfg.env.name} with end_criterion={cfg.env.end_criterion} has no problem {cfg.problem.name}: "
                f"choose one of {list(cfg.env.support[cfg.env.end_criterion])}"
            )
    check_options(
        cfg,
        choices={
            "dueling": ("mean", "max", None),
            "problem.n_step": ("last", "best"),
        },
        flags="double noisy prioritized categorical compile cuda_graphs video epsilon.with_noise",
        whole="batch_size n_steps atoms buffer_size warmup_frames updates"
        + " target_period" * (cfg.target_period is not None),
        positive="lr.start lr.end tau",
        shares="epsilon.start epsilon.end beta tau" + " risk_level" * (cfg.risk_level is not None),
        amounts="alpha sigma_init epsilon.fraction",
        numbers="problem.level",
        intervals="problem.support" if cfg.categorical else "",
    )
    if cfg.epsilon.end > cfg.epsilon.start:
        raise ValueError(f"epsilon.end={cfg.epsilon.end} is more than epsilon.start={cfg.epsilon.start}; lower it")
    check_replay(cfg)


@hydra.main(version_base="1.3", config_path="configs", config_name="rainbow_safety")
def main(cfg: DictConfig) -> None:
    start(cfg, train, kept=KEPT.split(), show=show, open_envs=GYMNASIUM)


def train(cfg: DictConfig, folder: Path, saved: Path | None) -> None:
    check(cfg)
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    env = make_env(cfg, cfg.num_envs)
    backup = BACKUPS[cfg.problem.name]()
    network = make_network(cfg, env)
    make_loss = CategoricalDQNLoss if cfg.categorical else SafetyDQNLoss
    loss = make_loss(network, backup=backup, double=cfg.double, n_step=cfg.problem.n_step, bootstrap_on_truncation=True)
    mode = "reduce-overhead" if cfg.cuda_graphs else "default"
    compute = torch.compile(loss, fullgraph=True, mode=mode) if cfg.compile else loss
    policy = make_policy(cfg, network)

    at_random = 0.0 if cfg.noisy and not cfg.epsilon.with_noise else 1.0
    epsilon = EGreedyModule(
        env.action_spec,
        eps_init=at_random * cfg.epsilon.start,
        eps_end=at_random * cfg.epsilon.end,
        annealing_num_steps=max(int(cfg.epsilon.fraction * cfg.frames), 1),
    ).to(cfg.device)
    explore = TensorDictSequential(policy, epsilon)

    updates = ((cfg.frames - cfg.warmup_frames) // cfg.num_envs + 1) * cfg.updates
    uniform = RandomSampler()
    prioritized = PrioritizedSampler(cfg.buffer_size, cfg.alpha, cfg.beta, beta_annealing_steps=updates)
    window = [*backup.signals, "observation"] if cfg.problem.n_step == "best" else [*backup.signals]
    windows = NStepTransform(cfg.n_steps, signals=window, num_envs=cfg.num_envs)
    buffer = LeanReplayBuffer(
        storage=LazyTensorStorage(cfg.buffer_size, device=cfg.device),
        sampler=prioritized if cfg.prioritized else uniform,
        transform=windows,
        batch_size=cfg.batch_size,
        priority_key="td_error",
    )
    stored = ["observation", "action", *(("next", key) for key in ("observation", "done", "terminated", "truncated"))]
    stored += [("next", signal) for signal in backup.signals]

    parameters = list(loss.parameters())
    optimizer = torch.optim.Adam(parameters, cfg.lr.start, fused=True)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, (cfg.lr.end / cfg.lr.start) ** (1 / updates))
    if cfg.target_period is None:
        target = SoftUpdate(loss, tau=cfg.tau)
    else:
        target = HardUpdate(loss, value_network_update_interval=0)  # its own count is one off and in no checkpoint
    gamma = make_gamma(cfg)
    measure = make_measure(cfg, backup)
    facts = {
        "algorithm": "rainbow" if cfg.categorical else "dqn",
        "env": cfg.env.name,
        "problem": cfg.problem.name,
        "seed": cfg.seed,
    }
    components = {"loss": loss, "optimizer": optimizer, "decay": decay, "gamma": gamma, "epsilon": epsilon}
    components |= {"buffer": buffer, "env": env}

    with make_run(cfg, folder, saved, state=env.reset(), **components) as run:
        if getattr(env, "needs_reset", False):  # a simulator's world is not in the checkpoint: new episodes begin
            windows.clear()
            run.state = env.reset()
        while run.frames < cfg.frames:
            with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
                reset_noise(policy)
                transition, run.state = env.step_and_maybe_reset(explore(run.state))
            epsilon.step(cfg.num_envs)
            buffer.extend(transition.select(*stored))
            run.advance(cfg.num_envs)
            loss.gamma = gamma.step(run.frames)
            ready = run.frames >= cfg.warmup_frames and len(buffer) >= cfg.batch_size
            for _ in range(cfg.updates if ready else 0):
                batch = buffer.sample()
                reset_noise(loss)
                losses = compute(batch)
                optimizer.zero_grad()
                losses["loss"].backward()
                torch.nn.utils.clip_grad_norm_(parameters, cfg.max_grad_norm)
                optimizer.step()
                decay.step()
                buffer.update_tensordict_priority(batch)
                run.count_update()
                if run.updates % (cfg.target_period or 1) == 0:
                    target.step()
            if run.updates and run.due(cfg.evaluations):
                scores = measure(policy, best_value(policy)).scores
                run.report(
                    scores,
                    gamma=gamma.gamma,
                    **explored(network, epsilon, buffer.sampler),
                    **{key: value.item() for key, value in losses.items()},
                    **statistics(network, batch),
                )
                warn_of_clipping(run)
            run.save_if_due()
        found = measure(policy, best_value(policy))
        title = f"{cfg.env.name}, {cfg.problem.name}, seed {cfg.seed}, {run.frames:,} frames: "
        torch.save(network.state_dict(), folder / MODEL)
        run.finish(found.scores, draw=lambda: measure.conclude(found, network, title, folder), **facts)


def show(cfg: DictConfig, folder: Path) -> None:
    """Measure the model that a finished run left in `folder`."""
    check(cfg)
    torch.set_num_threads(cfg.threads)
    network = make_network(cfg, make_env(cfg, 1))
    network.load_state_dict(torch.load(folder / MODEL, map_location=cfg.device, weights_only=True))
    policy = make_policy(cfg, network)
    for name, score in make_measure(cfg, BACKUPS[cfg.problem.name]())(policy, best_value(policy)).scores.items():
        if score is not None:
            print(f"{name:<20}{score:.4f}")


def make_network(cfg: DictConfig, env: EnvBase) -> RainbowNetwork:
    """The value network, for vectors (of which angles are encoded) and images."""
    features, encoder = encode(env)
    return RainbowNetwork(
        features,
        env.action_spec.space.n,
        support=tuple(cfg.problem.support) if cfg.categorical else None,
        atoms=cfg.atoms,
        hidden=cfg.hidden,
        dueling=cfg.dueling,
        noisy=cfg.noisy,
        sigma_init=cfg.sigma_init,
        encoder=encoder,
        device=cfg.device,
    )


def encode(env: EnvBase) -> tuple[int | tuple[int, ...], nn.Module | None]:
    """What a network reads of the observations, and the encoder that it needs."""
    shape = tuple(env.observation_spec["observation"].shape[1:])
    if len(shape) == 3:
        return shape, NatureCNN(shape)
    return shape[0], AngleEncoding(shape[0], env.angles) if env.angles else None


def make_policy(cfg: DictConfig, network: RainbowNetwork) -> TensorDictSequential:
    """The greedy policy, which a distribution lets weigh the worst outcomes alone."""
    return greedy_policy(network, risk="mean" if cfg.risk_level is None else "cvar", level=cfg.risk_level)


def best_value(policy: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The value of the policy's own action in given states."""
    return lambda states: policy(TensorDict({"observation": states}, states.shape[:-1]))["chosen_action_value"]


def explored(network: RainbowNetwork, epsilon: EGreedyModule, sampler: Sampler) -> dict[str, float]:
    """How much the policy explores, and how far the weights of prioritized replay correct."""
    found = {"epsilon": epsilon.eps.item()}
    scales = [layer.weight_sigma.abs().mean() for layer in network.modules() if isinstance(layer, NoisyLinear)]
    if scales:
        found["sigma"] = torch.stack(scales).mean().item()
    if isinstance(sampler, PrioritizedSampler):
        found["beta"] = float(sampler.beta)
    return found


def statistics(network: RainbowNetwork, batch: TensorDictBase) -> dict[str, float]:
    """Entropy, spread and quantiles of the value distributions of a batch."""
    if network.support is None:
        return {}
    with evaluation_mode(network):
        found = distribution_statistics(network.logits(batch["observation"]), network.support)
    return {f"value_{name}": number.item() for name, number in found.items()}


def warn_of_clipping(run: TrainingRun) -> None:
    """One warning in a run whose support is too narrow for its values."""
    clipped = [row.get("clipped_mass", 0) > 0.01 for row in run.rows]
    lasting = sum(all(clipped[i : i + 3]) for i in range(len(clipped) - 2))
    if lasting == 1 and all(clipped[-3:]):
        run.warn("warning: over 1 % of the value mass keeps falling outside the support; widen problem.support")


if __name__ == "__main__":
    command_line(main)
