"""Laws of the cap on a policy's standard deviation (1/σ² = 1/s² + 1/c²)."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import AddStateIndependentNormalScale, NormalParamExtractor
from torch import nn

from torchrl_safety.modules import CappedNormalParams


class Given(nn.Module):
    """Passes location and scale on as they come."""

    def forward(self, loc, scale, *others):
        return (loc, scale, *others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_precisions_add_so_that_the_scale_is_below_the_cap_and_below_itself(dtype):
    head = CappedNormalParams(Given(), std_cap=0.5)
    raw = torch.logspace(-4, 4, 33, dtype=dtype)
    loc, scale = head(torch.zeros_like(raw), raw)
    assert scale.dtype == dtype
    assert (scale <= 0.5).all()
    assert (scale <= raw).all()
    assert (scale.diff() >= 0).all()
    assert 1 / scale.double() ** 2 == pytest.approx(1 / raw.double() ** 2 + 4, rel=1e-5)
    assert torch.equal(loc, torch.zeros_like(raw))


def test_a_scale_far_above_the_cap_still_has_a_gradient():
    raw = torch.tensor([0.01, 1.0, 10.0], requires_grad=True)
    CappedNormalParams(Given(), std_cap=0.1)(raw, raw)[1].sum().backward()
    expected = (1 + (raw.detach() / 0.1) ** 2) ** -1.5
    assert torch.allclose(raw.grad, expected)
    assert (raw.grad > 0).all()


def test_without_a_cap_it_is_the_extractor():
    written = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    for mine, theirs in zip(CappedNormalParams()(written), NormalParamExtractor()(written)):
        assert torch.equal(mine, theirs)


def test_it_caps_any_extractor_and_passes_on_what_that_passes_on():
    extractor = AddStateIndependentNormalScale(2)
    loc, scale = CappedNormalParams(extractor, std_cap=0.1)(torch.ones(3, 2))
    assert torch.equal(loc, torch.ones(3, 2))
    assert scale.shape == (3, 2)
    assert (scale < 0.1).all()
    assert len(CappedNormalParams(Given())(torch.ones(1), torch.ones(1), "hidden")) == 3


def test_the_cap_is_saved_and_must_be_positive():
    head, other = CappedNormalParams(std_cap=0.3), CappedNormalParams()
    other.load_state_dict(head.state_dict())
    assert torch.equal(other.std_cap, head.std_cap)
    for cap in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"std_cap is {cap}"):
            head.set_std_cap(cap)
        with pytest.raises(ValueError, match=f"std_cap is {cap}"):
            CappedNormalParams(std_cap=cap)


def test_a_new_cap_takes_no_recompilation():
    compiled = torch.compile(CappedNormalParams(Given(), std_cap=1.0), fullgraph=True, backend="eager")
    for cap in (1.0, 0.5, 0.25):
        compiled.set_std_cap(cap)
        with torch._dynamo.config.patch(error_on_recompile=cap < 1):
            assert compiled(torch.ones(1), torch.full((1,), 1e4))[1].item() == pytest.approx(cap)
