"""Noisy linear layers: learned, state-dependent exploration."""

from __future__ import annotations

import math

import torch
from tensordict.nn import TensorDictParams
from torch import Tensor, nn
from torch.nn import functional as F
from torchrl.objectives import LossModule


class NoisyLinear(nn.Module):
    r"""A linear layer with learned noise: :math:`y = (\mu_w + \sigma_w \epsilon_w) x + \mu_b + \sigma_b \epsilon_b`.

    Factorised noise is :math:`\epsilon_w = f(\epsilon_{out}) f(\epsilon_{in})^\top`,
    :math:`\epsilon_b = f(\epsilon_{out})` with :math:`f(x) = \mathrm{sgn}(x)\sqrt{|x|}`.
    Initially :math:`\mu \sim U(\pm 1/\sqrt{in})`,
    :math:`\sigma_w = \sigma_0/\sqrt{in}`, :math:`\sigma_b = \sigma_0/\sqrt{out}`. Source: Fortunato et al. 2018.

    Noise is on in training mode and off (:math:`y = \mu_w x + \mu_b`) in evaluation mode, in a policy and inside
    a loss alike; TorchRL's exploration type does not switch it. It changes only when :func:`reset_noise` is called.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        sigma_init: :math:`\sigma_0 \ge 0`.
        factorised: draw :math:`in + out` numbers instead of an independent one for every weight.
        device: where the parameters live.
        dtype: their floating point type.

    Raises:
        ValueError: for a negative `sigma_init` or a size below 1.

    Example:
        >>> import torch
        >>> from torchrl_safety.modules import NoisyLinear, reset_noise
        >>> layer, x = NoisyLinear(4, 2), torch.ones(4)
        >>> before = layer(x)
        >>> reset_noise(layer)
        >>> torch.equal(before, layer(x)), torch.equal(layer.eval()(x), layer(x))
        (False, True)
    """

    weight_noise: Tensor
    bias_noise: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sigma_init: float = 0.5,
        factorised: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1")
        if not 0 <= sigma_init < math.inf:
            raise ValueError(f"sigma_init is {sigma_init}; it must be >= 0 and finite (0.5 is usual)")
        self.in_features, self.out_features = in_features, out_features
        self.sigma_init, self.factorised = sigma_init, factorised
        like = torch.empty(out_features, in_features, device=device, dtype=dtype)
        self.weight_mu = nn.Parameter(torch.empty_like(like))
        self.weight_sigma = nn.Parameter(torch.empty_like(like))
        self.bias_mu = nn.Parameter(like.new_empty(out_features))
        self.bias_sigma = nn.Parameter(like.new_empty(out_features))
        self.register_buffer("weight_noise", torch.zeros_like(like))
        self.register_buffer("bias_noise", like.new_zeros(out_features))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the initial means, set the initial scales, and draw fresh noise."""
        bound = 1 / math.sqrt(self.in_features)
        with torch.no_grad():
            self.weight_mu.uniform_(-bound, bound, generator=generator)
            self.bias_mu.uniform_(-bound, bound, generator=generator)
            self.weight_sigma.fill_(self.sigma_init / math.sqrt(self.in_features))
            self.bias_sigma.fill_(self.sigma_init / math.sqrt(self.out_features))
        self.reset_noise(generator)

    def reset_noise(self, generator: torch.Generator | None = None) -> None:
        """Draw new noise in place, from `generator` or torch's global one."""
        self.draw_noise(self.weight_noise, self.bias_noise, generator)

    def draw_noise(self, weight_noise: Tensor, bias_noise: Tensor, generator: torch.Generator | None = None) -> None:
        """Draw new noise for this layer into buffers `[*K, out, in]` and `[*K, out]`, such as those of a copy of it."""
        if not self.factorised:
            weight_noise.normal_(generator=generator)
            bias_noise.normal_(generator=generator)
            return
        draws = bias_noise.new_empty(*bias_noise.shape[:-1], self.in_features + self.out_features)
        draws.normal_(generator=generator)
        shaped = draws.abs().sqrt_().copysign_(draws)
        noise_in, noise_out = shaped.split([self.in_features, self.out_features], -1)
        torch.mul(noise_out.unsqueeze(-1), noise_in.unsqueeze(-2), out=weight_noise)
        bias_noise.copy_(noise_out)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return F.linear(input, self.weight_mu, self.bias_mu)
        weight = torch.addcmul(self.weight_mu, self.weight_sigma, self.weight_noise)
        return F.linear(input, weight, torch.addcmul(self.bias_mu, self.bias_sigma, self.bias_noise))

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"sigma_init={self.sigma_init}, factorised={self.factorised}"
        )


def reset_noise(module: nn.Module, generator: torch.Generator | None = None) -> None:
    """Draw new noise in every :class:`NoisyLinear` of `module`.

    Given a TorchRL loss, the noise of each of its functional networks is drawn, online and target parameters
    independently (`loss.apply` reaches neither). Call it before each update with the loss, and at each action with
    the policy.

    Args:
        module: a network, a policy or a `LossModule`.
        generator: source of randomness; torch's global one if absent.

    Example:
        >>> from torchrl_safety.modules import NoisyLinear, reset_noise
        >>> reset_noise(NoisyLinear(4, 2))
    """
    if not isinstance(module, LossModule):
        for layer in module.modules():
            if isinstance(layer, NoisyLinear):
                layer.reset_noise(generator)
        return
    layers: dict[nn.Module, list[tuple[str, NoisyLinear]]] = {}  # of a network, whose online and target copies are two
    for name, child in module.named_children():
        network = module.__dict__.get(name.removeprefix("target_").removesuffix("_params"))
        if not isinstance(child, TensorDictParams) or network is None:
            reset_noise(child, generator)
            continue
        if network not in layers:
            layers[network] = [
                (f"{path}." if path else "", layer)
                for path, layer in network.named_modules()
                if isinstance(layer, NoisyLinear)
            ]
        for start, layer in layers[network]:
            # Several critics have their parameters stacked in one network's place.
            weight_noise, bias_noise = (child._buffers[f"{start}{name}_noise"] for name in ("weight", "bias"))
            layer.draw_noise(weight_noise, bias_noise, generator)
