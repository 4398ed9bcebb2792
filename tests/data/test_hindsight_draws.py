"""Hindsight over very many draws, over several goals at once, and over a storage that is too large to be scanned."""

from __future__ import annotations

import pytest
import torch
from line_goals import line_frames, reached, reward
from numbered_envs import Envs, buffer_with, relabel
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from torchrl_safety.data import GoalCondition, HindsightRelabel, HindsightTransform, PrioritizedSampler


@pytest.mark.parametrize("strategy", ["final", "episode", "future"])
def test_no_copy_has_a_goal_of_another_episode_or_env_in_a_million_draws(strategy):
    num_envs, length, capacity = 5, 1000, 2_003
    batch = line_frames(num_envs, length, seed=3, end=0.05)
    ends = batch["next", "done"].squeeze(-1)
    episode = (ends.cumsum(1) - ends.long() + torch.arange(num_envs).unsqueeze(1) * length).flatten()
    last = torch.where(ends, batch["frame"].squeeze(-1), 10**9).flip(1).cummin(1).values.flip(1).flatten()
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity),
        sampler=PrioritizedSampler(capacity),
        transform=HindsightTransform(reward, terminated_fn=reached, strategy=strategy, num_envs=num_envs),
        batch_size=45_000,
    )
    seen = 0
    for number, piece in enumerate(batch.split(67, 1)):
        rb.extend(piece)
        rows = rb.sample()
        rows["td_error"] = torch.rand(len(rows), 1)
        rb.update_tensordict_priority(rows)
        rows = rows[rows["relabelled"].squeeze(-1)]
        frame, goal = rows["frame"].flatten(), rows["desired_goal"].flatten()
        # A state is the number of the frame that leads to it plus a half, or of the frame that starts from it.
        at = goal.floor().long()
        assert torch.equal(episode[at], episode[frame]), number
        assert strategy != "future" or bool((goal >= frame + 0.5).all())
        assert strategy != "final" or torch.equal(goal, last[frame] + 0.5)
        assert torch.equal(rows["next", "desired_goal"].flatten(), goal)
        seen += len(rows)
    assert rb.write_count > 3 * capacity
    assert seen > 1_000_000 / 3  # a million over the three strategies


def test_several_goals_of_a_sampled_row_come_from_one_state():
    envs = Envs(1)
    frames = envs.steps(40)
    for state in (frames, frames["next"]):
        number = state["achieved_goal"][:, 2:]
        state["joint"] = torch.cat([number + 1000, torch.zeros_like(number)], -1)
    conditions = [GoalCondition.gymnasium(), GoalCondition("joint", [0], "joint", [1])]
    for n_steps in (1, 3):
        rb = buffer_with(relabel(goal_conditions=conditions, n_steps=n_steps), 40, 500)
        rb.extend(frames)
        batch = rb.sample()
        rows = batch[batch["relabelled"].squeeze(-1)]
        assert len(rows) > 100
        for state in (rows, rows["next"]):
            assert torch.equal(state["joint"][:, 1:], rows["desired_goal"][:, 2:] + 1000)
            assert torch.equal(state["joint"][:, :1], state["achieved_goal"][:, 2:] + 1000)
        others = batch[~batch["relabelled"].squeeze(-1)]
        assert (others["joint"][:, 1] == 0).all()


class Scans(TorchDispatchMode):
    """Notes the operations that read or make a tensor of `size` elements and neither index it nor view it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.found: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_view = all(output.alias_info is not None for output in func._schema.returns)
        if not is_view and func not in (torch.ops.aten.index.Tensor, torch.ops.aten.index_select.default):
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
            if any(tensor.numel() >= self.size for tensor in tensors):
                self.found.add(str(func))
        return result


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_a_sample_never_goes_through_the_storage(strategy, n_steps):
    capacity, size = 3_000, 8
    ends = (torch.arange(1, capacity + 501) % 50 == 0).unsqueeze(-1)
    state = torch.zeros(len(ends), 1)
    following = {"achieved_goal": state, "desired_goal": state, "reward": state, "terminated": torch.zeros_like(ends)}
    following |= {"truncated": ends, "done": ends}
    frames = TensorDict({"achieved_goal": state, "desired_goal": state, "next": following}, [len(ends)])
    transform = HindsightRelabel(reward, terminated_fn=reached, strategy=strategy, n_steps=n_steps)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), transform=transform, batch_size=size)
    for piece in frames.split(500):
        rb.extend(piece)
        with Scans(capacity) as scans:
            rb.sample()
        assert scans.found == set()
    with Scans(capacity) as scans:
        rb.storage[:]["next", "done"].any()
    assert scans.found == {"aten.any.default"}
