"""The greedy policies of both players on a table of values."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from tensordict.utils import NestedKey
from torch import Tensor, nn

PLAYERS = ("controller", "disturbance")


def greedy_game_policy(
    network: TensorDictModuleBase,
    *,
    num_disturbances: int | None = None,
    player: str | None = None,
    action_key: NestedKey = "action",
    disturbance_key: NestedKey = "disturbance",
) -> TensorDictSequential:
    r"""Greedy play on a table: :math:`u = \arg\max_u \min_d Q(s, u, d)` and :math:`d = \arg\min_d Q(s, u, d)`.

    The controller guarantees its value against every disturbance; the disturbance moves second, seeing the control.
    Both write indices `[*B]`, int64, the first on ties. The policy of both also writes ``"chosen_action_value"``
    `[*B, 1]`, the value :math:`\max_u \min_d Q`. Source: Isaacs 1965; Hsu et al. 2022 (ISAACS).

    Args:
        network: writes, as its last out key, action values `[*B, |U|, |D|]`, or a row of pairs `[*B, |U| * |D|]`.
        num_disturbances: :math:`|D|`, for a network that writes a row, such as a :class:`RainbowNetwork`.
        player: ``"controller"`` or ``"disturbance"`` for the policy of one; the one of the disturbance reads the
            control at `action_key`, whoever chose it.
        action_key: where the control goes.
        disturbance_key: where the disturbance goes.

    Raises:
        ValueError: for an unknown player, a network without out keys, or values that are no table.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_safety.modules import RainbowNetwork, greedy_game_policy
        >>> policy = greedy_game_policy(RainbowNetwork(2, 6, support=None), num_disturbances=2)
        >>> moves = policy(TensorDict({"observation": torch.zeros(5, 2)}, [5]))
        >>> moves["action"].shape, moves["disturbance"].shape
        (torch.Size([5]), torch.Size([5]))
    """
    if player not in (None, *PLAYERS):
        raise ValueError(f"player is {player!r}; choose one of {list(PLAYERS)}, or None for both")
    if not getattr(network, "out_keys", None):
        raise ValueError(
            f"the network is a {type(network).__name__} without out_keys: wrap it in a TensorDictModule that "
            "writes the action values last"
        )
    value_key = network.out_keys[-1]
    steps: list[nn.Module] = [network]
    if player != "disturbance":
        steps.append(TensorDictModule(_Controller(num_disturbances), [value_key], [action_key, "chosen_action_value"]))
    if player != "controller":
        steps.append(TensorDictModule(_Disturbance(num_disturbances), [value_key, action_key], [disturbance_key]))
    return TensorDictSequential(*steps)


class _Controller(nn.Module):
    def __init__(self, num_disturbances: int | None) -> None:
        super().__init__()
        self.num_disturbances = num_disturbances

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        value, control = _table(values, self.num_disturbances).amin(-1).max(-1, keepdim=True)
        return control.squeeze(-1), value


class _Disturbance(nn.Module):
    def __init__(self, num_disturbances: int | None) -> None:
        super().__init__()
        self.num_disturbances = num_disturbances

    def forward(self, values: Tensor, control: Tensor) -> Tensor:
        table = _table(values, self.num_disturbances)
        return torch.take_along_dim(table, control.reshape(*table.shape[:-2], 1, 1), -2).squeeze(-2).argmin(-1)


def _table(values: Tensor, num_disturbances: int | None) -> Tensor:
    """Action values as a table `[*B, |U|, |D|]`."""
    if num_disturbances is None:
        if values.dim() < 2:
            raise ValueError(
                f"the action values {list(values.shape)} are no table `[*B, |U|, |D|]`: give num_disturbances= for a "
                "network that writes the pairs in a row"
            )
        return values
    if num_disturbances < 1 or values.shape[-1] % num_disturbances:
        raise ValueError(
            f"num_disturbances is {num_disturbances}, which does not divide the {values.shape[-1]} action values: a "
            "flat network has one for each pair, |U| times |D|"
        )
    return values.unflatten(-1, (-1, num_disturbances))
