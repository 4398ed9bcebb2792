"""Value losses of two-player games with discrete actions: the scalar and the categorical one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_safety.objectives.backup_loss import avoid, reach_avoid
from torchrl_safety.objectives.backups import Backup
from torchrl_safety.objectives.dqn import CategoricalDQNLoss, SafetyDQNLoss, action_index, gather_action
from torchrl_safety.objectives.games import STORED_REMEDY, TwoPlayers
from torchrl_safety.objectives.signals import next_key, read


class _TableGame(TwoPlayers):
    """A table of values `[*B, |U|, |D|]` in the place of a row of them."""

    @dataclass
    class _AcceptedKeys(SafetyDQNLoss._AcceptedKeys):
        disturbance: NestedKey = "disturbance"

    default_keys = _AcceptedKeys

    def __init__(
        self,
        value_network: TensorDictModuleBase,
        *,
        num_disturbances: int | None = None,
        backup: Backup | None = None,
        terminal_type: str | None = None,
        **settings: Any,
    ) -> None:
        if num_disturbances is not None and num_disturbances < 1:
            raise ValueError(f"num_disturbances is {num_disturbances}; give the number |D| of disturbances, at least 1")
        super().__init__(value_network, backup=self._problem(backup, terminal_type), **settings)
        self.num_disturbances = num_disturbances

    def _played(self, found: Tensor, tensordict: TensorDictBase) -> Tensor:
        table, keys = self._table(found, tensordict), self.tensor_keys
        control = action_index(table.flatten(-2), read(tensordict, keys.action, STORED_REMEDY))
        row = _row(table, control)
        disturbance = read(tensordict, keys.disturbance, STORED_REMEDY)
        return gather_action(row, action_index(row, disturbance, "a disturbance"))

    def _greedy(self, found: Tensor, values: Tensor, tensordict: TensorDictBase) -> Tensor:
        choices = self._table(values.unsqueeze(-1), tensordict)
        control = choices.squeeze(-1).amin(-1).argmax(-1)
        disturbance = _row(choices, control).squeeze(-1).argmin(-1)
        return gather_action(_row(self._table(found, tensordict), control), disturbance)

    def _table(self, found: Tensor, tensordict: TensorDictBase) -> Tensor:
        """The network's output as `[*B, |U|, |D|, N]`."""
        if self.num_disturbances is not None:
            pairs = found.shape[-2]
            if pairs % self.num_disturbances:
                raise ValueError(
                    f"num_disturbances is {self.num_disturbances}, which does not divide the network's {pairs} values: "
                    "a flat network has one for each pair, |U| times |D|"
                )
            found = found.unflatten(-2, (-1, self.num_disturbances))
        batch = read(tensordict, next_key(self.tensor_keys.done), "Collect it with the environment's flags").shape[:-1]
        if found.shape[:-3] != batch:
            raise ValueError(
                f"the network's values {list(found.shape[:-1])} are no table `[*B, |U|, |D|]` of the batch "
                f"{list(batch)}: give a network that writes one, or num_disturbances= for one that writes the pairs "
                "`[*B, |U| * |D|]` in a row"
            )
        return found


def _row(table: Tensor, control: Tensor) -> Tensor:
    """The row `[*B, |D|, N]` of a table `[*B, |U|, |D|, N]` that belongs to a control `[*B]`."""
    return gather_action(table.flatten(-2), control).unflatten(-1, table.shape[-2:])


class IsaacsDQNLoss(_TableGame, SafetyDQNLoss):
    r"""Double DQN for the avoid game, or with any other backup: a controller against the worst disturbance.

    :math:`y = F(\bar Q(s', u^*, d^*))` with :math:`u^* = \arg\max_u \min_d Q(s', u, d)` and
    :math:`d^* = \arg\min_d Q(s', u^*, d)`, chosen by the online network and evaluated by the target network. The
    disturbance moves second, seeing the control: the value :math:`\max_u \min_d` is the lower one of the game, what the
    controller can guarantee. Everything else is that of :class:`SafetyDQNLoss`; with :math:`|D| = 1` it is that loss.
    Sources: Isaacs 1965; Hsu et al. 2022 (ISAACS), eq. 6-7; Fisac et al. 2019.

    Args:
        value_network: writes a table ``"action_value"`` `[*B, |U|, |D|]`, in the unit of the margin; or a row of pairs
            `[*B, |U| * |D|]`, control by control, as a :class:`~torchrl_safety.modules.RainbowNetwork` does.
        num_disturbances: :math:`|D|`, for a network that writes a row.
        backup: the problem; :class:`AvoidBackup` by default.
        terminal_type: ``"all"`` or ``"g"``, see :class:`ReachAvoidBackup`; without effect here.
        **settings: those of :class:`SafetyDQNLoss`: `gamma`, `double`, `loss_function`, `bootstrap_on_truncation`,
            `reduction`. There is no ``n_step="best"``, which holds for a single player only.

    Raises:
        ValueError: for an option out of range, values that are no table, an index of a player out of range, an empty
            batch, or a margin or loss that is NaN or infinite.
        KeyError: when a batch lacks a key, ``"disturbance"`` among them; there are no defaults.

    Example:
        >>> from torchrl_safety.envs import DoubleIntegratorEnv
        >>> from torchrl_safety.modules import RainbowNetwork
        >>> from torchrl_safety.objectives import IsaacsDQNLoss
        >>> loss = IsaacsDQNLoss(RainbowNetwork(2, 9, support=None), num_disturbances=3)
        >>> loss(DoubleIntegratorEnv(4, max_disturbance=0.5).rollout(3).reshape(-1))["loss"].shape
        torch.Size([])
    """


class GameplayDQNLoss(_TableGame, SafetyDQNLoss):
    r"""Double DQN for the reach-avoid game.

    :class:`IsaacsDQNLoss` with :class:`ReachAvoidBackup` as the default backup and nothing else changed.
    Source: Hsu et al. 2024 (Gameplay Filters), eq. 5b and 6a.

    Args:
        value_network: see :class:`IsaacsDQNLoss`, as for everything else.
        terminal_type: the value of a terminal step is :math:`\min(l, g)` (``"all"``, the default) or :math:`g`
            (``"g"``).

    Example:
        >>> from torchrl_safety.objectives import GameplayDQNLoss
        >>> GameplayDQNLoss.default_backup("g")
        ReachAvoidBackup(terminal_type='g')
    """

    default_backup = staticmethod(reach_avoid)


class IsaacsCategoricalDQNLoss(_TableGame, CategoricalDQNLoss):
    r"""Categorical value distributions for the avoid game, or with any other backup.

    :class:`CategoricalDQNLoss` whose next distribution is that of :math:`u^* = \arg\max_u \min_d Q(s', u, d)` and
    :math:`d^* = \arg\min_d Q(s', u^*, d)`, as in :class:`IsaacsDQNLoss`; :math:`Q` is the mean of a distribution.
    Sources: Hsu et al. 2022 (ISAACS); Bellemare et al. 2017.

    Args:
        value_network: writes logits ``"value_logits"`` `[*B, |U|, |D|, N]` and their means ``"action_value"``
            `[*B, |U|, |D|]`; or a row of pairs, `[*B, |U| * |D|, N]` and `[*B, |U| * |D|]`.
        num_disturbances: :math:`|D|`, for a network that writes a row.
        backup: the problem; :class:`AvoidBackup` by default.
        terminal_type: ``"all"`` or ``"g"``, see :class:`ReachAvoidBackup`; without effect here.
        **settings: those of :class:`CategoricalDQNLoss`, but ``n_step="best"``.

    Raises:
        ValueError: as :class:`IsaacsDQNLoss` and :class:`CategoricalDQNLoss` do.
        KeyError: when a batch lacks a key, ``"disturbance"`` among them; there are no defaults.

    Example:
        >>> from torchrl_safety.envs import DoubleIntegratorEnv
        >>> from torchrl_safety.modules import RainbowNetwork
        >>> from torchrl_safety.objectives import IsaacsCategoricalDQNLoss
        >>> loss = IsaacsCategoricalDQNLoss(RainbowNetwork(2, 9, support=(-1.0, 1.0)), num_disturbances=3)
        >>> sorted(loss(DoubleIntegratorEnv(4, max_disturbance=0.5).rollout(3).reshape(-1)).keys())
        ['clipped_mass', 'loss']
    """

    default_backup = staticmethod(avoid)


class GameplayCategoricalDQNLoss(_TableGame, CategoricalDQNLoss):
    r"""Categorical value distributions for the reach-avoid game.

    :class:`IsaacsCategoricalDQNLoss` with :class:`ReachAvoidBackup` as the default backup and nothing else changed.

    Args:
        value_network: see :class:`IsaacsCategoricalDQNLoss`, as for everything else.
        terminal_type: the value of a terminal step is :math:`\min(l, g)` (``"all"``, the default) or :math:`g`
            (``"g"``).

    Example:
        >>> from torchrl_safety.objectives import GameplayCategoricalDQNLoss
        >>> GameplayCategoricalDQNLoss.default_backup("all")
        ReachAvoidBackup(terminal_type='all')
    """

    default_backup = staticmethod(reach_avoid)
