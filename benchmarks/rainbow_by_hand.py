"""Rainbow on LunarLander-v3 in plain PyTorch and NumPy: what compare_rainbow.py holds the package against.

python benchmarks/rainbow_by_hand.py [frames] [seed]
"""

from __future__ import annotations

import copy
import sys
import time
from collections import deque

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_ENVS, CAPACITY, BATCH, WARMUP, N_STEPS, GAMMA = 8, 100_000, 128, 2_000, 3, 0.99
ALPHA, BETA, EPS, LR, TARGET_PERIOD, MAX_NORM = 0.2, 0.6, 1e-6, 5e-4, 1_000, 10.0
ATOMS, LOW, HIGH, SIGMA = 51, -100.0, 100.0, 0.5


class NoisyLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs, self.outputs, bound = inputs, outputs, inputs**-0.5
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), SIGMA * bound))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), SIGMA * outputs**-0.5))
        self.draw()

    def draw(self) -> None:
        noise = torch.randn(self.inputs + self.outputs)
        noise = noise.sign() * noise.abs().sqrt()
        self.noise_in, self.noise_out = noise[: self.inputs], noise[self.inputs :]
        self.noise = torch.outer(self.noise_out, self.noise_in)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.addcmul(self.weight, self.weight_sigma, self.noise)
        return F.linear(x, weight, torch.addcmul(self.bias, self.bias_sigma, self.noise_out))


class Network(nn.Module):
    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.torso = nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.head = NoisyLinear(128, (1 + actions) * ATOMS)

    def forward(self, observation: Tensor) -> Tensor:
        rows = self.head(self.torso(observation)).view(len(observation), -1, ATOMS)
        value, advantage = rows[:, :1], rows[:, 1:]
        return value + advantage - advantage.mean(1, keepdim=True)


class SumTree:
    """Leaves in rows of 64, whose sums are again in rows of 64, whose sums are searched as a whole."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.random, middle = np.random.default_rng(seed), -(-capacity // 64)
        self.leaves, self.sums = np.zeros((middle, 64)), np.zeros((-(-middle // 64), 64))

    def write(self, index: np.ndarray, leaf: np.ndarray | float) -> None:
        self.leaves.reshape(-1)[index] = leaf
        row = index >> 6
        self.sums.reshape(-1)[row] = self.leaves[row].sum(1)

    def find(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        totals = self.sums.sum(1).cumsum()
        mass = self.random.random(size) * totals[-1]
        node = np.searchsorted(totals, mass, side="right").clip(max=len(totals) - 1)
        mass -= np.where(node > 0, totals[node - 1], 0)
        rows, every = np.arange(size), self.leaves.reshape(-1)
        for level in (self.sums, self.leaves):
            running = level[node].cumsum(1)
            child = (running <= mass[:, None]).sum(1).clip(max=63)
            mass -= np.where(child > 0, running[rows, child - 1], 0)
            node = node * 64 + child
        return node, every[node]


class Replay:
    def __init__(self, inputs: int, seed: int) -> None:
        self.state, self.after = np.zeros((CAPACITY, inputs), "f4"), np.zeros((CAPACITY, inputs), "f4")
        self.action = np.zeros(CAPACITY, "i8")
        self.gain, self.discount = np.zeros(CAPACITY, "f4"), np.zeros(CAPACITY, "f4")
        self.tree, self.highest, self.written = SumTree(CAPACITY, seed), 1.0, 0

    def add(self, window: deque, after: np.ndarray, terminated: bool) -> None:
        """The n-step transition that starts with the oldest step of the window."""
        slot = self.written % CAPACITY
        self.state[slot], self.action[slot] = window[0][:2]
        self.gain[slot] = sum(GAMMA**k * step[2] for k, step in enumerate(window))
        self.after[slot], self.discount[slot] = after, 0.0 if terminated else GAMMA ** len(window)
        self.tree.write(np.array([slot]), (self.highest + EPS) ** ALPHA)
        self.written += 1

    def sample(self, beta: float) -> tuple[np.ndarray, Tensor, list[Tensor]]:
        index, leaf = self.tree.find(BATCH)
        weight = torch.from_numpy(((leaf / leaf.min()) ** -beta).astype("f4"))
        fields = (self.state, self.action, self.gain, self.after, self.discount)
        return index, weight, [torch.from_numpy(field[index]) for field in fields]

    def update(self, index: np.ndarray, priority: np.ndarray) -> None:
        self.highest = max(self.highest, float(priority.max()))
        self.tree.write(index, (priority + EPS) ** ALPHA)


class Rainbow:
    def __init__(self, seed: int, budget: int, warmup: int = WARMUP) -> None:
        torch.manual_seed(seed)
        self.envs = [gymnasium.make("LunarLander-v3") for _ in range(NUM_ENVS)]
        self.now = np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(self.envs)])
        self.network = Network(8, 4)
        self.target = copy.deepcopy(self.network)
        self.parameters = list(self.network.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, LR, fused=True)
        self.support = torch.linspace(LOW, HIGH, ATOMS)
        self.replay, self.windows = Replay(8, seed), [deque(maxlen=N_STEPS) for _ in self.envs]
        self.rows, self.budget, self.warmup = torch.arange(BATCH), budget, warmup
        self.frames = self.updates = 0
        self.returns, self.running = [], [0.0] * NUM_ENVS

    @torch.no_grad()
    def step(self) -> None:
        self.network.head.draw()
        actions = (self.network(torch.from_numpy(self.now)).softmax(-1) @ self.support).argmax(1).tolist()
        for i, (env, window) in enumerate(zip(self.envs, self.windows)):
            after, reward, terminated, truncated, _ = env.step(actions[i])
            window.append((self.now[i].copy(), actions[i], reward))
            self.running[i] += reward
            if len(window) == N_STEPS:
                self.replay.add(window, after, terminated)
                window.popleft()
            if terminated or truncated:
                while window:
                    self.replay.add(window, after, terminated)
                    window.popleft()
                self.returns.append(self.running[i])
                self.running[i], after = 0.0, env.reset()[0]
            self.now[i] = after
        self.frames += NUM_ENVS

    @torch.no_grad()
    def wanted(self, gain: Tensor, after: Tensor, discount: Tensor) -> Tensor:
        best = (self.network(after).softmax(-1) @ self.support).argmax(1)
        probs = self.target(after)[self.rows, best].softmax(-1)
        atoms = (gain[:, None] + discount[:, None] * self.support).clamp_(LOW, HIGH)
        place = ((atoms - LOW) * ((ATOMS - 1) / (HIGH - LOW))).clamp_(0, ATOMS - 1)
        lower = place.floor().clamp_(max=ATOMS - 2)
        upper_mass, index = probs * (place - lower), lower.long()
        mass = torch.zeros(BATCH, ATOMS).scatter_add_(1, index, probs - upper_mass)
        return mass.scatter_add_(1, index + 1, upper_mass)

    def loss(self, weight: Tensor, fields: list[Tensor]) -> tuple[Tensor, Tensor]:
        state, action, gain, after, discount = fields
        wanted = self.wanted(gain, after, discount)
        log_probs = self.network(state)[self.rows, action].log_softmax(-1)
        cross_entropy = -(wanted * log_probs).sum(-1)
        divergence = cross_entropy.detach() - torch.special.entr(wanted).sum(-1)
        return (weight * cross_entropy).mean(), divergence.clamp_(min=0)

    def update(self) -> None:
        beta = BETA + (1 - BETA) * min(1.0, self.updates / self.budget)
        index, weight, fields = self.replay.sample(beta)
        self.network.head.draw()
        self.target.head.draw()
        loss, priority = self.loss(weight, fields)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.optimizer.step()
        self.replay.update(index, priority.double().numpy())
        self.updates += 1
        if self.updates % TARGET_PERIOD == 0:
            self.target.load_state_dict(self.network.state_dict())

    def run(self, frames: int) -> None:
        for _ in range(frames // NUM_ENVS):
            self.step()
            for _ in range(NUM_ENVS if self.frames >= self.warmup else 0):
                self.update()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    budget, seed = (int(x) for x in (sys.argv[1:] + ["100000", "0"][len(sys.argv) - 1 :]))
    agent, begin = Rainbow(seed, budget), time.perf_counter()
    for _ in range(10):
        agent.run(budget // 10)
        speed = agent.frames / (time.perf_counter() - begin)
        print(f"{agent.frames} frames, {speed:.0f}/s, mean return {np.mean(agent.returns[-20:]):.0f}", flush=True)
