"""Frames per second of whole Rainbow loops on LunarLander-v3: the package beside plain PyTorch, and Tianshou.

python benchmarks/compare_rainbow.py [rounds] [frames of a round] [frames before the first update] [loops, e.g. ours]

All learn with one thread from 8 environments side by side: an update of 128 a frame, a network of 8-128-128 with a
noisy dueling head of 51 atoms on +-100, n = 3, a prioritized buffer of 100,000 (alpha .2, beta .6 -> 1), Adam at 5e-4,
clipping at 10, and a target copied every 1,000 updates; the noise alone explores. The package runs the loop of
examples/rainbow_safety.py, as it is and with the loss compiled, which takes minutes at first. After the warm-up the
loops take turns, each round begun by the next one. With 100,000 frames before the first update the buffers are full, as
in most of a long training: Tianshou looks through its whole buffer at every step. Processor time counts where other
work runs beside. Tianshou takes part where it is installed. Needs the extra `gym`.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable

import torch
from rainbow_by_hand import (
    ALPHA,
    ATOMS,
    BATCH,
    BETA,
    CAPACITY,
    GAMMA,
    HIGH,
    LOW,
    LR,
    MAX_NORM,
    N_STEPS,
    NUM_ENVS,
    SIGMA,
    TARGET_PERIOD,
    WARMUP,
    Rainbow,
)
from torchrl.data import LazyTensorStorage
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.objectives import HardUpdate

from torchrl_safety.data import LeanReplayBuffer, NStepTransform, PrioritizedSampler
from torchrl_safety.envs import LunarLanderEnv
from torchrl_safety.modules import RainbowNetwork, greedy_policy, reset_noise
from torchrl_safety.objectives import CategoricalDQNLoss

Loop = Callable[[int], None]
"""Collects and learns from so many frames more."""

BUDGET = 300_000
STORED = ["observation", "action", *(("next", key) for key in ("observation", "reward"))]
STORED += [("next", key) for key in ("done", "terminated", "truncated")]


def ours(warmup: int, *, compiled: bool) -> Loop:
    torch.manual_seed(0)
    env = LunarLanderEnv(NUM_ENVS, seed=0)
    network = RainbowNetwork(8, 4, support=(LOW, HIGH), atoms=ATOMS, hidden=(128, 128), sigma_init=SIGMA)
    loss = CategoricalDQNLoss(network, gamma=GAMMA, bootstrap_on_truncation=True)
    compute = torch.compile(loss, fullgraph=True) if compiled else loss
    policy = greedy_policy(network)
    buffer = LeanReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        sampler=PrioritizedSampler(CAPACITY, ALPHA, BETA, beta_annealing_steps=BUDGET),
        transform=NStepTransform(N_STEPS, num_envs=NUM_ENVS),
        batch_size=BATCH,
        priority_key="td_error",
    )
    parameters = list(loss.parameters())
    optimizer = torch.optim.Adam(parameters, LR, fused=True)
    target = HardUpdate(loss, value_network_update_interval=0)
    state, updates = env.reset(), 0

    def run(frames: int) -> None:
        nonlocal state, updates
        for _ in range(frames // NUM_ENVS):
            with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
                reset_noise(policy)
                transition, state = env.step_and_maybe_reset(policy(state))
            buffer.extend(transition.select(*STORED))
            for _ in range(NUM_ENVS if len(buffer) >= warmup else 0):
                batch = buffer.sample()
                reset_noise(loss)
                losses = compute(batch)
                optimizer.zero_grad()
                losses["loss"].backward()
                torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
                optimizer.step()
                buffer.update_tensordict_priority(batch)
                updates += 1
                if updates % TARGET_PERIOD == 0:
                    target.step()

    return run


def tianshou(warmup: int) -> Loop:
    import gymnasium
    from tianshou.algorithm.algorithm_base import policy_within_training_step
    from tianshou.algorithm.modelfree.c51 import C51Policy
    from tianshou.algorithm.modelfree.rainbow import RainbowDQN
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import Collector, PrioritizedVectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.discrete import NoisyLinear

    def noisy(x: int, y: int) -> NoisyLinear:
        return NoisyLinear(x, y, SIGMA)

    torch.manual_seed(0)
    env = gymnasium.make("LunarLander-v3")
    envs = DummyVectorEnv([lambda: gymnasium.make("LunarLander-v3") for _ in range(NUM_ENVS)])
    network = Net(
        state_shape=8,
        action_shape=4,
        hidden_sizes=[128, 128],
        softmax=True,
        num_atoms=ATOMS,
        dueling_param=({"linear_layer": noisy}, {"linear_layer": noisy}),
    )
    policy = C51Policy(
        model=network, action_space=env.action_space, num_atoms=ATOMS, v_min=LOW, v_max=HIGH, eps_training=0.0
    )
    algorithm = RainbowDQN(
        policy=policy,
        optim=AdamOptimizerFactory(lr=LR),
        gamma=GAMMA,
        n_step_return_horizon=N_STEPS,
        target_update_freq=TARGET_PERIOD,
    )
    buffer = PrioritizedVectorReplayBuffer(CAPACITY, NUM_ENVS, alpha=ALPHA, beta=BETA, weight_norm=True)
    collector = Collector(algorithm, envs, buffer, exploration_noise=True)
    collector.reset()
    updates = 0

    def run(frames: int) -> None:
        nonlocal updates
        for _ in range(frames // NUM_ENVS):
            with policy_within_training_step(policy):
                collector.collect(n_step=NUM_ENVS)
                for _ in range(NUM_ENVS if len(buffer) >= warmup else 0):
                    buffer.set_beta(min(1.0, BETA + (1 - BETA) * updates / BUDGET))
                    algorithm.update(buffer=buffer, sample_size=BATCH)
                    updates += 1

    return run


def main() -> None:
    numbers = sys.argv[1:4]
    rounds, frames, warmup = (int(x) for x in numbers + ["5", "1500", str(WARMUP)][len(numbers) :])
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    built: dict[str, Callable[[], Loop]] = {
        "by_hand": lambda: Rainbow(0, BUDGET, warmup).run,
        "ours": lambda: ours(warmup, compiled=False),
        "compiled": lambda: ours(warmup, compiled=True),
    }
    if importlib.util.find_spec("tianshou"):
        built["tianshou"] = lambda: tianshou(warmup)
    loops = {name: built[name]() for name in (sys.argv[4].split(",") if len(sys.argv) > 4 else built)}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for loop in loops.values():
        loop(warmup + 400)
    names = list(loops)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin = time.perf_counter(), time.process_time()
            loops[name](frames)
            taken[name].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    print(f"{'frames a second of':<16}{'wall time':>22}{'processor time':>30}")
    print(f"{'':<16}{'median':>11}{'best':>11}{'median':>11}{'best':>9}{'of ' + names[0]:>14}{'best':>8}")
    base = [(statistics.median(x), min(x)) for x in zip(*taken[names[0]])]
    for name, times in taken.items():
        wall, cpu = ((statistics.median(x), min(x)) for x in zip(*times))
        speeds = [frames / seconds for seconds in (*wall, *cpu)]
        ratios = [base[1][k] / cpu[k] for k in (0, 1)]
        print(
            f"{name:<16}{speeds[0]:11.0f}{speeds[1]:11.0f}{speeds[2]:11.0f}{speeds[3]:9.0f}"
            f"{ratios[0]:13.2f}x{ratios[1]:7.2f}x"
        )


if __name__ == "__main__":
    main()
