"""Clipped PPO of two-player games: two policies on one critic and one set of value targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, dispatch
from tensordict.utils import NestedKey
from torchrl.objectives import ClipPPOLoss

from torchrl_safety.objectives.backup_loss import BackupLoss, reach_avoid
from torchrl_safety.objectives.games import PLAYERS, ActivePlayers, TwoPlayers
from torchrl_safety.objectives.ppo import SafetyPPOLoss

_OF_THE_CRITIC = ("loss_critic", "value_clip_fraction", "explained_variance")

_NOT_OF_A_POLICY = ("critic_coeff", "loss_critic_type", "clip_value", "log_explained_variance", "separate_losses")

_REFUSED = {
    "advantage_norm": "its statistics would miss the advantages that both players share; use normalize_advantage=True",
    "delay_actor": "target updaters do not see the disturbance's copy; leave it out",
}


class _PolicyLoss(BackupLoss, ClipPPOLoss):
    """PPO's terms of one policy, given the advantages; not a loss by itself."""

    stored_keys = ("action", "sample_log_prob", "advantage")

    @dataclass
    class _AcceptedKeys(ClipPPOLoss._AcceptedKeys):
        pass

    default_keys = _AcceptedKeys

    @property
    def in_keys(self) -> list[NestedKey]:
        return [*self.actor_network.in_keys, *self._stored()]


class _GamePPO(ActivePlayers, TwoPlayers, SafetyPPOLoss):
    network_names = ("actor_network", "disturbance_network", "critic_network")
    stored_keys = ("action", "disturbance", "sample_log_prob", "disturbance_log_prob")
    disturbance_loss: _PolicyLoss

    @dataclass
    class _AcceptedKeys(SafetyPPOLoss._AcceptedKeys):
        disturbance: NestedKey = "disturbance"
        disturbance_log_prob: NestedKey = "disturbance_log_prob"

    default_keys = _AcceptedKeys

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        disturbance_network: ProbabilisticTensorDictSequential,
        critic_network: TensorDictModule,
        *,
        disturbance_settings: Mapping[str, Any] | None = None,
        active_players: tuple[str, ...] = PLAYERS,
        **settings: Any,
    ) -> None:
        for name, why in _REFUSED.items():
            if settings.get(name):
                raise ValueError(f"{name} is {settings[name]!r}, which a game cannot take: {why}")
        super().__init__(actor_network, critic_network, **settings)
        self.active_players = active_players
        left_out = (*_NOT_OF_A_POLICY, "backup", "terminal_type", "gamma", "lmbda", "bootstrap_on_truncation")
        shared = {name: value for name, value in settings.items() if name not in left_out}
        self.disturbance_loss = _PolicyLoss(disturbance_network, None, **{**shared, **(disturbance_settings or {})})
        found = self.disturbance_loss.tensor_keys
        self.set_keys(disturbance=found.action, disturbance_log_prob=found.sample_log_prob)
        stored = self._stored()
        if len({*stored}) < len(stored):
            raise ValueError(
                f"the players share a key among {stored}: give each actor its own, e.g. ProbabilisticActor(..., "
                "out_keys=['disturbance'], log_prob_keys=['disturbance_log_prob'])"
            )

    @property
    def disturbance_network(self) -> ProbabilisticTensorDictSequential:
        """The policy of the disturbance."""
        return self.disturbance_loss.actor_network

    def _forward_value_estimator_keys(self, **_: NestedKey) -> None:
        super()._forward_value_estimator_keys()
        if "disturbance_loss" in self._modules:
            keys = self.tensor_keys
            self.disturbance_loss.set_keys(
                action=keys.disturbance, sample_log_prob=keys.disturbance_log_prob, advantage=keys.advantage
            )

    @property
    def out_keys(self) -> list[str]:
        """The losses of both players and of the critic, and what describes the players that learn."""
        kinds = ["clip_fraction", "ESS", "kl_approx", "max_ratio", "mean_ratio", *["entropy"] * self.entropy_bonus]
        losses = [f"loss_{player}" for player in PLAYERS]
        if self.entropy_bonus:
            losses += [f"loss_entropy_{player}" for player in PLAYERS]
        return [*losses, "loss_critic", *(f"{kind}_{player}" for player in self.active_players for kind in kinds)]

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._check_batch(tensordict)
        tensordict, key = tensordict.clone(False), self.tensor_keys.advantage
        if tensordict.get(key, None) is None:
            self.value_estimator(
                tensordict,
                params=self._cached_critic_network_params_detached,
                target_params=self.target_critic_network_params,
            )
        advantage = tensordict.get(key)
        found = TensorDict({})
        if "controller" in self.active_players:
            found.update(_named(super().forward(tensordict), "controller"))
        else:
            found.update(self._critic_terms(tensordict))
        if "disturbance" in self.active_players:
            negated = tensordict.clone(False).set(key, -advantage)
            found.update(_named(self.disturbance_loss(negated), "disturbance"))
        rest = advantage.squeeze(-1) if self.reduction == "none" else advantage.sum()
        for name in self.out_keys:
            if name not in found:
                found.set(name, rest.new_zeros(rest.shape))
        return found

    def _critic_terms(self, tensordict: TensorDictBase) -> dict[str, Any]:
        """What ClipPPOLoss says of its critic, without a policy."""
        loss, *scalars = self.loss_critic(tensordict)
        named = {name: value for name, value in zip(_OF_THE_CRITIC[1:], scalars) if value is not None}
        return {"loss_critic": self._reduce_loss(loss, tensordict).squeeze(-1), **named}


def _named(terms: TensorDictBase, player: str) -> dict[str, Any]:
    """The terms of a policy under the name of its player; those of the critic as they are."""
    own = {name: value for name, value in terms.items() if name not in _OF_THE_CRITIC}
    named = {"loss" if name == "loss_objective" else name: value for name, value in own.items()}
    return {
        **{f"{name}_{player}": value for name, value in named.items()},
        **{name: value for name, value in terms.items() if name in _OF_THE_CRITIC},
    }


class IsaacsPPOLoss(_GamePPO):
    r"""Clipped PPO for the avoid game: two policies, one critic, one set of value targets.

    Value target :math:`G_t = F_t((1-\lambda) V_{t+1} + \lambda G_{t+1})` and advantage :math:`G_t - V_t` are those of
    :class:`SafetyPPOLoss`; the controller's clipped objective is that of the advantage, the disturbance's that of the
    negated advantage. A disturbance whose network has ``"action"`` among its in keys moves second.
    Sources: Hsu et al. 2022 (ISAACS); Schulman et al. 2017.

    It returns ``loss_controller``, ``loss_disturbance``, ``loss_entropy_controller``, ``loss_entropy_disturbance`` and
    ``loss_critic``. The parameters are `actor_network`, `critic_network` and, of the disturbance, `disturbance_loss`,
    by which :func:`~torchrl_safety.trainers.parameter_groups` gives each its learning rate.

    Args:
        actor_network: the controller, a probabilistic actor that also returns its log-probability.
        disturbance_network: the same for ``"disturbance"`` and ``"disturbance_log_prob"``.
        critic_network: writes ``"state_value"`` `[*B, 1]`, in the unit of the margin.
        disturbance_settings: what differs for the disturbance, e.g. ``{"entropy_coeff": 0.0}``.
        active_players: who learns, see :attr:`active_players`; assign ``("controller",)`` and ``("disturbance",)`` in
            turn for alternating phases.
        **settings: those of :class:`SafetyPPOLoss`, but `advantage_norm` and `delay_actor`.

    Raises:
        ValueError: for an option out of range, players that share a key, a flat batch without an advantage, or a NaN
            or infinite margin.
        KeyError: when a batch lacks a key, ``"disturbance"`` among them; there are no defaults.

    Example:
        >>> import torch
        >>> from tensordict.nn import TensorDictModule, TensorDictSequential
        >>> from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
        >>> from torchrl_safety.envs import DoubleIntegratorEnv
        >>> from torchrl_safety.objectives import IsaacsPPOLoss
        >>> def player(key):
        ...     net = MLP(in_features=2, out_features=3, num_cells=[8])
        ...     module = TensorDictModule(net, ["observation"], [f"{key}_logits"])
        ...     kind = torch.distributions.Categorical
        ...     return ProbabilisticActor(
        ...         module, {"logits": f"{key}_logits"}, [key], distribution_class=kind, return_log_prob=True
        ...     )
        >>> critic = ValueOperator(MLP(in_features=2, out_features=1, num_cells=[8]), in_keys=["observation"])
        >>> controller, disturbance = player("action"), player("disturbance")
        >>> loss = IsaacsPPOLoss(controller, disturbance, critic)
        >>> with torch.no_grad():
        ...     both = TensorDictSequential(controller, disturbance)
        ...     trajectories = DoubleIntegratorEnv(4, max_disturbance=0.5).rollout(3, both)
        >>> loss(trajectories)["loss_disturbance"].shape
        torch.Size([])
    """


class GameplayPPOLoss(_GamePPO):
    r"""Clipped PPO for the reach-avoid game.

    :class:`IsaacsPPOLoss` with :class:`ReachAvoidBackup` as the default backup and nothing else changed.
    Source: Hsu et al. 2024 (Gameplay Filters), eq. 5b and 6a.

    Args:
        actor_network: see :class:`IsaacsPPOLoss`, as for everything else.
        disturbance_network: the opponent.
        critic_network: writes ``"state_value"`` `[*B, 1]`.
        terminal_type: the value of a terminal step is :math:`\min(l, g)` (``"all"``, the default) or :math:`g`
            (``"g"``).

    Example:
        >>> from torchrl_safety.objectives import GameplayPPOLoss
        >>> GameplayPPOLoss.default_backup("g")
        ReachAvoidBackup(terminal_type='g')
    """

    default_backup = staticmethod(reach_avoid)
