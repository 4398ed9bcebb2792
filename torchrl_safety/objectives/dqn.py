"""Value losses for discrete actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictParams, dispatch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.objectives import LossModule

from torchrl_safety.objectives.backups import Backup, DiscountedReturnBackup
from torchrl_safety.objectives.categorical import project_categorical
from torchrl_safety.objectives.clamped_affine import ClampedAffine
from torchrl_safety.objectives.returns import skip_invalid
from torchrl_safety.objectives.signals import next_key, read, read_steps, refuse_unless, steps_key

_NETWORK_REMEDY = (
    "Give the loss a network that writes it (RainbowNetwork does), or name its key with loss.set_keys(...)"
)

_INPUT_REMEDY = (
    "It is an input of the network; n-step windows hold it below 'steps' if the NStepTransform has it among its signals"
)

_LOSS_FAULT = (
    "the loss is NaN or inf, because the network's output is; check the observations, lower the learning rate or clip "
    "the gradient"
)

Place = Callable[[NestedKey], NestedKey]


class CategoricalDQNLoss(LossModule):
    r"""Cross-entropy between the value distribution and its categorical target, for any backup (C51, Rainbow).

    Every atom :math:`z_j` of the next distribution is pushed through the backup's map, composed over the steps of an
    n-step window if the batch holds one, and projected onto the support:
    :math:`L = \frac1B \sum_i w_i\, \mathrm{CE}(m_i, p_i)`, :math:`m = \Pi\,(F_0 \circ \dots \circ F_{k-1})(z)`, where
    :math:`w` are the importance weights of a prioritized batch. Priorities (unweighted) go to ``"td_error"``.
    Sources: Bellemare et al. 2017, alg. 1; Hessel et al. 2018; the backups' own.

    Args:
        value_network: writes logits `[*B, A, N]` (``"value_logits"``) and action values `[*B, A]` (``"action_value"``).
        backup: the problem; an ordinary return by default.
        gamma: discount; a buffer that a schedule may assign to (``loss.gamma = 0.999``).
        double: choose the next action with the online network, evaluate it with the target network.
        n_step: for windows, ``"last"`` uses their end, ``"best"`` the largest of the 1..k-step targets (deterministic
            dynamics only; needs the network's inputs among the transform's `signals`).
        priority: ``"kl"`` for :math:`KL(m \| p)`, or ``"cross_entropy"``.
        bootstrap_on_truncation: whether a truncated step continues into the next value; else it counts as terminal.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        support: the atoms `[N]`; the network's ``support`` buffer if absent.

    Raises:
        ValueError: for an unknown option, no support, an empty batch, an action that is no index, a discount out of
            range, or a margin or loss that is NaN or infinite.
        KeyError: when a batch lacks a key; there are no defaults.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_safety.modules import RainbowNetwork
        >>> from torchrl_safety.objectives import AvoidBackup, CategoricalDQNLoss
        >>> loss = CategoricalDQNLoss(RainbowNetwork(2, 3, support=(-1.0, 1.0)), backup=AvoidBackup())
        >>> flag = torch.zeros(4, 1, dtype=torch.bool)
        >>> after = {
        ...     "observation": torch.rand(4, 2),
        ...     "safety_margin": torch.rand(4, 1),
        ...     "terminated": flag,
        ...     "done": flag,
        ... }
        >>> batch = {"observation": torch.rand(4, 2), "action": torch.tensor([0, 1, 2, 0]), "next": after}
        >>> loss(TensorDict(batch, [4]))["loss"].shape
        torch.Size([])
    """

    @dataclass
    class _AcceptedKeys:
        """Keys that `set_keys` can rename; signals and flags stand below ``"next"`` or ``"steps"``."""

        action: NestedKey = "action"
        value_logits: NestedKey = "value_logits"
        action_value: NestedKey = "action_value"
        priority: NestedKey = "td_error"
        priority_weight: NestedKey = "priority_weight"
        safety_margin: NestedKey = "safety_margin"
        target_margin: NestedKey = "target_margin"
        reward: NestedKey = "reward"
        terminated: NestedKey = "terminated"
        done: NestedKey = "done"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    out_keys = ["loss", "clipped_mass"]  # noqa: RUF012
    _schedulable_buffers = frozenset({"gamma"})

    value_network: TensorDictModuleBase
    value_network_params: TensorDictParams
    target_value_network_params: TensorDictParams
    gamma: Tensor
    support: Tensor

    def __init__(
        self,
        value_network: TensorDictModuleBase,
        *,
        backup: Backup | None = None,
        gamma: float = 0.99,
        double: bool = True,
        n_step: str = "last",
        priority: str = "kl",
        bootstrap_on_truncation: bool = False,
        reduction: str = "mean",
        support: Tensor | None = None,
    ) -> None:
        super().__init__()
        if backup is not None and not isinstance(backup, Backup):
            raise ValueError(f"backup is {backup!r}; give an instance of a Backup, e.g. AvoidBackup()")
        _check_choice("n_step", n_step, ("last", "best"))
        _check_choice("priority", priority, ("kl", "cross_entropy"))
        _check_choice("reduction", reduction, ("mean", "sum", "none"))
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma is {gamma}; a discount lies in [0, 1]")
        self.backup = DiscountedReturnBackup() if backup is None else backup
        self.double, self.n_step, self.priority, self.reduction = double, n_step, priority, reduction
        self.bootstrap_on_truncation = bootstrap_on_truncation
        # Double, because 1 - gamma is what counts near 1; a 0-d tensor does not promote the batch.
        self.register_buffer("gamma", torch.tensor(gamma, dtype=torch.float64, device="cpu"))
        if support is None:
            found = [buffer for name, buffer in value_network.named_buffers() if name.split(".")[-1] == "support"]
            if len(found) != 1:
                raise ValueError(f"the network has {len(found)} buffers named 'support', not one; pass support=atoms")
            support = found[0]
        self.register_buffer("support", _check_support(support).detach().clone())
        self.convert_to_functional(value_network, "value_network", create_target_params=True)

    @property
    def in_keys(self) -> list[NestedKey]:
        keys = self.tensor_keys
        after = [*self.value_network.in_keys, *self._signal_keys().values(), keys.terminated, keys.done]
        return [*self.value_network.in_keys, keys.action, *(next_key(key) for key in after)]

    def _signal_keys(self) -> dict[str, NestedKey]:
        return {name: getattr(self.tensor_keys, name) for name in self.backup.signals}

    def _forward_value_estimator_keys(self, **kwargs: NestedKey) -> None:
        """There is no estimator beneath this loss: the backup is the estimator."""

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        keys = self.tensor_keys
        if self.reduction == "mean" and not tensordict.batch_size.numel():
            raise ValueError(
                f"the batch {list(tensordict.batch_size)} holds no transition, so its mean loss is undefined"
            )
        with torch.no_grad():
            target, clipped = self.target_distribution(tensordict)
        source = self._network_input(tensordict, lambda key: key)
        logits = read(self._evaluate(self.value_network_params, source), keys.value_logits, _NETWORK_REMEDY)
        action = read(tensordict, keys.action, "Store the action index (a Categorical action) of each transition")
        log_probs = _gather_action(logits, _action_index(logits, action)).log_softmax(-1)
        cross_entropy = -(target * log_probs).sum(-1)
        error = cross_entropy.detach()
        refuse_unless(torch.isfinite(error).all(), _LOSS_FAULT)
        if self.priority == "kl":
            error = (error + torch.special.entr(target).sum(-1).neg()).clamp_min(0)
        tensordict.set(keys.priority, error.unsqueeze(-1))
        weight = tensordict.get(keys.priority_weight, None)
        if weight is not None:
            cross_entropy = cross_entropy * weight.reshape(cross_entropy.shape)
        return TensorDict({"loss": self._reduce_loss(cross_entropy, tensordict), "clipped_mass": clipped})

    def target_distribution(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """The projected target `[*B, N]` of each transition or window, and the share of mass beyond the support."""
        keys = self.tensor_keys
        refuse_unless(
            ((self.gamma >= 0) & (self.gamma <= 1)).all(), "loss.gamma lies outside [0, 1]; assign a discount"
        )
        signals, ended, valid = read_steps(
            tensordict,
            self._signal_keys(),
            terminated=keys.terminated,
            done=keys.done,
            bootstrap=self.bootstrap_on_truncation,
        )
        maps = skip_invalid(self.backup.step_map(signals, gamma=self.gamma, terminated=ended), valid)
        if self.n_step == "best" and valid is not None:
            maps = maps.scan()
            probs = self._greedy_probs(tensordict, steps_key, maps)
            atoms = maps(self.support.expand_as(probs))
            means = (probs * atoms).sum(-1, keepdim=True).masked_fill(~valid, -torch.inf)
            best = means.argmax(-2, keepdim=True).expand_as(atoms[..., :1, :])
            probs, atoms = probs.gather(-2, best).squeeze(-2), atoms.gather(-2, best).squeeze(-2)
        else:
            maps = maps.compose()
            probs = self._greedy_probs(tensordict, next_key, maps)
            atoms = maps(self.support.expand_as(probs))
        slack = 1e-4 * (self.support[1] - self.support[0])  # rounding at a margin that equals an end clips nothing
        outside = (atoms < self.support[0] - slack) | (atoms > self.support[-1] + slack)
        return project_categorical(atoms, probs, self.support), (probs * outside).sum(-1).mean()

    def _greedy_probs(self, tensordict: TensorDictBase, place: Place, maps: ClampedAffine) -> Tensor:
        """The target network's distribution of the greedy action in the states that `place` holds."""
        source = self._network_input(tensordict, place)
        evaluated = self._evaluate(self.target_value_network_params, source)
        chooser = self._evaluate(self.value_network_params, source) if self.double else evaluated
        values = read(chooser, self.tensor_keys.action_value, _NETWORK_REMEDY)
        logits = read(evaluated, self.tensor_keys.value_logits, _NETWORK_REMEDY)
        if logits.shape[-1:] != self.support.shape:
            raise ValueError(
                f"the network's logits {list(logits.shape)} do not fit the support of {len(self.support)} atoms: give "
                "the loss the support of its network"
            )
        probs = _gather_action(logits, values.argmax(-1)).softmax(-1)
        # A constant map has one image under any distribution: what follows a terminal step may even be NaN.
        return torch.where(maps.slope == 0, 1 / probs.shape[-1], probs)

    def _network_input(self, tensordict: TensorDictBase, place: Place) -> TensorDictBase:
        keys = self.value_network.in_keys
        return TensorDict({key: read(tensordict, place(key), _INPUT_REMEDY) for key in keys}, tensordict.batch_size)

    def _evaluate(self, params: TensorDictParams, source: TensorDictBase) -> TensorDictBase:
        # Otherwise the target parameters come back from the network as new ones that require gradients.
        with params.to_module(self.value_network, preserve_module_state=False):
            return self.value_network(source.copy())


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; choose one of {list(choices)}")


def _check_support(support: Tensor) -> Tensor:
    fault = None
    if support.dim() != 1 or support.shape[0] < 2 or not support.is_floating_point():
        fault = f"has shape {list(support.shape)} and type {support.dtype}"
    elif not support.is_meta:  # which has no values to look at
        steps = support.double().diff()
        slack = 1e-3 * steps.mean() + 4 * torch.finfo(support.dtype).eps * support.abs().max()
        if not (steps > 0).all() or (steps - steps.mean()).abs().max() > slack:
            fault = f"is {support.tolist()}"
    if fault is not None:
        raise ValueError(
            f"the support {fault}; give increasing, evenly spaced atoms `[N]`, e.g. torch.linspace(vmin, vmax, 51)"
        )
    return support


def _action_index(logits: Tensor, action: Tensor) -> Tensor:
    """`action`, an index of `logits` `[*B, A, N]` as `[*B]` or `[*B, 1]`, checked and without the last dimension."""
    batch, actions = logits.shape[:-2], logits.shape[-2]
    is_index = not (action.is_floating_point() or action.dtype == torch.bool)
    if not is_index or (action.shape != batch and action.shape != (*batch, 1)):
        raise ValueError(
            f"actions of shape {list(action.shape)} and type {action.dtype} do not index logits {list(logits.shape)}: "
            "give one integer per transition, `[*B]` or `[*B, 1]` (a Categorical action spec, not one-hot)"
        )
    refuse_unless(
        ((action >= 0) & (action < actions)).all(),
        f"an action lies outside 0..{actions - 1}: the network has {actions} actions; build it with those of the env",
    )
    return action.reshape(batch).long()


def _gather_action(logits: Tensor, index: Tensor) -> Tensor:
    """The row of `logits` `[*B, A, N]` of an action index `[*B]`."""
    return logits.gather(-2, index[..., None, None].expand(*index.shape, 1, logits.shape[-1])).squeeze(-2)
