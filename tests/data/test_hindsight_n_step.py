"""Hindsight with n-step windows, against a loop over the relabelled steps of each window."""

from __future__ import annotations

import pytest
import torch
from line_goals import (
    RADIUS,
    assert_same,
    distance,
    episodes_of,
    in_order,
    line_frames,
    marked,
    reached,
    relabelled,
    reward,
    state_of,
    states,
    written,
)

from torchrl_safety.data import HindsightTransform, NStepTransform


def windows(batch, strategy, n_steps, signals):
    """One row for each step and goal of complete episodes: its window under that goal, cut where it terminates."""
    rows = []
    for episode in episodes_of(batch):
        for t in range(len(episode)):
            for k in states(strategy, t, len(episode)):
                window = []
                for frame in episode[t : t + n_steps]:
                    window.append(relabelled(frame, state_of(episode, k)))
                    if window[-1]["next", "terminated"]:
                        break
                row = window[0].clone()
                row["next"] = window[-1]["next"].clone()
                missing = n_steps - len(window)
                for name in (*signals, "terminated"):
                    values = [frame["next", name] for frame in window]
                    row["steps", name] = torch.stack(values + [torch.zeros_like(values[0])] * missing)
                row["steps", "valid"] = torch.tensor([[True]] * len(window) + [[False]] * missing)
                rows.append(marked(row, True))
    return torch.stack(rows)


def hindsight(num_envs, n_steps, *, signals=("reward",), **settings):
    n_step = NStepTransform(n_steps, signals=signals, num_envs=num_envs)
    return HindsightTransform(reward, terminated_fn=reached, num_envs=num_envs, n_step=n_step, **settings)


def split(rows):
    copied = rows["relabelled"].squeeze(-1)
    return rows[~copied], rows[copied]


@pytest.mark.parametrize("strategy", ["final", "episode", "future"])
@pytest.mark.parametrize("n_steps", [1, 2, 3, 9])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_copies_are_windows_of_relabelled_steps_under_one_goal(strategy, n_steps, num_envs):
    batch = line_frames(num_envs, 18, seed=n_steps)
    signals = ("reward", "achieved_goal")
    settings = {"strategy": strategy, "num_goal_samples": 50, "signals": signals}
    expected = windows(batch, strategy, n_steps, signals)
    for pieces in ([batch], batch.unbind(1), batch.split(5, 1)):
        _, copies = split(written(hindsight(num_envs, n_steps, **settings), pieces))
        if strategy == "final":
            assert_same(copies, expected)
        assert_same(in_order(copies), in_order(expected))


@pytest.mark.parametrize("n_steps", [1, 3])
def test_originals_are_the_rows_of_the_n_step_transform_alone(n_steps):
    batch = line_frames(2, 30, seed=1)
    for pieces in ([batch], batch.unbind(1)):
        kept, _ = split(written(hindsight(2, n_steps), pieces))
        alone = written(NStepTransform(n_steps, num_envs=2), pieces)
        assert_same(kept.exclude("relabelled"), alone)


def test_one_stream_is_the_same_as_one_env():
    batch = line_frames(1, 30, seed=1)
    assert_same(written(hindsight(None, 3), batch[0].unbind(0)), written(hindsight(1, 3), batch.unbind(1)))


def test_a_window_ends_where_the_relabelled_step_reaches_the_goal():
    batch = line_frames(1, 6, end=0.0)
    batch["next", "truncated"][0, 5] = batch["next", "done"][0, 5] = True
    batch["next", "achieved_goal"][0, 3:] = 3.5  # stands at its final goal from step 3 on
    _, copies = split(hindsight(1, 4).inv(batch))
    assert copies["steps", "valid"].sum((1, 2)).tolist() == [4, 3, 2, 1, 1, 1]
    assert copies["next", "terminated"].all()
    assert copies["steps", "reward"][1].flatten().tolist() == [-1, -1, 0, 0]
    assert copies["next", "truncated"].flatten().tolist() == [False] * 5 + [True]


def test_margins_of_every_step_are_recomputed():
    batch = line_frames(1, 20, seed=3)
    batch["next", "target_margin"] = torch.full((1, 20, 1), -5.0)
    transform = HindsightTransform(
        None,
        target_margin_fn=lambda transition: RADIUS - distance(transition),
        num_envs=1,
        n_step=NStepTransform(3, signals=("target_margin", "achieved_goal"), num_envs=1),
    )
    _, copies = split(transform.inv(batch))
    goal = copies["desired_goal"].unsqueeze(1)
    expected = RADIUS - (copies["steps", "achieved_goal"] - goal).abs()
    assert torch.equal(copies["steps", "target_margin"], expected.masked_fill(~copies["steps", "valid"], 0))
    assert len(copies)
