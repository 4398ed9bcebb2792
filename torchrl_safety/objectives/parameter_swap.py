"""Calling a network with other parameters than its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from tensordict.nn import TensorDictParams
from torch import nn


class ParameterSwap:
    """Contexts in which a network computes with given parameters and buffers, as in ``params.to_module(network)``.

    TensorDict walks through the whole network at each swap, which takes as long as a small network itself; here the
    places of its tensors are looked up once, and again when a layer was replaced. Nothing is kept of `params`, so that
    whatever moves, loads or updates them is seen.

    Args:
        network: the module whose tensors `params` replaces.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self._look_up()

    def _look_up(self) -> None:
        network = self.network
        # Modules that hold their parameters in a second place (nn.LSTM) notice a change in their own __setattr__ only.
        self.is_plain = all(type(part).__setattr__ is nn.Module.__setattr__ for part in network.modules())
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        self._layers = [(part._modules, dict(part._modules)) for part in network.modules()]
        for path, part in network.named_modules(remove_duplicate=False):
            for owner in (part._parameters, part._buffers):
                self._places |= {f"{path}.{leaf}".lstrip("."): (owner, leaf) for leaf in owner}

    def __call__(self, params: TensorDictParams) -> AbstractContextManager:
        """The context in which the network's tensors are those of `params`."""
        if self.is_plain and not torch.compiler.is_compiling():
            if any(now != before for now, before in self._layers):
                self._look_up()
            return self._swapped(params)
        # Without the argument, target parameters come back from the network as new ones that require gradients.
        return params.to_module(self.network, preserve_module_state=False)

    @contextmanager
    def _swapped(self, params: TensorDictParams) -> Iterator[None]:
        tensors: dict[str, Any] = {**params._parameters, **params._buffers}
        places = [self._places[name] for name in tensors]
        own = [owner[leaf] for owner, leaf in places]
        try:
            for (owner, leaf), tensor in zip(places, tensors.values()):
                owner[leaf] = tensor
            yield
            for name in params._buffers:  # one that the network assigned anew, such as a count, goes with `params`
                owner, leaf = self._places[name]
                if owner[leaf] is not tensors[name]:
                    params.set(tuple(name.split(".")), owner[leaf])
        finally:
            for (owner, leaf), tensor in zip(places, own):
                owner[leaf] = tensor
