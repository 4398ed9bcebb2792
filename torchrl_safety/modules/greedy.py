"""The greedy policy on a value network, neutral or averse to risk."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.data import Categorical, TensorSpec
from torchrl.modules import QValueModule

from torchrl_safety.modules.rainbow import RainbowNetwork


def greedy_policy(
    network: TensorDictModuleBase,
    *,
    action_key: NestedKey = "action",
    spec: TensorSpec | None = None,
    risk: str = "mean",
    level: float | None = None,
    chosen_logits_key: NestedKey | None = None,
) -> TensorDictSequential:
    r"""The policy :math:`\arg\max_a Q(s, a)` of a value network, or :math:`\arg\max_a \mathrm{CVaR}_\alpha(Z(s, a))`.

    It writes one categorical action `[*B]`, an index, the first on ties; and as ``"chosen_action_value"`` `[*B, 1]`
    the value that this action maximises, which with ``risk="cvar"`` is its CVaR (those of all actions `[*B, A]` are
    ``"action_cvar"``). A conservative safe set is then, on a `network` that is a :class:`RainbowNetwork`, ``policy =
    greedy_policy(network, chosen_logits_key="chosen_logits")`` and ``network.quantile(policy(states)["chosen_logits"],
    0.05) >= 0``.

    Args:
        network: writes the action values as its last out key, e.g. a :class:`RainbowNetwork`.
        action_key: where the action (int64 index) goes.
        spec: the environment's action spec, to be checked: a one-hot environment would read an index as another
            action, without a word.
        risk: ``"mean"``, or ``"cvar"`` for the mean of the worst outcomes.
        level: :math:`\alpha` in (0, 1], the share of outcomes that ``"cvar"`` counts.
        chosen_logits_key: where the logits `[*B, N]` of the chosen action go; they are not written by default.

    Raises:
        ValueError: if `spec` is not Categorical, `network` names no out keys, `risk` is unknown, `level` does not go
            with it, or a distribution is asked of a network that has none.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_safety.modules import RainbowNetwork, greedy_policy
        >>> policy = greedy_policy(RainbowNetwork(2, 3, support=(-1.0, 1.0)), risk="cvar", level=0.1)
        >>> policy(TensorDict({"observation": torch.zeros(5, 2)}, [5]))["action"].shape
        torch.Size([5])
    """
    if spec is not None and not isinstance(spec, Categorical):
        raise ValueError(
            f"the action spec is {type(spec).__name__}, the policy writes an index: build the environment with "
            "Categorical actions, e.g. GymEnv(..., categorical_action_encoding=True)"
        )
    if not getattr(network, "out_keys", None):
        raise ValueError(
            f"the network is a {type(network).__name__} without out_keys: wrap it in a TensorDictModule that "
            "writes the action values last"
        )
    if risk not in ("mean", "cvar"):
        raise ValueError(f"risk is {risk!r}; choose one of ['mean', 'cvar']")
    if (risk == "cvar") != (level is not None):
        raise ValueError(f"risk is {risk!r} and level is {level}: 'cvar' needs a level in (0, 1], 'mean' takes none")
    steps: list[nn.Module] = [network]
    value_key = network.out_keys[-1]
    if level is not None:
        rainbow = _categorical(network)
        value_key = "action_cvar"
        steps.append(TensorDictModule(_CVaR(rainbow, level), [rainbow.out_keys[0]], [value_key]))
    steps.append(
        QValueModule(
            action_space="categorical",
            action_value_key=value_key,
            out_keys=[action_key, value_key, "chosen_action_value"],
        )
    )
    if chosen_logits_key is not None:
        in_keys = [_categorical(network).out_keys[0], action_key]
        steps.append(TensorDictModule(_of_action, in_keys, [chosen_logits_key]))
    return TensorDictSequential(*steps)


class _CVaR(nn.Module):
    """Reads the support in the network, so that whatever moves or loads that is seen; it has no state of its own."""

    def __init__(self, network: RainbowNetwork, level: float) -> None:
        super().__init__()
        self._network, self.level = (network,), level  # in a tuple, for it is a step of the policy already
        assert network.support is not None
        self(torch.zeros_like(network.support))  # refuses a level out of range now

    def forward(self, logits: Tensor) -> Tensor:
        return self._network[0].cvar(logits, self.level)


def _of_action(logits: Tensor, action: Tensor) -> Tensor:
    index = action[..., None, None].expand(*action.shape, 1, logits.shape[-1])
    return logits.gather(-2, index).squeeze(-2)


def _categorical(network: nn.Module) -> RainbowNetwork:
    """The one categorical network in `network`."""
    found = [part for part in network.modules() if isinstance(part, RainbowNetwork) and part.support is not None]
    if len(found) != 1:
        raise ValueError(
            f"the network holds {len(found)} RainbowNetworks with a support, not one: a distribution of the value "
            "(risk='cvar', chosen_logits_key) needs one, built with support=(vmin, vmax)"
        )
    return found[0]
