"""What every loss of this package shares: a backup, its estimator, the keys of its signals and the discount."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor
from torchrl.objectives.utils import get_value_estimator_entry
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_safety.objectives.backups import AvoidBackup, Backup, ReachAvoidBackup, check_terminal_type
from torchrl_safety.objectives.estimators import (
    BackupEstimator,
    BackupEstimators,
    NStepBackupEstimator,
    TDLambdaBackupEstimator,
)
from torchrl_safety.objectives.signals import (
    STEPS,
    check_choice,
    check_number,
    next_key,
    read,
    refuse_unless,
    refuse_unless_finite,
    steps_key,
)

Place = Callable[[NestedKey], NestedKey]
"""Where a key of a state stands in a batch: in the next state, or in the steps of a window."""

N_STEP = ("last", "best")

DISTANCES = ("smooth_l1", "l2", "l1")

_KEPT = ("backup", "gamma", "lmbda", "bootstrap_on_truncation", "differentiable")

ACTION_REMEDY = "Store the action index (a Categorical action) of each transition"

INPUT_REMEDY = (
    "It is an input of the network; n-step windows hold it below 'steps' if the NStepTransform has it among its signals"
)


def avoid(terminal_type: str) -> Backup:
    """The avoid backup, whose terminal value is the safety margin under either type."""
    check_terminal_type(terminal_type)
    return AvoidBackup()


def reach_avoid(terminal_type: str) -> Backup:
    """The reach-avoid backup of this terminal type."""
    return ReachAvoidBackup(terminal_type=terminal_type)


def here(key: NestedKey) -> NestedKey:
    """The place of the present state."""
    return key


def network_input(tensordict: TensorDictBase, keys: list[NestedKey], place: Place) -> TensorDict:
    """The entries `keys` of the state that `place` names, under their own names."""
    entries = {key: read(tensordict, place(key), INPUT_REMEDY) for key in keys}
    return TensorDict(entries, tensordict.batch_size)


def check_index(action: Tensor, batch: torch.Size, choices: str) -> None:
    """Refuse what is not one integer per transition, `[*B]` or `[*B, 1]`; one-hot actions would be read as indices."""
    is_index = not (action.is_floating_point() or action.dtype == torch.bool)
    if not is_index or (action.shape != batch and action.shape != (*batch, 1)):
        raise ValueError(
            f"actions of shape {list(action.shape)} and type {action.dtype} do not index {choices}: give one integer "
            "per transition, `[*B]` or `[*B, 1]` (a Categorical action spec, not one-hot)"
        )


LOSS_FAULT = (
    "the loss is NaN or inf, because the network's output is; check the observations, lower the learning rate or clip "
    "the gradient"
)


if TYPE_CHECKING:
    from torchrl.objectives import LossModule as _Base
else:
    _Base = object


class BackupLoss(_Base):
    """Stands before one of TorchRL's losses and gives it a backup; not a loss by itself.

    The estimator is the one home of the backup, the discount and `bootstrap_on_truncation`; `loss.gamma` reads and
    sets its buffer.
    """

    SUPPORTED_VALUE_ESTIMATORS = tuple(BackupEstimators)
    default_value_estimator: Any = BackupEstimators.BACKUP_NSTEP
    default_backup: Callable[[str], Backup] = staticmethod(avoid)
    n_step: str = "last"
    value_type: Any
    network_names: tuple[str, ...]
    """The networks whose inputs a batch holds."""
    stored_keys: tuple[str, ...] = ("action",)
    """What else a batch holds of the moment before the step, by its name in `set_keys`."""
    _estimator_settings: dict[str, Any]

    def _use_backup(
        self, backup: Backup | None, terminal_type: str | None, *, n_step: str = "last", **settings: Any
    ) -> None:
        """Build the estimator, once the parent is built."""
        self.n_step = check_choice("n_step", n_step, N_STEP)
        check_choice("reduction", self.reduction, ("mean", "sum", "none"))
        for name in ("loss_function", "loss_critic_type"):
            if hasattr(self, name):
                check_choice(name, getattr(self, name), DISTANCES)
        self._estimator_settings = {"backup": self._problem(backup, terminal_type), **settings}
        self.make_value_estimator()

    @classmethod
    def _problem(cls, backup: Backup | None, terminal_type: str | None) -> Backup:
        """The backup that is given, or the default one of a terminal type."""
        if backup is None:
            return cls.default_backup("all" if terminal_type is None else terminal_type)
        if terminal_type is not None:
            raise ValueError(
                f"terminal_type is {terminal_type!r} beside backup={backup!r}; give it to the backup, or leave one out"
            )
        return backup

    def make_value_estimator(self, value_type: Any = None, **hyperparams: Any) -> BackupLoss:
        """Another estimator, or other settings of it; what is not given stays as it is.

        Args:
            value_type: a member of :class:`BackupEstimators`, its name, or an estimator: a class, or an instance, which
                then belongs to this loss alone (its keys and its discount do).
            **hyperparams: `gamma`, `lmbda`, `backup`, `bootstrap_on_truncation`, ...

        Raises:
            NotImplementedError: for an estimator that takes no backup.
            ValueError: for settings out of range or beside a ready estimator, or ``n_step="best"`` with an estimator
                that knows no windows.
        """
        wanted = self.value_type if value_type is None else value_type
        if isinstance(wanted, ValueEstimatorBase):
            builder = type(wanted)
        else:
            builder = wanted if isinstance(wanted, type) else get_value_estimator_entry(wanted).cls
        if not issubclass(builder, BackupEstimator):
            raise NotImplementedError(
                f"the estimator {builder.__name__} takes no backup; give one of "
                f"{[name.name for name in BackupEstimators]}"
            )
        if self.n_step == "best" and not issubclass(builder, NStepBackupEstimator):
            raise ValueError(
                f"n_step is 'best', which {builder.__name__} does not know; use n_step='last' or NStepBackupEstimator"
            )
        if not isinstance(wanted, ValueEstimatorBase):
            self._value_estimator, self.value_type = self._build_estimator(builder, hyperparams), wanted
        elif hyperparams:
            raise ValueError(
                f"{sorted(hyperparams)} beside an estimator that is built; give them to {builder.__name__}"
            )
        else:
            self._value_estimator, self.value_type = wanted, builder
        self._forward_value_estimator_keys()
        return self

    def _build_estimator(self, builder: type[BackupEstimator], hyperparams: dict[str, Any]) -> BackupEstimator:
        current = {name: getattr(self._value_estimator, name) for name in _KEPT if hasattr(self._value_estimator, name)}
        kept = {**self._estimator_settings, **current}
        settings = {"device": self._default_device, **kept, **hyperparams}
        if not issubclass(builder, TDLambdaBackupEstimator) and "lmbda" not in hyperparams:
            settings.pop("lmbda", None)  # it waits for an estimator that has one
        if getattr(self, "critic_network", None) is None:
            settings.setdefault("value_network", None)  # else the estimator would take a network of action values
        estimator = builder.for_loss(self, **settings)
        self._estimator_settings = {**kept, **hyperparams}
        return estimator

    @property
    def backup(self) -> Backup:
        """The problem."""
        return self.value_estimator.backup

    @property
    def gamma(self) -> Tensor:
        """The discount; assign a number or a tensor to it."""
        return self.value_estimator.gamma

    @gamma.setter
    def gamma(self, value: float | Tensor) -> None:
        buffer = self.value_estimator.gamma
        if isinstance(value, Tensor) and value.numel() == 1:
            refuse_unless(((value >= 0) & (value <= 1)).all(), "gamma lies outside [0, 1]; assign a discount")
            buffer.copy_(value.detach().reshape(()))
        else:
            buffer.fill_(check_number("gamma", value, 0, 1))

    def _forward_value_estimator_keys(self, **_: NestedKey) -> None:
        estimator = self._value_estimator
        if estimator is not None:
            shared = {field.name for field in fields(estimator.default_keys)} & set(vars(self.tensor_keys))
            estimator.set_keys(**{name: getattr(self.tensor_keys, name) for name in sorted(shared)})

    @property
    def in_keys(self) -> list[NestedKey]:
        keys, state = self.tensor_keys, self._state_keys()
        after = dict.fromkeys([*state, *self._signal_keys().values(), keys.terminated, keys.done])
        return [*state, *self._stored(), *(next_key(key) for key in after)]

    def _stored(self) -> list[NestedKey]:
        return [key for name in self.stored_keys for key in _as_list(getattr(self.tensor_keys, name))]

    def _signal_keys(self) -> dict[str, NestedKey]:
        return {name: getattr(self.tensor_keys, name) for name in self.backup.signals}

    def _state_keys(self) -> list[NestedKey]:
        """What the networks read of a state."""
        inputs = dict.fromkeys(unravel_key(key) for name in self.network_names for key in getattr(self, name).in_keys)
        return [key for key in inputs if key not in self._stored()]

    def _window_target(self, tensordict: TensorDictBase, value_at: Callable[[Place], Tensor]) -> Tensor:
        """The target `[*B, 1]`; `value_at` gives the values of the states that a place names."""
        estimator = self.value_estimator
        if self.n_step == "best" and STEPS in tensordict:
            return estimator.best_estimate(tensordict, value_at(steps_key))
        return estimator.value_estimate(tensordict, next_value=value_at(next_key))

    def _refuse_empty(self, shape: torch.Size) -> None:
        if self.reduction == "mean" and not shape.numel():
            raise ValueError(f"the batch {list(shape)} holds no transition, so its mean loss is undefined")

    def _maybe_get_priority_weight(self, tensordict: TensorDictBase) -> Tensor | None:
        # TorchRL's looks for the key among those of the first level, where a nested one is a TypeError.
        is_used = self.use_prioritized_weights in (True, "auto")
        return tensordict.get(self.tensor_keys.priority_weight, None) if is_used else None

    def _reduce_loss(
        self,
        loss: Tensor,
        tensordict: TensorDictBase | None = None,
        *,
        weights: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Importance weights multiply each loss before the mean over the batch, which TorchRL divides by their sum."""
        self._refuse_empty(loss.shape)
        if weights is not None:
            loss = loss * weights.reshape(loss.shape)
        reduced = super()._reduce_loss(loss, tensordict, **options)
        refuse_unless_finite(reduced, LOSS_FAULT)
        return reduced


def _as_list(key: NestedKey | list[NestedKey]) -> list[NestedKey]:
    """The keys of a composite action, or of a plain one."""
    return [unravel_key(each) for each in (key if isinstance(key, list) else [key])]
