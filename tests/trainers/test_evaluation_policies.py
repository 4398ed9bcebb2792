"""What an evaluation does to a policy: no noise, no exploration, and everything as it was afterwards."""

from __future__ import annotations

import pytest
import torch
from script_env import constant_control
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded
from torchrl.envs import ExplorationType, exploration_type
from torchrl.modules import ProbabilisticActor, TanhNormal

from torchrl_safety.envs import DoubleIntegratorEnv
from torchrl_safety.modules import NoisyLinear
from torchrl_safety.trainers import evaluate, evaluation_mode


def test_evaluation_draws_nothing_from_the_global_generator():
    env = DoubleIntegratorEnv(3, seed=0)
    before = torch.get_rng_state()
    evaluate(env, constant_control(2), episodes=7, max_steps=60)
    assert torch.equal(torch.get_rng_state(), before)


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


class Weak(nn.Module):
    """Location minus the mean of the observation, and a standard deviation of 1."""

    def forward(self, observation):
        return -observation.mean(-1, keepdim=True), torch.ones_like(observation[..., :1])


class LessIsMore(nn.Module):
    """Logits that prefer to brake."""

    def forward(self, observation):
        velocity = observation[..., 1:]
        return torch.cat([velocity, torch.zeros_like(velocity), -velocity], -1)


def gaussian_actor(env):
    module = TensorDictModule(Weak(), in_keys=["observation"], out_keys=["loc", "scale"])
    return ProbabilisticActor(
        module,
        spec=Bounded(-1.0, 1.0, (1,)),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        default_interaction_type=ExplorationType.RANDOM,
    )


def categorical_actor(env):
    module = TensorDictModule(LessIsMore(), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(
        module,
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        default_interaction_type=ExplorationType.RANDOM,
    )


@pytest.mark.parametrize(("actor", "discrete"), [(gaussian_actor, False), (categorical_actor, True)])
def test_a_stochastic_policy_acts_deterministically_and_its_exploration_comes_back(actor, discrete):
    env = DoubleIntegratorEnv(8, discrete=discrete)
    policy = actor(env)
    starts = torch.rand(8, 2, generator=torch.Generator().manual_seed(0)) - 0.5
    outside = exploration_type()
    found = evaluate(env, policy, starts=starts, max_steps=10).states
    assert exploration_type() == outside

    state, expected = starts, [starts]
    for _ in range(10):
        control = -state[:, 1:].sign() if discrete else torch.tanh(-state.mean(-1, keepdim=True))
        state = env.dynamics(state, control)
        expected.append(state)
    assert torch.allclose(found, torch.stack(expected, 1), atol=1e-5)
