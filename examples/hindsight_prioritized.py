"""Learn goal-conditioned tasks with hindsight and prioritized replay.

python examples/hindsight_prioritized.py env=bit_flip|goal_double_integrator|fetch_reach|point_maze hindsight=true

Discrete actions are learned by double DQN, continuous ones by SAC. Every option stands in
examples/configs/hindsight_prioritized.yaml. The loop in `train` is meant to be copied. The robots need the extra
`robotics`.
"""

from __future__ import annotations

from pathlib import Path

import hydra
import torch
from goal_tasks import SIMULATED, TASKS, Simulator, Task, make_task
from launch import check_replay, command_line, make_gamma, make_run, start
from omegaconf import DictConfig
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import LazyTensorStorage, RandomSampler, TensorDictReplayBuffer
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal
from torchrl.objectives import SoftUpdate

from torchrl_safety.data import HindsightTransform, NStepTransform, PrioritizedSampler
from torchrl_safety.modules import greedy_policy
from torchrl_safety.objectives import SafetyDQNLoss, SafetySACLoss
from torchrl_safety.trainers import (
    ExactSetEvaluator,
    check_options,
    evaluation_mode,
)

KEPT = "env seed num_envs hindsight strategy num_goal_samples prioritized n_steps buffer_size hidden"  # on a resume
ENDS = ("done", "terminated", "truncated")


def check(cfg: DictConfig) -> None:
    check_options(
        cfg,
        choices={
            "env.name": TASKS,
            "strategy": ("final", "future", "episode", "random"),
            "n_step": ("last", "best"),
            "loss_function": ("smooth_l1", "l2", "l1"),
        },
    )
    simulated = cfg.env.name in SIMULATED
    check_options(
        cfg,
        flags="hindsight prioritized entropy_in_target",
        counts="seed evaluations checkpoints",
        whole="frames threads num_envs num_goal_samples buffer_size batch_size warmup_frames updates n_steps rollouts",
        widths="hidden",
        shares="random_actions priority.beta gamma.start gamma.end gamma.ratio tau",
        amounts="priority.alpha",
        positive="lr tau temperature gamma.period max_grad_norm" + " env.threshold" * simulated,
        numbers="" if cfg.get("target_entropy") == "auto" else "target_entropy",
        device="device",
    )
    if simulated and cfg.num_envs != 1:
        raise ValueError(f"num_envs={cfg.num_envs}, but {cfg.env.name} runs one simulator; set num_envs=1")
    check_replay(cfg)


@hydra.main(version_base="1.3", config_path="configs", config_name="hindsight_prioritized")
def main(cfg: DictConfig) -> None:
    start(cfg, train, kept=KEPT.split(), open_envs=SIMULATED)


def make_learner(cfg: DictConfig, task: Task) -> tuple[nn.Module, nn.Module]:
    """The loss and the policy: double DQN for an index, SAC for a vector."""
    features = sum(task.env.observation_spec[key].shape[-1] for key in task.inputs)
    layers = {"num_cells": list(cfg.hidden), "activation_class": nn.ReLU, "device": cfg.device}
    settings = {"backup": task.backup, "n_step": cfg.n_step, "bootstrap_on_truncation": True}
    settings["loss_function"] = cfg.loss_function
    if hasattr(task.env.action_spec.space, "n"):
        perceptron = MLP(in_features=features, out_features=task.env.action_spec.space.n, **layers)
        network = TensorDictModule(perceptron, task.inputs, ["action_value"])
        return SafetyDQNLoss(network, **settings), greedy_policy(network, spec=task.env.action_spec)
    controls = task.env.action_spec.shape[-1]
    perceptron = MLP(in_features=features, out_features=2 * controls, **layers)
    actor = ProbabilisticActor(
        TensorDictSequential(
            TensorDictModule(perceptron, task.inputs, ["parameters"]),
            TensorDictModule(NormalParamExtractor(), ["parameters"], ["loc", "scale"]),
        ),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={
            end: getattr(task.env.action_spec.space, end).reshape(-1, controls)[0] for end in ("low", "high")
        },
        return_log_prob=True,
    )
    critic = MLP(in_features=features + controls, out_features=1, **layers)
    loss = SafetySACLoss(
        actor,
        TensorDictModule(critic, [*task.inputs, "action"], ["state_action_value"]),
        entropy_in_target=cfg.entropy_in_target,
        target_entropy=-float(controls) if cfg.target_entropy == "auto" else cfg.target_entropy,
        alpha_init=cfg.temperature,
        **settings,
    )
    return loss, actor


def success_rate(cfg: DictConfig, policy: nn.Module) -> float:
    """Share of the roll-outs, always the same ones, at whose end the goal is reached."""
    simulated = cfg.env.name in SIMULATED
    task = make_task(cfg, num_envs=1 if simulated else cfg.rollouts, seed=cfg.seed + 1)
    successes = []
    with evaluation_mode(policy), set_exploration_type(ExplorationType.DETERMINISTIC):
        for _ in range(cfg.rollouts if simulated else 1):
            state = task.env.reset()
            over = torch.zeros_like(state["done"])
            success = over
            while not over.all():
                transition, state = task.env.step_and_maybe_reset(policy(state.select(*task.env.observation_keys)))
                at_goal = task.relabel["reward_fn"](transition) == 0
                done = transition["next", "done"]
                success, over = success | (done & ~over & at_goal), over | done
            successes.append(success.reshape(-1))
    return torch.cat(successes).double().mean().item()


def explore(cfg: DictConfig, task: Task, policy: nn.Module, state: TensorDictBase, *, share: float) -> TensorDictBase:
    """The state with an action in it, a random one in a `share` of the cases."""
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        acting = policy(state.select(*task.env.observation_keys, *ENDS, strict=False))
    action = acting["action"]
    at_random = torch.rand(state.batch_size, device=cfg.device) < share
    at_random = at_random.reshape(*state.batch_size, *[1] * (action.ndim - state.ndim))
    return acting.set("action", torch.where(at_random, task.env.action_spec.rand(), action))


def train(cfg: DictConfig, folder: Path, saved: Path | None) -> None:
    check(cfg)
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    task = make_task(cfg, num_envs=cfg.num_envs, seed=cfg.seed)
    env, backup = task.env, task.backup
    loss, policy = make_learner(cfg, task)

    updates = ((cfg.frames - cfg.warmup_frames) // cfg.num_envs + 1) * cfg.updates
    window = [*backup.signals, *(task.inputs if cfg.n_step == "best" else [])]
    windows = NStepTransform(cfg.n_steps, signals=window, num_envs=cfg.num_envs)
    hindsight = HindsightTransform(
        **task.relabel,
        strategy=cfg.strategy,
        num_goal_samples=cfg.num_goal_samples,
        num_envs=cfg.num_envs,
        n_step=windows,
    )
    prioritized = PrioritizedSampler(
        cfg.buffer_size, cfg.priority.alpha, cfg.priority.beta, beta_annealing_steps=updates
    )
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(cfg.buffer_size, device=cfg.device),
        sampler=prioritized if cfg.prioritized else RandomSampler(),
        transform=hindsight if cfg.hindsight else windows,
        batch_size=cfg.batch_size,
        priority_key="td_error",
    )
    keys = [*task.inputs, *(each.measurement_key for each in hindsight.relabel.goal_conditions)]
    stored = ["action", *keys, *(("next", key) for key in (*keys, *ENDS, *backup.signals))]

    parameters = list(loss.parameters())
    optimizer = torch.optim.Adam(parameters, cfg.lr, fused=True)
    target = SoftUpdate(loss, tau=cfg.tau)
    gamma = make_gamma(cfg)
    facts = {
        "algorithm": "sac" if isinstance(loss, SafetySACLoss) else "dqn",
        "env": cfg.env.name,
        "problem": "reach_avoid" if "target_margin" in backup.signals else "reach",
        "seed": cfg.seed,
        "hindsight": cfg.hindsight,
    }
    measure = exact_set(cfg, task) if facts["problem"] == "reach_avoid" else None

    def best_value(states: torch.Tensor) -> torch.Tensor:
        """The value of the policy's own action."""
        tensordict = TensorDict({"observation": states}, states.shape[:-1])
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            acting = policy(tensordict)
        return loss.critic_values(acting).amin(0) if facts["algorithm"] == "sac" else acting["chosen_action_value"]

    components = {"loss": loss, "optimizer": optimizer, "gamma": gamma, "buffer": buffer}
    components["env"] = Simulator(env) if cfg.env.name in SIMULATED else env

    with make_run(cfg, folder, saved, state=env.reset(), **components) as run:
        while run.frames < cfg.frames:
            share = 1.0 if run.frames < cfg.warmup_frames else cfg.random_actions
            transition, run.state = env.step_and_maybe_reset(explore(cfg, task, policy, run.state, share=share))
            if "reward" in backup.signals:  # environments differ in what they pay
                transition["next", "reward"] = task.relabel["reward_fn"](transition)
            buffer.extend(transition.select(*stored).reshape(cfg.num_envs))
            run.advance(cfg.num_envs)
            loss.gamma = gamma.step(run.frames)
            for _ in range(cfg.updates if run.frames >= cfg.warmup_frames and len(buffer) >= cfg.batch_size else 0):
                batch = buffer.sample()
                losses = loss(batch)
                optimizer.zero_grad()
                sum(term for name, term in losses.items() if name.startswith("loss")).backward()
                torch.nn.utils.clip_grad_norm_(parameters, cfg.max_grad_norm)
                optimizer.step()
                target.step()
                if cfg.prioritized:
                    buffer.update_tensordict_priority(batch)
                run.count_update()
            if run.updates and run.due(cfg.evaluations):
                scores = measure(policy, best_value).scores if measure else {"success_rate": success_rate(cfg, policy)}
                run.report(scores, gamma=gamma.gamma, **{key: value.item() for key, value in losses.items()})
            run.save_if_due()
        if measure:
            found = measure(policy, best_value)
            run.finish(
                found.scores, draw=lambda: {"value_map": measure.picture(found, labels=cfg.env.grid.labels)}, **facts
            )
        else:
            run.finish({"success_rate": success_rate(cfg, policy)}, **facts)


def exact_set(cfg: DictConfig, task: Task) -> ExactSetEvaluator:
    """Measures the learned set of the double integrator against the exact one."""
    env = make_task(cfg, num_envs=cfg.rollouts, seed=cfg.seed, max_steps=None, end_criterion="reach_avoid").env
    grid = cfg.env.grid
    return ExactSetEvaluator(env, task.backup, low=grid.low, high=grid.high, grid=grid.nodes, seed=cfg.seed)


if __name__ == "__main__":
    command_line(main)
