"""Frames per second of Gymnasium environments: a bare loop over them, `SafetyGymEnv`, and TorchRL's `GymEnv`.

Run with `OMP_NUM_THREADS=1 python -m pytest benchmarks/bench_gym.py --benchmark-columns=median,ops`; rows of a group
differ in nothing but who steps, so that their ratios mean the same on every machine. Actions are drawn beforehand.
"""

import gymnasium
import pytest
import torch
from torchrl.envs import GymEnv, SerialEnv

from torchrl_safety.envs import LunarLanderEnv, SafetyGymEnv

ROUNDS, STEPS = 20, 200


def time_frames(benchmark, num_envs: int, run) -> None:
    benchmark.group = f"{num_envs} environments"
    benchmark.pedantic(run, rounds=ROUNDS, warmup_rounds=1)
    benchmark.extra_info["frames_per_second"] = num_envs * STEPS / benchmark.stats.stats.median


def actions_of(num_envs: int) -> torch.Tensor:
    return torch.randint(4, (STEPS, num_envs), generator=torch.Generator().manual_seed(0))


def stepper(env):
    """`STEPS` steps of a TorchRL environment, as the examples' loops take them."""
    actions, state = [*actions_of(env.batch_size.numel()).reshape(STEPS, *env.batch_size)], [env.reset()]

    def run() -> None:
        for action in actions:
            state[0]["action"] = action
            _, state[0] = env.step_and_maybe_reset(state[0])

    return run


@pytest.mark.parametrize("num_envs", [1, 8])
def test_bare_loop(benchmark, num_envs):
    envs = [gymnasium.make("LunarLander-v3") for _ in range(num_envs)]
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
    actions = actions_of(num_envs).tolist()

    def run() -> None:
        for row in actions:
            for env, action in zip(envs, row):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()

    time_frames(benchmark, num_envs, run)


@pytest.mark.parametrize("num_envs", [1, 8])
def test_safety_gym_env(benchmark, num_envs):
    time_frames(benchmark, num_envs, stepper(SafetyGymEnv("LunarLander-v3", num_envs)))


@pytest.mark.parametrize("num_envs", [1, 8])
def test_safety_gym_env_with_margins(benchmark, num_envs):
    env = LunarLanderEnv(num_envs, problem="reach_avoid", end_criterion="env")
    time_frames(benchmark, num_envs, stepper(env))


@pytest.mark.parametrize("num_envs", [1, 8])
def test_torchrl_gym_env(benchmark, num_envs):
    def make() -> GymEnv:
        return GymEnv("LunarLander-v3", categorical_action_encoding=True)

    time_frames(benchmark, num_envs, stepper(make() if num_envs == 1 else SerialEnv(num_envs, make)))
