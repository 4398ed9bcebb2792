"""The hindsight buffers as they come: MATLAB's defaults, and what a first use of them gets wrong."""

from __future__ import annotations

import math

import pytest
import torch
from line_goals import line_frames, reached, reward
from torchrl.data import Categorical, Composite, Unbounded

from torchrl_safety.data import HindsightPrioritizedReplayBuffer, HindsightReplayBuffer
from torchrl_safety.envs import BitFlipEnv

STATE = Composite(achieved_goal=Unbounded((1,)), desired_goal=Unbounded((1,)))


def make(kind=HindsightPrioritizedReplayBuffer, **settings):
    return kind(STATE, Composite(), reward, reached, **settings)


def test_the_defaults_are_those_of_matlab():
    """MATH §5: capacity 10000, strategy final, K 4, alpha .6, beta .4, a million steps of annealing."""
    buffer = make()
    assert (len(buffer), buffer.capacity, buffer.alpha, buffer.beta) == (0, 10_000, 0.6, 0.4)
    assert (buffer.hindsight.strategy, buffer.hindsight.num_goal_samples) == ("final", 4)
    buffer.extend(line_frames(1, 20)[0])
    for draws in range(1, 4):
        buffer.sample(2)
        assert math.isclose(buffer.beta, 0.4 + draws * 0.6 / 1e6, rel_tol=1e-12)


def test_a_new_item_has_a_leaf_of_its_priority_plus_a_millionth_to_the_power_alpha():
    buffer = make()
    buffer.extend(line_frames(1, 3, end=0.0)[0])
    buffer.update_priority(torch.tensor([0, 1]), torch.tensor([0.0, 5.0]))
    buffer.extend(line_frames(1, 3, end=0.0)[0][:1])
    wanted = [(priority + 1e-6) ** 0.6 for priority in (0.0, 5.0, 1.0, 5.0)]
    assert buffer.sampler._tree.get(torch.arange(4)).tolist() == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("kind", [HindsightReplayBuffer, HindsightPrioritizedReplayBuffer])
def test_the_specs_of_several_envs_are_refused(kind):
    env = BitFlipEnv(2, bits=3)
    one = env.observation_spec_unbatched, env.action_spec_unbatched
    kind(*one, reward, reached, num_envs=2)
    with pytest.raises(ValueError, match=r"observation_spec describes a batch \[2\] of envs; give .*_unbatched"):
        kind(env.observation_spec, one[1], reward, reached, num_envs=2)
    actions = Composite(action=Categorical(3, shape=(2,)), shape=(2,))
    with pytest.raises(ValueError, match=r"action_spec describes a batch \[2\]"):
        kind(one[0], actions, reward, reached, num_envs=2)


@pytest.mark.parametrize("length", [1, 3])
def test_a_batch_without_its_errors_is_refused_with_nothing_changed(length):
    buffer = make(alpha=1.0)
    buffer.extend(line_frames(1, 8)[0])
    priorities = torch.rand(len(buffer), dtype=torch.float64)
    buffer.update_priority(torch.arange(len(buffer)), priorities)
    batch = buffer.sample(4, sequence_length=length)
    batch["loss"] = torch.rand(batch.shape)
    with pytest.raises(KeyError, match=r"Priority 'td_error' is missing: the batch holds .*'loss'"):
        buffer.update_tensordict_priority(batch)
    assert torch.equal(buffer.sampler.priority_of(torch.arange(len(buffer))), priorities)
    buffer.priority_key = "loss"
    batch["loss"] = torch.full(batch.shape, 7.0)
    buffer.update_tensordict_priority(batch)
    drawn = batch["index"][batch["valid"].squeeze(-1)]
    assert (buffer.sampler.priority_of(drawn) == 7).all()


def test_a_buffer_that_has_room_for_copies_only_says_so_when_asked_for_frames():
    buffer = make(HindsightReplayBuffer, capacity=4)
    buffer.extend(line_frames(1, 6, end=0.9, seed=1)[0])
    assert len(buffer) == 4
    with pytest.raises(ValueError, match=r"needs 5 frames, the buffer holds 0 beside 4 copies; .* larger capacity"):
        buffer.generate_hindsight(5)
