"""The encoder of images, and a network of images."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.nn import functional as F

from torchrl_safety.modules import NatureCNN, NoisyLinear, RainbowNetwork, greedy_policy, reset_noise


def images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("in_shape", "features"),
    [((4, 84, 84), 3136), ((3, 64, 64), 1024), ((1, 36, 36), 64), ((1, 36, 44), 128), ((2, 96, 60), 64 * 8 * 4)],
)
def test_the_features_are_counted_from_the_shape_of_the_images(in_shape, features):
    """Sizes by hand: 84 -> 20 -> 9 -> 7 and 64 * 7 * 7 = 3136, as in the paper."""
    encoder = NatureCNN(in_shape)
    assert encoder.out_features == features
    assert encoder(images(2, *in_shape)).shape == (2, features)


def test_the_layers_are_those_of_the_paper():
    convolutions = [layer for layer in NatureCNN((4, 84, 84)).modules() if isinstance(layer, nn.Conv2d)]
    described = [(c.in_channels, c.out_channels, c.kernel_size, c.stride, c.padding) for c in convolutions]
    assert described == [
        (4, 32, (8, 8), (4, 4), (0, 0)),
        (32, 64, (4, 4), (2, 2), (0, 0)),
        (64, 64, (3, 3), (1, 1), (0, 0)),
    ]


def test_each_convolution_is_rectified_and_the_last_one_flattened():
    encoder = NatureCNN((2, 40, 36), dtype=torch.float64)
    x = torch.rand(3, 2, 40, 36, dtype=torch.float64)
    parameters, y = iter(encoder.parameters()), x
    for stride in (4, 2, 1):
        y = F.conv2d(y, next(parameters), next(parameters), stride=stride).clamp_min(0)
    torch.testing.assert_close(encoder(x), y.reshape(3, -1))


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0,)])
def test_any_batch_shape_is_encoded_image_by_image(shape):
    encoder, x = NatureCNN((2, 36, 36)), images(*shape, 2, 36, 36)
    features = encoder(x)
    assert features.shape == (*shape, 64)
    for image, found in zip(x.reshape(-1, 2, 36, 36), features.reshape(-1, 64)):
        torch.testing.assert_close(encoder(image), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_are_scaled_to_the_unit_interval_and_other_numbers_taken_as_they_are(dtype):
    encoder, x = NatureCNN((2, 36, 36), dtype=dtype), images(3, 2, 36, 36)
    expected = encoder(x.to(dtype) / 255)
    assert expected.dtype == dtype
    assert torch.equal(encoder(x), expected)
    torch.testing.assert_close(encoder((x.double() / 255).float()), expected, atol=1e-6, rtol=0)
    assert not torch.equal(encoder(x.to(dtype)), expected)


@pytest.mark.parametrize("in_shape", [(4, 35, 84), (4, 84, 35), (1, 1, 1)])
def test_an_image_too_small_for_the_kernels_is_refused(in_shape):
    with pytest.raises(ValueError, match=r"in_shape is \(.*too small.*at least 36"):
        NatureCNN(in_shape)


@pytest.mark.parametrize("in_shape", [(84, 84), (), (0, 84, 84), (1, 4, 84, 84)])
def test_a_shape_that_is_none_of_an_image_is_refused(in_shape):
    with pytest.raises(ValueError, match=r"in_shape is \(.*give \(channels, height, width\)"):
        NatureCNN(in_shape)


def test_images_of_another_shape_are_named():
    with pytest.raises(ValueError, match=r"\[5, 36, 36, 2\], the encoder takes .*\(2, 36, 36\)"):
        NatureCNN((2, 36, 36))(images(5, 36, 36, 2))


# --- in a network ---


def make(in_shape: tuple[int, ...] = (2, 36, 36), **settings) -> RainbowNetwork:
    torch.manual_seed(0)
    encoder = NatureCNN((2, 36, 36), dtype=settings.get("dtype"))
    return RainbowNetwork(in_shape, 3, **{"support": (-1.0, 1.0), "hidden": (16,), "encoder": encoder, **settings})


@pytest.mark.parametrize("settings", [{}, {"hidden": (), "head_hidden": (8,)}, {"support": None}], ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,)])
def test_a_network_of_images_takes_any_batch_shape(settings, shape):
    network, x = make(**settings), images(*shape, 2, 36, 36)
    result = greedy_policy(network)(TensorDict({"observation": x}, shape))
    assert result["action_value"].shape == (*shape, 3)
    assert result["action"].shape == shape
    scaled = network(TensorDict({"observation": x.float() / 255}, shape))["action_value"]
    torch.testing.assert_close(result["action_value"], scaled)


def test_rainbow_of_the_paper_has_noisy_streams_of_512_behind_the_convolutions():
    encoder = NatureCNN((4, 84, 84))
    network = RainbowNetwork((4, 84, 84), 6, support=(-10.0, 10.0), hidden=(), head_hidden=(512,), encoder=encoder)
    noisy = [(m.in_features, m.out_features) for m in network.modules() if isinstance(m, NoisyLinear)]
    assert noisy == [(3136, 512), (512, 51), (3136, 512), (512, 6 * 51)]
    assert not [m for m in network.modules() if isinstance(m, nn.Linear)]


def test_gradients_reach_the_convolutions_and_noise_changes_the_values():
    network, batch = make(), TensorDict({"observation": images(4, 2, 36, 36)}, [4])
    before = network(batch.clone())["action_value"]
    before.sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in network.encoder.parameters())
    reset_noise(network)
    assert not torch.equal(network(batch)["action_value"], before)


def test_a_shape_needs_an_encoder_and_images_of_that_shape():
    with pytest.raises(ValueError, match=r"in_features is \(2, 36, 36\), a shape.*encoder=NatureCNN\(\(2, 36, 36\)\)"):
        make(encoder=None)
    with pytest.raises(ValueError, match=r"in_features is \(\), num_actions 3; both must be at least 1"):
        make(in_shape=())
    for found in ((5, 36, 36), (5, 2, 36, 37)):
        with pytest.raises(ValueError, match=r"has shape \[.*the network takes `\[\*B, 2, 36, 36\]`"):
            make()(TensorDict({"observation": images(*found)}, []))
