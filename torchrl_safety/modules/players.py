"""Policies of two players, and simple disturbances to play against."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from tensordict.utils import NestedKey
from torchrl.data import Bounded, Categorical, MultiCategorical, TensorSpec


class TwoPlayerPolicy(TensorDictSequential):
    r"""A controller and a disturbance that act in the same environment.

    The game is :math:`\max_u \min_d`. By default both move at once: the disturbance may not read the controller's
    action. As the second mover it must, :math:`d \sim \pi_d(s, u)`, the side of caution where the two orders differ.
    :attr:`controller` alone is what is deployed. Whatever either reads besides, such as the joint table of a critic
    that the controller has evaluated, passes from one to the other.

    Args:
        controller: writes `action_key`.
        disturbance: writes `disturbance_key`, e.g. :class:`RandomDisturbance` or :class:`ZeroDisturbance`.
        second_mover: whether the disturbance sees the controller's action.
        action_key: of the controller.
        disturbance_key: of the disturbance.

    Raises:
        ValueError: a player that does not write its action, one that reads the other's against the order of moves, or
            both writing the same key, where the second would overwrite the first.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl_safety.modules import TwoPlayerPolicy
        >>> controller = TensorDictModule(torch.nn.Linear(3, 2), ["observation"], ["action"])
        >>> against = TensorDictModule(lambda action: -action, ["action"], ["disturbance"])
        >>> policy = TwoPlayerPolicy(controller, against, second_mover=True)
        >>> data = policy(TensorDict({"observation": torch.zeros(5, 3)}, [5]))
        >>> torch.equal(data["disturbance"], -data["action"]), policy.controller is controller
        (True, True)
    """

    def __init__(
        self,
        controller: TensorDictModuleBase,
        disturbance: TensorDictModuleBase,
        *,
        second_mover: bool = False,
        action_key: NestedKey = "action",
        disturbance_key: NestedKey = "disturbance",
    ) -> None:
        action_key, disturbance_key = unravel_key(action_key), unravel_key(disturbance_key)
        for name, player, key in (
            ("controller", controller, action_key),
            ("disturbance", disturbance, disturbance_key),
        ):
            if key not in player.out_keys:
                raise ValueError(f"the {name} writes {player.out_keys}, not {key!r}: name it in its out_keys")
        if disturbance_key in controller.in_keys:
            raise ValueError(
                f"the controller reads {disturbance_key!r}, but it moves first: take it out of its in_keys"
            )
        if (action_key in disturbance.in_keys) != second_mover:
            reads = "does not read" if second_mover else "reads"
            raise ValueError(
                f"the disturbance {reads} {action_key!r} with second_mover={second_mover}: its in_keys are "
                f"{disturbance.in_keys}, change them or second_mover"
            )
        shared = [key for key in controller.out_keys if key in disturbance.out_keys and key != "_"]
        if shared:
            raise ValueError(
                f"both players write {shared}, and the second overwrites the first: give one of them other out_keys, "
                "such as 'disturbance_log_prob'"
            )
        super().__init__(controller, disturbance)
        self.second_mover = second_mover

    @property
    def controller(self) -> TensorDictModuleBase:
        """The deployable part, the very module that was given."""
        return self.module[0]

    @property
    def disturbance(self) -> TensorDictModuleBase:
        """The adversary, the very module that was given."""
        return self.module[1]


class ZeroDisturbance(TensorDictModuleBase):
    r"""A disturbance that never acts, :math:`d = 0`.

    Args:
        spec: that of the disturbance, batch dimensions included: Categorical, or Bounded around 0.
        zero_index: which index of a Categorical spec stands for no disturbance, as `env.zero_action()` of a native
            environment has it; a table need not hold it in its middle.
        out_key: where the disturbance goes.

    Raises:
        ValueError: a spec of another kind, a missing or superfluous index, or one out of range.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Categorical
        >>> from torchrl_safety.modules import ZeroDisturbance
        >>> ZeroDisturbance(Categorical(3, shape=(2,)), zero_index=1)(TensorDict({}, [2]))["disturbance"]
        tensor([1, 1])
    """

    value: torch.Tensor

    def __init__(self, spec: TensorSpec, *, zero_index: int | None = None, out_key: NestedKey = "disturbance") -> None:
        super().__init__()
        self.in_keys: list[NestedKey] = []
        self.out_keys = [out_key]
        _check_spec(spec)
        if isinstance(spec, Categorical):
            if isinstance(zero_index, bool) or not isinstance(zero_index, int) or not 0 <= zero_index < spec.n:
                raise ValueError(
                    f"zero_index={zero_index!r} must be one of 0..{spec.n - 1}, the index that stands for no "
                    "disturbance: int(env.zero_action()[0]) of a native environment"
                )
            value = torch.tensor(zero_index, dtype=spec.dtype, device=spec.device)
        else:
            if zero_index is not None:
                raise ValueError(
                    f"zero_index={zero_index} is for a Categorical spec, this one is Bounded: leave it out"
                )
            value = spec.zero().reshape(-1, *spec.shape[-1:])[0].clone()
            if not spec.is_in(value.expand(spec.shape)):
                raise ValueError("0 is not between the bounds of the spec: this disturbance always acts")
        self.register_buffer("value", value, persistent=False)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        shape = (*tensordict.batch_size, *self.value.shape)
        return tensordict.set(self.out_keys[0], self.value.expand(shape).clone())


class RandomDisturbance(TensorDictModuleBase):
    r"""A disturbance drawn uniformly, :math:`d \sim U`, in every exploration type.

    Args:
        spec: that of the disturbance, batch dimensions included: Categorical, or Bounded with finite bounds.
        out_key: where the disturbance goes.
        generator: draws; None makes one that follows torch's global one. Its state is in :meth:`state_dict`.

    Raises:
        ValueError: a spec of another kind, without bounds, or what is not a generator.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded
        >>> from torchrl_safety.modules import RandomDisturbance
        >>> policy = RandomDisturbance(Bounded(-2.0, 2.0, (5, 3)))
        >>> policy(TensorDict({}, [5]))["disturbance"].abs().max() <= 2
        tensor(True)
    """

    low: torch.Tensor
    high: torch.Tensor

    def __init__(
        self,
        spec: TensorSpec,
        *,
        out_key: NestedKey = "disturbance",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.in_keys: list[NestedKey] = []
        self.out_keys = [out_key]
        _check_spec(spec)
        if not isinstance(generator, torch.Generator | None):
            raise ValueError(f"generator={generator!r} must be a torch.Generator or None: seed one with manual_seed")
        if generator is None:
            generator = torch.Generator(spec.device or "cpu")
            generator.manual_seed(int(torch.randint(2**62, (), device="cpu")))
        self._generator = generator
        self.num_actions = spec.n if isinstance(spec, Categorical) else None
        self.dtype = spec.dtype
        low = high = torch.zeros((), device="cpu")  # of which indices need only the device
        if isinstance(spec, Bounded):
            low, high = (bound.reshape(-1, *bound.shape[-1:])[0] for bound in (spec.space.low, spec.space.high))
        self.register_buffer("low", low.to(spec.device, copy=True), persistent=False)
        self.register_buffer("high", high.to(spec.device, copy=True), persistent=False)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        shape, source = tensordict.batch_size, self._generator
        if self.num_actions is not None:
            drawn = torch.randint(self.num_actions, shape, dtype=self.dtype, generator=source, device=source.device)
            return tensordict.set(self.out_keys[0], drawn.to(self.low.device))
        shape = (*shape, *self.low.shape)
        unit = torch.rand(shape, dtype=self.dtype, generator=source, device=source.device).to(self.low.device)
        return tensordict.set(self.out_keys[0], torch.addcmul(self.low, unit, self.high - self.low))

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        """The generator's state, for :meth:`state_dict`."""
        return {"generator": self._generator.get_state()}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        """Continues the draws of a saved generator; the inverse of :meth:`get_extra_state`."""
        self._generator.set_state(state["generator"].cpu())


def _check_spec(spec: TensorSpec) -> None:
    is_index = isinstance(spec, Categorical) and not isinstance(spec, MultiCategorical)
    if not is_index and not (isinstance(spec, Bounded) and spec.dtype.is_floating_point):
        raise ValueError(
            f"the spec is {type(spec).__name__} of {spec.dtype}: give the leaf of the disturbance, Categorical "
            "(indices) or Bounded, as env.full_action_spec['disturbance']"
        )
    if isinstance(spec, Bounded) and not (spec.space.low.isfinite() & spec.space.high.isfinite()).all():
        raise ValueError("the spec has infinite bounds: a disturbance needs finite ones")
