"""Value estimators that take a backup: TD(0), n-step and TD(λ), for the losses of this package and TorchRL's own.

Each is a :class:`~torchrl.objectives.value.ValueEstimatorBase` registered under a member of :class:`BackupEstimators`.
They know a problem only by its step map, and TorchRL's seams only by `value_estimate`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.objectives.utils import register_value_estimator
from torchrl.objectives.value import TD0Estimator, ValueEstimatorBase

from torchrl_safety.objectives.backups import Backup
from torchrl_safety.objectives.clamped_affine import ClampedAffine
from torchrl_safety.objectives.returns import lambda_return, n_step_return, skip_invalid
from torchrl_safety.objectives.signals import STEPS, check_number, next_key, read, read_steps, refuse_unless

_VALUE_REMEDY = (
    "Give the estimator a value network that writes it, pass next_value=..., or name its key with set_keys(...)"
)

_INPUT_REMEDY = "The value network reads it in this state and in the next one; collect both, the true next observation"


class BackupEstimators(Enum):
    """Names of the estimators for ``loss.make_value_estimator(...)``; TorchRL also takes them as lowercase strings."""

    BACKUP_TD0 = "Backup TD(0) estimate"
    BACKUP_NSTEP = "Backup n-step estimate"
    BACKUP_TDLAMBDA = "Backup TD(lambda) estimate"


class BackupEstimator(TD0Estimator):
    r"""What the three estimators share: the backup, its signals' keys, the discount and the meaning of an end.

    The target of a step is :math:`F(V(s'))`, :math:`F` the backup's map with the signals read at :math:`s'`. A
    terminated step is a constant. A truncated step counts as terminal too, unless `bootstrap_on_truncation`: then it
    continues into the value of the true final observation.

    Args:
        backup: the problem.
        gamma: discount in [0, 1]; a float64 buffer, in which 1 - gamma stays exact near 1.
        value_network: writes ``"state_value"`` `[*B, 1]`; may be absent where a loss gives the next value.
        bootstrap_on_truncation: whether a truncated step continues into the next value.
        differentiable: whether gradients flow through the targets; else next values are detached.
        **settings: further arguments of TorchRL's estimators, e.g. ``skip_existing`` or ``deactivate_vmap``.

    Raises:
        ValueError: for a discount out of range, something that is no backup, or a setting that would change margins
            (``average_rewards``) or replace true final observations (``shifted``).
    """

    @dataclass
    class _AcceptedKeys(ValueEstimatorBase._AcceptedKeys):
        """Keys that `set_keys` can rename; repeated, because TorchRL looks for them in this very class."""

        advantage: NestedKey = "advantage"
        value_target: NestedKey = "value_target"
        value: NestedKey = "state_value"
        reward: NestedKey = "reward"
        done: NestedKey = "done"
        terminated: NestedKey = "terminated"
        steps_to_next_obs: NestedKey = "steps_to_next_obs"
        sample_log_prob: NestedKey | None = None
        safety_margin: NestedKey = "safety_margin"
        target_margin: NestedKey = "target_margin"

    default_keys = _AcceptedKeys
    tensor_keys: Any
    gamma: Tensor

    def __init__(
        self,
        *,
        backup: Backup | None = None,
        gamma: float | Tensor = 0.99,
        value_network: TensorDictModuleBase | None = None,
        bootstrap_on_truncation: bool = False,
        differentiable: bool = False,
        **settings: Any,
    ) -> None:
        for name, why in (
            ("average_rewards", "standardised rewards are no margins"),
            ("shifted", "values of a shifted observation are not those of the true final one"),
        ):
            if settings.pop(name, False):
                raise ValueError(f"{name} is true, but {why}; leave it out")
        if not isinstance(backup, Backup):
            raise ValueError(f"backup is {backup!r}; give an instance of a Backup, e.g. AvoidBackup()")
        if not isinstance(bootstrap_on_truncation, bool):
            raise ValueError(f"bootstrap_on_truncation is {bootstrap_on_truncation!r}; give True or False")
        discount = check_number("gamma", gamma, 0, 1)
        super().__init__(gamma=discount, value_network=value_network, differentiable=differentiable, **settings)
        self.backup, self.bootstrap_on_truncation = backup, bootstrap_on_truncation
        # Double, because 1 - gamma is what counts near 1; a 0-d tensor does not promote the batch.
        self.gamma = torch.tensor(discount, dtype=torch.float64, device="cpu")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BackupEstimator:
        exact = {name: buffer for name, buffer in self.named_buffers(recurse=False) if name in ("gamma", "lmbda")}
        super()._apply(fn, recurse)
        # A cast of the loss moves these along with it, but not to its precision, in which 1 - gamma may be 0.
        for name, value in exact.items():
            moved = getattr(self, name)
            if not moved.is_meta and not value.is_meta and moved.dtype != value.dtype:
                setattr(self, name, value.to(moved.device))
        return self

    def signal_keys(self) -> dict[str, NestedKey]:
        """Signal name -> key, of the signals that the backup reads."""
        return {name: getattr(self.tensor_keys, name) for name in self.backup.signals}

    def value_estimate(
        self,
        tensordict: TensorDictBase,
        target_params: TensorDictBase | None = None,
        next_value: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """The target of each step; what a kind of estimator is."""
        raise NotImplementedError(
            f"{type(self).__name__} has no target of its own; use TD0BackupEstimator, NStepBackupEstimator or "
            "TDLambdaBackupEstimator"
        )

    @dispatch
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
    ) -> TensorDictBase:
        """Write the target and the advantage, the target less the value, into `tensordict`; the values too."""
        if self.value_network is None:
            read(tensordict, self.tensor_keys.value, _VALUE_REMEDY)
        else:
            for key in self.value_network.in_keys:
                if tensordict.get(next_key(key), None) is not None:
                    read(tensordict, key, _INPUT_REMEDY)
            self._check_next_inputs(tensordict)
        return super().forward(tensordict, params=params, target_params=target_params)

    def _check_next_inputs(self, tensordict: TensorDictBase) -> None:
        """Refuse next observations that are missing, or NaN where the target depends on them."""
        keys = self.tensor_keys
        ended = tensordict.get(next_key(keys.terminated if self.bootstrap_on_truncation else keys.done), None)
        for key in self.value_network.in_keys:
            if tensordict.get(key, None) is None:
                continue  # the network may do without; if not, it says so
            after = read(tensordict, next_key(key), _INPUT_REMEDY)
            if ended is not None and after.is_floating_point():
                nan = after.isnan().flatten(tensordict.ndim).any(-1) & ~ended.flatten(tensordict.ndim).all(-1)
                refuse_unless(
                    ~nan.any(),
                    f"{next_key(key)!r} is NaN at a step that goes on into its value; collect the true next "
                    "observation (a Collector with compact_obs=True leaves it out)",
                )

    @staticmethod
    def _sanitize_next_obs_nan(data: TensorDictBase, in_keys: list[NestedKey]) -> TensorDictBase:
        # TorchRL's puts the present observation in the place of a NaN one, and waits for the accelerator to look. Here
        # a NaN is refused where it counts, and behind an end the map ignores it.
        return data

    @property
    def in_keys(self) -> list[NestedKey]:
        keys = self.tensor_keys
        inputs = [keys.value] if self.value_network is None else list(self.value_network.in_keys)
        after = [*inputs, *self.signal_keys().values(), keys.terminated, keys.done]
        return [*inputs, *(next_key(key) for key in after)]

    def step_maps(self, tensordict: TensorDictBase) -> tuple[ClampedAffine, Tensor | None]:
        """The backup's map of each step, fields `[*B, n, 1]`, and which steps are valid (None: all).

        A transition counts as a window of one step; invalid steps of a window are the identity.
        """
        keys = self.tensor_keys
        if tensordict.get(keys.steps_to_next_obs, None) is not None:
            raise ValueError(
                f"the batch holds {keys.steps_to_next_obs!r}, the windows of TorchRL's MultiStepTransform: they sum "
                "rewards, which cannot be undone for margins; use torchrl_safety.data.NStepTransform"
            )
        signals, ended, valid = read_steps(
            tensordict,
            self.signal_keys(),
            terminated=keys.terminated,
            done=keys.done,
            bootstrap=self.bootstrap_on_truncation,
        )
        return skip_invalid(self.backup.step_map(signals, gamma=self.gamma, terminated=ended), valid), valid

    def _value_after(
        self, tensordict: TensorDictBase, target_params: TensorDictBase | None, next_value: Tensor | None
    ) -> Tensor:
        if next_value is None:
            if self.value_network is not None:
                self._check_next_inputs(tensordict)
            next_value = self._next_value(tensordict, target_params, kwargs={})
        if next_value is None:
            next_value = read(tensordict, next_key(self.tensor_keys.value), _VALUE_REMEDY)
        return next_value if self.differentiable else next_value.detach()


@register_value_estimator(BackupEstimators.BACKUP_NSTEP, default_kwargs={"gamma": 0.99})
class NStepBackupEstimator(BackupEstimator):
    r"""The n-step target :math:`(F_0 \circ \dots \circ F_{k-1})(V(s_k))` of windows; TD(0) on transitions.

    Windows are those of :class:`~torchrl_safety.data.NStepTransform`: raw signals below ``"steps"``, so that the
    discount is today's. See :class:`BackupEstimator` for the arguments, and MATH of
    :class:`~torchrl_safety.objectives.ClampedAffine` for the composition.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_safety.objectives import AvoidBackup, NStepBackupEstimator
        >>> estimator = NStepBackupEstimator(backup=AvoidBackup(), gamma=1.0)
        >>> flag = torch.zeros(1, 1, dtype=torch.bool)
        >>> steps = {"safety_margin": torch.tensor([[[0.5], [0.3]]]), "valid": torch.ones(1, 2, 1, dtype=torch.bool)}
        >>> window = TensorDict({"steps": steps, "next": {"done": flag, "terminated": flag}}, [1])
        >>> estimator.value_estimate(window, next_value=torch.tensor([[0.4]]))
        tensor([[0.3000]])
    """

    def value_estimate(
        self,
        tensordict: TensorDictBase,
        target_params: TensorDictBase | None = None,
        next_value: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """The target `[*B, 1]` of each transition or window; `next_value` `[*B, 1]` is that of its last state."""
        maps, _valid = self.step_maps(tensordict)
        return n_step_return(maps, self._value_after(tensordict, target_params, next_value))

    def best_estimate(self, tensordict: TensorDictBase, values: Tensor) -> Tensor:
        r"""The largest of the 1..k-step targets, :math:`\max_k (F_0 \circ \dots \circ F_{k-1})(V(s_k))` `[*B, 1]`.

        Each is a lower bound of the true value under deterministic dynamics and a single player, so the largest is the
        tightest. `values` `[*B, n, 1]` are those of the states after each step.
        """
        maps, valid = self.step_maps(tensordict)
        targets = maps.scan()(values)
        if valid is not None:
            targets = targets.masked_fill(~valid, -torch.inf)
        return targets.amax(-2)


@register_value_estimator(BackupEstimators.BACKUP_TD0, default_kwargs={"gamma": 0.99})
class TD0BackupEstimator(BackupEstimator):
    r"""The one-step target :math:`F(V(s'))` of transitions. See :class:`BackupEstimator` for the arguments.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_safety.objectives import AvoidBackup, TD0BackupEstimator
        >>> estimator = TD0BackupEstimator(backup=AvoidBackup(), gamma=0.5)
        >>> flag = torch.zeros(1, 1, dtype=torch.bool)
        >>> after = {"safety_margin": torch.tensor([[0.5]]), "done": flag, "terminated": flag}
        >>> estimator.value_estimate(TensorDict({"next": after}, [1]), next_value=torch.tensor([[-1.0]]))
        tensor([[-0.2500]])
    """

    def value_estimate(
        self,
        tensordict: TensorDictBase,
        target_params: TensorDictBase | None = None,
        next_value: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """The target `[*B, 1]` of each transition; `next_value` `[*B, 1]`."""
        _refuse_windows(tensordict, "TD(0)")
        maps, _valid = self.step_maps(tensordict)
        return n_step_return(maps, self._value_after(tensordict, target_params, next_value))


@register_value_estimator(BackupEstimators.BACKUP_TDLAMBDA, default_kwargs={"gamma": 0.99, "lmbda": 0.95})
class TDLambdaBackupEstimator(BackupEstimator):
    r"""The :math:`\lambda`-return :math:`G_t = F_t((1-\lambda) V_{t+1} + \lambda G_{t+1})` of trajectories `[*B, T]`.

    :meth:`forward` writes it as ``"value_target"`` and :math:`G_t - V_t` as ``"advantage"``. It mixes inside the
    operator (see :func:`~torchrl_safety.objectives.lambda_return`), unlike generalised advantage estimation, whose sum
    of one-step errors leaves the range of the margins.

    Args:
        lmbda: :math:`\lambda \in [0, 1]`, a float64 buffer.
        time_dim: which batch dimension is time; by default the one named ``"time"``, else the last of at least two.
        **settings: see :class:`BackupEstimator`.

    Raises:
        ValueError: for a batch with no time dimension, such as a flat replay batch, and for n-step windows.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_safety.objectives import AvoidBackup, TDLambdaBackupEstimator
        >>> estimator = TDLambdaBackupEstimator(backup=AvoidBackup(), gamma=1.0, lmbda=1.0)
        >>> flag = torch.zeros(1, 2, 1, dtype=torch.bool)
        >>> after = {"safety_margin": torch.tensor([[[0.5], [0.2]]]), "done": flag, "terminated": flag}
        >>> estimator.value_estimate(TensorDict({"next": after}, [1, 2]), next_value=torch.ones(1, 2, 1))
        tensor([[[0.2000],
                 [0.2000]]])
    """

    lmbda: Tensor

    def __init__(self, *, lmbda: float | Tensor = 0.95, time_dim: int | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.register_buffer("lmbda", torch.tensor(check_number("lmbda", lmbda, 0, 1), dtype=torch.float64))
        self.time_dim = time_dim

    def value_estimate(
        self,
        tensordict: TensorDictBase,
        target_params: TensorDictBase | None = None,
        next_value: Tensor | None = None,
        time_dim: int | None = None,
        **_: Any,
    ) -> Tensor:
        r"""The :math:`\lambda`-return `[*B, T, 1]`; `next_value` `[*B, T, 1]` is that of each true next observation."""
        _refuse_windows(tensordict, "TD(lambda)")
        done = read(tensordict, next_key(self.tensor_keys.done), "Collect it with the environment's flags")
        time = self._find_time(tensordict, done, time_dim)
        if tensordict.ndim == 1 and self.value_network is not None:
            self._check_order(tensordict, done)
        maps, _valid = self.step_maps(tensordict)
        after = self._value_after(tensordict, target_params, next_value)
        return lambda_return(maps.compose(), after, lmbda=self.lmbda, done=done, time_dim=time)

    def _check_order(self, tensordict: TensorDictBase, done: Tensor) -> None:
        """Refuse a shuffled trajectory: indexing leaves its dimension the name 'time'."""
        goes_on = ~done[:-1].flatten(1).any(-1)
        for key in self.value_network.in_keys:
            here, after = tensordict.get(key, None), tensordict.get(next_key(key), None)
            if here is not None and after is not None:
                apart = (here[1:] != after[:-1]).flatten(1).any(-1)
                refuse_unless(
                    ~(apart & goes_on).any(),
                    f"the batch {list(tensordict.batch_size)} is no trajectory: {next_key(key)!r} of a step that goes "
                    f"on is not {key!r} of the step after it. Compute targets and advantages before the batch is "
                    "shuffled",
                )

    def _find_time(self, tensordict: TensorDictBase, done: Tensor, time_dim: int | None) -> int:
        chosen = self.time_dim if time_dim is None else time_dim
        # A batch made of keyword arguments takes the trailing 1 of columns for one more of its dimensions.
        dims = min(tensordict.ndim, done.ndim - 1)
        if chosen is not None:
            if not -dims <= chosen < dims:
                raise ValueError(f"time_dim is {chosen}, the batch {list(tensordict.batch_size)} has {dims} dimensions")
            return chosen % dims
        if tensordict._has_names() and "time" in tensordict.names:
            return tensordict.names.index("time")
        if dims < 2:
            raise ValueError(
                f"a batch {list(tensordict.batch_size)} is no trajectory: a lambda-return needs `[*B, T]` with time "
                "last (or a dimension named 'time', or time_dim=). Compute targets and advantages before the batch is "
                "flattened or shuffled; for replay batches use NStepBackupEstimator"
            )
        return dims - 1


def _refuse_windows(tensordict: TensorDictBase, name: str) -> None:
    if STEPS in tensordict:
        raise ValueError(
            f"the batch holds n-step windows ({STEPS!r}), which {name} would misread: use NStepBackupEstimator, or "
            "leave out the NStepTransform"
        )
