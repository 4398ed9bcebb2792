"""Train Rainbow on a safety problem and measure the learned set against the exact one.

python examples/rainbow_safety.py problem=avoid|reach_avoid|return seed=0 frames=480000 noisy=false resume=PATH

Every option stands in examples/configs/rainbow_safety.yaml. The loop in `main` is meant to be copied.
"""

from __future__ import annotations

import csv
import json
import os
import re
import sys
import time
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from tensordict.nn import TensorDictSequential
from torch.utils.tensorboard import SummaryWriter
from torchrl.checkpoint import CheckpointError
from torchrl.data import LazyTensorStorage, RandomSampler, TensorDictReplayBuffer
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import EGreedyModule
from torchrl.objectives import SoftUpdate
from tqdm import tqdm

from torchrl_safety.data import NStepTransform, PrioritizedSampler
from torchrl_safety.envs import DoubleIntegratorEnv
from torchrl_safety.modules import RainbowNetwork, greedy_policy, reset_noise
from torchrl_safety.objectives import AvoidBackup, CategoricalDQNLoss, DiscountedReturnBackup, ReachAvoidBackup
from torchrl_safety.trainers import (
    ExactSetEvaluator,
    Progress,
    SetEvaluation,
    StepGamma,
    catch_interrupt,
    check_options,
    find_checkpoint,
    make_checkpoint,
    plot_curves,
    plot_value_map,
    rotation,
)

BACKUPS = {"avoid": AvoidBackup, "reach_avoid": ReachAvoidBackup, "return": DiscountedReturnBackup}
ENVS = {"double_integrator": DoubleIntegratorEnv}
KEPT = "env problem seed num_envs n_steps buffer_size prioritized alpha noisy dueling atoms hidden"  # on a resume
TABLE = {
    "iou": "IoU with the exact set",
    "false_safe": "false-safe rate",
    "false_unsafe": "false-unsafe rate",
    "safe_rate": "safe rate of the greedy policy",
    "success_rate": "success rate of the greedy policy",
    "frames": "frames",
    "seconds": "seconds",
}


def make_env(cfg: DictConfig, num_envs: int, seed: int, **settings) -> DoubleIntegratorEnv:
    settings = {**{key: value for key, value in cfg.env.items() if key != "name"}, **settings}
    problem = "reach_avoid" if cfg.problem.name == "reach_avoid" else "avoid"
    return ENVS[cfg.env.name](num_envs, problem=problem, seed=seed, device=cfg.device, **settings)


def check(cfg: DictConfig) -> None:
    for option, choices in (("problem", BACKUPS), ("env", ENVS)):
        if cfg[option].name not in choices:
            raise ValueError(f"{option}.name is {cfg[option].name!r}; choose one of {list(choices)}")
    check_options(
        cfg,
        flags="double noisy prioritized",
        whole="frames threads batch_size n_steps atoms num_envs buffer_size warmup_frames grid rollouts rollout_steps",
        positive="lr.start lr.end tau max_grad_norm",
        shares="epsilon.start epsilon.end beta",
    )
    try:
        torch.zeros(1, device=cfg.device).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device is {cfg.device!r}, which PyTorch cannot use here; use device=cpu") from error
    if cfg.batch_size > cfg.warmup_frames or cfg.warmup_frames > cfg.buffer_size:
        raise ValueError(
            f"batch_size={cfg.batch_size}, warmup_frames={cfg.warmup_frames}, buffer_size={cfg.buffer_size}: need "
            "batch_size <= warmup_frames <= buffer_size, or the first batch is larger than what the buffer holds"
        )
    if cfg.frames < cfg.warmup_frames:
        raise ValueError(f"frames={cfg.frames} is less than warmup_frames={cfg.warmup_frames}; raise frames")


def remove_if_empty(folder: Path) -> None:
    """Hydra makes a folder for every start; one that nothing was written to is taken away."""
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()


def resumed(cfg: DictConfig) -> tuple[DictConfig, Path, Path | None]:
    """The configuration, the folder and the checkpoint of this run; a resumed run keeps its own."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    if cfg.resume is None:
        return cfg, folder, None
    remove_if_empty(folder)
    saved = find_checkpoint(str(cfg.resume)).resolve()
    folder = saved.parents[1]
    stored, changes = OmegaConf.load(folder / "config.yaml"), []
    for text in HydraConfig.get().overrides.task:
        option = re.split("[.=]", text)[0]
        if option in KEPT.split() and cfg[option] != stored[option]:
            raise ValueError(f"{text!r} beside resume=: the run has {option}={stored[option]}; leave it out")
        if option not in (*KEPT.split(), "resume"):
            changes.append(text)
    return OmegaConf.merge(stored, OmegaConf.from_dotlist(changes)), folder, saved


@hydra.main(version_base="1.3", config_path="configs", config_name="rainbow_safety")
def main(cfg: DictConfig) -> None:
    try:
        run(*resumed(cfg))
    except CheckpointError as error:
        fault = f"{error}; give the options that the run has, or another checkpoint of {cfg.resume}"
    except (ValueError, OSError) as error:
        fault = str(error)
    else:
        return
    remove_if_empty(Path(HydraConfig.get().runtime.output_dir))
    sys.exit(f"error: {fault}")


def run(cfg: DictConfig, folder: Path, saved: Path | None) -> None:
    check(cfg)
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    env = make_env(cfg, cfg.num_envs, seed=cfg.seed)
    backup = BACKUPS[cfg.problem.name]()
    network = RainbowNetwork(
        env.observation_spec["observation"].shape[-1],
        env.action_spec.space.n,
        support=tuple(cfg.problem.support),
        atoms=cfg.atoms,
        hidden=cfg.hidden,
        dueling=cfg.dueling,
        noisy=cfg.noisy,
        sigma_init=cfg.sigma_init,
        device=cfg.device,
    )
    loss = CategoricalDQNLoss(
        network, backup=backup, double=cfg.double, n_step=cfg.problem.n_step, bootstrap_on_truncation=True
    )
    policy = greedy_policy(network)

    def best_value(states: torch.Tensor) -> torch.Tensor:
        return policy(TensorDict({"observation": states}, states.shape[:-1]))["chosen_action_value"]

    epsilon = EGreedyModule(
        env.action_spec,
        eps_init=cfg.epsilon.start,
        eps_end=cfg.epsilon.end,
        annealing_num_steps=max(int(cfg.epsilon.fraction * cfg.frames), 1),
    ).to(cfg.device)
    explore = TensorDictSequential(policy, epsilon)

    updates = (cfg.frames - cfg.warmup_frames) // cfg.num_envs + 1
    uniform = RandomSampler()
    prioritized = PrioritizedSampler(cfg.buffer_size, cfg.alpha, cfg.beta, beta_annealing_steps=updates)
    window = [*backup.signals, "observation"] if cfg.problem.n_step == "best" else [*backup.signals]
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(cfg.buffer_size, device=cfg.device),
        sampler=prioritized if cfg.prioritized else uniform,
        transform=NStepTransform(cfg.n_steps, signals=window, num_envs=cfg.num_envs),
        batch_size=cfg.batch_size,
        priority_key="td_error",
    )
    stored = ["observation", "action", *(("next", key) for key in ("observation", "done", "terminated", "truncated"))]
    stored += [("next", signal) for signal in backup.signals]

    optimizer = torch.optim.Adam(loss.parameters(), cfg.lr.start, fused=True)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, (cfg.lr.end / cfg.lr.start) ** (1 / updates))
    target = SoftUpdate(loss, tau=cfg.tau)
    gamma = StepGamma(
        cfg.frames,
        gamma_start=cfg.gamma.start,
        gamma_end=cfg.gamma.end,
        ratio=cfg.gamma.ratio,
        period=cfg.gamma.period,
    )
    measure = ExactSetEvaluator(
        make_env(cfg, cfg.rollouts, seed=cfg.seed, max_steps=None),
        backup,
        half_size=(1.2, 2.2),
        grid=cfg.grid,
        level=cfg.problem.level,
        rollout_steps=cfg.rollout_steps,
        seed=cfg.seed,
    )
    progress = Progress(env.reset())
    checkpoint = make_checkpoint(
        loss=loss, optimizer=optimizer, decay=decay, gamma=gamma, epsilon=epsilon, buffer=buffer, env=env,
        progress=progress,
    )  # fmt: skip
    if saved is not None:
        checkpoint.load(saved, map_location=cfg.device)
    elif (folder / "config.yaml").exists():
        raise ValueError(f"{folder} already holds a run: continue it with resume={folder}, or choose another folder")
    OmegaConf.save(cfg, folder / ".config.yaml", resolve=True)
    (folder / ".config.yaml").replace(folder / "config.yaml")  # whole or not at all
    saves = rotation(folder)
    started = time.perf_counter() - progress.seconds
    writer = SummaryWriter(folder, purge_step=progress.frames)
    bar = tqdm(total=cfg.frames, initial=progress.frames, unit="frame", unit_scale=True, dynamic_ncols=True)

    def due(times: int) -> bool:
        """Whether one of `times` evenly spaced moments of the run, the end among them, has just been passed."""
        before, now = (
            min(frames, cfg.frames) * times // cfg.frames
            for frames in (progress.frames - cfg.num_envs, progress.frames)
        )
        return now > before

    with catch_interrupt() as interrupted:
        while progress.frames < cfg.frames:
            with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
                reset_noise(policy)
                transition, progress.state = env.step_and_maybe_reset(explore(progress.state))
            epsilon.step(cfg.num_envs)
            buffer.extend(transition.select(*stored))
            progress.frames += cfg.num_envs
            loss.gamma = gamma.step(progress.frames)
            if progress.frames >= cfg.warmup_frames and len(buffer) >= cfg.batch_size:
                batch = buffer.sample()
                reset_noise(loss)
                losses = loss(batch)
                optimizer.zero_grad()
                losses["loss"].backward()
                torch.nn.utils.clip_grad_norm_(loss.parameters(), cfg.max_grad_norm)
                optimizer.step()
                decay.step()
                target.step()
                buffer.update_tensordict_priority(batch)
                progress.updates += 1
            bar.update(cfg.num_envs)
            if progress.updates and due(cfg.evaluations):
                scores = measure(policy, best_value).scores
                progress.seconds = time.perf_counter() - started
                row = {"frames": progress.frames, "seconds": progress.seconds, "gamma": gamma.gamma}
                row |= {key: value.item() for key, value in losses.items()} | scores
                progress.rows.append(row)
                report(row, progress.rows, writer, bar, folder)
            if due(cfg.checkpoints) or interrupted:
                progress.seconds = time.perf_counter() - started
                saves.save(checkpoint, step=progress.frames)
            if interrupted:
                bar.close()
                print(f"stopped after {progress.frames} frames; continue with resume={folder}", file=sys.stderr)
                sys.exit(130)
    bar.close()
    progress.seconds = time.perf_counter() - started
    finish(cfg, folder, progress, measure, measure(policy, best_value), writer)


def report(row: dict, rows: list[dict], writer: SummaryWriter, bar: tqdm, folder: Path) -> None:
    """One row to the progress bar, TensorBoard and metrics.csv."""
    bar.set_postfix_str(
        f"γ {row['gamma']:.4g}, loss {row['loss']:.3f}, safe rate {row['safe_rate']:.3f}, IoU {row['iou']:.3f}"
    )
    for key, value in row.items():
        if key != "frames" and value is not None:
            writer.add_scalar(key, value, row["frames"])
    with (folder / "metrics.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(row))
        table.writeheader()
        table.writerows(rows)
    clipped = [past["clipped_mass"] > 0.01 for past in rows]
    lasting = sum(all(clipped[i : i + 3]) for i in range(len(clipped) - 2))
    if lasting == 1 and all(clipped[-3:]):
        bar.write("warning: over 1 % of the value mass keeps falling outside the support; widen problem.support")


def finish(cfg, folder: Path, progress: Progress, measure: ExactSetEvaluator, found: SetEvaluation, writer) -> None:
    """The table, the pictures and summary.json."""
    scores = found.scores
    summary = {**scores, "frames": progress.frames, "seconds": round(progress.seconds, 1)}
    summary |= {"seed": cfg.seed, "problem": cfg.problem.name}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    figure = plot_value_map(
        measure.axes,
        found.value,
        exact=measure.exact,
        states=found.states[:8],
        level=measure.level,
        title=f"{cfg.env.name}, {cfg.problem.name}: IoU {scores['iou']:.3f} after {progress.frames:,} frames",
    )
    figure.savefig(folder / "value_map.png", dpi=120)
    writer.add_figure("value_map", figure, progress.frames)
    writer.close()
    curves = ("iou", "false_safe", "false_unsafe", "safe_rate", "success_rate", "loss", "gamma")
    drawn = [name for name in curves if scores.get(name, 0) is not None]
    plot_curves(progress.rows, drawn).savefig(folder / "curves.png")
    for key, label in TABLE.items():
        if (value := summary[key]) is not None:
            print(f"{label:<34}{value:>10,}" if isinstance(value, int) else f"{label:<34}{value:>10.4f}")
    print(f"written to {folder}")


if __name__ == "__main__":
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra hands its complaint over instead of printing several lines
    try:
        main()
    except HydraException as error:
        sys.exit("error: " + " ".join(str(error).split("Config search path")[0].split()))
