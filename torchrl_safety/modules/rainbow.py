"""Rainbow's network and the greedy policy on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.data import Categorical, TensorSpec
from torchrl.modules import QValueModule

from torchrl_safety.modules.dueling import DuelingHead
from torchrl_safety.modules.noisy import NoisyLinear


class RainbowNetwork(TensorDictModuleBase):
    r"""A categorical value network with optional dueling and noisy heads (Hessel et al. 2018); or a scalar one.

    For every action it gives logits over `atoms` values spaced evenly on `support`; the action value is the mean
    :math:`Q(s, a) = \sum_j z_j\, \mathrm{softmax}(\ell(s, a))_j`. Without a support the head gives :math:`Q` itself.

    Args:
        in_features: size of the observation.
        num_actions: number of discrete actions.
        support: smallest and largest value (vmin, vmax), in the unit of the margin or return; 0 is legal at either
            end. ``None`` for scalar values, which are not bounded.
        atoms: number of support points, at least 2.
        hidden: widths of the shared layers.
        dueling: ``"mean"``, ``"max"``, or ``None`` for a plain head.
        noisy: whether the head is a :class:`NoisyLinear`.
        sigma_init: initial noise scale of the head.
        activation: makes the nonlinearity between layers.
        encoder: applied to the observation before the shared layers, e.g. an :class:`AngleEncoding`; its
            `out_features` is what they take, while `in_features` stays the size of the raw observation.
        in_key: key of the observation `[*B, in_features]`.
        out_keys: keys of the logits `[*B, num_actions, atoms]`, which a scalar network does not write, and of the
            action values `[*B, num_actions]`.
        device: where the parameters live.
        dtype: their floating point type.

    Raises:
        ValueError: for a support that is empty, reversed or infinite, fewer than 2 atoms, no action, an unknown dueling
            mode, an encoder without `out_features`, or an observation of another size.
        KeyError: for an input without the observation.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_safety.modules import RainbowNetwork
        >>> network = RainbowNetwork(2, 3, support=(-1.0, 1.0), atoms=51)
        >>> network(TensorDict({"observation": torch.zeros(5, 2)}, [5]))["action_value"].shape
        torch.Size([5, 3])
    """

    support: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_actions: int,
        *,
        support: tuple[float, float] | None,
        atoms: int = 51,
        hidden: Sequence[int] = (128, 128),
        dueling: str | None = "mean",
        noisy: bool = True,
        sigma_init: float = 0.5,
        activation: Callable[[], nn.Module] = nn.ReLU,
        encoder: nn.Module | None = None,
        in_key: NestedKey = "observation",
        out_keys: tuple[NestedKey, NestedKey] = ("value_logits", "action_value"),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if support is not None and (len(support) != 2 or not -math.inf < support[0] < support[1] < math.inf):
            raise ValueError(f"support is {tuple(support)}; give finite (vmin, vmax) with vmin < vmax")
        if support is not None and atoms < 2:
            raise ValueError(f"atoms is {atoms}; a categorical value needs at least 2")
        if in_features < 1 or num_actions < 1:
            raise ValueError(f"in_features is {in_features}, num_actions {num_actions}; both must be at least 1")
        if isinstance(hidden, int):
            raise ValueError(f"hidden is {hidden}; give the width of each layer, e.g. hidden=({hidden},)")
        self.in_features = in_features
        self.in_keys, self.out_keys = [in_key], list(out_keys if support is not None else out_keys[1:])
        self.num_actions, self.atoms = num_actions, atoms if support is not None else 1
        places = None if support is None else torch.linspace(*support, atoms, device=device, dtype=dtype)
        self.register_buffer("support", places)
        self.encoder = encoder
        layers: list[nn.Module] = []
        width = in_features if encoder is None else _encoded_width(encoder)
        for size in hidden:
            layers += [nn.Linear(width, size, device=device, dtype=dtype), activation()]
            width = size
        self.torso = nn.Sequential(*layers)
        self.dueling = None if dueling is None else DuelingHead(dueling, action_dim=-2)
        linear = partial(NoisyLinear, sigma_init=sigma_init) if noisy else nn.Linear
        # One layer gives both streams: the first row of atoms is the value, the others the advantages.
        rows = num_actions + (self.dueling is not None)
        self.head = linear(width, rows * self.atoms, device=device, dtype=dtype)

    def logits(self, observation: Tensor) -> Tensor:
        """Logits `[*B, num_actions, atoms]` of an observation `[*B, in_features]`; without a support, values and 1."""
        if self.encoder is not None:
            observation = self.encoder(observation)
        rows = self.head(self.torso(observation)).unflatten(-1, (-1, self.atoms))
        if self.dueling is None:
            return rows
        value, advantage = rows.split([1, self.num_actions], -2)
        return self.dueling(value, advantage)

    def _first_weight(self) -> Tensor:
        layer: nn.Module = self.torso[0] if len(self.torso) else self.head
        return getattr(layer, "weight_mu" if isinstance(layer, NoisyLinear) else "weight")

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        key = self.in_keys[0]
        observation = tensordict.get(key, None)
        if observation is None:
            raise KeyError(
                f"the observation {key!r} is missing; present: {sorted(map(str, tensordict.keys(True, True)))}"
            )
        if observation.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"the observation {key!r} has shape {list(observation.shape)}, the network takes "
                f"`[*B, {self.in_features}]`: build it with the in_features that the observations have"
            )
        # Integers and other precisions (MuJoCo's float64) are taken in that of the network.
        logits = self.logits(observation.to(self._first_weight().dtype))
        if self.support is None:
            return tensordict.set(self.out_keys[0], logits.squeeze(-1))
        tensordict.set(self.out_keys[0], logits)
        return tensordict.set(self.out_keys[1], logits.softmax(-1) @ self.support)


def _encoded_width(encoder: nn.Module) -> int:
    width = getattr(encoder, "out_features", None)
    if not isinstance(width, int) or width < 1:
        raise ValueError(
            f"encoder is a {type(encoder).__name__} whose out_features is {width!r}: give it a whole number there, the "
            "size of what it returns"
        )
    return width


def greedy_policy(
    network: TensorDictModuleBase, *, action_key: NestedKey = "action", spec: TensorSpec | None = None
) -> TensorDictSequential:
    r"""The policy :math:`\arg\max_a Q(s, a)` of a value network.

    It writes one categorical action `[*B]`, an index; the first on ties.

    Args:
        network: writes the action values as its last out key, e.g. a :class:`RainbowNetwork`.
        action_key: where the action (int64 index) goes.
        spec: the environment's action spec, to be checked: a one-hot environment would read an index as another
            action, without a word.

    Raises:
        ValueError: if `spec` is not Categorical, or `network` names no out keys.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_safety.modules import RainbowNetwork, greedy_policy
        >>> policy = greedy_policy(RainbowNetwork(2, 3, support=(-1.0, 1.0)))
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
    value_key = network.out_keys[-1]
    argmax = QValueModule(
        action_space="categorical",
        action_value_key=value_key,
        out_keys=[action_key, value_key, "chosen_action_value"],
    )
    return TensorDictSequential(network, argmax)
