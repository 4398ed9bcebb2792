"""The disturbance that does most harm to a given controller."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.data import Categorical
from torchrl.envs import EnvBase, ExplorationType, set_exploration_type
from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import LossModule

from torchrl_safety.modules import AngleEncoding
from torchrl_safety.objectives import AvoidBackup, OpponentBackup, ReachAvoidBackup, SafetyPPOLoss
from torchrl_safety.trainers.league import League
from torchrl_safety.trainers.matches import Arena, CrossPlay, cross_play, frozen, simple_disturbances
from torchrl_safety.trainers.schedules import StepGamma

BACKUPS = {"avoid": AvoidBackup, "reach_avoid": ReachAvoidBackup}


class BestResponse(NamedTuple):
    """A disturbance trained against one controller, and how the controller fares beside others."""

    disturbance: TensorDictModuleBase
    """The policy, frozen; it writes the disturbance alone."""
    cross_play: CrossPlay
    """Controllers (the given one first) against disturbances (this one last); `cross_play.table()` has intervals."""
    updates: int
    """Gradient steps of the training."""
    seconds: float
    """Time of the training."""


def best_response(
    env: EnvBase,
    controller: TensorDictModuleBase,
    budget: int,
    *,
    max_steps: int,
    problem: str = "avoid",
    disturbances: Mapping[str, TensorDictModuleBase] | None = None,
    league: League | None = None,
    episodes: int = 200,
    starts: Tensor | None = None,
    restarts: int = 1,
    rollout_steps: int = 24,
    epochs: int = 6,
    minibatch: int = 512,
    hidden: Sequence[int] = (64, 64),
    encoder: nn.Module | None = None,
    lr: float = 3e-3,
    observation_key: NestedKey = "observation",
    **keys: NestedKey,
) -> BestResponse:
    r"""Train a fresh disturbance against a frozen controller, and count whom the controller withstands.

    Because the controller :math:`\pi` does not learn, this is a problem of one player, who minimises:
    :math:`V(s) = \min_d F(V(s'))` under :math:`u = \pi(s)`. It is learned as
    :math:`\max_d` of :math:`-V` (:class:`~torchrl_safety.objectives.OpponentBackup`) by clipped PPO, which takes
    indices and continuous disturbances alike; one step of a disturbance changes little of a value, and an advantage
    tells such steps apart sooner than a table of action values does. The rate against it bounds the controller's worst
    case from above: a stronger disturbance may exist, and one training out of two may miss a weakness that the other
    finds (`restarts`). Networks and draws follow torch's global generator. Compare the exploitability of Lanctot et al.
    2017.

    Args:
        env: a batch of two-player environments.
        controller: the policy; it acts deterministically.
        budget: frames of each training.
        max_steps: steps after which training starts episodes anew, and the most of an evaluated one.
        problem: `"avoid"` or `"reach_avoid"`, what counts as a win of the controller.
        disturbances: others to compare with, such as ``{"trained": policy}``, beside `"zero"` and `"random"`.
        league: whose controllers and disturbances join the comparison.
        episodes: the least number for each pair.
        starts: first states `[N, ...]` of those episodes, taken in turn; by default the environment draws them.
        restarts: how many disturbances are trained, each from networks of its own; the one that the controller
            withstands least often is kept.
        rollout_steps: steps of each environment from which one iteration learns.
        epochs: passes over them.
        minibatch: transitions of a gradient step.
        hidden: widths of the layers of the two networks.
        encoder: what they put before their layers, with its `out_features`; by default an
            :class:`~torchrl_safety.modules.AngleEncoding` of the environment's angles.
        lr: learning rate at the start; it falls to a tenth.
        observation_key: what the disturbance reads.
        **keys: `action_key`, `disturbance_key`, `safety_margin`, `target_margin`.

    Raises:
        ValueError: an unknown problem, a budget below one iteration, no training at all, or an environment without one
            of the actions.

    Example:
        >>> import torch
        >>> from torchrl_safety.envs import DoubleIntegratorEnv
        >>> from torchrl_safety.modules import ZeroDisturbance
        >>> from torchrl_safety.trainers import best_response
        >>> env = DoubleIntegratorEnv(32, max_disturbance=0.5, seed=0)
        >>> idle = ZeroDisturbance(env.full_action_spec["action"], zero_index=1, out_key="action")
        >>> found = best_response(env, idle, 768, max_steps=20, hidden=(8,), episodes=8)
        >>> found.cross_play.disturbances
        ('zero', 'random', 'best response')
    """
    began = time.perf_counter()
    arena = Arena(env, max_steps=max_steps, problem=problem, **keys)
    least = rollout_steps * env.numel()
    if not isinstance(budget, int) or budget < least:
        raise ValueError(
            f"budget is {budget!r} frames; it must be a whole number of at least {least}, the {rollout_steps} steps of "
            f"{env.numel()} environments from which one update learns"
        )
    if not isinstance(restarts, int) or restarts < 1:
        raise ValueError(f"restarts is {restarts!r}; at least one disturbance must be trained")
    opponent, done, candidates = frozen(controller), 0, []
    played: dict[str, Any] = {
        "episodes": episodes,
        "max_steps": max_steps,
        "problem": problem,
        "starts": starts,
        **keys,
    }
    for _ in range(restarts):
        player, loss = _learner(arena, observation_key, hidden, encoder)
        done += _train(
            arena,
            opponent,
            player,
            loss,
            budget,
            rollout_steps=rollout_steps,
            epochs=epochs,
            minibatch=minibatch,
            lr=lr,
        )
        candidates.append(frozen(player))
        candidates[-1].select_out_keys(arena.disturbance_key)
    found = candidates[0]
    if restarts > 1:
        tried = {str(number): candidate for number, candidate in enumerate(candidates)}
        found = candidates[int(cross_play(env, {"controller": opponent}, tried, **played).rates[0].argmin())]
    seconds = time.perf_counter() - began
    others = {**({} if league is None else league.disturbances), **(disturbances or {})}
    others = {**simple_disturbances(env, disturbance_key=arena.disturbance_key), **others, "best response": found}
    controllers = {"controller": opponent, **({} if league is None else league.controllers)}
    table = cross_play(env, controllers, others, **played)
    return BestResponse(found, table, done, seconds)


def _train(
    arena: Arena,
    controller: TensorDictModuleBase,
    player: TensorDictModuleBase,
    loss: LossModule,
    budget: int,
    *,
    rollout_steps: int,
    epochs: int,
    minibatch: int,
    lr: float,
) -> int:
    """The number of gradient steps made."""
    env, key = arena.env, arena.disturbance_key
    batch_frames = env.numel() * rollout_steps
    iterations = budget // batch_frames
    per_epoch = -(-batch_frames // minibatch)
    optimizer = torch.optim.Adam(loss.parameters(), lr)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1 ** (1 / (iterations * epochs * per_epoch)))
    gamma = StepGamma(budget)
    learned = [*player.in_keys, key, loss.tensor_keys.sample_log_prob, "advantage", "value_target"]
    since_reset, state = 0, env.reset()
    for iteration in range(iterations):
        steps = []
        with torch.no_grad():
            for _ in range(rollout_steps):
                with set_exploration_type(ExplorationType.DETERMINISTIC):
                    state[arena.action_key] = controller(state.select(*controller.in_keys))[arena.action_key]
                with set_exploration_type(ExplorationType.RANDOM):
                    transition, state = env.step_and_maybe_reset(player(state))
                steps.append(transition)
        since_reset += rollout_steps
        if since_reset >= arena.max_steps:  # where nothing fails, no episode ends
            since_reset, state = 0, env.reset()
        loss.gamma = gamma.step(iteration * batch_frames)
        batch = torch.stack(steps, len(env.batch_size))
        for _ in range(epochs):
            with torch.no_grad():  # anew in each epoch: the targets follow the critic
                loss.value_estimator(batch, params=loss.critic_network_params)
            flat = batch.select(*dict.fromkeys(learned)).reshape(-1)
            for rows in torch.randperm(len(flat), device=env.device).split(minibatch):
                losses = loss(flat[rows])
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                torch.nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
                decay.step()
    return iterations * epochs * per_epoch


def _learner(
    arena: Arena, observation: NestedKey, hidden: Sequence[int], encoder: nn.Module | None
) -> tuple[ProbabilisticActor, SafetyPPOLoss]:
    """A fresh disturbance that reads `observation`, and the loss that lets it do harm."""
    env, key = arena.env, arena.disturbance_key
    spec, observed = env.full_action_spec[key], env.full_observation_spec[observation]
    size = observed.shape[-1]

    def perceptron(outputs: int) -> nn.Sequential:
        first = AngleEncoding(size, getattr(env, "angles", ())) if encoder is None else copy.deepcopy(encoder)
        layers = MLP(first.out_features, outputs, num_cells=list(hidden), activation_class=nn.Tanh)
        return nn.Sequential(first, layers.to(env.device, observed.dtype))

    if isinstance(spec, Categorical):
        head, parameters = perceptron(spec.n), ["logits"]
        settings: dict[str, Any] = {"distribution_class": torch.distributions.Categorical}
    else:
        head, parameters = perceptron(2 * spec.shape[-1]).append(NormalParamExtractor()), ["loc", "scale"]
        low, high = (bound.reshape(-1, spec.shape[-1])[0] for bound in (spec.space.low, spec.space.high))
        settings = {"distribution_class": TanhNormal, "distribution_kwargs": {"low": low, "high": high}}
    actor = ProbabilisticActor(
        TensorDictModule(head, [observation], parameters),
        in_keys=parameters,
        out_keys=[key],
        return_log_prob=True,
        log_prob_key="disturbance_log_prob",
        **settings,
    )
    loss = SafetyPPOLoss(
        actor,
        ValueOperator(perceptron(1), in_keys=[observation]),
        backup=OpponentBackup(BACKUPS[arena.problem]()),
        bootstrap_on_truncation=True,
        normalize_advantage=True,
        entropy_coeff=1e-3,
    )
    loss.set_keys(action=key, sample_log_prob="disturbance_log_prob", **arena.keys)
    return actor, loss
