"""Soft actor-critic for any backup, with continuous and with discrete actions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.objectives import DiscreteSACLoss, SACLoss
from torchrl.objectives.sac import compute_rsample_log_prob

from torchrl_safety.objectives.backup_loss import (
    ACTION_REMEDY,
    BackupLoss,
    Place,
    check_index,
    network_input,
    reach_avoid,
)
from torchrl_safety.objectives.backups import Backup
from torchrl_safety.objectives.signals import check_number, read

_CRITIC_REMEDY = "Give the loss critics that write it (ValueOperator(..., out_keys=...)), or name its key with set_keys"


class _SoftBackupLoss(BackupLoss):
    """The constructor that both kinds of actions share."""

    network_names: tuple[str, ...] = ("actor_network", "qvalue_network")
    critic_key: str
    """What a critic writes, by its name in `set_keys`."""
    entropy_in_target: bool

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        qvalue_network: TensorDictModule,
        *,
        backup: Backup | None = None,
        terminal_type: str | None = None,
        gamma: float = 0.99,
        n_step: str = "last",
        bootstrap_on_truncation: bool = False,
        entropy_in_target: bool = False,
        min_alpha: float | None = 1e-3,
        max_alpha: float | None = None,
        **settings: Any,
    ) -> None:
        if settings.get("value_network") is not None:
            raise ValueError("value_network is given, but the target is a value of the critics; leave it out")
        least = check_number("min_alpha", 0.0 if min_alpha is None else min_alpha, 0, math.inf)
        check_number("max_alpha", math.inf if max_alpha is None else max_alpha, least, math.inf)
        if settings.get("reduction") == "none":
            settings.setdefault("scalar_output_mode", "exclude")
        super().__init__(actor_network, qvalue_network, min_alpha=min_alpha, max_alpha=max_alpha, **settings)
        self.entropy_in_target = entropy_in_target
        self._use_backup(
            backup, terminal_type, n_step=n_step, gamma=gamma, bootstrap_on_truncation=bootstrap_on_truncation
        )

    @property
    def _alpha(self) -> Tensor:
        return self._temperature(self.log_alpha)

    def _temperature(self, log_alpha: Tensor) -> Tensor:
        """The temperature, and its logarithm brought within the limits."""
        # TorchRL's writes to `.data`, which fails under `torch.compile`: when it is compiled, or in the backward.
        with torch.no_grad():
            if self.min_log_alpha is not None or self.max_log_alpha is not None:
                log_alpha.clamp_(self.min_log_alpha, self.max_log_alpha)
            return log_alpha.exp()

    def _target(self, tensordict: TensorDictBase) -> Tensor:
        self._refuse_empty(tensordict.batch_size)
        with torch.no_grad():
            return self._window_target(tensordict, lambda place: self._next_value(tensordict, place)).squeeze(-1)

    def _next_value(self, tensordict: TensorDictBase, place: Place) -> Tensor:
        raise NotImplementedError

    def critic_values(self, tensordict: TensorDictBase) -> Tensor:
        """What each of the `N` critics says of the states (and actions) of `tensordict`, `[N, *B, 1]` or `[N, *B, A]`.

        The learned value of a state is the least over the critics, at the policy's mode or its best action.
        """
        return self._critics(tensordict.select(*self.qvalue_network.in_keys), self.qvalue_network_params)

    def _critics(self, state: TensorDictBase, params: TensorDictBase) -> Tensor:
        """What the critics with the stacked `params` say of `state`."""
        # One by one: for the few critics of SAC that is quicker than vmap on a CPU, and compiles to plain products.
        key, values = getattr(self.tensor_keys, self.critic_key), []
        for each in params.unbind(0):
            with each.to_module(self.qvalue_network, preserve_module_state=False):
                values.append(read(self.qvalue_network(state.copy()), key, _CRITIC_REMEDY))
        return torch.stack(values)

    def _make_vmap(self) -> None:
        """Nothing to make: TorchRL's losses call the method below."""

    def _vmap_qnetworkN0(self, state: TensorDictBase, params: TensorDictBase) -> TensorDict:
        values = self._critics(state, params)
        return TensorDict({getattr(self.tensor_keys, self.critic_key): values}, [len(values)])


class _ContinuousSAC(_SoftBackupLoss, SACLoss):
    critic_key = "state_action_value"

    @dataclass
    class _AcceptedKeys(SACLoss._AcceptedKeys):
        safety_margin: NestedKey = "safety_margin"
        target_margin: NestedKey = "target_margin"

    default_keys = _AcceptedKeys

    def _compute_target_v2(self, tensordict: TensorDictBase) -> Tensor:
        return self._target(tensordict)

    def _next_value(self, tensordict: TensorDictBase, place: Place) -> Tensor:
        state = network_input(tensordict, self._state_keys(), place)
        with (
            set_exploration_type(ExplorationType.RANDOM),
            self.actor_network_params.to_module(self.actor_network, preserve_module_state=False),
        ):
            action, log_prob = compute_rsample_log_prob(self.actor_network.get_dist(state))
        state.set(self.tensor_keys.action, action)
        value = self._critics(state, self.target_qvalue_network_params).amin(0)
        if self.entropy_in_target:
            value = value - self._alpha * log_prob.unsqueeze(-1)
        return value


class _DiscreteSAC(_SoftBackupLoss, DiscreteSACLoss):
    critic_key = "action_value"

    @dataclass
    class _AcceptedKeys(DiscreteSACLoss._AcceptedKeys):
        safety_margin: NestedKey = "safety_margin"
        target_margin: NestedKey = "target_margin"

    default_keys = _AcceptedKeys

    def __init__(self, *networks: TensorDictModule, action_space: Any = "categorical", **settings: Any) -> None:
        super().__init__(*networks, action_space=action_space, **settings)

    def qvalue_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        if self.action_space == "categorical":
            key = self.tensor_keys.action
            action = read(tensordict, key, ACTION_REMEDY)
            check_index(action, tensordict.batch_size, f"the critics' {self.tensor_keys.action_value!r}")
            tensordict = tensordict.copy().set(key, action.reshape(tensordict.batch_size))
        return super().qvalue_loss(tensordict)

    def _compute_target(self, tensordict: TensorDictBase) -> Tensor:
        return self._target(tensordict)

    def _next_value(self, tensordict: TensorDictBase, place: Place) -> Tensor:
        state = network_input(tensordict, self._state_keys(), place)
        with self.actor_network_params.to_module(self.actor_network, preserve_module_state=False):
            probs = self.actor_network.get_dist(state).logits.softmax(-1)
        value = probs * self._critics(state, self.target_qvalue_network_params).amin(0)
        if self.entropy_in_target:
            value = value + self._alpha * torch.special.entr(probs)
        return value.sum(-1, keepdim=True)


class SafetySACLoss(_ContinuousSAC):
    r"""Soft actor-critic for the avoid problem: TorchRL's SACLoss with the backup's target.

    :math:`y = F(\min_i \bar Q_i(s', a'))`, :math:`a' \sim \pi(s')`, :math:`F` the backup's map, composed over the
    steps of an n-step window if the batch holds one. The entropy bonus moves the actor only: inside the target it adds
    up as :math:`\gamma \to 1` and shifts the zero level set. The learned set is read at
    :math:`\min_i Q_i(s, \pi(s))`. Importance weights multiply each transition's losses; priorities
    :math:`\max_i |Q_i - y|`, unweighted, go to ``"td_error"``.
    Sources: Haarnoja et al. 2018; Hsu et al. 2022 (ISAACS), section IV.

    Args:
        actor_network: a probabilistic actor; writes ``"action"`` `[*B, C]`.
        qvalue_network: writes ``"state_action_value"`` `[*B, 1]`, in the unit of the margin.
        backup: the problem; :class:`AvoidBackup` by default.
        terminal_type: ``"all"`` or ``"g"``, see :class:`ReachAvoidBackup`; without effect here.
        gamma: discount; ``loss.gamma = 0.999`` moves it.
        n_step: for windows, ``"last"`` uses their end, ``"best"`` the largest of the 1..k-step targets (deterministic
            dynamics only; needs the networks' inputs among the transform's `signals`).
        bootstrap_on_truncation: whether a truncated step continues into the next value; else it counts as terminal.
        entropy_in_target: whether :math:`-\alpha \log \pi(a'|s')` is part of the next value.
        min_alpha: least temperature.
        max_alpha: largest temperature; no limit by default.
        **settings: those of :class:`torchrl.objectives.SACLoss`, e.g. `num_qvalue_nets`, `loss_function`, `reduction`.
            The critics run one by one, so `deactivate_vmap` changes nothing.

    Raises:
        ValueError: for an option out of range, or a margin that is NaN or infinite.
        KeyError: when a batch lacks a key; there are no defaults.

    Example:
        >>> import torch
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
        >>> from torchrl_safety.envs import DoubleIntegratorEnv
        >>> from torchrl_safety.objectives import SafetySACLoss
        >>> env = DoubleIntegratorEnv(4, discrete=False)
        >>> head = torch.nn.Sequential(MLP(in_features=2, out_features=2, num_cells=[8]), NormalParamExtractor())
        >>> module = TensorDictModule(head, in_keys=["observation"], out_keys=["loc", "scale"])
        >>> actor = ProbabilisticActor(
        ...     module, in_keys=["loc", "scale"], distribution_class=TanhNormal, spec=env.full_action_spec_unbatched
        ... )
        >>> critic = ValueOperator(MLP(in_features=3, out_features=1, num_cells=[8]), in_keys=["observation", "action"])
        >>> loss = SafetySACLoss(actor, critic)
        >>> sorted(loss(env.rollout(3).reshape(-1)).keys())
        ['alpha', 'entropy', 'loss_actor', 'loss_alpha', 'loss_qvalue']
    """


class ReachAvoidSACLoss(_ContinuousSAC):
    r"""Soft actor-critic for the reach-avoid problem.

    :class:`SafetySACLoss` with :class:`ReachAvoidBackup` as the default backup and nothing else changed.

    Args:
        actor_network: see :class:`SafetySACLoss`, as for everything else.
        qvalue_network: writes ``"state_action_value"`` `[*B, 1]`.
        terminal_type: the value of a terminal step is :math:`\min(l, g)` (``"all"``, the default) or :math:`g`
            (``"g"``).

    Example:
        >>> from torchrl_safety.objectives import ReachAvoidSACLoss
        >>> ReachAvoidSACLoss.default_backup("g")
        ReachAvoidBackup(terminal_type='g')
    """

    default_backup = staticmethod(reach_avoid)


class DiscreteSafetySACLoss(_DiscreteSAC):
    r"""Soft actor-critic with discrete actions for the avoid problem: TorchRL's DiscreteSACLoss with a backup.

    :math:`y = F\big(\sum_a \pi(a|s') \min_i \bar Q_i(s', a)\big)`. Source: Christodoulou 2019, eq. 10-12.

    Args:
        actor_network: a probabilistic actor with a categorical distribution.
        qvalue_network: writes ``"action_value"`` `[*B, A]`, in the unit of the margin.
        **settings: those of :class:`SafetySACLoss` and of :class:`torchrl.objectives.DiscreteSACLoss`; `num_actions`
            is needed for the automatic target entropy, `action_space` is ``"categorical"`` by default.

    Raises:
        ValueError: for an option out of range, or a margin that is NaN or infinite.
        KeyError: when a batch lacks a key; there are no defaults.

    Example:
        >>> import torch
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.modules import MLP, ProbabilisticActor
        >>> from torchrl_safety.envs import DoubleIntegratorEnv
        >>> from torchrl_safety.objectives import DiscreteSafetySACLoss
        >>> net = TensorDictModule(MLP(in_features=2, out_features=3, num_cells=[8]), ["observation"], ["logits"])
        >>> actor = ProbabilisticActor(net, in_keys=["logits"], distribution_class=torch.distributions.Categorical)
        >>> critic = MLP(in_features=2, out_features=3, num_cells=[8])
        >>> loss = DiscreteSafetySACLoss(
        ...     actor, TensorDictModule(critic, ["observation"], ["action_value"]), num_actions=3
        ... )
        >>> loss(DoubleIntegratorEnv(4).rollout(3).reshape(-1))["loss_qvalue"].shape
        torch.Size([])
    """


class DiscreteReachAvoidSACLoss(_DiscreteSAC):
    r"""Soft actor-critic with discrete actions for the reach-avoid problem.

    :class:`DiscreteSafetySACLoss` with :class:`ReachAvoidBackup` as the default backup and nothing else changed.

    Args:
        actor_network: see :class:`DiscreteSafetySACLoss`, as for everything else.
        qvalue_network: writes ``"action_value"`` `[*B, A]`.

    Example:
        >>> from torchrl_safety.objectives import DiscreteReachAvoidSACLoss
        >>> DiscreteReachAvoidSACLoss.default_backup("all")
        ReachAvoidBackup(terminal_type='all')
    """

    default_backup = staticmethod(reach_avoid)
