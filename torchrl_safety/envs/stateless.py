"""A batch of environments that holds nothing but its random generator."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Composite
from torchrl.envs import EnvBase

from torchrl_safety.envs.settings import check_count, check_dtype, check_generator

DONE_KEYS = ("done", "terminated", "truncated")


class StatelessEnv(EnvBase):
    """The base of environments that step from whatever state a tensordict holds, with a generator that is saved.

    A subclass gives :meth:`_step_entries`, `_reset` and the specs.

    Args:
        num_envs: N, the batch size.
        generator: draws the start states; its state is in :meth:`state_dict`.
        seed: seeds an own generator; not together with `generator`.
        dtype: floating-point type of states, rewards and continuous actions; None is torch's default dtype.
        device: where everything lives; None is torch's default device.

    Raises:
        ValueError: a setting out of range, or settings that exclude each other.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        generator: torch.Generator | None,
        seed: int | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        dtype = torch.get_default_dtype() if dtype is None else dtype
        check_count("num_envs", num_envs, "the number of copies that run side by side")
        check_dtype(dtype)
        check_generator(generator, seed)
        device = torch.get_default_device() if device is None else torch.device(device)
        super().__init__(device=device, batch_size=(num_envs,))
        self.dtype = dtype
        self._generator = _make_generator(generator, seed, device)

    @abc.abstractmethod
    def _step_entries(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        """Everything that a step writes under `"next"`."""

    def get_extra_state(self) -> dict[str, Tensor]:
        """The generator's state, as a tensor, for :meth:`state_dict`."""
        return {"generator": self._generator.get_state()}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Continues the draws of a saved generator; the inverse of :meth:`get_extra_state`."""
        self._generator.set_state(state["generator"].cpu())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Continues the draws of a saved generator; an empty state leaves it as it is."""
        # TorchRL's Collector saves an empty state for an environment without transforms, and loads it strictly.
        return super().load_state_dict(state_dict, strict=strict and bool(state_dict), assign=assign)

    def _set_seed(self, seed: int | None) -> None:
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def _done_spec(self) -> Composite:
        shape, device = self.batch_size, self.device
        flags = {key: Categorical(2, shape=(*shape, 1), dtype=torch.bool, device=device) for key in DONE_KEYS}
        return Composite(flags, shape=shape, device=device)

    def _not_done(self) -> dict[str, Tensor]:
        return {key: torch.zeros((*self.batch_size, 1), dtype=torch.bool, device=self.device) for key in DONE_KEYS}

    def _wrap(self, entries: dict[str, Tensor]) -> TensorDict:
        return TensorDict(entries, batch_size=self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = self._wrap(self._step_entries(tensordict))
        stepped = tensordict.get("_step", None)
        if stepped is None:
            return out
        return out.where(stepped.reshape(self.batch_size), self._skip_tensordict(tensordict))


def require(tensordict: TensorDictBase, key: str, remedy: str) -> Tensor:
    """The entry of a tensordict, or a KeyError that names the key, the keys present and the remedy."""
    value = tensordict.get(key, None)
    if value is None:
        present = sorted(str(name) for name in tensordict.keys())  # noqa: SIM118
        raise KeyError(f"key {key!r} is missing, present are {present}: {remedy}")
    return value


def is_plain(env: EnvBase, tensordict: TensorDictBase) -> bool:
    """Whether a step needs nothing of TorchRL's own way but the step itself."""
    return (
        type(tensordict) is TensorDict
        and tensordict.device == env.device
        and env._post_step_mdp_hooks is None
        and not env.run_type_checks
        and not ({"next", "_step", "_reset"} & set(tensordict.keys()))
        and all(isinstance(value, Tensor) for value in tensordict.values())
    )


def clear_ended(root: dict[str, Tensor], written: Mapping[str, Any], ended: Tensor) -> None:
    """As in TorchRL, what a reset does not write (an old action, say) becomes zero in the rows that ended `[N]`."""
    for key in root.keys() - written.keys():
        value = root[key]
        root[key] = value.masked_fill(ended.reshape(-1, *(1,) * (value.ndim - 1)), 0)


def _make_generator(generator: torch.Generator | None, seed: int | None, device: torch.device) -> torch.Generator:
    if generator is not None:
        return generator
    generator = torch.Generator(device=device)
    # Without a seed the starts follow torch.manual_seed, as everything else that draws from torch does.
    generator.manual_seed(int(torch.randint(2**62, (), device="cpu")) if seed is None else seed)
    return generator
