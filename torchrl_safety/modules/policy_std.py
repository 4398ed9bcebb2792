"""A cap on the standard deviation of a Gaussian policy."""

from __future__ import annotations

import torch
from tensordict.nn import NormalParamExtractor
from torch import Tensor, nn


class CappedNormalParams(nn.Module):
    r"""Location and scale of a Gaussian policy, its scale below a cap: :math:`1/\sigma^2 = 1/s^2 + 1/c^2`.

    The scale `s` of the network and the cap `c` combine as precisions do, so that :math:`\sigma` is below both, is
    about the smaller of the two where they differ, and has a gradient everywhere: a scale that a falling cap
    overtakes can still be learned, which a hard clamp would prevent. An infinite cap changes nothing.

    The cap is a buffer. :meth:`set_std_cap` writes it in place, so that a loss made from the policy sees it, and a
    checkpoint of either holds it.

    Args:
        extractor: makes location and scale of what the network writes; None is TorchRL's `NormalParamExtractor`.
        std_cap: :math:`c > 0`, the initial cap.
        device: where the buffer lives.

    Raises:
        ValueError: for a cap that is not positive.

    Example:
        >>> import torch
        >>> from torchrl_safety.modules import CappedNormalParams
        >>> head = CappedNormalParams(std_cap=0.5)
        >>> loc, scale = head(torch.tensor([0.0, 100.0]))  # a scale of about 100
        >>> scale
        tensor([0.5000])
        >>> head.set_std_cap(0.1)
        >>> head(torch.tensor([0.0, 100.0]))[1]
        tensor([0.1000])
    """

    std_cap: Tensor

    def __init__(
        self,
        extractor: nn.Module | None = None,
        *,
        std_cap: float = torch.inf,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.extractor = NormalParamExtractor() if extractor is None else extractor
        self.register_buffer("std_cap", torch.ones((), device=device))
        self.set_std_cap(std_cap)

    def set_std_cap(self, std_cap: float) -> None:
        """Move the cap; the `apply` of a :class:`~torchrl_safety.trainers.ScheduleHook`."""
        if not std_cap > 0:
            raise ValueError(f"std_cap is {std_cap}; it must be positive, and may be infinite")
        self.std_cap.fill_(std_cap)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Location `[*B, A]`, scale `[*B, A]` in (0, cap), and what the extractor passes on."""
        loc, scale, *others = self.extractor(*tensors)
        return loc, scale / (1 + (scale / self.std_cap).square()).sqrt(), *others
