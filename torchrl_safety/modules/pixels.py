"""An encoder of images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Channels, kernel and stride of each convolution, Mnih et al. 2015."""


class NatureCNN(nn.Module):
    """The convolutions of Mnih et al. 2015, each with a ReLU: 32 of 8x8 by 4, 64 of 4x4 by 2, 64 of 3x3 by 1.

    The features are the flattened output of the last one: 3136 of an 84x84 image. The paper's layer of 512 is
    `hidden=(512,)` of a :class:`RainbowNetwork`, or `head_hidden=(512,)` in each stream. Images of bytes (uint8) are
    scaled by 1/255, all others taken as they are.

    Args:
        in_shape: channels, height and width `(C, H, W)`; stacked frames count as channels.
        device: where the parameters live.
        dtype: their floating point type.

    Raises:
        ValueError: for a shape that is not three sizes of at least 1, an image too small for the three kernels (36 is
            the smallest height and width), or images of another shape.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_safety.modules import NatureCNN, RainbowNetwork
        >>> encoder = NatureCNN((4, 84, 84))
        >>> encoder.out_features
        3136
        >>> network = RainbowNetwork((4, 84, 84), 6, support=(-10.0, 10.0), hidden=(512,), encoder=encoder)
        >>> frames = torch.zeros(5, 4, 84, 84, dtype=torch.uint8)
        >>> network(TensorDict({"observation": frames}, [5]))["action_value"].shape
        torch.Size([5, 6])
    """

    def __init__(
        self,
        in_shape: Sequence[int],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_shape = tuple(int(size) for size in in_shape)
        if len(self.in_shape) != 3 or min(self.in_shape) < 1:
            raise ValueError(f"in_shape is {self.in_shape}; give (channels, height, width), each at least 1")
        convolutions: list[nn.Module] = []
        channels, *size = self.in_shape
        for width, kernel, stride in LAYERS:
            convolutions += [nn.Conv2d(channels, width, kernel, stride, device=device, dtype=dtype), nn.ReLU()]
            channels, size = width, [(length - kernel) // stride + 1 for length in size]
        if min(size) < 1:
            raise ValueError(
                f"in_shape is {self.in_shape}: the image is too small for the three kernels, whose last one would see "
                "nothing; height and width must be at least 36 (84 is usual)"
            )
        self.convolutions = nn.Sequential(*convolutions)
        self.out_features = channels * size[0] * size[1]

    def forward(self, input: Tensor) -> Tensor:
        """Features `[*B, out_features]` of images `[*B, C, H, W]`."""
        if input.shape[-3:] != self.in_shape:
            raise ValueError(
                f"the images have shape {list(input.shape)}, the encoder takes `[*B, C, H, W]` with (C, H, W) = "
                f"{self.in_shape}: build it with the in_shape that they have"
            )
        first: Tensor = self.convolutions[0].weight  # type: ignore[assignment]
        images = input.to(first.dtype)
        if input.dtype == torch.uint8:
            images = images / 255
        features = self.convolutions(images.reshape(-1, *self.in_shape))
        return features.reshape(*input.shape[:-3], self.out_features)

    def extra_repr(self) -> str:
        return f"in_shape={self.in_shape}"
