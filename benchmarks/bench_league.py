"""The share of a training run that the steps of the league take at its default settings, with 1,024 environments.

Run with `OMP_NUM_THREADS=1 python benchmarks/bench_league.py`; prints CPU seconds, which other processes do not change.
"""

import time

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from torchrl_safety.envs import DoubleIntegratorEnv
from torchrl_safety.modules import RainbowNetwork, TwoPlayerPolicy, greedy_policy
from torchrl_safety.objectives import SafetyDQNLoss
from torchrl_safety.trainers import League

NUM_ENVS, STEPS = 1024, 40


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    settings = {"support": None, "noisy": False}
    networks = [RainbowNetwork(2, 3, **settings) for _ in range(2)]
    controller, disturbance = (
        greedy_policy(net, action_key=key) for net, key in zip(networks, ("action", "disturbance"))
    )
    matches = DoubleIntegratorEnv(NUM_ENVS, max_disturbance=0.5)
    league = League(matches, controller, disturbance, max_steps=200, init_key="step_count")
    for _ in range(5):  # a full league: every later step has as many pairs as this one
        for side in ("controller", "disturbance"):
            league._add(side, 0)
    began = time.process_time()
    report = league.update(0)
    league_seconds = time.process_time() - began

    env = DoubleIntegratorEnv(NUM_ENVS, max_disturbance=0.5, max_steps=200)
    policy = TwoPlayerPolicy(controller, league.opponent)
    loss = SafetyDQNLoss(networks[0])
    optimizer = torch.optim.Adam(loss.parameters(), 1e-3)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=256)
    state: TensorDict = env.reset()
    seconds = {"collect": 0.0, "learn": 0.0}
    for _ in range(STEPS):
        began = time.process_time()
        with torch.no_grad():
            transition, state = env.step_and_maybe_reset(policy(state))
        buffer.extend(transition)
        seconds["collect"] += time.process_time() - began
        began = time.process_time()
        losses = loss(buffer.sample())
        optimizer.zero_grad()
        losses["loss"].backward()
        optimizer.step()
        seconds["learn"] += time.process_time() - began
    between = league.interval / (STEPS * NUM_ENVS) * sum(seconds.values())
    share = league_seconds / (league_seconds + between)
    print({**report, **seconds, "league_seconds": league_seconds, "seconds_between_steps": between, "share": share})


if __name__ == "__main__":
    main()
