"""An environment that follows a script, and its episodes judged by hand."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

RUNNING, TERMINATED, TRUNCATED = range(3)


class ScriptEnv(EnvBase):
    """Plays written episodes: row `i` has the margins `g[i]`, `l[i]` `[T + 1]` and the ends `[T]`.

    The state is the row and the time. A reset of its own begins the next row.
    """

    _supports_set_state = True

    def __init__(self, g, l, ends, *, batch=(), target=True):  # noqa: E741
        super().__init__(batch_size=batch)
        self.g, self.l, self.ends, self.target, self.row = g, l, ends, target, 0
        column = (*batch, 1)
        margins = {"safety_margin": Unbounded(column)} | ({"target_margin": Unbounded(column)} if target else {})
        self.observation_spec = Composite({"observation": Unbounded((*batch, 2)), **margins}, shape=batch)
        self.state_spec = Composite({"observation": Unbounded((*batch, 2))}, shape=batch)
        flags = {key: Categorical(2, shape=column, dtype=torch.bool) for key in ("done", "terminated", "truncated")}
        self.full_done_spec = Composite(flags, shape=batch)
        self.action_spec = Categorical(2, shape=batch)
        self.reward_spec = Unbounded(column)

    def _entries(self, state):
        row, step = state.long().unbind(-1)
        step = step.clamp(max=self.g.shape[1] - 1)
        entries = {"observation": state, "safety_margin": self.g[row, step].unsqueeze(-1)}
        if self.target:
            entries["target_margin"] = self.l[row, step].unsqueeze(-1)
        return entries

    def _reset(self, tensordict=None, set_state=False, **_):
        if set_state:
            state = tensordict["observation"].clone()
        else:
            rows = torch.arange(self.row, self.row + self.numel()).reshape(self.batch_size) % len(self.g)
            self.row += self.numel()
            state = torch.stack([rows, torch.zeros_like(rows)], -1).float()
        return TensorDict(self._entries(state), self.batch_size)

    def _step(self, tensordict):
        state = tensordict["observation"] + torch.tensor([0.0, 1.0])
        row, step = state.long().unbind(-1)
        end = self.ends[row, (step - 1).clamp(max=self.ends.shape[1] - 1)].unsqueeze(-1)
        flags = {"terminated": end == TERMINATED, "truncated": end == TRUNCATED, "done": end != RUNNING}
        return TensorDict(
            {**self._entries(state), **flags, "reward": torch.zeros(*self.batch_size, 1)}, self.batch_size
        )

    def _set_seed(self, seed):
        return seed


def still(tensordict):
    return tensordict.set("action", torch.zeros(tensordict.batch_size, dtype=torch.int64))


def starts_of(count):
    return torch.stack([torch.arange(count), torch.zeros(count, dtype=torch.int64)], -1).float()


def constant_control(index: int):
    return lambda tensordict: tensordict.set("action", torch.full(tensordict.batch_size, index))
