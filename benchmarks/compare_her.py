"""Processor time of a step of hindsight SAC on FetchReach: examples/hindsight_prioritized.py beside Stable-Baselines3.

python benchmarks/compare_her.py [seed]

Both learn from one simulator with networks of [256, 256], one update of 256 for each step, four goals of the strategy
"future", gamma .95 and a learning rate of 1e-3, on one thread. Each runs twice in a process of its own, for 1,500 and
for 3,000 steps (1,000 of them without updates); the difference is what a step costs, without starting, importing and
evaluating. Needs the extra `robotics` and stable-baselines3.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

SHORT, LONG = 1_500, 3_000
EXAMPLE = Path(__file__).parents[1] / "examples" / "hindsight_prioritized.py"
OPTIONS = ["env=fetch_reach", "rollouts=1", "evaluations=1", "checkpoints=0"]

PEER = """
import sys
import gymnasium, gymnasium_robotics, torch
from stable_baselines3 import SAC, HerReplayBuffer
torch.set_num_threads(1)
env = gymnasium.make("FetchReach-v4")
model = SAC(
    "MultiInputPolicy", env, learning_rate=1e-3, gamma=0.95, batch_size=256, learning_starts=1000, tau=0.02,
    train_freq=1, gradient_steps=1, replay_buffer_class=HerReplayBuffer, buffer_size=100_000,
    replay_buffer_kwargs=dict(n_sampled_goal=4, goal_selection_strategy="future"),
    policy_kwargs=dict(net_arch=[256, 256]), seed=int(sys.argv[2]),
)
model.learn(int(sys.argv[1]))
"""


def seconds(command: list[str]) -> float:
    """Processor time of a command, itself and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    seed = sys.argv[1] if len(sys.argv) > 1 else "0"
    found: dict[str, list[float]] = {"prioritized, write time": [], "uniform, write time": [], "Stable-Baselines3": []}
    for steps in (SHORT, LONG):
        for name, taken in found.items():
            if name == "Stable-Baselines3":
                taken.append(seconds([sys.executable, "-c", PEER, str(steps), seed]))
                continue
            with tempfile.TemporaryDirectory() as folder:
                options = [*OPTIONS, f"frames={steps}", f"seed={seed}", f"hydra.run.dir={folder}/run"]
                options.append(f"prioritized={'true' if name.startswith('prioritized') else 'false'}")
                taken.append(seconds([sys.executable, str(EXAMPLE), *options]))
    for name, (short, long) in found.items():
        print(f"{name:<26}{1000 * (long - short) / (LONG - SHORT):8.2f} ms a step")


if __name__ == "__main__":
    main()
