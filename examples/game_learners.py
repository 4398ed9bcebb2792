"""What learns in game_safety.py: a joint table of action values, or two actors with critics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from omegaconf import DictConfig
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictModuleBase
from torch import nn
from torchrl.envs import EnvBase, ExplorationType, set_exploration_type
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import LossModule

from torchrl_safety.modules import AngleEncoding, RainbowNetwork, TwoPlayerPolicy, greedy_game_policy
from torchrl_safety.objectives import (
    GameplayCategoricalDQNLoss,
    GameplayDQNLoss,
    GameplayPPOLoss,
    GameplaySACLoss,
    IsaacsCategoricalDQNLoss,
    IsaacsDQNLoss,
    IsaacsPPOLoss,
    IsaacsSACLoss,
)
from torchrl_safety.trainers import League

PLAYERS = ("controller", "disturbance")
MODEL = "model.pt"


class Learner(NamedTuple):
    """A loss and what it trains."""

    loss: LossModule
    policy: TensorDictModuleBase
    """Writes the actions of both players."""
    controller: TensorDictModuleBase
    """Writes the control alone."""
    disturbance: TensorDictModuleBase
    """Writes the disturbance alone, which may read the control."""
    value: Callable[[torch.Tensor], torch.Tensor]
    """The value `[*, 1]` of states `[*, S]` under the policy."""
    rates: dict[str, float]
    """Learning rate of each network of the loss."""


def down_to(depth: float | None, transition: TensorDictBase) -> TensorDictBase:
    """The transition with its safety margin down to minus `depth`, if one is given: who has lost falls no further."""
    if depth is not None:
        margin = transition["next", "safety_margin"]
        transition["next", "safety_margin"] = margin.clamp(min=-depth)
    return transition


class Scaled(nn.Module):
    """What an encoder makes of the observation divided by a scale, which is 1 for angles."""

    scale: torch.Tensor

    def __init__(self, scale: torch.Tensor, encoder: AngleEncoding) -> None:
        super().__init__()
        self.encoder, self.out_features = encoder, encoder.out_features
        self.register_buffer("scale", scale)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.encoder(observation / self.scale)


def make_learner(cfg: DictConfig, env: EnvBase) -> Learner:
    """The learner of ``cfg.algo``."""
    size = env.observation_spec["observation"].shape[-1]
    return {"dqn": _dqn, "sac": _sac, "ppo": _ppo}[cfg.algo.name](cfg, env, size, make_encoder(cfg, env))


def make_encoder(cfg: DictConfig, env: EnvBase) -> AngleEncoding | Scaled | None:
    """What every network puts before its layers: angles as sine and cosine, the rest in units of ``cfg.env.scale``."""
    encoding = AngleEncoding(env.observation_spec["observation"].shape[-1], env.angles)
    if "scale" in cfg.env:
        return Scaled(torch.tensor(list(cfg.env.scale), device=cfg.device), encoding)
    return encoding if env.angles else None


def save(folder: Path, learner: Learner, league: League | None = None) -> None:
    """Leave what was trained, and the past players, in the folder of the run."""
    parts = {"loss": learner.loss.state_dict(), "league": None if league is None else league.state_dict()}
    torch.save(parts, folder / MODEL)


def load(folder: Path, learner: Learner, league: League | None, device: str) -> None:
    """The inverse of :func:`save`, into a learner and a league built from the same options."""
    if not (folder / MODEL).exists():
        raise ValueError(f"{folder} holds no {MODEL}, which a run leaves at its end: finish it with resume={folder}")
    saved = torch.load(folder / MODEL, map_location=device, weights_only=True)
    learner.loss.load_state_dict(saved["loss"])
    if league is not None:
        league.load_state_dict(saved["league"])


def _dqn(cfg: DictConfig, env: EnvBase, size: int, encoder: AngleEncoding | Scaled | None) -> Learner:
    controls, disturbances = (env.full_action_spec[key].space.n for key in ("action", "disturbance"))
    algo, is_avoid = cfg.algo, cfg.problem.name == "avoid"
    network = RainbowNetwork(
        size,
        controls * disturbances,
        support=tuple(cfg.problem.support) if algo.categorical else None,
        atoms=algo.atoms,
        hidden=cfg.hidden,
        dueling=algo.dueling,
        noisy=algo.noisy,
        encoder=encoder,
        device=cfg.device,
    )
    if algo.categorical:
        make_loss = IsaacsCategoricalDQNLoss if is_avoid else GameplayCategoricalDQNLoss
    else:
        make_loss = IsaacsDQNLoss if is_avoid else GameplayDQNLoss
    loss = make_loss(network, num_disturbances=disturbances, double=algo.double, bootstrap_on_truncation=True)
    policy = greedy_game_policy(network, num_disturbances=disturbances)

    def value(states: torch.Tensor) -> torch.Tensor:
        return policy(TensorDict({"observation": states}, states.shape[:-1]))["chosen_action_value"]

    players = [greedy_game_policy(network, num_disturbances=disturbances, player=name) for name in PLAYERS]
    return Learner(loss, policy, *players, value, {"value_network": cfg.lr.critic})


class JointValue(nn.Module):
    """Q(s, u, d): the encoded observation beside both actions, through a multilayer perceptron."""

    def __init__(self, encoder: nn.Module, **settings) -> None:
        super().__init__()
        self.encoder, self.mlp = encoder, MLP(out_features=1, activation_class=nn.ReLU, **settings)

    def forward(self, observation: torch.Tensor, *actions: torch.Tensor) -> torch.Tensor:
        return self.mlp(torch.cat([self.encoder(observation), *actions], -1))


class Head(nn.Module):
    """Location and scale of a player's action, from the encoded observation and what else it sees."""

    def __init__(self, encoder: nn.Module, **settings) -> None:
        super().__init__()
        self.encoder, self.mlp = encoder, MLP(activation_class=nn.ReLU, **settings)
        self.extract = NormalParamExtractor()

    def forward(self, observation: torch.Tensor, *seen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.extract(self.mlp(torch.cat([self.encoder(observation), *seen], -1)))


def _sac(cfg: DictConfig, env: EnvBase, size: int, encoder: AngleEncoding | Scaled | None) -> Learner:
    features = size if encoder is None else encoder.out_features
    shared = nn.Identity() if encoder is None else encoder
    layers = {"num_cells": list(cfg.hidden), "device": cfg.device}
    specs = {key: env.full_action_spec[key] for key in ("action", "disturbance")}
    widths = {key: spec.shape[-1] for key, spec in specs.items()}

    def player(key: str, *seen: str) -> ProbabilisticActor:
        head = Head(
            shared,
            in_features=features + sum(widths[name] for name in seen),
            out_features=2 * widths[key],
            **layers,
        )
        outputs = [f"{key}_loc", f"{key}_scale"]
        return ProbabilisticActor(
            TensorDictModule(head, ["observation", *seen], outputs),
            in_keys={"loc": outputs[0], "scale": outputs[1]},
            out_keys=[key],
            distribution_class=TanhNormal,
            distribution_kwargs={end: getattr(specs[key].space, end)[0] for end in ("low", "high")},
            return_log_prob=True,
        )

    algo = cfg.algo
    controller = player("action")
    disturbance = player("disturbance", *(["action"] if algo.second_mover else []))
    critic = TensorDictModule(
        JointValue(shared, in_features=features + sum(widths.values()), **layers),
        ["observation", "action", "disturbance"],
        ["state_action_value"],
    )
    make_loss = IsaacsSACLoss if cfg.problem.name == "avoid" else GameplaySACLoss
    loss = make_loss(
        controller,
        disturbance,
        critic,
        bootstrap_on_truncation=True,
        num_qvalue_nets=algo.critics,
        pessimism=algo.pessimism,
        entropy_in_target=algo.entropy_in_target,
        target_entropy=algo.target_entropy.controller,
        target_entropy_disturbance=algo.target_entropy.disturbance,
        alpha_init=algo.alpha.start,
        min_alpha=algo.alpha.min,
        max_alpha=algo.alpha.max,
    )
    policy = TwoPlayerPolicy(controller, disturbance, second_mover=algo.second_mover)

    def value(states: torch.Tensor) -> torch.Tensor:
        tensordict = TensorDict({"observation": states}, states.shape[:-1])
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            return loss.critic_values(policy(tensordict)).amin(0)

    rates = {"actor_network": cfg.lr.controller, "disturbance_network": cfg.lr.disturbance}
    rates |= {"qvalue_network": cfg.lr.critic}
    rates |= dict.fromkeys(["log_alpha", "log_alpha_disturbance"], cfg.lr.alpha)
    return Learner(loss, policy, controller, disturbance, value, rates)


class Logits(nn.Module):
    """Logits of a player's action, from the encoded observation and the index of what else it sees."""

    def __init__(self, encoder: nn.Module, choices: int, **settings) -> None:
        super().__init__()
        self.encoder, self.choices, self.mlp = encoder, choices, MLP(activation_class=nn.Tanh, **settings)

    def forward(self, observation: torch.Tensor, *seen: torch.Tensor) -> torch.Tensor:
        coded = [nn.functional.one_hot(index, self.choices).to(observation.dtype) for index in seen]
        return self.mlp(torch.cat([self.encoder(observation), *coded], -1))


def _ppo(cfg: DictConfig, env: EnvBase, size: int, encoder: AngleEncoding | Scaled | None) -> Learner:
    features = size if encoder is None else encoder.out_features
    shared = nn.Identity() if encoder is None else encoder
    layers = {"num_cells": list(cfg.hidden), "device": cfg.device}
    counts = {key: env.full_action_spec[key].space.n for key in ("action", "disturbance")}

    def player(key: str, *seen: str) -> ProbabilisticActor:
        inputs = features + sum(counts[name] for name in seen)
        logits = Logits(shared, counts["action"], in_features=inputs, out_features=counts[key], **layers)
        return ProbabilisticActor(
            TensorDictModule(logits, ["observation", *seen], [f"{key}_logits"]),
            in_keys={"logits": f"{key}_logits"},
            out_keys=[key],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        )

    algo = cfg.algo
    controller = player("action")
    disturbance = player("disturbance", *(["action"] if algo.second_mover else []))
    perceptron = MLP(in_features=features, out_features=1, activation_class=nn.Tanh, **layers)
    critic = ValueOperator(nn.Sequential(shared, perceptron), in_keys=["observation"])
    make_loss = IsaacsPPOLoss if cfg.problem.name == "avoid" else GameplayPPOLoss
    loss = make_loss(
        controller,
        disturbance,
        critic,
        lmbda=algo.lmbda,
        clip_epsilon=algo.clip,
        entropy_coeff=algo.entropy,
        normalize_advantage=True,
        bootstrap_on_truncation=True,
    )

    def value(states: torch.Tensor) -> torch.Tensor:
        return critic(TensorDict({"observation": states}, states.shape[:-1]))["state_value"]

    rates = {"actor_network": cfg.lr.controller, "disturbance_loss": cfg.lr.disturbance}
    rates |= {"critic_network": cfg.lr.critic}
    policy = TwoPlayerPolicy(controller, disturbance, second_mover=algo.second_mover)
    return Learner(loss, policy, controller, disturbance, value, rates)
