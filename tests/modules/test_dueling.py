"""DuelingHead: the split into a value and advantages is identifiable, per atom too."""

from __future__ import annotations

import pytest
import torch

from torchrl_safety.modules import DuelingHead

MODES = ("mean", "max")


def streams(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A value `[*shape, 1, 7]` and advantages `[*shape, 4, 7]` of 4 actions and 7 atoms."""
    source = torch.Generator().manual_seed(0)
    value = torch.randn(*shape, 1, 7, generator=source, dtype=torch.float64)
    return value, torch.randn(*shape, 4, 7, generator=source, dtype=torch.float64)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_every_atom_is_joined_on_its_own(mode, shape):
    """MATH §9: Q = V + A - mean_a A, or - max_a A, per atom."""
    value, advantage = streams(*shape)
    joined = DuelingHead(mode, action_dim=-2)(value, advantage)
    assert joined.shape == advantage.shape
    rows = zip(joined.reshape(-1, 4, 7).tolist(), value.reshape(-1, 7).tolist(), advantage.reshape(-1, 4, 7).tolist())
    for got, v, a in rows:
        for atom in range(7):
            column = [a[action][atom] for action in range(4)]
            baseline = sum(column) / 4 if mode == "mean" else max(column)
            assert [got[action][atom] for action in range(4)] == pytest.approx(
                [v[atom] + x - baseline for x in column], abs=1e-12
            )


@pytest.mark.parametrize("mode", MODES)
def test_the_value_stream_is_the_mean_or_the_maximum_of_the_result(mode):
    value, advantage = streams(5)
    joined = DuelingHead(mode, action_dim=-2)(value, advantage)
    recovered = joined.mean(-2, keepdim=True) if mode == "mean" else joined.amax(-2, keepdim=True)
    torch.testing.assert_close(recovered, value)


@pytest.mark.parametrize("mode", MODES)
def test_a_shift_of_all_advantages_changes_nothing(mode):
    """MATH §9: identifiable."""
    value, advantage = streams(5)
    head = DuelingHead(mode, action_dim=-2)
    torch.testing.assert_close(head(value, advantage + 3.0), head(value, advantage))


@pytest.mark.parametrize("mode", MODES)
def test_the_order_of_the_actions_is_the_order_of_the_advantages(mode):
    value, advantage = streams(5)
    joined = DuelingHead(mode, action_dim=-2)(value, advantage)
    assert torch.equal(joined.argsort(-2), advantage.argsort(-2))


def test_scalar_action_values_use_the_last_dimension():
    joined = DuelingHead()(torch.tensor([5.0]), torch.tensor([1.0, 3.0]))
    assert joined.tolist() == [4.0, 6.0]
    joined = DuelingHead("max")(torch.tensor([5.0]), torch.tensor([1.0, 3.0]))
    assert joined.tolist() == [3.0, 5.0]


def test_another_mode_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"'median'.*\['mean', 'max'\]"):
        DuelingHead("median")
