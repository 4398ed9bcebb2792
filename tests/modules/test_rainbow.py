"""RainbowNetwork: its shapes, its streams, its noise, and what it takes as an observation."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from torchrl_safety.modules import AngleEncoding, NoisyLinear, RainbowNetwork, reset_noise

VARIANTS = [
    {"dueling": dueling, "noisy": noisy, "hidden": hidden}
    for dueling in ("mean", "max", None)
    for noisy in (True, False)
    for hidden in ((16, 16), ())
]


def make(**settings) -> RainbowNetwork:
    torch.manual_seed(0)
    return RainbowNetwork(2, 3, **{"support": (-2.0, 0.0), "atoms": 11, "hidden": (16,), **settings})


def observe(*shape: int, dtype: torch.dtype = torch.float32) -> TensorDict:
    return TensorDict({"observation": torch.rand(*shape, 2, dtype=dtype)}, shape)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (0,)])
def test_any_batch_shape_gives_logits_per_action_and_atom_and_one_value_per_action(variant, shape):
    result = make(**variant)(observe(*shape))
    assert result["value_logits"].shape == (*shape, 3, 11)
    assert result["action_value"].shape == (*shape, 3)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_action_value_is_the_mean_of_the_distribution(variant):
    result = make(**variant, dtype=torch.float64)(observe(4, dtype=torch.float64))
    for logits, values in zip(result["value_logits"].tolist(), result["action_value"].tolist()):
        for row, value in zip(logits, values):
            weights = [math.exp(x) for x in row]
            atoms = [-2.0 + 0.2 * j for j in range(11)]
            assert value == pytest.approx(sum(w * z for w, z in zip(weights, atoms)) / sum(weights), abs=1e-12)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_batches_are_evaluated_row_by_row(variant):
    network, batch = make(**variant), observe(3, 4)
    whole = network(batch.clone())["action_value"]
    for t in range(3):
        for b in range(4):
            torch.testing.assert_close(network(batch[t, b])["action_value"], whole[t, b])


@pytest.mark.parametrize("mode", ["mean", "max"])
def test_the_first_row_of_a_dueling_head_is_the_value_the_others_the_advantages(mode):
    network = make(dueling=mode, noisy=False, hidden=())
    x = torch.rand(5, 2)
    rows = nn.functional.linear(x, network.head.weight, network.head.bias).reshape(5, 4, 11)
    value, advantage = rows[:, 0], rows[:, 1:]
    for atom in range(11):
        column = advantage[:, :, atom]
        baseline = column.sum(1) / 3 if mode == "mean" else column.max(1).values
        expected = value[:, atom : atom + 1] + column - baseline[:, None]
        torch.testing.assert_close(network.logits(x)[:, :, atom], expected)


@pytest.mark.parametrize("dueling", ["mean", None])
def test_noise_is_in_the_head_only_and_only_if_asked_for(dueling):
    noisy, plain = make(dueling=dueling), make(dueling=dueling, noisy=False)
    assert isinstance(noisy.head, NoisyLinear)
    assert not any(isinstance(layer, NoisyLinear) for layer in [*plain.modules(), *noisy.torso.modules()])
    batch = observe(5)
    for network, training, changes in ((noisy, True, True), (noisy, False, False), (plain, True, False)):
        before = network.train(training)(batch.clone())["action_value"]
        reset_noise(network)
        assert torch.equal(network(batch.clone())["action_value"], before) is not changes


STREAMS = [
    {"dueling": dueling, "noisy": noisy, "head_hidden": widths}
    for dueling in ("mean", "max", None)
    for noisy in (True, "independent", False)
    for widths in ((8,), (8, 6))
]


@pytest.mark.parametrize("settings", STREAMS, ids=str)
def test_hidden_layers_of_the_streams_are_those_of_separate_networks_joined_by_the_aggregation(settings):
    network, x = make(**settings, dtype=torch.float64), torch.rand(5, 2, dtype=torch.float64)
    features = network.torso(x)

    def by_hand(stream: nn.Sequential) -> torch.Tensor:
        y = features
        *within, last = [layer for layer in stream if not isinstance(layer, nn.ReLU)]
        assert [layer.out_features for layer in within] == list(settings["head_hidden"])
        for layer in within:
            y = layer(y).clamp_min(0)
        return last(y)

    if settings["dueling"] is None:
        expected = by_hand(network.head).reshape(5, 3, 11)
    else:
        value = by_hand(network.head.value).reshape(5, 1, 11)
        advantage = by_hand(network.head.advantage).reshape(5, 3, 11)
        expected = network.dueling(value, advantage)
    torch.testing.assert_close(network.logits(x), expected)
    assert network(observe(2, 3))["action_value"].shape == (2, 3, 3)


@pytest.mark.parametrize("mode", ["mean", "max"])
@pytest.mark.parametrize("head_hidden", [(), (8,)])
def test_a_constant_added_to_every_advantage_changes_nothing_and_one_added_to_the_value_all(mode, head_hidden):
    """MATH §9: identifiable; Wang et al. 2016, eq. 8 and 9."""
    network = make(dueling=mode, head_hidden=head_hidden, noisy=False, dtype=torch.float64)
    x = torch.rand(5, 2, dtype=torch.float64)
    before = network.logits(x)
    bias = network.head.advantage[-1].bias if head_hidden else network.head.bias[11:]
    shift = torch.randn(11, dtype=torch.float64)  # one constant for each atom
    with torch.no_grad():
        bias += shift.repeat(3)
    torch.testing.assert_close(network.logits(x), before)
    bias = network.head.value[-1].bias if head_hidden else network.head.bias[:11]
    with torch.no_grad():
        bias += shift
    torch.testing.assert_close(network.logits(x), before + shift)


@pytest.mark.parametrize(
    ("noisy", "noisy_hidden", "expected"),
    [(True, True, [8, 11, 8, 33]), (True, False, [11, 33]), (False, True, []), ("independent", True, [8, 11, 8, 33])],
)
def test_noise_is_in_the_streams_where_it_is_asked_for(noisy, noisy_hidden, expected):
    network = make(noisy=noisy, noisy_hidden=noisy_hidden, head_hidden=(8,), sigma_init=0.8)
    layers = [layer for layer in network.modules() if isinstance(layer, NoisyLinear)]
    assert [layer.out_features for layer in layers] == expected
    assert {layer.factorised for layer in layers} <= {noisy != "independent"}
    assert {layer.sigma_init for layer in layers} <= {0.8}
    assert not any(isinstance(layer, NoisyLinear) for layer in network.torso.modules())


@pytest.mark.parametrize(("noisy", "factorised"), [(True, True), ("factorised", True), ("independent", False)])
@pytest.mark.parametrize("head_hidden", [(), (8,)])
def test_the_kind_of_noise_is_that_of_the_layers(noisy, factorised, head_hidden):
    network = make(noisy=noisy, head_hidden=head_hidden)
    layers = [layer for layer in network.modules() if isinstance(layer, NoisyLinear)]
    ranks = {torch.linalg.matrix_rank(layer.weight_noise).item() == 1 for layer in layers}
    assert ranks == {factorised}


def test_names_of_parameters_without_hidden_layers_of_the_streams_stay_as_they_were():
    """Checkpoints hold them."""
    layers = [f"torso.{i}.{name}" for i in (0, 2) for name in ("weight", "bias")]
    noise = [f"head.{part}_{name}" for part in ("weight", "bias") for name in ("mu", "sigma", "noise")]
    assert {*make(hidden=(16, 16)).state_dict()} == {"support", *layers, *noise}
    assert {*make(hidden=(16, 16), noisy=False).state_dict()} == {"support", *layers, "head.weight", "head.bias"}


def test_sigma_init_reaches_the_head():
    torch.testing.assert_close(make(sigma_init=0.8).head.weight_sigma.detach(), torch.full((44, 16), 0.8 / 4))


@pytest.mark.parametrize("support", [(-2.0, 0.0), (0.0, 1.0), (-170.4, 0.697)])
def test_atoms_are_evenly_spaced_from_end_to_end_and_zero_is_a_legal_end(support):
    network = make(support=support, dtype=torch.float64)
    expected = [support[0] + (support[1] - support[0]) * j / 10 for j in range(11)]
    assert network.support.tolist() == pytest.approx(expected, abs=1e-12)
    values = network(observe(50, dtype=torch.float64))["action_value"]
    assert ((values > support[0]) & (values < support[1])).all()


def test_keys_can_be_nested_and_renamed():
    network = make(in_key=("agent", "state"), out_keys=(("agent", "logits"), ("agent", "q")))
    assert network.in_keys == [("agent", "state")]
    assert network.out_keys == [("agent", "logits"), ("agent", "q")]
    result = network(TensorDict({"agent": {"state": torch.rand(4, 2)}}, [4]))
    assert result["agent", "logits"].shape == (4, 3, 11)
    assert result["agent", "q"].shape == (4, 3)


def test_a_copy_and_a_state_dict_compute_the_same():
    network, batch = make(dtype=torch.float64), observe(5, dtype=torch.float64)
    expected = network(batch.clone())["value_logits"]
    other = make(dtype=torch.float64, support=(-1.0, 1.0))
    reset_noise(other)
    other.load_state_dict(network.state_dict())
    assert torch.equal(other(batch.clone())["value_logits"], expected)
    assert torch.equal(copy.deepcopy(network)(batch.clone())["value_logits"], expected)
    assert {value.dtype for value in network.state_dict().values()} == {torch.float64}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"support": (1.0, 1.0)}, r"support is \(1.0, 1.0\)"),
        ({"support": (1.0, -1.0)}, "vmin < vmax"),
        ({"support": (float("nan"), 1.0)}, "support is"),
        ({"support": (0.0, float("inf"))}, "give finite"),
        ({"support": (0.0,)}, r"support is \(0.0,\)"),
        ({"hidden": 128}, r"hidden is 128.*hidden=\(128,\)"),
        ({"head_hidden": 512}, r"head_hidden is 512.*head_hidden=\(512,\)"),
        ({"noisy": "gaussian"}, r"noisy is 'gaussian'; choose one of \[False, True, 'factorised', 'independent'\]"),
        ({"noisy": None}, "noisy is None"),
        ({"sigma_init": float("inf")}, "sigma_init is inf"),
        ({"atoms": 1}, "atoms is 1"),
        ({"dueling": "sum"}, "dueling mode is 'sum'"),
        ({"sigma_init": -1.0}, "sigma_init is -1.0"),
    ],
)
def test_settings_out_of_range_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        make(**settings)


@pytest.mark.parametrize(("in_features", "num_actions"), [(0, 3), (2, 0)])
def test_a_network_without_inputs_or_actions_is_refused(in_features, num_actions):
    with pytest.raises(ValueError, match=rf"in_features is {in_features}, num_actions {num_actions}"):
        RainbowNetwork(in_features, num_actions, support=(-1.0, 1.0))


def test_an_observation_that_is_missing_or_of_another_size_is_named():
    network = make()
    with pytest.raises(KeyError, match=r"'observation' is missing; present: \['pixels'\]"):
        network(TensorDict({"pixels": torch.zeros(5, 2)}, [5]))
    with pytest.raises(ValueError, match=r"\[5, 3\], the network takes `\[\*B, 2\]`"):
        network(TensorDict({"observation": torch.zeros(5, 3)}, [5]))


@pytest.mark.parametrize("settings", [{}, {"hidden": (), "head_hidden": (8,)}, {"support": None}], ids=str)
def test_a_network_compiles_without_graph_breaks(settings):
    network, batch = make(**settings), observe(5)
    expected = network(batch.clone())["action_value"]
    torch.compiler.reset()
    compiled = torch.compile(network, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(batch)["action_value"], expected)


@pytest.mark.parametrize("settings", [{}, {"hidden": (), "head_hidden": (8,)}, {"hidden": (), "noisy": False}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_an_observation_of_another_type_is_taken_in_the_precision_of_the_network(dtype, settings):
    network = make(**settings)
    numbers = torch.tensor([[1.0, -2.0], [0.0, 3.0]])
    expected = network(TensorDict({"observation": numbers}, [2]))["action_value"]
    assert torch.equal(network(TensorDict({"observation": numbers.to(dtype)}, [2]))["action_value"], expected)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_an_encoder_is_applied_to_the_raw_observation_before_the_shared_layers(variant):
    encoded = make(**variant, encoder=AngleEncoding(2, angles=(1,)))
    torch.manual_seed(0)
    plain = RainbowNetwork(3, 3, support=(-2.0, 0.0), atoms=11, **variant)
    assert encoded.in_features == 2
    assert encoded.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(encoded.state_dict())
    batch = observe(5)
    x, angle = batch["observation"].unbind(-1)
    by_hand = TensorDict({"observation": torch.stack((x, angle.cos(), angle.sin()), -1)}, [5])
    assert torch.equal(encoded(batch)["value_logits"], plain(by_hand)["value_logits"])
    with pytest.raises(ValueError, match=r"\[5, 3\], the network takes `\[\*B, 2\]`"):
        encoded(by_hand)


def test_turning_once_around_changes_no_value_of_a_network_that_encodes_angles():
    network = make(encoder=AngleEncoding(2, angles=(1,)), dtype=torch.float64)
    batch = observe(5, dtype=torch.float64)
    around = TensorDict({"observation": batch["observation"] + torch.tensor([0.0, math.tau])}, [5])
    torch.testing.assert_close(network(around)["action_value"], network(batch)["action_value"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("width", [None, 0, 2.5])
def test_an_encoder_that_does_not_say_its_width_is_refused(width):
    encoder = nn.Identity()
    if width is not None:
        encoder.out_features = width
    with pytest.raises(ValueError, match=rf"encoder is a Identity whose out_features is {width}"):
        make(encoder=encoder)


def test_the_parameters_of_an_encoder_are_those_of_the_network():
    network = make(encoder=nn.Linear(2, 7))
    network(observe(5))["action_value"].sum().backward()
    assert network.encoder.weight.grad.abs().sum() > 0
    assert {*network.encoder.parameters()} < {*network.parameters()}
