"""Rainbow's parts on examples small enough to follow by hand."""

from __future__ import annotations

import math

import pytest
import torch
from prioritized_buffers import leaves
from tensordict import TensorDict
from torch import nn
from torch.testing import assert_close
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from torchrl_safety.data import HindsightPrioritizedReplayBuffer, NStepTransform, PriorityTree
from torchrl_safety.envs import BitFlipEnv
from torchrl_safety.modules import DuelingHead, NoisyLinear, RainbowNetwork, greedy_policy
from torchrl_safety.objectives import (
    CategoricalDQNLoss,
    DiscountedReturnBackup,
    SafetyDQNLoss,
    project_categorical,
)

FIVE = (0.1, 0.2, 0.4, 0.2, 0.1)
"""Masses of five atoms at -2, -1, 0, 1 and 2."""
FIVE_LATER = (0.03, 0.15, 0.32, 0.32, 0.18)
"""Those after a reward of 1/2 with gamma = .9, which sends the atoms to -1.3, -.4, .5, 1.4 and 2.3, that is 2."""


def fixed_network(probs: list[list[float]], low: float, high: float) -> RainbowNetwork:
    """A network whose value distributions are `probs`, one for each action, whatever it observes."""
    network = RainbowNetwork(
        1,
        len(probs),
        support=(low, high),
        atoms=len(probs[0]),
        hidden=(),
        dueling=None,
        noisy=False,
        dtype=torch.double,
    )
    with torch.no_grad():
        network.head.weight.zero_()
        network.head.bias.copy_(torch.tensor(probs, dtype=torch.double).clamp_min(1e-300).log().flatten())
    return network


def step(reward: float, *, terminated: bool = False) -> TensorDict:
    flag = torch.tensor([[terminated]])
    after = {"observation": torch.zeros(1, 1), "reward": torch.tensor([[reward]], dtype=torch.double)}
    after |= {"terminated": flag, "done": flag}
    return TensorDict({"observation": torch.zeros(1, 1), "action": torch.tensor([0]), "next": after}, [1])


def bits(nats: torch.Tensor) -> float:
    return nats.item() / math.log(2)


def entropy(p: float) -> float:
    return -p * math.log2(p) - (1 - p) * math.log2(1 - p)


def divergence(p: float, q: float) -> float:
    return p * math.log2(p / q) + (1 - p) * math.log2((1 - p) / (1 - q))


def root(function, low: float, high: float) -> float:
    """Where a rising function is 0."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if function(middle) > 0 else (middle, high)
    return low


def test_five_atoms_after_a_reward():
    """MATH §4: atom b = (image - vmin) / Δz between its two nodes; a share of .1 lies beyond the support."""
    loss = CategoricalDQNLoss(fixed_network([[*FIVE]], -2, 2), gamma=0.9)
    target, clipped = loss.target_distribution(step(0.5))
    assert_close(target, torch.tensor([FIVE_LATER], dtype=torch.double))
    assert clipped.item() == pytest.approx(0.1)
    images = torch.tensor([-1.3, -0.4, 0.5, 1.4, 2.3])
    assert_close(project_categorical(images, torch.tensor(FIVE), torch.linspace(-2, 2, 5)), torch.tensor(FIVE_LATER))


def test_a_reward_beyond_the_support_is_told_and_one_within_is_not():
    """MATH §4: a landing is worth 100, a support of ±50 puts all of it on its end."""
    for end, value, share in ((50, 50, 1.0), (100, 100, 0.0)):
        loss = CategoricalDQNLoss(fixed_network([[1.0, 0.0, 0.0, 0.0, 0.0]], -end, end))
        target, clipped = loss.target_distribution(step(100.0, terminated=True))
        assert (target @ loss.support).item() == pytest.approx(value)
        assert clipped.item() == share


def test_the_priority_is_what_is_lost_and_the_loss_what_is_lost_and_the_entropy():
    """MATH §9: an entropy of .4406 bits and a divergence of .1969 bits. MATH §4: CE(m, p) = H(m) + KL(m || p)."""
    p = root(lambda x: entropy(x) - 0.4406, 1e-9, 0.5)
    q = root(lambda x: divergence(p, x) - 0.1969, p, 1 - 1e-9)
    after, now = [1 - p, p], [1 - q, q]
    loss = CategoricalDQNLoss(fixed_network([now], -1, 1), gamma=1.0)
    with torch.no_grad():
        loss.target_value_network_params["head", "bias"].copy_(fixed_network([after], -1, 1).head.bias)
    batch = step(0.0)
    assert bits(loss(batch)["loss"].detach()) == pytest.approx(0.4406 + 0.1969, abs=1e-6)
    assert bits(batch["td_error"]) == pytest.approx(0.1969, abs=1e-6)
    gradient = torch.autograd.grad(loss(batch)["loss"], list(loss.parameters()))[-1]
    assert_close(gradient, torch.tensor([p - q, q - p], dtype=torch.double))  # p - m, that of the divergence


def test_treasure_and_trap_have_the_mean_of_nothing_and_another_risk():
    """A sure 0 and an even chance of ±100: their means agree, their quantiles and shortfalls do not."""
    network = fixed_network([[0.0, 0.0, 1.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0, 0.5]], -100, 100)
    logits = network.logits(torch.zeros(1, dtype=torch.double))
    assert (logits.softmax(-1) @ network.support).tolist() == pytest.approx([0, 0], abs=1e-9)
    for level, quantile, cvar in ((0.25, -100, -100), (0.5, -100, -100), (0.75, 100, -100 / 3), (1.0, 100, 0)):
        assert network.quantile(logits, level).tolist() == pytest.approx([0, quantile], abs=1e-9)
        assert network.cvar(logits, level).tolist() == pytest.approx([0, cvar], abs=1e-9)
    state = TensorDict({"observation": torch.zeros(1)}, [])
    assert greedy_policy(network, risk="cvar", level=0.9)(state)["action"] == 0


@pytest.mark.parametrize(("end", "expected"), [(None, 6.0), ("terminated", 2.5), ("truncated", 5.0)])
def test_a_window_of_rewards_is_their_discounted_sum_and_the_discounted_rest(end, expected):
    """MATH §3, return: 1 + 3/2 + 6/4 + 16/8 with gamma = 1/2; ended after the second step 1 + 3/2, or + 10/4."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), transform=NStepTransform(3), batch_size=1)
    flags = {name: torch.zeros(3, 1, dtype=torch.bool) for name in ("terminated", "truncated", "done")}
    if end is not None:
        flags[end][1] = flags["done"][1] = True
    after = {
        "observation": torch.tensor([[0.0], [10.0], [16.0]]),
        "reward": torch.tensor([[1.0], [3.0], [6.0]]),
        **flags,
    }
    before = {"observation": torch.zeros(3, 1), "action": torch.zeros(3, dtype=torch.long)}
    buffer.extend(TensorDict({**before, "next": after}, [3]))
    network = RainbowNetwork(1, 1, support=None, hidden=(), dueling=None, noisy=False)
    nn.init.ones_(network.head.weight)  # the value of a state is the number it is
    nn.init.zeros_(network.head.bias)
    loss = SafetyDQNLoss(
        network, backup=DiscountedReturnBackup(), gamma=0.5, loss_function="l1", bootstrap_on_truncation=True
    )
    window = buffer[:1]
    assert loss(window)["loss"].item() == pytest.approx(expected)
    assert window["td_error"].item() == pytest.approx(expected)


def test_a_value_and_an_advantage_that_cannot_be_told_apart_are_held_to_one_split():
    """MATH §9: 1 = .5 + .5 = .1 + .9 without a constraint; with it the value is the mean, or the best."""
    value, advantage = torch.tensor([2.0]), torch.tensor([0.3, 0.5, 0.7])
    assert DuelingHead("mean")(value, advantage).tolist() == pytest.approx([1.8, 2.0, 2.2])
    assert DuelingHead("max")(value, advantage).tolist() == pytest.approx([1.6, 1.8, 2.0])
    for mode in ("mean", "max"):
        halves = DuelingHead(mode)(torch.tensor([0.5]), torch.tensor([0.5]))
        tenths = DuelingHead(mode)(torch.tensor([0.1]), torch.tensor([0.9]))
        assert [halves.item(), tenths.item()] == pytest.approx([0.5, 0.1])


def test_noise_of_two_inputs_and_two_outputs_by_hand():
    """MATH §9: f(4) = 2, f(-9) = -3, f(1) = 1, f(-.25) = -.5; σ0 is .5, which starts σ at .5/√2."""
    layer = NoisyLinear(2, 2)
    assert_close(layer.weight_sigma.detach(), torch.full((2, 2), 0.5 / math.sqrt(2)))
    assert_close(layer.bias_sigma.detach(), torch.full((2,), 0.5 / math.sqrt(2)))
    draws = torch.tensor([4.0, -9.0, 1.0, -0.25])  # of the inputs, then of the outputs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "normal_", lambda tensor, generator=None: tensor.copy_(draws))
        layer.reset_noise()
    assert layer.weight_noise.tolist() == [[2.0, -3.0], [-1.0, 1.5]]
    assert layer.bias_noise.tolist() == [1.0, -0.5]
    assert not layer.weight_noise.requires_grad


def test_the_search_takes_the_left_sum_away_when_it_goes_right():
    """MATH §5: P(j) = leaf_j / Σ leaf: .55 of the total lies in the slot that covers .5 to .8, not in the last."""
    tree = PriorityTree(4)
    tree.set(torch.arange(4), torch.tensor([0.2, 0.3, 0.3, 0.2]))
    slots, leaves = tree.find(torch.tensor([0.0, 0.19, 0.21, 0.55, 0.79, 0.81]))
    assert slots.tolist() == [0, 0, 1, 2, 2, 3]
    assert leaves.tolist() == pytest.approx([0.2, 0.2, 0.3, 0.3, 0.3, 0.2])
    tree.set(torch.tensor([2]), 0.0)
    assert tree.find(torch.tensor([0.55]))[0].item() == 1, "of the .7 that are left, .385"


def test_the_defaults_of_the_hindsight_buffer():
    """MATH §5: capacity 10000, strategy final, K 4, α .6, β0 .4, N_S 1e6, and ε 1e-6 unless MATLAB's 0 is asked for."""
    env = BitFlipEnv(2, bits=3)
    specs = env.observation_spec_unbatched, env.action_spec_unbatched
    buffer = HindsightPrioritizedReplayBuffer(
        *specs, lambda transition: transition["next", "achieved_goal"].float().mean(-1, keepdim=True), num_envs=2
    )
    assert (buffer.storage.max_size, buffer.alpha, buffer.beta) == (10_000, 0.6, 0.4)
    assert (buffer.hindsight.strategy, buffer.hindsight.num_goal_samples) == ("final", 4)
    buffer.extend(env.rollout(3, break_when_any_done=False))
    buffer.update_priority(torch.tensor([0]), 0.0)
    assert leaves(buffer)[0].item() == pytest.approx(1e-6**0.6)
    buffer.sample(4)
    assert buffer.beta == pytest.approx(0.4 + 0.6 / 1e6, abs=1e-12)
