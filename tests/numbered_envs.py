"""Envs whose measurement tells env, episode and step, and buffers that relabel what they write."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from torchrl_safety.data import HindsightRelabel

STRATEGIES = ("future", "final", "episode")
LAYOUTS = ("stream", "interleaved", "columns")
NUM_ENVS = {"stream": 1, "interleaved": 3, "columns": 3}


class Envs:
    """Envs whose measurement tells env, episode and step, with a record of every frame."""

    def __init__(self, num_envs: int, seed: int = 0, longest: int = 6, dtype: torch.dtype = torch.float32) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.num_envs, self.longest, self.dtype = num_envs, longest, dtype
        self.now = [[0, 0] for _ in range(num_envs)]
        self.left = [self.draw() for _ in range(num_envs)]
        self.written: list[tuple[int, int, int]] = []
        self.length: dict[tuple[int, int], int] = {}

    def draw(self) -> int:
        return int(torch.randint(1, self.longest + 1, (), generator=self.generator))

    def cut(self) -> None:
        """A reset of all envs in the middle of their episodes."""
        for env, (episode, step) in enumerate(self.now):
            if step:
                self.length[env, episode] = step
                self.now[env], self.left[env] = [episode + 1, 0], self.draw()

    def steps(self, num_steps: int) -> TensorDict:
        """Frames `[N, T]`, or `[T]` of one env."""
        states, ended = [], []
        for _ in range(num_steps):
            for env in range(self.num_envs):
                episode, step = self.now[env]
                self.written.append((env, episode, step))
                states.append([env, episode, step])
                ended.append(step + 1 == self.left[env])
                self.now[env][1] += 1
                if ended[-1]:
                    self.length[env, episode] = step + 1
                    self.now[env], self.left[env] = [episode + 1, 0], self.draw()
        state = torch.tensor(states, dtype=self.dtype)
        goal, done = torch.full_like(state, -1), torch.tensor(ended).unsqueeze(-1)
        following = {
            "achieved_goal": state + torch.tensor([0, 0, 1]),
            "desired_goal": goal.clone(),
            "reward": torch.full((len(state), 1), -7.0, dtype=self.dtype),
            "terminated": done & (state[:, 2:] % 2 == 0),  # a failure: no goal was reached
            "truncated": done & (state[:, 2:] % 2 == 1),
            "done": done,
        }
        frames = TensorDict({"achieved_goal": state, "desired_goal": goal, "next": following}, [len(state)])
        frames = frames.reshape(num_steps, self.num_envs).transpose(0, 1).contiguous()
        return frames[0] if self.num_envs == 1 else frames

    def kept(self, capacity: int) -> list[tuple[int, int, int]]:
        return self.written[-capacity:]

    def goals(self, frame: tuple[int, int, int], strategy: str, kept: list[tuple[int, int, int]]) -> set[int]:
        """The states that may give this frame its goal, by going through every frame that is there."""
        env, episode, step = frame
        length = self.length.get((env, episode))
        if length is None:
            return set()
        if strategy == "final":
            return {length}
        same = [other[2] for other in kept if other[:2] == (env, episode)]
        if strategy == "future":
            return {other + 1 for other in same if other >= step}
        return set(same) | {other + 1 for other in same}


def distance(transition):
    following = transition["next"]
    return (following["achieved_goal"] - following["desired_goal"]).abs().sum(-1, keepdim=True)


def reward(transition):
    return -distance(transition)


def reached(transition):
    return distance(transition) == 0


def relabel(layout="stream", seed=0, **settings) -> HindsightRelabel:
    if layout == "interleaved":
        settings.setdefault("num_envs", 3)
    settings.setdefault("terminated_fn", reached)
    settings.setdefault("share", 1.0)
    return HindsightRelabel(reward, generator=torch.Generator().manual_seed(seed), **settings)


def buffer_with(transform, capacity=12, batch_size=256, layout="stream", storage=LazyTensorStorage, sampler=None):
    ndim = {"ndim": 2} if layout == "columns" else {}
    rb = TensorDictReplayBuffer(
        storage=storage(capacity, **ndim),
        batch_size=batch_size,
        **({} if sampler is None else {"sampler": sampler}),
    )
    rb.set_rng(torch.Generator().manual_seed(1))
    return rb.append_transform(transform)


def rows_of(batch) -> list[tuple]:
    """(env, episode, step), goal, relabelled of each row."""
    state, goal = batch["achieved_goal"].long().tolist(), batch["desired_goal"].long().tolist()
    return list(zip(map(tuple, state), map(tuple, goal), batch["relabelled"].flatten().tolist()))
