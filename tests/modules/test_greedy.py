"""The greedy policy: its action, and how it takes account of risk."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.data import Categorical, OneHot

from torchrl_safety.modules import RainbowNetwork, categorical_cvar, greedy_policy, reset_noise


def make(**settings) -> RainbowNetwork:
    torch.manual_seed(0)
    return RainbowNetwork(2, 3, **{"support": (-2.0, 0.0), "atoms": 11, "hidden": (16,), **settings})


def observe(*shape: int, dtype: torch.dtype = torch.float32) -> TensorDict:
    return TensorDict({"observation": torch.rand(*shape, 2, dtype=dtype)}, shape)


def table(values: list[list[float]]) -> TensorDictModule:
    """A value network that ignores the observation."""
    return TensorDictModule(lambda observation: torch.tensor(values), ["observation"], ["action_value"])


@pytest.mark.parametrize("shape", [(), (5,), (3, 4)])
def test_the_greedy_action_is_the_index_of_the_largest_value(shape):
    network = make()
    result = greedy_policy(network)(observe(*shape))
    action, values = result["action"], result["action_value"]
    assert action.shape == shape
    assert Categorical(3, shape=shape).is_in(action)
    for index, row in zip(action.flatten().tolist(), values.reshape(-1, 3).tolist()):
        assert row[index] == max(row)
    best = result["chosen_action_value"]
    assert best.shape == (*shape, 1)
    assert torch.equal(best.squeeze(-1), values.amax(-1))


def test_ties_give_one_valid_action_the_first():
    result = greedy_policy(table([[10.0, 10.0, 3.0], [0.0, 7.0, 7.0], [1.0, 1.0, 1.0]]))(observe(3))
    assert result["action"].tolist() == [0, 1, 0]
    assert result["chosen_action_value"].tolist() == [[10.0], [7.0], [1.0]]


def test_the_policy_shares_the_weights_and_the_noise_of_its_network():
    network, batch = make(), observe(5)
    policy = greedy_policy(network, action_key=("agent", "action"))
    reset_noise(policy)
    assert torch.equal(policy(batch.clone())["action_value"], network(batch.clone())["action_value"])
    assert {*policy.parameters()} == {*network.parameters()}
    assert policy(batch)["agent", "action"].shape == (5,)


def test_a_wrapped_network_makes_a_policy_too():
    halve = TensorDictModule(lambda x: x / 2, ["pixels"], ["observation"])
    network = make()
    policy = greedy_policy(TensorDictSequential(halve, network))
    x = torch.rand(5, 2)
    expected = network(TensorDict({"observation": x / 2}, [5]))["action_value"].argmax(-1)
    assert torch.equal(policy(TensorDict({"pixels": x}, [5]))["action"], expected)


def test_a_policy_of_indices_refuses_a_one_hot_environment():
    network = RainbowNetwork(2, 3, support=(-1.0, 1.0))
    with pytest.raises(ValueError, match=r"OneHot.*categorical_action_encoding=True"):
        greedy_policy(network, spec=OneHot(3))
    assert "action" in greedy_policy(network, spec=Categorical(3)).out_keys


def test_a_network_that_names_no_values_is_refused():
    with pytest.raises(ValueError, match=r"Linear without out_keys.*TensorDictModule"):
        greedy_policy(torch.nn.Linear(2, 3))


# --- risk ---


def gamble(shape: tuple[int, ...] = (1,)) -> tuple[RainbowNetwork, TensorDict]:
    """Atoms -1, 0, 1. Action 0 is surely 0; action 1 is better on average, -1 with probability 1/4 and 1 with 3/4."""
    network = RainbowNetwork(2, 2, support=(-1.0, 1.0), atoms=3, hidden=(), dueling=None, noisy=False)
    logits = torch.tensor([[1e-9, 1.0, 1e-9], [0.25, 1e-9, 0.75]]).log()
    with torch.no_grad():
        network.head.weight.zero_()
        network.head.bias.copy_(logits.flatten())
    return network, observe(*shape)


@pytest.mark.parametrize(
    ("level", "action", "value"), [(0.1, 0, 0.0), (0.25, 0, 0.0), (0.4, 0, 0.0), (0.6, 1, 0.1 / 0.6), (1.0, 1, 0.5)]
)
def test_a_policy_averse_to_risk_looks_only_at_the_worst_outcomes(level, action, value):
    """CVaR of the gamble at level a >= 1/4 is (a - 1/2) / a, which is above 0 only from a = 1/2 on."""
    network, states = gamble((4,))
    result = greedy_policy(network, risk="cvar", level=level)(states)
    assert result["action"].tolist() == [action] * 4
    torch.testing.assert_close(result["chosen_action_value"], torch.full((4, 1), value), atol=1e-6, rtol=0)
    torch.testing.assert_close(result["action_value"], torch.tensor([[0.0, 0.5]]).expand(4, 2), atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(), (1,), (3, 4)])
def test_the_chosen_value_is_the_largest_cvar_of_the_distributions(shape):
    network = make(dtype=torch.float64)
    result = greedy_policy(network, risk="cvar", level=0.2, action_key=("agent", "action"))(
        observe(*shape, dtype=torch.float64)
    )
    expected = categorical_cvar(result["value_logits"].softmax(-1), network.support, 0.2)
    assert torch.equal(result["action_cvar"], expected)
    assert torch.equal(result["agent", "action"], expected.argmax(-1))
    assert torch.equal(result["chosen_action_value"].squeeze(-1), expected.amax(-1))
    assert result["chosen_action_value"].shape == (*shape, 1)


def test_the_whole_of_the_outcomes_is_no_risk():
    network, states = make(dtype=torch.float64), observe(50, dtype=torch.float64)
    neutral, whole = greedy_policy(network)(states.clone()), greedy_policy(network, risk="cvar", level=1.0)(states)
    torch.testing.assert_close(whole["chosen_action_value"], neutral["chosen_action_value"])
    assert torch.equal(whole["action"], neutral["action"])


@pytest.mark.parametrize("risk", [{}, {"risk": "cvar", "level": 0.1}], ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4)])
def test_the_logits_of_the_chosen_action_give_a_conservative_set(risk, shape):
    network = make(support=(-1.0, 1.0))
    result = greedy_policy(network, chosen_logits_key=("chosen", "logits"), **risk)(observe(*shape))
    rows = zip(
        result["value_logits"].reshape(-1, 3, 11),
        result["action"].flatten(),
        result["chosen", "logits"].reshape(-1, 11),
    )
    for logits, action, chosen in rows:
        assert torch.equal(chosen, logits[action])
    safe = network.quantile(result["chosen", "logits"], 0.05) >= 0
    assert safe.shape == shape
    below = (result["chosen", "logits"].softmax(-1) * (network.support < 0)).sum(-1)
    assert torch.equal(safe, below < 0.05)


def test_a_policy_averse_to_risk_has_the_state_of_the_neutral_one_and_a_copy_stands_alone():
    network, states = make(), observe(5)
    policy = greedy_policy(network, risk="cvar", level=0.3)
    assert policy.state_dict().keys() == greedy_policy(network).state_dict().keys()
    duplicate = copy.deepcopy(policy).double()
    torch.testing.assert_close(
        duplicate(states.clone())["action_cvar"].float(), policy(states)["action_cvar"], atol=1e-5, rtol=0
    )
    assert duplicate(observe(5, dtype=torch.float64))["action_cvar"].dtype == torch.float64


@pytest.mark.parametrize("risk", [{}, {"risk": "cvar", "level": 0.1, "chosen_logits_key": "chosen"}], ids=str)
def test_a_policy_compiles_without_graph_breaks(risk):
    policy, states = greedy_policy(make(), **risk), observe(5)
    expected = policy(states.clone())
    torch.compiler.reset()
    got = torch.compile(policy, fullgraph=True, backend="eager")(states)
    for key in policy.out_keys:
        torch.testing.assert_close(got[key], expected[key])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"risk": "variance"}, r"risk is 'variance'; choose one of \['mean', 'cvar'\]"),
        ({"risk": "cvar"}, "level is None: 'cvar' needs a level"),
        ({"level": 0.1}, "risk is 'mean' and level is 0.1"),
        ({"risk": "cvar", "level": 0.0}, r"level is 0.0; it must lie in \(0, 1\]"),
        ({"risk": "cvar", "level": 1.5}, "level is 1.5"),
    ],
)
def test_settings_of_risk_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        greedy_policy(make(), **settings)


@pytest.mark.parametrize("settings", [{"risk": "cvar", "level": 0.1}, {"chosen_logits_key": "chosen"}], ids=str)
def test_a_network_of_scalar_values_has_no_risk(settings):
    with pytest.raises(ValueError, match=r"0 RainbowNetworks with a support, not one.*support=\(vmin, vmax\)"):
        greedy_policy(make(support=None), **settings)


def test_the_distribution_is_found_in_a_wrapped_network():
    halve = TensorDictModule(lambda x: x / 2, ["pixels"], ["observation"])
    policy = greedy_policy(TensorDictSequential(halve, make()), risk="cvar", level=0.1)
    assert policy(TensorDict({"pixels": torch.rand(5, 2)}, [5]))["action_cvar"].shape == (5, 3)


def test_the_support_of_the_worst_outcomes_is_that_of_the_network_however_it_came_there():
    source = make(support=(5.0, 6.0))
    network = make(device="meta")
    policy = greedy_policy(network, risk="cvar", level=0.3)
    policy.to_empty(device="cpu")
    network.load_state_dict(source.state_dict(), assign=True)
    states = observe(5)
    expected = greedy_policy(source, risk="cvar", level=0.3)(states.clone())["action_cvar"]
    assert torch.equal(policy(states)["action_cvar"], expected)
