"""Rainbow's network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_safety.modules.distributional import categorical_cvar, categorical_quantile
from torchrl_safety.modules.dueling import DuelingHead
from torchrl_safety.modules.noisy import NoisyLinear

FACTORISED = {True: True, "factorised": True, "independent": False}
"""The noise that a network may have -> whether it is factorised."""


class RainbowNetwork(TensorDictModuleBase):
    r"""A categorical value network with optional dueling and noisy heads (Hessel et al. 2018); or a scalar one.

    For every action it gives logits over `atoms` values spaced evenly on `support`; the action value is the mean
    :math:`Q(s, a) = \sum_j z_j\, \mathrm{softmax}(\ell(s, a))_j`. Without a support the head gives :math:`Q` itself.

    Args:
        in_features: size of the observation, or the shape of one that an `encoder` takes, `(C, H, W)` for images.
        num_actions: number of discrete actions.
        support: smallest and largest value (vmin, vmax), in the unit of the margin or return; 0 is legal at either
            end. ``None`` for scalar values, which are not bounded.
        atoms: number of support points, at least 2.
        hidden: widths of the shared layers.
        dueling: ``"mean"``, ``"max"``, or ``None`` for a plain head.
        noisy: noise in the head: ``"factorised"`` (or True), ``"independent"``, or False for none.
        head_hidden: widths of hidden layers between the shared ones and the head, separate for the value and the
            advantages; Rainbow's are `(512,)`, with `hidden=()` behind a :class:`NatureCNN`.
        noisy_hidden: whether those layers have the noise of the head too.
        sigma_init: initial noise scale.
        activation: makes the nonlinearity between layers.
        encoder: applied to the observation before the shared layers, e.g. an :class:`AngleEncoding` or a
            :class:`NatureCNN`; its `out_features` is what they take, while `in_features` stays the size or shape of the
            raw observation. One of several dimensions reaches it in its own type, so that bytes can be scaled.
        in_key: key of the observation `[*B, in_features]`, or `[*B, *in_features]` for a shape.
        out_keys: keys of the logits `[*B, num_actions, atoms]`, which a scalar network does not write, and of the
            action values `[*B, num_actions]`.
        device: where the parameters live.
        dtype: their floating point type.

    Raises:
        ValueError: for a support that is empty, reversed or infinite, fewer than 2 atoms, no action, an unknown dueling
            mode or noise, a shape without an encoder, an encoder without `out_features`, or an observation of another
            size.
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
        in_features: int | Sequence[int],
        num_actions: int,
        *,
        support: tuple[float, float] | None,
        atoms: int = 51,
        hidden: Sequence[int] = (128, 128),
        dueling: str | None = "mean",
        noisy: bool | str = True,
        head_hidden: Sequence[int] = (),
        noisy_hidden: bool = True,
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
        self.in_features, self._in_shape = in_features, _observation_shape(in_features, num_actions, encoder)
        for name, widths in (("hidden", hidden), ("head_hidden", head_hidden)):
            if isinstance(widths, int):
                raise ValueError(f"{name} is {widths}; give the width of each layer, e.g. {name}=({widths},)")
        if noisy not in (False, *FACTORISED):
            raise ValueError(f"noisy is {noisy!r}; choose one of {[False, *FACTORISED]}")
        self.in_keys, self.out_keys = [in_key], list(out_keys if support is not None else out_keys[1:])
        self.num_actions, self.atoms = num_actions, atoms if support is not None else 1
        places = None if support is None else torch.linspace(*support, atoms, device=device, dtype=dtype)
        self.register_buffer("support", places)
        self.encoder = encoder
        self.dueling = None if dueling is None else DuelingHead(dueling, action_dim=-2)

        plain: Callable[..., nn.Module] = partial(nn.Linear, device=device, dtype=dtype)
        outer = plain
        if noisy:
            outer = partial(
                NoisyLinear, sigma_init=sigma_init, factorised=FACTORISED[noisy], device=device, dtype=dtype
            )

        def layers(widths: Sequence[int], linear: Callable[..., nn.Module]) -> list[nn.Module]:
            return [layer for sizes in pairwise(widths) for layer in (linear(*sizes), activation())]

        def stream(rows: int) -> nn.Module:
            within = layers(widths, outer if noisy_hidden else plain)
            last = outer(widths[-1], rows * self.atoms)
            return nn.Sequential(*within, last) if within else last

        widths = (self._in_shape[0] if encoder is None else _encoded_width(encoder), *hidden)
        self.torso = nn.Sequential(*layers(widths, plain))
        widths = (widths[-1], *head_hidden)
        # The first row of atoms is the value, the others the advantages; without hidden layers one layer gives both.
        self.head: nn.Module
        if self.dueling is not None and head_hidden:
            self.head = _Streams(stream(1), stream(num_actions))
        else:
            self.head = stream(num_actions + (self.dueling is not None))

    def logits(self, observation: Tensor) -> Tensor:
        """Logits `[*B, num_actions, atoms]` of an observation `[*B, *in_features]`; without a support, values and 1."""
        if observation.shape[-len(self._in_shape) :] != self._in_shape:
            raise ValueError(
                f"the observation {self.in_keys[0]!r} has shape {list(observation.shape)}, the network takes "
                f"`[*B, {', '.join(map(str, self._in_shape))}]`: build it with the in_features that the observations "
                "have"
            )
        # Integers and other precisions (MuJoCo's float64) are taken in that of the network; an image only its encoder
        # can read.
        if len(self._in_shape) == 1:
            observation = observation.to(self._first_weight().dtype)
        if self.encoder is not None:
            observation = self.encoder(observation)
        rows = self.head(self.torso(observation)).unflatten(-1, (-1, self.atoms))
        if self.dueling is None:
            return rows
        value, advantage = rows.split([1, self.num_actions], -2)
        return self.dueling(value, advantage)

    def action_values(self, observation: Tensor) -> Tensor:
        """Action values `[*B, num_actions]` of an observation `[*B, *in_features]`."""
        return self._mean(self.logits(observation))

    def _mean(self, logits: Tensor) -> Tensor:
        return logits.squeeze(-1) if self.support is None else logits.softmax(-1) @ self.support

    def quantile(self, logits: Tensor, level: float) -> Tensor:
        """:func:`categorical_quantile` `[*B]` of logits `[*B, atoms]` over the support of the network."""
        return categorical_quantile(logits.softmax(-1), self._atoms(), level)

    def cvar(self, logits: Tensor, level: float) -> Tensor:
        """:func:`categorical_cvar` `[*B]` of logits `[*B, atoms]` over the support of the network."""
        return categorical_cvar(logits.softmax(-1), self._atoms(), level)

    def _atoms(self) -> Tensor:
        if self.support is None:
            raise ValueError(
                "the network gives scalar values without a distribution; build it with support=(vmin, vmax)"
            )
        return self.support

    def _first_weight(self) -> Tensor:
        layer: nn.Module = self.torso if len(self.torso) else self.head
        while not isinstance(layer, nn.Linear | NoisyLinear):
            layer = next(layer.children())
        return layer.weight_mu if isinstance(layer, NoisyLinear) else layer.weight

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        key = self.in_keys[0]
        observation = tensordict.get(key, None)
        if observation is None:
            raise KeyError(
                f"the observation {key!r} is missing; present: {sorted(map(str, tensordict.keys(True, True)))}"
            )
        logits = self.logits(observation)
        if self.support is not None:
            tensordict.set(self.out_keys[0], logits)
        return tensordict.set(self.out_keys[-1], self._mean(logits))


class _Streams(nn.Module):
    """A value and advantages with hidden layers of their own."""

    def __init__(self, value: nn.Module, advantage: nn.Module) -> None:
        super().__init__()
        self.value, self.advantage = value, advantage

    def forward(self, features: Tensor) -> Tensor:
        return torch.cat([self.value(features), self.advantage(features)], -1)


def _observation_shape(
    in_features: int | Sequence[int], num_actions: int, encoder: nn.Module | None
) -> tuple[int, ...]:
    shape = tuple(in_features) if isinstance(in_features, Sequence) else (in_features,)
    if min(shape, default=0) < 1 or num_actions < 1:
        raise ValueError(f"in_features is {in_features}, num_actions {num_actions}; both must be at least 1")
    if len(shape) > 1 and encoder is None:
        raise ValueError(
            f"in_features is {shape}, a shape, and there is no encoder to flatten it: give one, e.g. "
            f"encoder=NatureCNN({shape}) for images"
        )
    return shape


def _encoded_width(encoder: nn.Module) -> int:
    width = getattr(encoder, "out_features", None)
    if not isinstance(width, int) or width < 1:
        raise ValueError(
            f"encoder is a {type(encoder).__name__} whose out_features is {width!r}: give it a whole number there, the "
            "size of what it returns"
        )
    return width
