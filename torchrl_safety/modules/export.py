"""A trained policy as one file that runs without this package."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_safety.modules.greedy import greedy_policy
from torchrl_safety.modules.noisy import NoisyLinear
from torchrl_safety.modules.rainbow import RainbowNetwork


def export_policy(
    policy: TensorDictModuleBase,
    path: str | Path,
    example_observation: Tensor | TensorDictBase,
    *,
    format: str = "torch",
) -> Path:
    r"""Write a policy without noise, for batches of any size, as a file of `torch.export` or ONNX.

    The exported function takes the policy's inputs, in the order of its `in_keys`, and returns a dictionary of all that
    the policy writes (ONNX: named outputs), a nested key ``("agent", "action")`` as ``"agent.action"``. Noisy layers
    are exported as linear layers of their means, everything else in evaluation mode, a random policy as its
    deterministic one. `policy` itself is not touched: a copy of it is exported.

    Args:
        policy: e.g. a :func:`greedy_policy`; a :class:`RainbowNetwork` gets its greedy policy.
        path: file to write, usually `.pt2` (``torch.export.load(path).module()`` reads it) or `.onnx`.
        example_observation: `[B, ...]` with any B >= 1, whose type and device the exported function will expect; for a
            policy of several inputs a TensorDict of them.
        format: ``"torch"``, or ``"onnx"``, which needs the extra `onnx` (`pip install torchrl-safety[onnx]`).

    Returns:
        The path.

    Raises:
        ValueError: for an unknown format, or an example without a batch dimension, without rows, or of another number
            of inputs.
        ImportError: for ONNX without its packages.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torchrl_safety.modules import RainbowNetwork, export_policy
        >>> network = RainbowNetwork(2, 3, support=(-1.0, 1.0), hidden=(8,))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = export_policy(network, f"{folder}/policy.pt2", torch.zeros(1, 2))
        ...     act = torch.export.load(path).module()
        >>> act(torch.zeros(5, 2))["action"].shape
        torch.Size([5])
    """
    if format not in ("torch", "onnx"):
        raise ValueError(f"format is {format!r}; choose one of ['torch', 'onnx']")
    missing = [name for name in ("onnx", "onnxscript") if format == "onnx" and find_spec(name) is None]
    if missing:
        raise ImportError(f"the format 'onnx' needs {missing}: python -m pip install 'torchrl-safety[onnx]'")
    if isinstance(policy, RainbowNetwork):
        policy = greedy_policy(policy)
    tensors = _Tensors(_without_noise(copy.deepcopy(policy))).eval()
    # A size of 1 would be taken for a constant.
    examples = tuple(torch.cat([example, example]) for example in _examples(policy, example_observation))
    shapes = {"inputs": tuple({0: torch.export.Dim("batch")} for _ in examples)}
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        program = torch.export.export(tensors, examples, dynamic_shapes=shapes, strict=False)
    if format == "torch":
        torch.export.save(program, path)
    else:
        torch.onnx.export(
            program,
            examples,
            path,
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=_names(policy.in_keys),
            output_names=_names(policy.out_keys),
            external_data=False,
            verbose=False,
        )
    return Path(path)


class _Tensors(nn.Module):
    """A policy as a function of tensors."""

    def __init__(self, policy: TensorDictModuleBase) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        # Without a batch size, which would become a constant of the program.
        written = self.policy(TensorDict(dict(zip(self.policy.in_keys, inputs)), []))
        keys = self.policy.out_keys
        return {name: written[key] for name, key in zip(_names(keys), keys)}


def _without_noise(module: nn.Module) -> nn.Module:
    """`module` with every noisy layer replaced by the linear one of its means."""
    for name, child in module.named_children():
        if isinstance(child, NoisyLinear):
            linear = nn.Linear(child.in_features, child.out_features, device="meta")
            linear.weight, linear.bias = child.weight_mu, child.bias_mu
            setattr(module, name, linear)
        else:
            _without_noise(child)
    return module


def _examples(policy: TensorDictModuleBase, example: Tensor | TensorDictBase) -> list[Tensor]:
    if isinstance(example, Tensor) and len(policy.in_keys) != 1:
        raise ValueError(
            f"the policy has the inputs {policy.in_keys}, the example is one tensor: give a TensorDict of them"
        )
    examples = [example] if isinstance(example, Tensor) else [example[key] for key in policy.in_keys]
    for key, tensor in zip(policy.in_keys, examples):
        if tensor.dim() < 2 or tensor.shape[0] < 1:
            raise ValueError(
                f"the example of {key!r} has shape {list(tensor.shape)}; give `[B, ...]`, a batch of at least one"
            )
    return examples


def _names(keys: list[NestedKey]) -> list[str]:
    return [key if isinstance(key, str) else ".".join(key) for key in keys]
