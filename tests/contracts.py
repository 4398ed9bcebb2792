"""What shared tests parametrize over: a new backup joins `BACKUPS`, a new loss `LOSSES`, and inherits every law."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import settings
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import LossModule

from torchrl_safety.modules import RainbowNetwork
from torchrl_safety.objectives import (
    AvoidBackup,
    Backup,
    CategoricalDQNLoss,
    DiscountedReturnBackup,
    DiscreteReachAvoidSACLoss,
    DiscreteSafetySACLoss,
    GameplayCategoricalDQNLoss,
    GameplayDQNLoss,
    GameplayPPOLoss,
    GameplaySACLoss,
    IsaacsCategoricalDQNLoss,
    IsaacsDQNLoss,
    IsaacsPPOLoss,
    IsaacsSACLoss,
    LipschitzReachAvoidBackup,
    OpponentBackup,
    ReachAvoidA2CLoss,
    ReachAvoidBackup,
    ReachAvoidDQNLoss,
    ReachAvoidPPOLoss,
    ReachAvoidSACLoss,
    ReachBackup,
    SafetyA2CLoss,
    SafetyDQNLoss,
    SafetyPPOLoss,
    SafetySACLoss,
)

SIGNALS = ("safety_margin", "target_margin", "reward")

BACKUPS: tuple[tuple[Backup, tuple[str, ...]], ...] = (
    (AvoidBackup(), ("safety_margin",)),
    (ReachBackup(), ("target_margin",)),
    (ReachAvoidBackup(), ("safety_margin", "target_margin")),
    (ReachAvoidBackup(terminal_type="g"), ("safety_margin", "target_margin")),
    (LipschitzReachAvoidBackup(), ("safety_margin", "target_margin")),
    (DiscountedReturnBackup(), ("reward",)),
    (OpponentBackup(ReachAvoidBackup()), ("safety_margin", "target_margin")),
)
"""`(backup, names of the signals it reads)`."""


CASES: list[dict] = json.loads((Path(__file__).parent / "cases" / "backups.json").read_text())
"""Numeric cases; lists run over the time steps of one trajectory.

`td0[p][t]`, `lambda_return[p][t]`; `n_step[p]`: the window of the first k steps, with its own `terminated` and
`bootstrap`; `categorical[p]`: every atom through the map of the first step, not terminated, and projected.
"""

CASE_BACKUPS: dict[str, Backup] = {
    "avoid": AvoidBackup(),
    "reach": ReachBackup(),
    "reach_avoid": ReachAvoidBackup(),
    "lipschitz": LipschitzReachAvoidBackup(),
    "return": DiscountedReturnBackup(),
}
"""The problems p of the cases."""


class Operator(NamedTuple):
    """A backup in plain Python floats, written from the papers' equations and not from the algebra."""

    running: Callable[[float, float, float, float, float], float]
    terminal: Callable[[float, float, float], float]

    def __call__(self, signals: dict[str, float], value: float, gamma: float, terminated: bool = False) -> float:
        g, l, r = (float(signals.get(name, float("nan"))) for name in SIGNALS)  # noqa: E741
        return self.terminal(g, l, r) if terminated else self.running(g, l, r, value, gamma)


def _reach_avoid(g, l, r, v, gamma):  # noqa: E741
    return (1 - gamma) * min(l, g) + gamma * min(g, max(l, v))


OPERATORS: dict[str, Operator] = {
    "AvoidBackup()": Operator(
        lambda g, l, r, v, gamma: (1 - gamma) * g + gamma * min(g, v),  # noqa: E741
        lambda g, l, r: g,  # noqa: E741
    ),
    "ReachBackup()": Operator(
        lambda g, l, r, v, gamma: (1 - gamma) * l + gamma * max(l, v),  # noqa: E741
        lambda g, l, r: l,  # noqa: E741
    ),
    "ReachAvoidBackup(terminal_type='all')": Operator(_reach_avoid, lambda g, l, r: min(l, g)),  # noqa: E741
    "ReachAvoidBackup(terminal_type='g')": Operator(_reach_avoid, lambda g, l, r: g),  # noqa: E741
    "LipschitzReachAvoidBackup()": Operator(
        lambda g, l, r, v, gamma: min(g, max(l, gamma * v)),  # noqa: E741
        lambda g, l, r: min(l, g),  # noqa: E741
    ),
    "DiscountedReturnBackup()": Operator(
        lambda g, l, r, v, gamma: r + gamma * v,  # noqa: E741
        lambda g, l, r: r,  # noqa: E741
    ),
    "OpponentBackup(ReachAvoidBackup(terminal_type='all'))": Operator(
        lambda g, l, r, v, gamma: (1 - gamma) * max(-l, -g) + gamma * max(-g, min(-l, v)),  # noqa: E741
        lambda g, l, r: max(-l, -g),  # noqa: E741
    ),
}
"""`repr(backup)` -> the same operator, recomputed."""

LAWS = settings(max_examples=60, deadline=None, derandomize=True)
"""The hypothesis profile of the shared laws: quick and repeatable."""


def random_signals(
    names: tuple[str, ...], shape: tuple[int, ...], *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Normal signals of this shape, among them target margins above the safety margin."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name in names}


# --- losses ---

ACTIONS = 3
DISTURBANCES = 2
OBSERVATION = 2


class Keys(NamedTuple):
    """Where a test's networks find what they read."""

    observation: Any = "observation"
    action: Any = "action"
    log_prob: Any = "action_log_prob"
    disturbance: Any = "disturbance"
    disturbance_log_prob: Any = "disturbance_log_prob"

    @property
    def opponent(self) -> Keys:
        """The keys of the disturbance in the place of those of the controller."""
        return self._replace(action=self.disturbance, log_prob=self.disturbance_log_prob)


def _mlp(inputs: int, outputs: int) -> MLP:
    return MLP(in_features=inputs, out_features=outputs, num_cells=[8], activation_class=nn.Tanh)


def _actor(keys: Keys, continuous: bool, *, actions: int = ACTIONS, sees: tuple[Any, ...] = ()) -> ProbabilisticActor:
    """A policy; `sees` are the keys of numbers that it reads beside the observation."""
    outputs, distribution = (
        (["loc", "scale"], TanhNormal) if continuous else (["logits"], torch.distributions.Categorical)
    )
    head = _mlp(OBSERVATION + len(sees), 2 if continuous else actions)
    network = nn.Sequential(head, NormalParamExtractor()) if continuous else head
    return ProbabilisticActor(
        TensorDictModule(_Joined(network) if sees else network, [keys.observation, *sees], outputs),
        in_keys=outputs,
        out_keys=[keys.action],
        distribution_class=distribution,
        return_log_prob=True,
        log_prob_keys=[keys.log_prob],
    )


class _Joined(nn.Module):
    """Columns of several inputs side by side."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> Any:
        return self.network(torch.cat(inputs, -1))


def _table(keys: Keys) -> TensorDictModule:
    network = nn.Sequential(_mlp(OBSERVATION, ACTIONS * DISTURBANCES), nn.Unflatten(-1, (ACTIONS, DISTURBANCES)))
    return TensorDictModule(network, [keys.observation], ["action_value"])


def _action_values(keys: Keys) -> TensorDictModule:
    return TensorDictModule(_mlp(OBSERVATION, ACTIONS), [keys.observation], ["action_value"])


class LossCase(NamedTuple):
    """A loss: what to build it from and what fits it."""

    family: str
    loss: type[LossModule]
    backup: Backup
    """The default one."""
    settings: dict[str, Any]
    """Those without which it cannot be built, or not be compared with a loop."""
    networks: Callable[[Keys], tuple[nn.Module, ...]]
    continuous: bool
    terms: dict[str, str]
    """Name of each term of the loss -> the parameter that it trains, or what holds those."""
    critic: str
    """The term that holds the distance to the target."""

    @property
    def on_policy(self) -> bool:
        """Whether a batch is trajectories `[*B, T]`."""
        return self.family in ("PPO", "A2C", "game PPO")

    @property
    def game(self) -> bool:
        """Whether there are two players."""
        return "game" in self.family

    @property
    def categorical(self) -> bool:
        """Whether the value is a distribution."""
        return "categorical" in self.family

    def build(self, *, keys: Keys | None = None, dtype: torch.dtype = torch.float64, **settings: Any) -> LossModule:
        """The loss, always of the same weights; its target networks differ from the online ones."""
        torch.manual_seed(0)
        networks = (network.to(dtype) for network in self.networks(keys or Keys()))
        loss = self.loss(*networks, **{**self.settings, **settings})
        for name, params in loss.named_children():
            if name.startswith("target_"):
                for key, value in params.items(True, True):
                    if value.is_floating_point() and "support" not in key:
                        value.data.add_(torch.randn(value.shape, dtype=torch.float64))
        return loss

    def batch(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> TensorDict:
        """Transitions, or trajectories, with every kind of end among them."""
        shape = shape or ((3, 5) if self.on_policy else (12,))
        generator = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(*shape, *size, generator=generator, dtype=torch.float64).to(dtype)

        place = torch.arange(math.prod(shape)).reshape(*shape, 1)
        terminated, truncated = place % 8 == 3, place % 7 == 5
        after = {name: normal(1) for name in SIGNALS} | {"observation": normal(OBSERVATION)}
        after |= {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        action = torch.randint(ACTIONS, shape, generator=generator)
        root = {"observation": normal(OBSERVATION), "action": normal(1).tanh() * 0.9 if self.continuous else action}
        root["action_log_prob"] = normal() / 4 - 1
        if self.game:
            disturbance = torch.randint(DISTURBANCES, shape, generator=generator)
            root["disturbance"] = normal(1).tanh() * 0.9 if self.continuous else disturbance
            root["disturbance_log_prob"] = normal() / 4 - 1
        return TensorDict({**root, "next": after}, shape)


def _pair(family: str, safety: type[LossModule], reach_avoid: type[LossModule], *rest: Any) -> tuple[LossCase, ...]:
    return (
        LossCase(family, safety, AvoidBackup(), *rest),
        LossCase(family, reach_avoid, ReachAvoidBackup(), *rest),
    )


def _critic(keys: Keys) -> ValueOperator:
    return ValueOperator(_mlp(OBSERVATION, 1), in_keys=[keys.observation])


_SAC = {"loss_actor": "actor_network_params", "loss_qvalue": "qvalue_network_params", "loss_alpha": "log_alpha"}
_ON_POLICY = {
    "loss_objective": "actor_network_params",
    "loss_entropy": "actor_network_params",
    "loss_critic": "critic_network_params",
}

LOSSES: tuple[LossCase, ...] = (
    *_pair(
        "DQN",
        SafetyDQNLoss,
        ReachAvoidDQNLoss,
        {"loss_function": "l2"},
        lambda keys: (_action_values(keys),),
        False,
        {"loss": "value_network_params"},
        "loss",
    ),
    LossCase(
        "categorical DQN",
        CategoricalDQNLoss,
        DiscountedReturnBackup(),
        {},
        lambda keys: (
            RainbowNetwork(OBSERVATION, ACTIONS, support=(-2.0, 2.0), atoms=7, hidden=(8,), in_key=keys.observation),
        ),
        False,
        {"loss": "value_network_params"},
        "loss",
    ),
    *_pair(
        "SAC",
        SafetySACLoss,
        ReachAvoidSACLoss,
        {"loss_function": "l2", "target_entropy": -1.0},
        lambda keys: (
            _actor(keys, True),
            ValueOperator(
                _mlp(OBSERVATION + 1, 1), in_keys=[keys.observation, keys.action], out_keys=["state_action_value"]
            ),
        ),
        True,
        _SAC,
        "loss_qvalue",
    ),
    *_pair(
        "discrete SAC",
        DiscreteSafetySACLoss,
        DiscreteReachAvoidSACLoss,
        {"loss_function": "l2", "num_actions": ACTIONS},
        lambda keys: (_actor(keys, False), _action_values(keys)),
        False,
        _SAC,
        "loss_qvalue",
    ),
    *(
        case
        for family, safety, reach_avoid in (
            ("PPO", SafetyPPOLoss, ReachAvoidPPOLoss),
            ("A2C", SafetyA2CLoss, ReachAvoidA2CLoss),
        )
        for case in _pair(
            family,
            safety,
            reach_avoid,
            {"loss_critic_type": "l2"},
            lambda keys: (_actor(keys, False), _critic(keys)),
            False,
            _ON_POLICY,
            "loss_critic",
        )
    ),
    *_pair(
        "game DQN",
        IsaacsDQNLoss,
        GameplayDQNLoss,
        {"loss_function": "l2"},
        lambda keys: (_table(keys),),
        False,
        {"loss": "value_network_params"},
        "loss",
    ),
    *_pair(
        "game categorical DQN",
        IsaacsCategoricalDQNLoss,
        GameplayCategoricalDQNLoss,
        {"num_disturbances": DISTURBANCES},
        lambda keys: (
            RainbowNetwork(
                OBSERVATION,
                ACTIONS * DISTURBANCES,
                support=(-2.0, 2.0),
                atoms=7,
                hidden=(8,),
                in_key=keys.observation,
            ),
        ),
        False,
        {"loss": "value_network_params"},
        "loss",
    ),
    *_pair(
        "game SAC",
        IsaacsSACLoss,
        GameplaySACLoss,
        {"loss_function": "l2", "target_entropy": -1.0, "target_entropy_disturbance": -1.0},
        lambda keys: (
            _actor(keys, True),
            _actor(keys.opponent, True, sees=(keys.action,)),
            ValueOperator(
                _mlp(OBSERVATION + 2, 1),
                in_keys=[keys.observation, keys.action, keys.disturbance],
                out_keys=["state_action_value"],
            ),
        ),
        True,
        {
            "loss_controller": "actor_network_params",
            "loss_disturbance": "disturbance_network_params",
            "loss_qvalue": "qvalue_network_params",
            "loss_alpha_controller": "log_alpha",
            "loss_alpha_disturbance": "log_alpha_disturbance",
        },
        "loss_qvalue",
    ),
    *_pair(
        "game PPO",
        IsaacsPPOLoss,
        GameplayPPOLoss,
        {"loss_critic_type": "l2"},
        lambda keys: (_actor(keys, False), _actor(keys.opponent, False, actions=DISTURBANCES), _critic(keys)),
        False,
        {
            "loss_controller": "actor_network_params",
            "loss_entropy_controller": "actor_network_params",
            "loss_disturbance": "disturbance_loss",
            "loss_entropy_disturbance": "disturbance_loss",
            "loss_critic": "critic_network_params",
        },
        "loss_critic",
    ),
)
"""Every loss, with its default backup."""
