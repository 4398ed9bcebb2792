"""Frames per second of the native environments under a random policy, whose draws are counted in.

Run with `OMP_NUM_THREADS=1 python -m pytest benchmarks/bench_envs.py --benchmark-columns=median,ops`; every row's
`extra_info` holds frames/s, in the JSON of `--benchmark-json=PATH`.
"""

from collections.abc import Callable

import pytest
from tensordict import TensorDict

from torchrl_safety.envs import DoubleIntegratorEnv

BATCHES = [1, 64, 1024, 4096]
ENVS = {
    "avoid": lambda n: DoubleIntegratorEnv(n, seed=0, max_steps=200),
    "reach_avoid": lambda n: DoubleIntegratorEnv(n, problem="reach_avoid", seed=0, max_steps=200),
    "two_player": lambda n: DoubleIntegratorEnv(n, max_disturbance=0.5, seed=0, max_steps=200),
    "continuous": lambda n: DoubleIntegratorEnv(n, discrete=False, seed=0, max_steps=200),
}


def time_frames(benchmark, num_envs: int, step: Callable[[TensorDict], TensorDict], tensordict: TensorDict) -> None:
    state = [tensordict]

    def frame() -> None:
        state[0] = step(state[0])

    benchmark.pedantic(frame, rounds=20, iterations=50, warmup_rounds=2)
    benchmark.extra_info["frames_per_second"] = num_envs / benchmark.stats.stats.median


@pytest.mark.parametrize("num_envs", BATCHES)
@pytest.mark.parametrize("name", ENVS)
def test_step_and_maybe_reset(benchmark, name, num_envs):
    env = ENVS[name](num_envs)
    time_frames(benchmark, num_envs, lambda td: env.step_and_maybe_reset(env.rand_action(td))[1], env.reset())


@pytest.mark.parametrize("num_envs", BATCHES)
@pytest.mark.parametrize("name", ENVS)
def test_step(benchmark, name, num_envs):
    env = ENVS[name](num_envs)
    time_frames(benchmark, num_envs, lambda td: env.step_mdp(env.step(env.rand_action(td))), env.reset())
