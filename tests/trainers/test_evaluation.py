"""Laws of set metrics, of reading a set off a critic, and of roll-outs."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import RenameTransform, TransformedEnv

from torchrl_safety.envs import DoubleIntegratorEnv
from torchrl_safety.modules import NoisyLinear
from torchrl_safety.objectives import AvoidBackup, DiscountedReturnBackup, ReachAvoidBackup, ReachBackup
from torchrl_safety.trainers import ExactSetEvaluator, evaluate, evaluation_mode, set_metrics, state_value


def test_set_metrics_equal_counting_state_by_state():
    generator = torch.Generator().manual_seed(0)
    predicted, exact = torch.rand(2, 7, 11, generator=generator) > 0.4
    pairs = list(zip(predicted.flatten().tolist(), exact.flatten().tolist()))
    both = sum(p and e for p, e in pairs)
    metrics = set_metrics(predicted, exact)
    assert metrics.iou == pytest.approx(both / sum(p or e for p, e in pairs))
    assert metrics.false_safe == pytest.approx(sum(p and not e for p, e in pairs) / sum(not e for _, e in pairs))
    assert metrics.false_unsafe == pytest.approx(sum(e and not p for p, e in pairs) / sum(e for _, e in pairs))


def test_calling_everything_safe_misses_no_safe_state_and_every_unsafe_one():
    exact = torch.tensor([True, False, False, False])
    assert set_metrics(torch.ones(4, dtype=torch.bool), exact) == (0.25, 1.0, 0.0)


def test_empty_sets_have_no_rate_to_speak_of():
    nothing = torch.zeros(3, dtype=torch.bool)
    assert set_metrics(nothing, nothing) == (1.0, 0.0, 0.0)
    assert set_metrics(~nothing, ~nothing) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("predicted", "exact"),
    [(torch.ones(3), torch.ones(3)), (torch.ones(3, dtype=torch.bool), torch.ones(3, 1, dtype=torch.bool))],
)
def test_set_metrics_refuse_values_and_mismatched_shapes(predicted, exact):
    with pytest.raises(ValueError, match=r"bool|differ in shape"):
        set_metrics(predicted, exact)


def test_the_value_of_a_state_adds_its_own_margins_to_the_critic():
    g, l, v = torch.randn(3, 50, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)  # noqa: E741
    signals = {"safety_margin": g, "target_margin": l}
    assert torch.equal(state_value(AvoidBackup(), signals, v), torch.minimum(g, v))
    assert torch.equal(state_value(ReachBackup(), signals, v), torch.maximum(l, v))
    expected = torch.minimum(g, torch.maximum(l, v))
    assert torch.equal(state_value(ReachAvoidBackup(), signals, v), expected)
    assert torch.equal(state_value(DiscountedReturnBackup(), {"reward": g}, v), g + v)


def constant_control(index: int):
    return lambda tensordict: tensordict.set("action", torch.full(tensordict.batch_size, index))


def test_safe_means_that_no_margin_on_the_way_is_negative():
    starts = torch.tensor([[0.0, 0.0], [0.0, 1.5], [0.5, 0.1], [-0.9, -0.01]])
    env = DoubleIntegratorEnv(4)
    # Without control the mass drifts: x(T) = x + v T.
    after = starts[:, 0] + starts[:, 1] * 0.05 * 100
    result = evaluate(env, constant_control(1), starts=starts, max_steps=100)
    assert result.safe_rate == (after.abs() <= 1).float().mean().item() == 0.75
    assert result.success_rate is None


def test_a_failure_before_the_target_is_no_success_and_one_after_it_is():
    # The first passes the target at rest and then hits the wall; the second never gets there; the third starts inside.
    starts = torch.tensor([[-0.1, 0.0], [0.9, 0.0], [0.0, 0.0]])
    env = DoubleIntegratorEnv(3, problem="reach_avoid")
    result = evaluate(env, constant_control(2), starts=starts, max_steps=200)
    assert result.safe_rate == 0.0
    assert result.success_rate == pytest.approx(2 / 3)


@pytest.mark.parametrize("end_criterion", ["failure", "timeout"])
def test_coming_back_to_the_target_after_a_failure_is_no_success(end_criterion):
    def go_home(tensordict):
        return tensordict.set("action", 1 - tensordict["observation"].sum(-1).sign().long())

    starts = torch.tensor([[-0.9, -1.2], [-0.5, 0.0]])  # the first leaves the walls before it can turn
    env = DoubleIntegratorEnv(2, problem="reach_avoid", end_criterion=end_criterion)
    result = evaluate(env, go_home, starts=starts, max_steps=400)
    assert (result.safe_rate, result.success_rate) == (0.5, 0.5)


def test_an_ended_episode_stays_where_it_ended():
    env = DoubleIntegratorEnv(1)
    states = evaluate(env, constant_control(2), starts=torch.tensor([[0.9, 0.5]]), max_steps=50).states
    assert states.shape == (1, 51, 2)
    outside = (states[0, :, 0].abs() > 1).nonzero()[0].item()
    assert torch.equal(states[0, outside:], states[0, outside].expand(51 - outside, 2))


def test_noise_is_off_in_evaluation_and_every_mode_is_put_back():
    head, frozen = NoisyLinear(2, 3), nn.Dropout().eval()
    policy = nn.Sequential(head, frozen)
    noisy = policy(torch.ones(2))
    with evaluation_mode(policy):
        assert not head.training
        assert torch.equal(policy(torch.ones(2)), head.weight_mu.sum(1) + head.bias_mu)
        assert not policy(torch.ones(2)).requires_grad
    assert head.training
    assert not frozen.training
    assert torch.equal(policy(torch.ones(2)), noisy)


def test_evaluation_uses_the_means_of_a_noisy_policy():
    head = NoisyLinear(2, 3, sigma_init=50.0)

    class Argmax(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = head

        def forward(self, observation):
            return self.head(observation).argmax(-1)

    starts = torch.rand(64, 2, generator=torch.Generator().manual_seed(0)) - 0.5
    policy = TensorDictModule(Argmax(), in_keys=["observation"], out_keys=["action"])
    env = DoubleIntegratorEnv(64)
    first = evaluate(env, policy, starts=starts, max_steps=5).states
    head.reset_noise()
    assert torch.equal(first, evaluate(env, policy, starts=starts, max_steps=5).states)


def test_starts_that_do_not_fit_the_batch_are_refused():
    with pytest.raises(ValueError, match=r"\[3, 2\].*\[4\]"):
        evaluate(DoubleIntegratorEnv(4), constant_control(1), starts=torch.zeros(3, 2), max_steps=1)


@pytest.mark.parametrize("grid", [0, 1, 2])
def test_a_grid_without_a_node_to_start_from_is_refused(grid):
    with pytest.raises(ValueError, match=f"take more nodes than grid={grid}"):
        ExactSetEvaluator(DoubleIntegratorEnv(2), AvoidBackup(), half_size=(1.2, 2.2), grid=grid)


def test_an_evaluator_lives_where_its_environment_does():
    with torch.device("meta"):  # which holds no numbers
        env = DoubleIntegratorEnv(2, device="cpu")
        evaluator = ExactSetEvaluator(env, AvoidBackup(), half_size=(1.2, 2.2), grid=11)
    assert env.exact_safe(evaluator.starts).all()


def test_margins_may_stand_under_other_keys_and_a_missing_one_is_named():
    starts = torch.tensor([[0.0, 0.0], [0.0, 1.5]])
    env = DoubleIntegratorEnv(2)
    expected = evaluate(env, constant_control(1), starts=starts, max_steps=50).safe_rate
    renamed = TransformedEnv(env, RenameTransform(["safety_margin"], ["margin"]))
    assert (
        evaluate(renamed, constant_control(1), starts=starts, max_steps=50, safety_margin="margin").safe_rate
        == expected
    )
    with pytest.raises(KeyError, match=r"safety_margin.*_reset and in _step"):
        evaluate(renamed, constant_control(1), starts=starts, max_steps=1)
