"""What the parts hand to TorchRL's Collector and Trainer is what the next one needs, also in a run that goes on."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import OPERATORS
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SoftUpdate
from torchrl.trainers import DefaultOptimizationStepper, ReplayBufferTrainer, TargetNetUpdaterHook, Trainer

from torchrl_safety.data import NStepTransform, PrioritizedSampler
from torchrl_safety.envs import DoubleIntegratorEnv
from torchrl_safety.objectives import SafetyPPOLoss, SafetySACLoss
from torchrl_safety.trainers import (
    EvaluationHook,
    ScheduleHook,
    StepGamma,
    evaluate,
    find_checkpoint,
    make_checkpoint,
    rotation,
)

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")


ENVS, STEPS, N = 8, 12, 3
BATCH = ENVS * STEPS
TOTAL = 4 * BATCH


class Run:
    """Soft actor-critic on 3-step windows, prioritized, with its discount and an evaluation on hooks."""

    def __init__(self, batches: int = 4, seed: int = 0, folder: Path | None = None) -> None:
        torch.manual_seed(seed)
        self.env = DoubleIntegratorEnv(ENVS, discrete=False, max_steps=5, seed=seed)
        head = torch.nn.Sequential(MLP(in_features=2, out_features=2, num_cells=[32]), NormalParamExtractor())
        module = TensorDictModule(head, ["observation"], ["loc", "scale"])
        actor = ProbabilisticActor(
            module, in_keys=["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True
        )
        critic = ValueOperator(MLP(in_features=3, out_features=1, num_cells=[32]), in_keys=["observation", "action"])
        self.loss = SafetySACLoss(actor, critic, gamma=0.5, bootstrap_on_truncation=True, target_entropy=-1.0)
        self.start = {name: value.clone() for name, value in self.loss.state_dict().items()}
        self.frames: list[TensorDict] = []
        self.gammas: list[float] = []
        self.errors: list[float] = []
        self.trainer = trainer = Trainer(
            collector=Collector(
                self.env,
                actor,
                frames_per_batch=BATCH,
                total_frames=batches * BATCH,
                auto_register_policy_transforms=False,
            ),
            total_frames=batches * BATCH,
            frame_skip=1,
            optim_steps_per_batch=10,
            loss_module=self.loss,
            optimizer=torch.optim.Adam(self.loss.parameters(), 1e-2),
            optimization_stepper=DefaultOptimizationStepper(),
            progress_bar=False,
            save_trainer_interval=BATCH - 1,
            checkpoint=None if folder is None else make_checkpoint(),
            checkpoint_rotation=None if folder is None else rotation(folder),
        )
        self.windows = NStepTransform(N, signals=("safety_margin",), num_envs=ENVS)
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(1000),
            sampler=PrioritizedSampler(1000, generator=torch.Generator().manual_seed(seed)),
            transform=self.windows,
            batch_size=64,
            priority_key="td_error",
        )
        replay = ReplayBufferTrainer(self.buffer)
        trainer.register_op("batch_process", lambda batch: self.frames.append(batch.clone()))
        trainer.register_op("batch_process", replay.extend)
        trainer.register_op("process_optim_batch", replay.sample)
        trainer.register_op("post_optim_log", self.buffer.update_tensordict_priority)
        trainer.register_op("post_optim_log", lambda batch: self.errors.append(batch["td_error"].mean().item()))
        trainer.register_op("post_optim", TargetNetUpdaterHook(SoftUpdate(self.loss, tau=0.05)))
        trainer.register_module("replay_buffer", replay)
        trainer.register_module("env", self.env)
        ScheduleHook(StepGamma(TOTAL, gamma_start=0.5, period=0.25), self.apply).register(trainer, "gamma")
        judge = DoubleIntegratorEnv(4, discrete=False, seed=1)
        self.evaluation = EvaluationHook(
            lambda: evaluate(judge, actor, episodes=4, max_steps=3).scores, interval=2 * BATCH
        )
        self.evaluation.register(trainer)
        trainer.register_op("post_steps", self.save)  # the collector is gone when training has ended

    def save(self) -> None:
        self.saved = io.BytesIO()
        torch.save(self.trainer.state_dict(), self.saved)
        self.saved.seek(0)

    def apply(self, gamma: float) -> None:
        self.loss.gamma = gamma
        self.gammas.append(gamma)


def expected_windows(frames: TensorDict) -> list[dict[str, Any]]:
    """The window of each frame of `[E, T]` that is complete, by looking ahead frame by frame."""
    rows = []
    for env in range(frames.shape[0]):
        for start in range(frames.shape[1]):
            last = start
            while last - start < N - 1 and last < frames.shape[1] and not frames["next", "done"][env, last]:
                last += 1
            if last < frames.shape[1]:
                span = frames[env, start : last + 1]
                rows.append({"first": span[0], "last": span[-1], "margins": span["next", "safety_margin"].flatten()})
    return rows


def check_windows(rows: TensorDict, frames: TensorDict) -> None:
    """Each complete window of the frames is there, once, and nothing else is."""
    expected = expected_windows(frames)
    assert len(rows) == len(expected)
    at = {tuple(state): i for i, state in enumerate(rows["observation"].tolist())}
    for window in expected:
        row, length = rows[at.pop(tuple(window["first"]["observation"].tolist()))], len(window["margins"])
        assert torch.equal(row["action"], window["first"]["action"])
        assert row["steps", "valid"].flatten().tolist() == [True] * length + [False] * (N - length)
        assert torch.equal(row["steps", "safety_margin"].flatten()[:length], window["margins"])
        for key in ("observation", "safety_margin", "terminated", "truncated", "done"):
            assert torch.equal(row["next", key], window["last"]["next", key]), key
    assert not at


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_a_trainer_learns_from_every_window_once_and_runs_each_hook():
    run = Run()
    run.trainer.train()
    frames = torch.cat(run.frames, 1)
    assert frames.shape == (ENVS, 4 * STEPS)
    check_windows(run.buffer[:], frames)
    assert frames["next", "truncated"].any()
    assert frames["next", "terminated"].any()
    assert run.gammas == [StepGamma(TOTAL, gamma_start=0.5, period=0.25).step(i * BATCH) for i in range(5)]
    assert float(run.loss.gamma) == pytest.approx(0.9999)
    assert [row["frames"] for row in run.evaluation.rows] == [2 * BATCH, 4 * BATCH]
    leaves = run.buffer.sampler._tree.get(torch.arange(len(run.buffer)))
    assert leaves.unique().numel() > len(run.buffer) / 2  # all the same until an update
    assert sum(run.errors[-5:]) < sum(run.errors[:5]) / 2
    moved = {name for name, value in run.loss.state_dict().items() if not torch.equal(value, run.start[name])}
    assert any(name.startswith("target_qvalue") for name in moved)


@pytest.mark.parametrize("unified", [False, True])
def test_a_saved_trainer_goes_on_in_another_one_with_all_that_it_holds(unified, tmp_path):
    folder = tmp_path if unified else None
    run, other = Run(batches=2, folder=folder), Run(batches=4, seed=7, folder=folder)
    run.trainer.train()
    if unified:
        other.trainer.load_from_file(find_checkpoint(tmp_path))
    else:
        other.trainer.load_state_dict(torch.load(run.saved, weights_only=True))
    other.save()
    run.saved.seek(0)
    before, after = (torch.load(file, weights_only=True) for file in (run.saved, other.saved))
    for state in (before, after):
        del state["collector"]["traj_pool"]  # a collector that goes on begins new episodes
        del state["replay_buffer"]["replay_buffer"]["_storage"]["_storage"]  # beyond its length it is not initialised
        del state["state"]["_last_save"]
    assert same(before, after)
    known = len(run.buffer)
    assert known == len(other.buffer) > 0
    assert same(run.buffer[:].to_dict(), other.buffer[:].to_dict())
    assert torch.equal(other.env.reset()["observation"], run.env.reset()["observation"])
    other.windows.clear()  # what they wait for does not come
    other.trainer.train()
    assert other.trainer.collected_frames == TOTAL
    assert other.gammas == [StepGamma(TOTAL, gamma_start=0.5, period=0.25).step(i * BATCH) for i in (2, 3, 4)]
    check_windows(other.buffer[known:], torch.cat(other.frames, 1))
    assert [row["frames"] for row in other.evaluation.rows] == [2 * BATCH, 4 * BATCH]


def test_a_collector_of_a_native_environment_alone_goes_on():
    def collector(seed: int) -> Collector:
        env = DoubleIntegratorEnv(4, seed=seed)
        policy = TensorDictModule(lambda state: state[..., 0].lt(0).long() * 2, ["observation"], ["action"])
        return Collector(env, policy, frames_per_batch=20, total_frames=60, auto_register_policy_transforms=False)

    first, second = collector(0), collector(1)
    next(iter(first))
    before = second.env.state_dict()
    second.load_state_dict(first.state_dict())
    assert second._frames == 20
    assert same(second.env.state_dict(), before)
    assert sum(batch.numel() for batch in second) == 40
    with pytest.raises(RuntimeError, match="_extra_state"):
        second.env.load_state_dict({"other": torch.zeros(1)})


def test_returns_of_a_collected_batch_are_those_of_its_episodes_and_fitting_them_lowers_the_loss():
    torch.manual_seed(0)
    logits = TensorDictModule(MLP(in_features=2, out_features=3, num_cells=[16]), ["observation"], ["logits"])
    actor = ProbabilisticActor(
        logits, in_keys=["logits"], distribution_class=torch.distributions.Categorical, return_log_prob=True
    )
    critic = ValueOperator(MLP(in_features=2, out_features=1, num_cells=[16]), in_keys=["observation"])
    loss = SafetyPPOLoss(actor, critic, gamma=0.9, lmbda=0.8, bootstrap_on_truncation=True)
    env = DoubleIntegratorEnv(6, max_steps=4, seed=0)
    collector = Collector(env, actor, frames_per_batch=60, total_frames=60, auto_register_policy_transforms=False)
    (batch,) = list(collector)
    with torch.no_grad():
        loss.value_estimator(batch, params=loss.critic_network_params)
        after = critic(batch["next"].select("observation"))["state_value"]
    operator = OPERATORS["AvoidBackup()"]
    for i in range(6):
        for t in reversed(range(10)):
            value = after[i, t].item()
            if t < 9 and not batch["next", "done"][i, t]:
                value = 0.2 * value + 0.8 * batch["value_target"][i, t + 1].item()
            step = {"safety_margin": batch["next", "safety_margin"][i, t].item()}
            expected = operator(step, value, 0.9, batch["next", "terminated"][i, t].item())
            assert batch["value_target"][i, t].item() == pytest.approx(expected, abs=1e-5)
    flat, optimizer, errors = batch.reshape(-1), torch.optim.Adam(loss.parameters(), 1e-2), []
    for _ in range(60):
        losses = loss(flat)
        optimizer.zero_grad()
        losses["loss_critic"].backward()
        optimizer.step()
        errors.append(losses["loss_critic"].item())
    assert errors[-1] < errors[0] / 3
