"""On-policy actor-critic losses for any backup: clipped PPO and A2C on exact lambda-returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, dispatch
from tensordict.utils import NestedKey
from torchrl.objectives import A2CLoss, ClipPPOLoss

from torchrl_safety.objectives.backup_loss import BackupLoss, reach_avoid
from torchrl_safety.objectives.backups import Backup
from torchrl_safety.objectives.estimators import BackupEstimators
from torchrl_safety.objectives.signals import read

STORED_REMEDY = (
    "Collect it with the policy (an actor built with return_log_prob=True writes both it and its log-probability), or "
    "name its key with loss.set_keys(...)"
)


class _OnPolicyBackupLoss(BackupLoss):
    """The constructor that PPO and A2C share."""

    default_value_estimator = BackupEstimators.BACKUP_TDLAMBDA
    network_names: tuple[str, ...] = ("actor_network", "critic_network")

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        critic_network: TensorDictModule,
        *,
        backup: Backup | None = None,
        terminal_type: str | None = None,
        gamma: float = 0.99,
        lmbda: float = 0.95,
        bootstrap_on_truncation: bool = False,
        **settings: Any,
    ) -> None:
        if critic_network is None:
            raise ValueError("critic_network is None; the targets need a critic that writes 'state_value'")
        super().__init__(actor_network, critic_network, **settings)
        self._use_backup(
            backup, terminal_type, gamma=gamma, lmbda=lmbda, bootstrap_on_truncation=bootstrap_on_truncation
        )

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The losses; of a batch that holds what the policy did, and at least one step of it."""
        self._check_batch(tensordict)
        return super().forward(tensordict)

    def _check_batch(self, tensordict: TensorDictBase) -> None:
        self._refuse_empty(tensordict.batch_size)
        for key in self._stored():
            if read(tensordict, key, STORED_REMEDY).requires_grad:
                raise ValueError(f"{key!r} in the batch requires gradients; collect it under torch.no_grad()")


class _PPO(_OnPolicyBackupLoss, ClipPPOLoss):
    stored_keys: tuple[str, ...] = ("action", "sample_log_prob")

    @dataclass
    class _AcceptedKeys(ClipPPOLoss._AcceptedKeys):
        safety_margin: NestedKey = "safety_margin"
        target_margin: NestedKey = "target_margin"

    default_keys = _AcceptedKeys


class _A2C(_OnPolicyBackupLoss, A2CLoss):
    @dataclass
    class _AcceptedKeys(A2CLoss._AcceptedKeys):
        safety_margin: NestedKey = "safety_margin"
        target_margin: NestedKey = "target_margin"

    default_keys = _AcceptedKeys


class SafetyPPOLoss(_PPO):
    r"""Clipped PPO for the avoid problem: TorchRL's ClipPPOLoss on exact lambda-returns.

    Value target :math:`G_t = F_t((1-\lambda) V_{t+1} + \lambda G_{t+1})`, advantage :math:`G_t - V_t` (see
    :func:`lambda_return`). Not generalised advantage estimation: a sum of one-step errors leaks through the inactive
    branches of min and max. Sources: Schulman et al. 2017; the backups' own.

    Call ``loss.value_estimator(batch, params=..., target_params=...)`` on the trajectories `[*B, T]` before they are
    shuffled into minibatches; a loss that gets trajectories without an advantage does so itself.

    Args:
        actor_network: a probabilistic actor that also returns its log-probability.
        critic_network: writes ``"state_value"`` `[*B, 1]`, in the unit of the margin.
        backup: the problem; :class:`AvoidBackup` by default.
        terminal_type: ``"all"`` or ``"g"``, see :class:`ReachAvoidBackup`; without effect here.
        gamma: discount; ``loss.gamma = 0.999`` moves it.
        lmbda: :math:`\lambda \in [0, 1]`.
        bootstrap_on_truncation: whether a truncated step continues into the value of its final observation; else it
            counts as terminal.
        **settings: those of :class:`torchrl.objectives.ClipPPOLoss`, e.g. `clip_epsilon`, `entropy_coeff`,
            `normalize_advantage`, `reduction`.

    Raises:
        ValueError: for an option out of range, a flat batch without an advantage, or a NaN or infinite margin.
        KeyError: when a batch lacks a key; there are no defaults.

    Example:
        >>> import torch
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
        >>> from torchrl_safety.envs import DoubleIntegratorEnv
        >>> from torchrl_safety.objectives import SafetyPPOLoss
        >>> net = TensorDictModule(MLP(in_features=2, out_features=3, num_cells=[8]), ["observation"], ["logits"])
        >>> actor = ProbabilisticActor(
        ...     net, in_keys=["logits"], distribution_class=torch.distributions.Categorical, return_log_prob=True
        ... )
        >>> critic = ValueOperator(MLP(in_features=2, out_features=1, num_cells=[8]), in_keys=["observation"])
        >>> loss = SafetyPPOLoss(actor, critic)
        >>> with torch.no_grad():
        ...     trajectories = DoubleIntegratorEnv(4).rollout(3, actor)
        >>> loss(trajectories)["loss_critic"].shape
        torch.Size([])
    """


class ReachAvoidPPOLoss(_PPO):
    r"""Clipped PPO for the reach-avoid problem.

    :class:`SafetyPPOLoss` with :class:`ReachAvoidBackup` as the default backup and nothing else changed.

    Args:
        actor_network: see :class:`SafetyPPOLoss`, as for everything else.
        critic_network: writes ``"state_value"`` `[*B, 1]`.
        terminal_type: the value of a terminal step is :math:`\min(l, g)` (``"all"``, the default) or :math:`g`
            (``"g"``).

    Example:
        >>> from torchrl_safety.objectives import ReachAvoidPPOLoss
        >>> ReachAvoidPPOLoss.default_backup("g")
        ReachAvoidBackup(terminal_type='g')
    """

    default_backup = staticmethod(reach_avoid)


class SafetyA2CLoss(_A2C):
    r"""A2C for the avoid problem: TorchRL's A2CLoss on exact lambda-returns.

    Targets and advantages as in :class:`SafetyPPOLoss`; the policy gradient is
    :math:`-\log \pi(a|s)\,(G_t - V_t)`. Source: Mnih et al. 2016; the backups' own.

    Args:
        actor_network: a probabilistic actor that also returns its log-probability.
        critic_network: writes ``"state_value"`` `[*B, 1]`, in the unit of the margin.
        **settings: `backup`, `terminal_type`, `gamma`, `lmbda` and `bootstrap_on_truncation` as in
            :class:`SafetyPPOLoss`; the rest are those of :class:`torchrl.objectives.A2CLoss`.

    Raises:
        ValueError: for an option out of range, a flat batch without an advantage, or a NaN or infinite margin.
        KeyError: when a batch lacks a key; there are no defaults.

    Example:
        >>> import torch
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
        >>> from torchrl_safety.envs import DoubleIntegratorEnv
        >>> from torchrl_safety.objectives import SafetyA2CLoss
        >>> net = TensorDictModule(MLP(in_features=2, out_features=3, num_cells=[8]), ["observation"], ["logits"])
        >>> actor = ProbabilisticActor(
        ...     net, in_keys=["logits"], distribution_class=torch.distributions.Categorical, return_log_prob=True
        ... )
        >>> critic = ValueOperator(MLP(in_features=2, out_features=1, num_cells=[8]), in_keys=["observation"])
        >>> loss = SafetyA2CLoss(actor, critic)
        >>> with torch.no_grad():
        ...     trajectories = DoubleIntegratorEnv(4).rollout(3, actor)
        >>> loss(trajectories)["loss_objective"].shape
        torch.Size([])
    """


class ReachAvoidA2CLoss(_A2C):
    r"""A2C for the reach-avoid problem.

    :class:`SafetyA2CLoss` with :class:`ReachAvoidBackup` as the default backup and nothing else changed.

    Args:
        actor_network: see :class:`SafetyA2CLoss`, as for everything else.
        critic_network: writes ``"state_value"`` `[*B, 1]`.

    Example:
        >>> from torchrl_safety.objectives import ReachAvoidA2CLoss
        >>> ReachAvoidA2CLoss.default_backup("all")
        ReachAvoidBackup(terminal_type='all')
    """

    default_backup = staticmethod(reach_avoid)
