"""The encoding of angles."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from torchrl_safety.modules import AngleEncoding


@pytest.mark.parametrize("angles", [(), (0,), (4,), (1, 3), (3, 1), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (0,)])
def test_others_come_first_then_the_cosines_then_the_sines(angles, shape):
    encoding = AngleEncoding(5, angles)
    x = torch.randn(*shape, 5, dtype=torch.float64) * 3
    got = encoding(x)
    assert got.shape == (*shape, encoding.out_features) == (*shape, 5 + len(angles))
    for row, expected in zip(got.reshape(-1, encoding.out_features).tolist(), x.reshape(-1, 5).tolist()):
        others = [value for index, value in enumerate(expected) if index not in angles]
        cosines, sines = ([f(expected[index]) for index in angles] for f in (math.cos, math.sin))
        assert row == pytest.approx([*others, *cosines, *sines], abs=1e-12)


def test_the_border_of_the_range_of_an_angle_does_not_show():
    below, above = torch.tensor([[[0.3, math.pi - 1e-6]], [[0.3, -math.pi + 1e-6]]], dtype=torch.float64)
    encoding = AngleEncoding(2, (1,))
    torch.testing.assert_close(encoding(below), encoding(above), atol=3e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_precision_of_the_input_is_kept_and_gradients_pass(dtype):
    x = torch.randn(4, 3, dtype=dtype, requires_grad=True)
    encoded = AngleEncoding(3, (2,))(x)
    assert encoded.dtype == dtype
    encoded.sum().backward()
    expected = torch.cat((torch.ones(4, 2, dtype=dtype), (x[:, 2:].cos() - x[:, 2:].sin()).detach()), -1)
    torch.testing.assert_close(x.grad, expected)


def test_there_is_nothing_to_save_and_a_copy_encodes_the_same():
    encoding, x = AngleEncoding(3, (0,)), torch.randn(4, 3)
    assert encoding.state_dict() == {}
    assert torch.equal(copy.deepcopy(encoding)(x), encoding(x))
    assert "angles=(0,)" in repr(encoding)


@pytest.mark.parametrize("angles", [(3,), (-1,), (1, 1)])
def test_angles_that_are_no_different_entries_are_refused(angles):
    with pytest.raises(ValueError, match=r"angles is \(.*\); give different indices in 0\.\.2"):
        AngleEncoding(3, angles)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="size is 0"):
        AngleEncoding(0, ())
    with pytest.raises(ValueError, match=r"\[5, 4\], the encoding takes `\[\*B, 3\]`"):
        AngleEncoding(3, (2,))(torch.zeros(5, 4))
