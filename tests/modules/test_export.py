"""An exported policy acts like the one it was made of, on batches of any size and without its noise."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import ProbabilisticActor, TanhNormal

from torchrl_safety.modules import (
    AngleEncoding,
    CappedNormalParams,
    NatureCNN,
    NoisyLinear,
    RainbowNetwork,
    export,
    export_policy,
    greedy_policy,
    reset_noise,
)
from torchrl_safety.objectives import CategoricalDQNLoss

SIZES = (1, 2, 7, 64)
SUFFIX = {"torch": "pt2", "onnx": "onnx"}

pytestmark = [  # PyTorch's own, while it writes ONNX
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:# The axis name:UserWarning"),
]


def make(**settings) -> RainbowNetwork:
    torch.manual_seed(0)
    return RainbowNetwork(2, 3, **{"support": (-2.0, 1.0), "atoms": 11, "hidden": (16,), **settings})


def run(path: Path, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the file says, read by a program that knows nothing of the policy."""
    if path.suffix == ".pt2":
        return torch.export.load(path).module()(*inputs)
    session = onnxruntime.InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    given = {place.name: tensor.numpy() for place, tensor in zip(session.get_inputs(), inputs)}
    return dict(zip(names, map(torch.from_numpy, session.run(names, given))))


def same(found: dict[str, torch.Tensor], expected: TensorDict, names: dict) -> None:
    assert found.keys() == names.keys()
    for name, key in names.items():
        torch.testing.assert_close(found[name], expected[key], atol=1e-5, rtol=1e-5, msg=f"{name} of {expected.shape}")


POLICIES = {
    "plain": lambda: greedy_policy(make()),
    "streams": lambda: greedy_policy(make(head_hidden=(8,), noisy="independent", dueling="max")),
    "scalar": lambda: greedy_policy(make(support=None, dueling=None)),
    "averse": lambda: greedy_policy(
        make(encoder=AngleEncoding(2, (1,))), risk="cvar", level=0.1, chosen_logits_key="chosen"
    ),
}


@pytest.mark.parametrize("format", SUFFIX)
@pytest.mark.parametrize("name", POLICIES)
def test_the_file_gives_the_greedy_action_and_the_values_for_batches_of_any_size(format, name, tmp_path):
    policy = POLICIES[name]()
    path = export_policy(policy, tmp_path / f"policy.{SUFFIX[format]}", torch.zeros(1, 2), format=format)
    policy.eval()
    for size in SIZES:
        x = 4 * torch.rand(size, 2) - 2
        expected = policy(TensorDict({"observation": x}, [size]))
        same(run(path, x), expected, {key: key for key in policy.out_keys})


@pytest.mark.parametrize("format", SUFFIX)
def test_a_redraw_of_the_noise_changes_no_export_and_the_policy_keeps_its_modes_and_noise(format, tmp_path):
    network, x = make(head_hidden=(8,)), torch.rand(7, 2)
    network.torso.eval()
    modes = [part.training for part in network.modules()]
    state = {name: value.clone() for name, value in network.state_dict().items()}
    first = run(export_policy(network, tmp_path / f"first.{SUFFIX[format]}", x, format=format), x)
    assert [part.training for part in network.modules()] == modes
    assert state.keys() == network.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    reset_noise(network)
    second = run(export_policy(network, tmp_path / f"second.{SUFFIX[format]}", x, format=format), x)
    for name, value in first.items():
        assert torch.equal(second[name], value), name
    assert not torch.equal(network(TensorDict({"observation": x}, [7]))["action_value"], first["action_value"])


def test_a_file_holds_the_means_alone(tmp_path):
    program = torch.export.load(export_policy(make(), tmp_path / "policy.pt2", torch.zeros(2, 2)))
    assert not [name for name in program.state_dict if "sigma" in name or "noise" in name]
    names = [name for name in program.state_dict if not name.endswith("support")]
    assert len(names) == 4


def test_the_network_of_a_loss_is_exported_after_an_update(tmp_path):
    network = make()
    loss = CategoricalDQNLoss(network)
    flag = torch.zeros(4, 1, dtype=torch.bool)
    after = {"observation": torch.rand(4, 2), "reward": torch.rand(4, 1), "terminated": flag, "done": flag}
    batch = TensorDict({"observation": torch.rand(4, 2), "action": torch.tensor([0, 1, 2, 0]), "next": after}, [4])
    reset_noise(loss)
    loss(batch)["loss"].backward()
    torch.optim.SGD(loss.parameters(), 1.0).step()
    path, x = export_policy(network, tmp_path / "policy.pt2", torch.zeros(3, 2)), torch.rand(5, 2)
    expected = greedy_policy(network.eval())(TensorDict({"observation": x}, [5]))
    same(
        run(path, x), expected, {key: key for key in ("value_logits", "action_value", "action", "chosen_action_value")}
    )


@pytest.mark.parametrize("format", SUFFIX)
def test_images_of_bytes_go_in_as_they_are(format, tmp_path):
    torch.manual_seed(0)
    network = RainbowNetwork((1, 36, 36), 2, support=(-1.0, 1.0), hidden=(8,), encoder=NatureCNN((1, 36, 36)))
    x = torch.randint(0, 256, (3, 1, 36, 36), dtype=torch.uint8)
    path = export_policy(network, tmp_path / f"p.{SUFFIX[format]}", x[:1], format=format)
    expected = network.eval()(TensorDict({"observation": x}, [3]))["action_value"]
    torch.testing.assert_close(run(path, x)["action_value"], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("format", SUFFIX)
def test_several_inputs_and_nested_keys_are_named_and_ordered_as_in_the_policy(format, tmp_path):
    join = TensorDictModule(lambda x, goal: x - goal, [("agent", "x"), "goal"], ["observation"])
    policy = greedy_policy(TensorDictSequential(join, make()), action_key=("agent", "action"))
    example = TensorDict({"goal": torch.zeros(2, 2), "agent": {"x": torch.zeros(2, 2)}}, [2])
    path = export_policy(policy, tmp_path / f"p.{SUFFIX[format]}", example, format=format)
    x, goal = torch.rand(5, 2), torch.rand(5, 2)
    expected = policy.eval()(TensorDict({"goal": goal, "agent": {"x": x}}, [5]))
    found = run(path, x, goal)
    torch.testing.assert_close(found["agent.action"], expected["agent", "action"])
    torch.testing.assert_close(found["action_value"], expected["action_value"], atol=1e-5, rtol=1e-5)
    if format == "onnx":
        inputs = onnxruntime.InferenceSession(path).get_inputs()
        assert [(place.name, place.shape) for place in inputs] == [("agent.x", ["batch", 2]), ("goal", ["batch", 2])]


def test_a_random_policy_is_exported_as_its_deterministic_one(tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(NoisyLinear(2, 4), CappedNormalParams(std_cap=0.5))
    actor = ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
    )
    path, x = export_policy(actor, tmp_path / "p.pt2", torch.zeros(2, 2)), torch.rand(5, 2)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        expected = actor.eval()(TensorDict({"observation": x}, [5]))["action"]
    torch.testing.assert_close(run(path, x)["action"], expected)


@pytest.mark.parametrize("shape", [(2,), (0, 2)])
def test_an_example_without_rows_is_refused(shape, tmp_path):
    with pytest.raises(ValueError, match=r"example of 'observation' has shape .*give `\[B, \.\.\.\]`"):
        export_policy(make(), tmp_path / "p.pt2", torch.zeros(shape))


def test_what_does_not_fit_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"format is 'jit'; choose one of \['torch', 'onnx'\]"):
        export_policy(make(), tmp_path / "p", torch.zeros(1, 2), format="jit")
    join = TensorDictModule(lambda x, goal: x - goal, ["x", "goal"], ["observation"])
    with pytest.raises(ValueError, match=r"inputs \['x', 'goal'\], the example is one tensor"):
        export_policy(greedy_policy(TensorDictSequential(join, make())), tmp_path / "p", torch.zeros(1, 2))
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"\['onnx', 'onnxscript'\].*torchrl-safety\[onnx\]"):
        export_policy(make(), tmp_path / "p", torch.zeros(1, 2), format="onnx")
    assert not (tmp_path / "p").exists()
