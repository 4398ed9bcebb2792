"""A goal-conditioned task on a line, and hindsight written as plain loops over its frames."""

from __future__ import annotations

import math

import torch
from tensordict import TensorDict

RADIUS = 0.75


def distance(transition):
    following = transition["next"]
    return (following["achieved_goal"] - following["desired_goal"]).abs().amax(-1, keepdim=True)


def reached(transition):
    return distance(transition) < RADIUS


def reward(transition):
    return reached(transition).to(transition["next", "reward"].dtype) - 1


def line_frames(num_envs, length, *, seed=0, end=0.25, dtype=torch.float32):
    """Random frames `[N, T]`: consecutive states of an episode share their number, no other two states do.

    `"frame"` numbers the frames; about half of the ends are failures, the others truncations.
    """
    rng = torch.Generator().manual_seed(seed)
    ends = torch.rand(num_envs, length, 1, generator=rng) < end
    failed = ends & (torch.rand(ends.shape, generator=rng) < 0.5)
    return line_episodes(failed, ends & ~failed, dtype)


def line_episodes(terminated, truncated, dtype=torch.float32):
    """Frames `[N, T]` with these ends, flags `[N, T, 1]`."""
    num_envs, length = terminated.shape[:2]
    frame = torch.arange(num_envs * length).reshape(num_envs, length, 1)
    after = frame.to(dtype) + 0.5
    starts = torch.ones_like(terminated)
    starts[:, 1:] = (terminated | truncated)[:, :-1]
    before = torch.where(starts, after - 0.5, after - 1)
    goal = torch.full_like(after, -7)
    flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
    state, following = ({"achieved_goal": at, "desired_goal": goal.clone()} for at in (before, after))
    following |= {"reward": torch.full_like(after, -1), **flags}
    return TensorDict({"frame": frame, **state, "next": following}, [num_envs, length])


def episodes_of(batch):
    """The complete episodes of frames `[N, T]` by the time they end, then env: lists of single frames."""
    found = []
    for env in range(batch.shape[0]):
        episode = []
        for t in range(batch.shape[1]):
            episode.append(batch[env, t])
            if batch["next", "done"][env, t]:
                found.append((t, env, episode))
                episode = []
    return [episode for *_, episode in sorted(found, key=lambda entry: entry[:2])]


def state_of(episode, k):
    """What state k of an episode, from 0, measures."""
    return episode[0]["achieved_goal"] if k == 0 else episode[k - 1]["next", "achieved_goal"]


def relabelled(frame, goal, *, keep_failures=True, by_goal=True):
    """One frame with another goal, its outcome worked out by hand."""
    copy = frame.clone()
    copy["desired_goal"] = goal.clone()
    copy["next", "desired_goal"] = goal.clone()
    before = abs(float(frame["next", "achieved_goal"]) - float(frame["next", "desired_goal"])) < RADIUS
    now = abs(float(frame["next", "achieved_goal"]) - float(goal)) < RADIUS
    failed = bool(frame["next", "terminated"]) and not before
    copy["next", "reward"] = torch.full_like(frame["next", "reward"], 0.0 if now else -1.0)
    terminated = now or (failed and keep_failures) if by_goal else bool(frame["next", "terminated"])
    copy["next", "terminated"] = torch.tensor([terminated])
    copy["next", "done"] = torch.tensor([terminated or bool(frame["next", "truncated"])])
    return copy


def marked(frame, flag):
    copy = frame.clone()
    copy["relabelled"] = torch.tensor([flag])
    return copy


def states(strategy, t, length):
    """The states that may give a goal to step t of an episode."""
    return {"final": [length], "episode": range(length + 1), "future": range(t + 1, length + 1)}[strategy]


def all_copies(batch, strategy, **rules):
    """The copies with every goal that the strategy allows, as when K is large; ordered by episode, step and state."""
    return [
        marked(relabelled(frame, state_of(episode, k), **rules), True)
        for episode in episodes_of(batch)
        for t, frame in enumerate(episode)
        for k in states(strategy, t, len(episode))
    ]


def assert_same(rows, expected):
    assert rows.batch_size == expected.batch_size
    assert set(rows.keys(True, True)) == set(expected.keys(True, True))
    for key, value in expected.items(True, True):
        torch.testing.assert_close(rows[key], value, rtol=0, atol=0, msg=lambda text, key=key: f"{key}: {text}")


def in_order(rows):
    """Rows `[M]` sorted by original or copy, frame and goal, so that the order of random draws plays no part."""
    for key in ("desired_goal", "frame", "relabelled"):
        rows = rows[rows[key].flatten().argsort(stable=True)]
    return rows


def written(transform, pieces):
    """All rows that come out for these pieces, `[M]`."""
    return torch.cat([row for row in map(transform.inv, pieces) if row is not None])


def not_by_chance(counts, num_cells):
    """Whether counts are too uneven to be uniform; a fair draw is called uneven about once in a million."""
    expected = sum(counts.values()) / num_cells
    statistic = sum((counts.get(cell, 0) - expected) ** 2 / expected for cell in counts)
    statistic += expected * (num_cells - len(counts))
    freedom = num_cells - 1
    return statistic > freedom + 5 * math.sqrt(2 * freedom) + 12
