"""NoisyLinear: its maths, and that its noise is on, and refreshed, inside losses."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded
from torchrl.modules import (
    DistributionalQValueActor,
    NormalParamExtractor,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import ClipPPOLoss, DistributionalDQNLoss, DQNLoss, HardUpdate, LossModule, SACLoss, SoftUpdate

from torchrl_safety.modules import NoisyLinear, RainbowNetwork, reset_noise
from torchrl_safety.objectives import AvoidBackup, CategoricalDQNLoss

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fills(samples: torch.Tensor, cdf) -> bool:
    """Kolmogorov-Smirnov at about p = 1e-4."""
    ordered = samples.double().flatten().sort().values
    n = len(ordered)
    empirical = torch.arange(1, n + 1, dtype=torch.float64) / n
    return (empirical - cdf(ordered)).abs().max().item() < 2.2 / math.sqrt(n)


def unfactor(noise: torch.Tensor) -> torch.Tensor:
    """The inverse of f(x) = sgn(x) sqrt|x|."""
    return noise.sign() * noise**2


def normal_cdf(x: torch.Tensor) -> torch.Tensor:
    return (1 + torch.erf(x / math.sqrt(2))) / 2


def noise_of(params) -> torch.Tensor:
    return torch.cat([v.flatten() for k, v in params.items(True, True) if "noise" in str(k)]).clone()


def learned(params) -> torch.Tensor:
    return torch.cat([v.detach().flatten() for k, v in params.items(True, True) if "noise" not in str(k)]).clone()


def test_means_start_uniform_within_one_over_root_in_and_scales_constant():
    """MATH §9: μ ~ U(±1/√in), σ_w = σ0/√in, σ_b = σ0/√out."""
    torch.manual_seed(0)
    layer = NoisyLinear(100, 3000, sigma_init=0.4)
    for mean in (layer.weight_mu, layer.bias_mu):
        assert fills(mean.detach(), lambda x: (x * 10 + 1) / 2)
    torch.testing.assert_close(layer.weight_sigma.detach(), torch.full((3000, 100), 0.4 / 10))
    torch.testing.assert_close(layer.bias_sigma.detach(), torch.full((3000,), 0.4 / math.sqrt(3000)))


def test_factorised_noise_is_an_outer_product_of_signed_roots_of_normal_numbers():
    """MATH §9: ε_w = f(ε_out) f(ε_in)ᵀ, ε_b = f(ε_out), f(x) = sgn(x) √|x|."""
    layer = NoisyLinear(1500, 2000, dtype=torch.float64)
    layer.reset_noise(generator())
    out = layer.bias_noise
    factor_in = layer.weight_noise[7] / out[7]
    torch.testing.assert_close(layer.weight_noise, torch.outer(out, factor_in))
    assert fills(unfactor(out), normal_cdf)
    assert fills(unfactor(factor_in), normal_cdf)
    assert abs(torch.corrcoef(torch.stack([out[:1500], factor_in]))[0, 1]) < 0.1


def test_independent_noise_is_normal_and_not_an_outer_product():
    """MATH §9: one number for every weight."""
    layer = NoisyLinear(200, 100, factorised=False)
    layer.reset_noise(generator())
    assert fills(layer.weight_noise, normal_cdf)
    assert fills(layer.bias_noise, normal_cdf)
    assert torch.linalg.matrix_rank(layer.weight_noise) == 100


@pytest.mark.parametrize("factorised", [True, False])
def test_training_mode_adds_scaled_noise_and_evaluation_mode_is_the_mean_exactly(factorised):
    """MATH §9: the deterministic mode uses μ."""
    layer = NoisyLinear(3, 2, factorised=factorised, dtype=torch.float64)
    x = torch.randn(5, 4, 3, generator=generator(), dtype=torch.float64)
    names = ("weight_mu", "weight_sigma", "weight_noise", "bias_mu", "bias_sigma", "bias_noise")
    weight, scale, noise, bias, bias_scale, bias_noise = (getattr(layer, name).tolist() for name in names)

    def by_hand(row, on: bool) -> list[float]:
        return [
            sum((weight[i][j] + on * scale[i][j] * noise[i][j]) * row[j] for j in range(3))
            + bias[i]
            + on * bias_scale[i] * bias_noise[i]
            for i in range(2)
        ]

    for on in (True, False):
        expected = [by_hand(row, on) for row in x.reshape(-1, 3).tolist()]
        got = layer.train(on)(x)
        assert got.shape == (5, 4, 2)
        torch.testing.assert_close(got.reshape(-1, 2), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight_mu, layer.bias_mu))


def test_without_scale_there_is_no_noise():
    layer = NoisyLinear(3, 2, sigma_init=0.0)
    x = torch.ones(3)
    assert torch.equal(layer.train()(x), layer.eval()(x))


@pytest.mark.parametrize("factorised", [True, False])
def test_a_generator_reproduces_the_draws_and_leaves_the_global_one_alone(factorised):
    layer, other = (NoisyLinear(3, 2, factorised=factorised) for _ in range(2))
    state = torch.get_rng_state()
    source = generator(3)
    layer.reset_parameters(source)
    other.reset_parameters(generator(3))
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    before = layer.weight_noise.clone()
    reset_noise(nn.Sequential(layer), source)
    assert not torch.equal(layer.weight_noise, before)


def test_noise_stays_until_it_is_reset():
    layer, x = NoisyLinear(3, 2), torch.ones(3)
    first = layer(x)
    assert torch.equal(layer(x), first)
    reset_noise(layer)
    assert not torch.equal(layer(x), first)


def test_noise_survives_deepcopy_and_a_state_dict_in_a_file():
    layer, x = NoisyLinear(3, 2), torch.randn(4, 3)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = NoisyLinear(3, 2)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    copied = copy.deepcopy(layer)
    assert torch.equal(loaded(x), layer(x))
    assert torch.equal(copied(x), layer(x))
    reset_noise(copied)
    assert torch.equal(loaded(x), layer(x))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"in_features": 0}, "in_features is 0"),
        ({"out_features": -1}, "out_features is -1"),
        ({"sigma_init": -0.1}, "sigma_init is -0.1"),
        ({"sigma_init": float("nan")}, "sigma_init is nan"),
    ],
)
def test_settings_out_of_range_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        NoisyLinear(**{"in_features": 3, "out_features": 2, **settings})


# --- inside losses ---


def flags(batch: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(batch, 1, dtype=torch.bool) for name in ("done", "terminated")}


def discrete_batch() -> TensorDict:
    source = generator(1)
    after = {
        "observation": torch.randn(6, 4, generator=source),
        "safety_margin": torch.randn(6, 1, generator=source),
        "reward": torch.randn(6, 1, generator=source),
        **flags(6),
    }
    action = torch.randint(3, (6,), generator=source)
    return TensorDict({"observation": torch.randn(6, 4, generator=source), "action": action, "next": after}, [6])


def categorical_loss() -> LossModule:
    network = RainbowNetwork(4, 3, support=(-2.0, 2.0), atoms=11, hidden=(8,))
    return CategoricalDQNLoss(network, backup=AvoidBackup())


def streams_loss() -> LossModule:
    network = RainbowNetwork(4, 3, support=(-2.0, 2.0), atoms=11, hidden=(8,), head_hidden=(6,), noisy="independent")
    return CategoricalDQNLoss(network, backup=AvoidBackup())


def torchrl_dqn_loss() -> LossModule:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), NoisyLinear(8, 3))
    actor = QValueActor(module, in_keys=["observation"], action_space="categorical")
    return DQNLoss(actor, delay_value=True, action_space="categorical")


def torchrl_distributional_loss() -> LossModule:
    module = nn.Sequential(NoisyLinear(4, 33), nn.Unflatten(-1, (11, 3)))
    actor = DistributionalQValueActor(
        module, torch.linspace(-2, 2, 11), in_keys=["observation"], action_space="categorical"
    )
    return DistributionalDQNLoss(actor, gamma=0.9)


LOSSES = (categorical_loss, streams_loss, torchrl_dqn_loss, torchrl_distributional_loss)


@pytest.fixture(params=LOSSES, ids=lambda make: make.__name__)
def loss(request) -> LossModule:
    torch.manual_seed(0)
    made = request.param()
    SoftUpdate(made, tau=0.1)
    return made


def test_noise_is_on_inside_a_loss_and_every_scale_gets_a_gradient(loss):
    """MATH §9: σ learns."""
    first = loss(discrete_batch())["loss"]
    first.backward()
    scales = {name: p.grad for name, p in loss.named_parameters() if "sigma" in name}
    assert len(scales) == 2 * sum(isinstance(part, NoisyLinear) for part in loss.value_network.modules())
    for name, gradient in scales.items():
        assert gradient is not None, name
        assert gradient.abs().sum() > 0, name
    assert torch.equal(loss(discrete_batch())["loss"], first)
    reset_noise(loss)
    assert not torch.equal(loss(discrete_batch())["loss"], first)


def test_evaluation_mode_of_the_network_switches_the_noise_of_its_loss_off(loss):
    loss.value_network.eval()
    first = loss(discrete_batch())["loss"]
    reset_noise(loss)
    assert torch.equal(loss(discrete_batch())["loss"], first)


def test_reset_noise_of_a_loss_redraws_online_and_target_independently_and_nothing_else(loss):
    """MATH §9: online and target noise is independent, and other at each redraw."""
    online, target = loss.value_network_params, loss.target_value_network_params
    draws = []
    for seed in range(400):
        before = noise_of(online), noise_of(target), learned(online), learned(target)
        reset_noise(loss, generator(seed))
        assert not (noise_of(online) == before[0]).any()
        assert not (noise_of(target) == before[1]).any()
        assert torch.equal(learned(online), before[2])
        assert torch.equal(learned(target), before[3])
        draws.append(torch.stack([noise_of(online), noise_of(target)]))
    both = torch.stack(draws)
    covariance = (both[:, 0] * both[:, 1]).mean(0)
    assert covariance.abs().max() < 0.35, "about 5 standard deviations of independent draws"
    reset_noise(loss, generator(399))
    assert torch.equal(torch.stack([noise_of(online), noise_of(target)]), both[-1])


def test_the_policy_that_shares_the_network_acts_with_the_noise_of_the_online_parameters():
    torch.manual_seed(0)
    loss = categorical_loss()
    reset_noise(loss)
    shared = loss.value_network.head
    assert torch.equal(shared.weight_noise, loss.value_network_params["head", "weight_noise"])
    reset_noise(loss.value_network)
    assert torch.equal(shared.weight_noise, loss.value_network_params["head", "weight_noise"])
    assert shared.weight_noise.data_ptr() != loss.target_value_network_params["head", "weight_noise"].data_ptr()


@pytest.mark.parametrize("make", LOSSES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_target_updates_work_whether_built_before_or_after_noise_was_drawn(make, when):
    torch.manual_seed(0)
    loss = make()
    if when == "before":
        hard, soft = HardUpdate(loss, value_network_update_interval=1), SoftUpdate(loss, tau=0.25)
    reset_noise(loss)
    loss(discrete_batch())
    reset_noise(loss)
    if when == "after":
        hard, soft = HardUpdate(loss, value_network_update_interval=1), SoftUpdate(loss, tau=0.25)
    online, target = loss.value_network_params, loss.target_value_network_params
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.add_(1.0)
    expected = 0.25 * learned(online) + 0.75 * learned(target)
    soft.step()
    torch.testing.assert_close(learned(target), expected)
    for _ in range(2):  # HardUpdate(interval=k) has period k + 1
        hard.step()
    assert torch.equal(learned(target), learned(online))
    reset_noise(loss)
    assert not (noise_of(online) == noise_of(target)).any()


def sac_loss() -> LossModule:
    actor_net = nn.Sequential(NoisyLinear(4, 4), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(actor_net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        spec=Bounded(-1, 1, (2,)),
    )

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = NoisyLinear(6, 1)

        def forward(self, observation, action):
            return self.layer(torch.cat([observation, action], -1))

    return SACLoss(actor, ValueOperator(Critic(), in_keys=["observation", "action"]), num_qvalue_nets=3)


def test_stacked_critics_each_draw_their_own_noise_and_learn_their_own_scales():
    torch.manual_seed(0)
    loss = sac_loss()
    SoftUpdate(loss, tau=0.1)
    for params in (loss.qvalue_network_params, loss.target_qvalue_network_params):
        before = params["module", "layer", "weight_noise"].clone()
        assert before.shape == (3, 1, 6)
        reset_noise(loss)
        drawn = params["module", "layer", "weight_noise"]
        assert drawn.shape == before.shape
        for noise in (before[:1], drawn[1:2], drawn[2:3]):
            assert not (noise == drawn[:1]).any()
    batch = discrete_batch()
    batch["action"] = torch.rand(6, 2)
    loss(batch)["loss_qvalue"].backward()
    gradient = loss.qvalue_network_params["module", "layer", "weight_sigma"].grad
    assert (gradient.abs().sum((1, 2)) > 0).all()


def test_a_loss_that_is_not_functional_is_reached_too():
    actor = ProbabilisticActor(
        TensorDictModule(nn.Sequential(NoisyLinear(4, 4), NormalParamExtractor()), ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    loss = ClipPPOLoss(actor, ValueOperator(NoisyLinear(4, 1), in_keys=["observation"]), functional=False)
    layers = [layer for layer in loss.modules() if isinstance(layer, NoisyLinear)]
    before = [layer.weight_noise.clone() for layer in layers]
    reset_noise(loss)
    assert len(layers) == 2
    for layer, noise in zip(layers, before):
        assert not (layer.weight_noise == noise).any()
