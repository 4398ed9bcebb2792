"""Value losses for discrete actions: the scalar and the categorical one, for any backup."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictParams, dispatch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.objectives import LossModule
from torchrl.objectives.utils import distance_loss

from torchrl_safety.objectives.backup_loss import (
    ACTION_REMEDY,
    DISTANCES,
    INPUT_REMEDY,
    LOSS_FAULT,
    BackupLoss,
    Place,
    check_index,
    here,
    network_input,
    reach_avoid,
)
from torchrl_safety.objectives.backups import Backup, DiscountedReturnBackup
from torchrl_safety.objectives.categorical import node_positions, project_positions
from torchrl_safety.objectives.parameter_swap import ParameterSwap
from torchrl_safety.objectives.returns import n_step_return
from torchrl_safety.objectives.signals import (
    check_choice,
    next_key,
    read,
    refuse_outside,
    refuse_unless_finite,
    steps_key,
)

_NETWORK_REMEDY = (
    "Give the loss a network that writes it (RainbowNetwork does), or name its key with loss.set_keys(...)"
)

_KEY_OF = {"logits": "value_logits", "action_values": "action_value"}
"""Method of a network -> name of the key under which it writes the same."""


class _ActionValueLoss(BackupLoss, LossModule):
    """Everything but the form of the value: [*B, A, N] with the N numbers that describe one action's value."""

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
    network_names = ("value_network",)
    value_network: TensorDictModuleBase
    value_network_params: TensorDictParams
    target_value_network_params: TensorDictParams

    def __init__(
        self,
        value_network: TensorDictModuleBase,
        *,
        backup: Backup | None,
        terminal_type: str | None,
        double: bool,
        reduction: str,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.double, self.reduction = double, check_choice("reduction", reduction, ("mean", "sum", "none"))
        self.convert_to_functional(value_network, "value_network", create_target_params=True)
        self._swap = ParameterSwap(value_network)
        self._use_backup(backup, terminal_type, **settings)

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        keys = self.tensor_keys
        with torch.no_grad():
            target, report = self._target(tensordict)
        found = self._learned(self.value_network_params, tensordict, here)
        loss, priority = self._distance(self._played(found, tensordict), target)
        refuse_unless_finite(priority, LOSS_FAULT)
        tensordict.set(keys.priority, priority.unsqueeze(-1))
        weight = tensordict.get(keys.priority_weight, None)
        return TensorDict({"loss": self._reduce_loss(loss, tensordict, weights=weight), **report})

    def _target(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """The target `[*B, N]`, and what to report beside the loss."""
        raise NotImplementedError

    def _form(self, evaluated: TensorDictBase) -> Tensor:
        """The network's output `[*, A, N]` in which the value is learned."""
        raise NotImplementedError

    def _distance(self, found: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Loss `[*B]` of `[*B, N]` against its target, and the priority `[*B]`, which has no gradient."""
        raise NotImplementedError

    def _greedy_next(self, tensordict: TensorDictBase, place: Place) -> Tensor:
        """The target network's output `[*, N]` for the greedy action in the states that `place` names."""
        if self.double:
            found = self._learned(self.target_value_network_params, tensordict, place)
            values = self._asked("action_values", -1, self.value_network_params, tensordict, place)
        else:
            evaluated = self._evaluate(self.target_value_network_params, tensordict, place)
            found, values = self._form(evaluated), read(evaluated, self.tensor_keys.action_value, _NETWORK_REMEDY)
        return self._greedy(found, values, tensordict)

    def _played(self, found: Tensor, tensordict: TensorDictBase) -> Tensor:
        """The row `[*B, N]` of the network's output that belongs to the stored action."""
        return gather_action(found, action_index(found, read(tensordict, self.tensor_keys.action, ACTION_REMEDY)))

    def _greedy(self, found: Tensor, values: Tensor, tensordict: TensorDictBase) -> Tensor:
        """The row `[*, N]` of the network's output that belongs to the best action by `values`."""
        return gather_action(found, values.argmax(-1))

    def _learned(self, params: TensorDictParams, tensordict: TensorDictBase, place: Place) -> Tensor:
        """The network's output `[*, A, N]` in which the value is learned, of the states that `place` names."""
        raise NotImplementedError

    def _asked(
        self, output: str, number: int, params: TensorDictParams, tensordict: TensorDictBase, place: Place
    ) -> Tensor:
        """One output of the network, of the states that `place` names, and nothing else where the network can do that.

        `output` is the method that gives it, `number` its place among the network's `out_keys`.
        """
        network, key = self.value_network, getattr(self.tensor_keys, _KEY_OF[output])
        method = getattr(network, output, None)
        if method is None or network.out_keys[number] != key:
            return read(self._evaluate(params, tensordict, place), key, _NETWORK_REMEDY)
        inputs = [read(tensordict, place(key), INPUT_REMEDY) for key in self._state_keys()]
        with self._swapped(params):
            return method(*inputs)

    def _swapped(self, params: TensorDictParams) -> AbstractContextManager:
        if self._swap.network is not self.value_network:
            self._swap = ParameterSwap(self.value_network)
        return self._swap(params)

    def _evaluate(self, params: TensorDictParams, tensordict: TensorDictBase, place: Place) -> TensorDictBase:
        source = network_input(tensordict, self._state_keys(), place)
        with self._swapped(params):
            return self.value_network(source)


class _ScalarDQN(_ActionValueLoss):
    out_keys = ["loss"]  # noqa: RUF012

    def __init__(
        self,
        value_network: TensorDictModuleBase,
        *,
        backup: Backup | None = None,
        terminal_type: str | None = None,
        gamma: float = 0.99,
        double: bool = True,
        n_step: str = "last",
        loss_function: str = "smooth_l1",
        bootstrap_on_truncation: bool = False,
        reduction: str = "mean",
    ) -> None:
        super().__init__(
            value_network,
            backup=backup,
            terminal_type=terminal_type,
            double=double,
            reduction=reduction,
            n_step=n_step,
            gamma=gamma,
            bootstrap_on_truncation=bootstrap_on_truncation,
        )
        self.loss_function = check_choice("loss_function", loss_function, DISTANCES)

    def _target(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        return self._window_target(tensordict, lambda place: self._greedy_next(tensordict, place)), {}

    def _form(self, evaluated: TensorDictBase) -> Tensor:
        return read(evaluated, self.tensor_keys.action_value, _NETWORK_REMEDY).unsqueeze(-1)

    def _learned(self, params: TensorDictParams, tensordict: TensorDictBase, place: Place) -> Tensor:
        return self._asked("action_values", -1, params, tensordict, place).unsqueeze(-1)

    def _distance(self, found: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        loss = distance_loss(found, target, loss_function=self.loss_function)
        return loss.squeeze(-1), (found.detach() - target).abs().squeeze(-1)


class SafetyDQNLoss(_ScalarDQN):
    r"""Double DQN for the avoid problem, or with any other backup.

    :math:`y = F(\bar Q(s', \arg\max_a Q(s', a)))`, :math:`F` the backup's map, composed over the steps of an n-step
    window if the batch holds one; loss :math:`\frac1B \sum_i w_i\, \ell(Q(s_i, a_i) - y_i)`, :math:`w` the importance
    weights of a prioritized batch. Priorities :math:`|Q - y|` go to ``"td_error"``.
    Sources: van Hasselt et al. 2016; Fisac et al. 2019.

    Args:
        value_network: writes ``"action_value"`` `[*B, A]`, in the unit of the margin. A method `action_values` of its
            inputs, as :class:`~torchrl_safety.modules.RainbowNetwork` has, is called in its place.
        backup: the problem; :class:`AvoidBackup` by default.
        terminal_type: ``"all"`` or ``"g"``, see :class:`ReachAvoidBackup`; without effect here.
        gamma: discount; ``loss.gamma = 0.999`` moves it.
        double: choose the next action with the online network, evaluate it with the target network.
        n_step: for windows, ``"last"`` uses their end, ``"best"`` the largest of the 1..k-step targets (deterministic
            dynamics only; needs the network's inputs among the transform's `signals`).
        loss_function: :math:`\ell`: ``"smooth_l1"``, ``"l2"`` or ``"l1"``.
        bootstrap_on_truncation: whether a truncated step continues into the next value; else it counts as terminal.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Raises:
        ValueError: for an option out of range, an empty batch, an action that is no index, or a margin or loss that is
            NaN or infinite.
        KeyError: when a batch lacks a key; there are no defaults.

    Example:
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.modules import MLP
        >>> from torchrl_safety.envs import DoubleIntegratorEnv
        >>> from torchrl_safety.objectives import SafetyDQNLoss
        >>> net = MLP(in_features=2, out_features=3, num_cells=[8])
        >>> loss = SafetyDQNLoss(TensorDictModule(net, ["observation"], ["action_value"]))
        >>> loss(DoubleIntegratorEnv(4).rollout(3).reshape(-1))["loss"].shape
        torch.Size([])
    """


class ReachAvoidDQNLoss(_ScalarDQN):
    r"""Double DQN for the reach-avoid problem.

    :class:`SafetyDQNLoss` with :class:`ReachAvoidBackup` as the default backup and nothing else changed.

    Args:
        value_network: see :class:`SafetyDQNLoss`, as for everything else.
        terminal_type: the value of a terminal step is :math:`\min(l, g)` (``"all"``, the default) or :math:`g`
            (``"g"``).

    Example:
        >>> from torchrl_safety.objectives import ReachAvoidDQNLoss
        >>> ReachAvoidDQNLoss.default_backup("g")
        ReachAvoidBackup(terminal_type='g')
    """

    default_backup = staticmethod(reach_avoid)


def _ordinary_return(terminal_type: str) -> Backup:
    return DiscountedReturnBackup()


class CategoricalDQNLoss(_ActionValueLoss):
    r"""Cross-entropy between the value distribution and its categorical target, for any backup (C51, Rainbow).

    Every atom :math:`z_j` of the next distribution is pushed through the backup's map, composed over the steps of an
    n-step window if the batch holds one, and projected onto the support:
    :math:`L = \frac1B \sum_i w_i\, \mathrm{CE}(m_i, p_i)`, :math:`m = \Pi\,(F_0 \circ \dots \circ F_{k-1})(z)`, where
    :math:`w` are the importance weights of a prioritized batch. Priorities (unweighted) go to ``"td_error"``.
    Sources: Bellemare et al. 2017, alg. 1; Hessel et al. 2018; the backups' own.

    Args:
        value_network: writes logits `[*B, A, N]` (``"value_logits"``) and action values `[*B, A]` (``"action_value"``).
            If it has methods `logits` and `action_values` of its inputs, as
            :class:`~torchrl_safety.modules.RainbowNetwork` has, they are called where only one of the two is needed.
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

    out_keys = ["loss", "clipped_mass"]  # noqa: RUF012
    default_backup = staticmethod(_ordinary_return)
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
        super().__init__(
            value_network,
            backup=backup,
            terminal_type=None,
            double=double,
            reduction=reduction,
            n_step=n_step,
            gamma=gamma,
            bootstrap_on_truncation=bootstrap_on_truncation,
        )
        self.priority = check_choice("priority", priority, ("kl", "cross_entropy"))
        if support is None:
            found = [buffer for name, buffer in value_network.named_buffers() if name.split(".")[-1] == "support"]
            if len(found) != 1:
                raise ValueError(f"the network has {len(found)} buffers named 'support', not one; pass support=atoms")
            support = found[0]
        self.register_buffer("support", _check_support(support).detach().clone())

    def _target(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        target, clipped = self.target_distribution(tensordict)
        return target, {"clipped_mass": clipped}

    def _form(self, evaluated: TensorDictBase) -> Tensor:
        return read(evaluated, self.tensor_keys.value_logits, _NETWORK_REMEDY)

    def _learned(self, params: TensorDictParams, tensordict: TensorDictBase, place: Place) -> Tensor:
        return self._asked("logits", 0, params, tensordict, place)

    def _distance(self, found: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        cross_entropy = -(target * found.log_softmax(-1)).sum(-1)
        error = cross_entropy.detach()
        if self.priority == "kl":
            error = (error - torch.special.entr(target).sum(-1)).clamp_min(0)
        return cross_entropy, error

    def target_distribution(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """The projected target `[*B, N]` of each transition or window, and the share of mass beyond the support."""
        maps, valid = self.value_estimator.step_maps(tensordict)
        if self.n_step == "best" and valid is not None:
            maps = maps.scan()
            probs = self._greedy_probs(tensordict, steps_key, maps.slope == 0)
            atoms = maps(self.support.expand_as(probs))
            means = (probs * atoms).sum(-1, keepdim=True).masked_fill(~valid, -torch.inf)
            best = means.argmax(-2, keepdim=True).expand_as(atoms[..., :1, :])
            probs, atoms = probs.gather(-2, best).squeeze(-2), atoms.gather(-2, best).squeeze(-2)
        else:
            probs = self._greedy_probs(tensordict, next_key, (maps.slope == 0).any(-2))
            atoms = n_step_return(maps, self.support.expand_as(probs))
        positions = node_positions(atoms, self.support)
        middle = (len(self.support) - 1) / 2
        outside = (positions - middle).abs() > middle + 1e-4  # rounding at a margin that equals an end clips nothing
        # Bytes, since they turn into floats five times as fast as bools do.
        clipped = probs.flatten().dot(outside.flatten().view(torch.uint8).to(probs.dtype)) / probs[..., 0].numel()
        return project_positions(positions, probs, len(self.support)), clipped

    def _greedy_probs(self, tensordict: TensorDictBase, place: Place, is_ignored: Tensor) -> Tensor:
        """The target network's distribution `[*, N]` of the greedy action in the states that `place` holds."""
        logits = self._greedy_next(tensordict, place)
        if logits.shape[-1:] != self.support.shape:
            raise ValueError(
                f"the network's logits {list(logits.shape)} do not fit the support of {len(self.support)} atoms: give "
                "the loss the support of its network"
            )
        # A constant map has one image under any distribution: what follows a terminal step may even be NaN.
        return logits.softmax(-1).masked_fill(is_ignored, 1 / logits.shape[-1])


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


def action_index(logits: Tensor, action: Tensor, one: str = "an action") -> Tensor:
    """`action`, an index of `logits` `[*B, A, N]` as `[*B]` or `[*B, 1]`, checked and without the last dimension."""
    batch, actions = logits.shape[:-2], logits.shape[-2]
    check_index(action, batch, f"logits {list(logits.shape)}")
    refuse_outside(
        action,
        actions,
        f"{one} lies outside 0..{actions - 1}: the network has {actions} of them; build it with those of the env",
    )
    return action.reshape(batch).long()


def gather_action(logits: Tensor, index: Tensor) -> Tensor:
    """The row of `logits` `[*B, A, N]` of an action index `[*B]`."""
    rows = logits.flatten(0, -2)
    first = torch.arange(0, rows.shape[0], logits.shape[-2], device=index.device)
    return rows.index_select(0, first + index.flatten()).unflatten(0, index.shape)  # gather takes several times longer
