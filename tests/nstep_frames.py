"""Frames for NStepTransform, and its rows by a loop over plain Python lists."""

from __future__ import annotations

import functools

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

SIGNALS = ("reward", "safety_margin")


def frames(num_envs, length, seed=0, end=0.25):
    """Random frames `[N, T]` whose observation is a number that no other frame has."""
    rng = torch.Generator().manual_seed(seed)
    number = torch.arange(float(num_envs * length)).reshape(num_envs, length, 1)
    terminated = torch.rand(number.shape, generator=rng) < end / 2
    truncated = torch.rand(number.shape, generator=rng) < end / 2
    return with_ends(number, terminated, truncated, rng)


def with_ends(number, terminated, truncated, rng=None):
    noise = functools.partial(torch.randn, number.shape, generator=rng or torch.Generator().manual_seed(0))
    flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
    root = {"observation": number, "action": number.squeeze(-1).long(), "done": torch.zeros_like(terminated)}
    following = {"observation": number + 0.5, "reward": noise(), "safety_margin": noise(), **flags}
    return TensorDict({**root, "next": following}, number.shape[:-1])


def one_stream(length, *, terminated=(), truncated=()):
    """Frames `[T]` that end at the given steps."""
    marks = {"terminated": terminated, "truncated": truncated}
    flags = {name: torch.tensor([[t in steps] for t in range(length)]) for name, steps in marks.items()}
    return with_ends(torch.arange(float(length)).unsqueeze(-1), **flags)


def expected_rows(batch, n_steps, signals=SIGNALS):
    """The rows of frames `[N, T]`, one window at a time: `(last step, env, first step, row)`, in order."""
    num_envs, length = batch.batch_size
    rows = []
    for env in range(num_envs):
        for start in range(length):
            window = [start]
            while len(window) < n_steps and window[-1] < length and not batch["next", "done"][env, window[-1]]:
                window.append(window[-1] + 1)
            if window[-1] >= length:
                continue
            row = batch[env, start].clone()
            row["next"] = batch["next"][env, window[-1]].clone()
            padding = n_steps - len(window)
            for name in (*signals, "terminated"):
                values = [batch["next", name][env, t] for t in window]
                row["steps", name] = torch.stack(values + [torch.zeros_like(values[0])] * padding)
            row["steps", "valid"] = torch.tensor([[True]] * len(window) + [[False]] * padding)
            rows.append((window[-1], env, start, row))
    rows.sort(key=lambda entry: entry[:3])
    return torch.stack([entry[-1] for entry in rows]) if rows else None


def written(transform, pieces):
    """All rows that come out for these pieces, `[M]`."""
    rows = [row for row in map(transform.inv, pieces) if row is not None]
    return torch.cat(rows) if rows else None


def assert_same(rows, expected):
    assert (rows is None) == (expected is None)
    if expected is None:
        return
    assert rows.batch_size == expected.batch_size
    assert set(rows.keys(True, True)) == set(expected.keys(True, True))
    for key, value in expected.items(True, True):
        torch.testing.assert_close(rows[key], value, rtol=0, atol=0, msg=lambda text, key=key: f"{key}: {text}")


def buffer_with(*transforms, cls=TensorDictReplayBuffer, storage=LazyTensorStorage):
    rb = cls(storage=storage(1000), batch_size=8)
    for transform in transforms:
        rb.append_transform(transform)
    return rb


def stored(rb):
    rows = rb[:]
    return rows.exclude("index") if len(rb) else None
