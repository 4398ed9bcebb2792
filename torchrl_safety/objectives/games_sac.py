"""Soft actor-critic of two-player games: two actors and two temperatures on one critic of both actions."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, TensorDictParams, dispatch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Composite
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.objectives.sac import compute_rsample_log_prob

from torchrl_safety.objectives.backup_loss import Place, here, network_input, reach_avoid
from torchrl_safety.objectives.games import PLAYERS, ActivePlayers, TwoPlayers
from torchrl_safety.objectives.sac import SafetySACLoss
from torchrl_safety.objectives.signals import check_choice, check_number


class _Player(NamedTuple):
    """Where the loss keeps what belongs to a player."""

    name: str
    network: str
    action: str
    """By its name in `set_keys`."""
    log_alpha: str
    target_entropy: str
    payoff: int
    """The sign with which the value counts for the player."""


_CONTROLLER = _Player("controller", "actor_network", "action", "log_alpha", "target_entropy", 1)
_DISTURBANCE = _Player(
    "disturbance", "disturbance_network", "disturbance", "log_alpha_disturbance", "target_entropy_disturbance", -1
)
_BOTH = (_CONTROLLER, _DISTURBANCE)  # in the order in which they move


class _GameSAC(ActivePlayers, TwoPlayers, SafetySACLoss):
    network_names = ("actor_network", "disturbance_network", "qvalue_network")
    out_keys = [  # noqa: RUF012
        "loss_controller",
        "loss_disturbance",
        "loss_qvalue",
        "loss_alpha_controller",
        "loss_alpha_disturbance",
        "alpha_controller",
        "alpha_disturbance",
        "entropy_controller",
        "entropy_disturbance",
    ]
    disturbance_network: ProbabilisticTensorDictSequential
    disturbance_network_params: TensorDictParams
    target_disturbance_network_params: TensorDictParams
    log_alpha_disturbance: Tensor
    target_entropy_disturbance: Tensor

    @dataclass
    class _AcceptedKeys(SafetySACLoss._AcceptedKeys):
        disturbance: NestedKey = "disturbance"

    default_keys = _AcceptedKeys

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        disturbance_network: ProbabilisticTensorDictSequential,
        qvalue_network: TensorDictModule,
        *,
        pessimism: str = "per_player",
        target_entropy_disturbance: str | float = "auto",
        active_players: tuple[str, ...] = PLAYERS,
        **settings: Any,
    ) -> None:
        super().__init__(actor_network, qvalue_network, **settings)
        self.pessimism = check_choice("pessimism", pessimism, ("per_player", "min"))
        self.active_players = active_players
        self.convert_to_functional(disturbance_network, "disturbance_network", create_target_params=False)
        self.set_keys(disturbance=disturbance_network.dist_sample_keys[0])
        log_alpha = self.log_alpha.detach().clone()
        if self.fixed_alpha:
            self.register_buffer("log_alpha_disturbance", log_alpha)
        else:
            self.register_parameter("log_alpha_disturbance", torch.nn.Parameter(log_alpha))
        target = _target_entropy(disturbance_network, self.tensor_keys.disturbance, target_entropy_disturbance)
        self.register_buffer("target_entropy_disturbance", torch.full_like(log_alpha, target))

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._check_stored(tensordict)
        loss_qvalue, report = self.qvalue_v2_loss(tensordict)
        tensordict.set(self.tensor_keys.priority, report["td_error"])
        weights = self._maybe_get_priority_weight(tensordict)
        state = network_input(tensordict, self._state_keys(), here)
        moves = self._play(state, self.active_players)
        losses: dict[str, Tensor] = {"loss_qvalue": loss_qvalue}
        scalars: dict[str, Tensor] = {}
        for player, (action, log_prob) in zip(_BOTH, moves):
            alpha = self._temperature(getattr(self, player.log_alpha))
            terms = self._player_terms(player, state, action, log_prob, alpha)
            for name, term in zip(("loss", "loss_alpha"), terms or (None, None)):
                losses[f"{name}_{player.name}"] = (
                    torch.zeros_like(loss_qvalue)
                    if term is None
                    else self._reduce_loss(term, tensordict, weights=weights)
                )
            scalars |= {f"alpha_{player.name}": alpha, f"entropy_{player.name}": -log_prob.detach().mean()}
        found = TensorDict(losses, tensordict.batch_size if self.reduction == "none" else [])
        if self.reduction != "none":
            found.update(scalars)
        elif self.scalar_output_mode == "non_tensor":
            for name, value in scalars.items():
                found.set_non_tensor(name, value)
        networks = ("actor_network", "disturbance_network", "qvalue_network", "target_qvalue_network")
        self._clear_weakrefs(tensordict, found, *(f"{name}_params" for name in networks))
        return found

    def _player_terms(
        self, player: _Player, state: TensorDictBase, action: Tensor, log_prob: Tensor, alpha: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """The losses `[*B]` of a player's policy and of its temperature; None if it rests."""
        if player.name not in self.active_players:
            return None
        joint = state.copy().set(getattr(self.tensor_keys, player.action), action)
        values = self._critics(joint, self._cached_detached_qvalue_params).squeeze(-1)
        is_least = player.payoff > 0 or self.pessimism == "min"
        payoff = player.payoff * (values.amin(0) if is_least else values.amax(0))
        surplus = log_prob.detach() + getattr(self, player.target_entropy)
        return alpha * log_prob - payoff, -getattr(self, player.log_alpha) * surplus

    def _play(self, state: TensorDictBase, learning: tuple[str, ...] = ()) -> list[tuple[Tensor, Tensor]]:
        """Action and log-probability of each player, with a gradient for those that learn; `state` gets the actions.

        There they have no gradient: to one player the action of the other is given.
        """
        moves = []
        for player in _BOTH:
            network, params = getattr(self, player.network), getattr(self, f"{player.network}_params")
            with (
                nullcontext() if player.name in learning else torch.no_grad(),
                set_exploration_type(ExplorationType.RANDOM),
                params.to_module(network, preserve_module_state=False),
            ):
                action, log_prob = compute_rsample_log_prob(network.get_dist(state.copy()))
            state.set(getattr(self.tensor_keys, player.action), action.detach())
            moves.append((action, log_prob))
        return moves

    def _next_value(self, tensordict: TensorDictBase, place: Place) -> Tensor:
        state = network_input(tensordict, self._state_keys(), place)
        moves = self._play(state)
        value = self._critics(state, self.target_qvalue_network_params).amin(0)
        if self.entropy_in_target:
            for player, (_, log_prob) in zip(_BOTH, moves):
                alpha = self._temperature(getattr(self, player.log_alpha))
                value = value - player.payoff * alpha * log_prob.unsqueeze(-1)
        return value


def _target_entropy(network: ProbabilisticTensorDictSequential, key: NestedKey, target: Any) -> float:
    """The target entropy of the disturbance; by default minus the number of its entries."""
    if target != "auto":
        return check_number("target_entropy_disturbance", target, -math.inf, math.inf)
    spec: Any = getattr(network, "spec", None)
    leaf = spec.get(key, None) if isinstance(spec, Composite) else spec
    if leaf is None:
        raise ValueError(
            f"target_entropy_disturbance is 'auto', but the disturbance's network has no spec of {key!r}: give it one, "
            "ProbabilisticActor(..., spec=...), or a number"
        )
    batch_dims = 0 if leaf is spec else spec.ndim
    return -float(leaf.shape[batch_dims:].numel())


class IsaacsSACLoss(_GameSAC):
    r"""Soft actor-critic for the avoid game: a controller and a disturbance trained against each other.

    :math:`y = F(\min_i \bar Q_i(s', u', d'))` with :math:`u' \sim \pi_u(s')`, :math:`d' \sim \pi_d(s'[, u'])`,
    :math:`F` the backup's map, composed over the steps of an n-step window if the batch holds one. The controller's
    loss is :math:`E[\alpha_u \log \pi_u - q_u(s, u, \mathrm{sg}(d))]`, the disturbance's
    :math:`E[\alpha_d \log \pi_d + q_d(s, \mathrm{sg}(u), d)]`, sg for no gradient; each sees the critic that is worse
    for itself, :math:`q_u = \min_i Q_i` and :math:`q_d = \max_i Q_i`. A disturbance whose network has ``"action"``
    among its in keys moves second. Priorities :math:`\max_i |Q_i - y|` go to ``"td_error"``.
    Sources: Hsu et al. 2022 (ISAACS), section IV; Haarnoja et al. 2018.

    The parameters are `actor_network`, `disturbance_network`, `qvalue_network`, `log_alpha` and
    `log_alpha_disturbance`, by which :func:`~torchrl_safety.trainers.parameter_groups` gives each its learning rate.

    Args:
        actor_network: the controller, a probabilistic actor; writes ``"action"`` `[*B, C]`.
        disturbance_network: a probabilistic actor; writes ``"disturbance"`` `[*B, C_d]`.
        qvalue_network: reads the state and both actions; writes ``"state_action_value"`` `[*B, 1]`, in the unit of the
            margin.
        pessimism: ``"per_player"`` for the worse critic of each player, ``"min"`` for the least of them for both.
        target_entropy_disturbance: that of the disturbance; minus the number of its entries by default. The
            controller's is `target_entropy`.
        active_players: who learns, see :attr:`active_players`.
        **settings: those of :class:`SafetySACLoss`, but ``n_step="best"``. `alpha_init`, `fixed_alpha` and the limits
            hold for both temperatures; with `entropy_in_target` the value gains
            :math:`-\alpha_u \log \pi_u + \alpha_d \log \pi_d`.

    Raises:
        ValueError: for an option out of range, or a margin that is NaN or infinite.
        KeyError: when a batch lacks a key, ``"disturbance"`` among them; there are no defaults.

    Example:
        >>> import torch
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
        >>> from torchrl_safety.envs import DoubleIntegratorEnv
        >>> from torchrl_safety.objectives import IsaacsSACLoss
        >>> def player(key):
        ...     head = torch.nn.Sequential(MLP(in_features=2, out_features=2, num_cells=[8]), NormalParamExtractor())
        ...     module = TensorDictModule(head, in_keys=["observation"], out_keys=["loc", "scale"])
        ...     return ProbabilisticActor(module, ["loc", "scale"], [key], distribution_class=TanhNormal)
        >>> inputs = ["observation", "action", "disturbance"]
        >>> critic = ValueOperator(MLP(in_features=4, out_features=1, num_cells=[8]), in_keys=inputs)
        >>> loss = IsaacsSACLoss(
        ...     player("action"), player("disturbance"), critic, target_entropy=-1.0, target_entropy_disturbance=-1.0
        ... )
        >>> env = DoubleIntegratorEnv(4, discrete=False, max_disturbance=0.5)
        >>> loss(env.rollout(3).reshape(-1))["loss_disturbance"].shape
        torch.Size([])
    """


class GameplaySACLoss(_GameSAC):
    r"""Soft actor-critic for the reach-avoid game.

    :class:`IsaacsSACLoss` with :class:`ReachAvoidBackup` as the default backup and nothing else changed.
    Source: Hsu et al. 2024 (Gameplay Filters), eq. 5b and 6a.

    Args:
        actor_network: see :class:`IsaacsSACLoss`, as for everything else.
        disturbance_network: the opponent.
        qvalue_network: writes ``"state_action_value"`` `[*B, 1]` of the state and both actions.
        terminal_type: the value of a terminal step is :math:`\min(l, g)` (``"all"``, the default) or :math:`g`
            (``"g"``).

    Example:
        >>> from torchrl_safety.objectives import GameplaySACLoss
        >>> GameplaySACLoss.default_backup("g")
        ReachAvoidBackup(terminal_type='g')
    """

    default_backup = staticmethod(reach_avoid)
