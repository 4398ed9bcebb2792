"""Laws of the hooks: what a TorchRL Trainer steps, applies, measures and saves while it runs."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import HardUpdate
from torchrl.record import CSVLogger, TensorboardLogger
from torchrl.trainers import DefaultOptimizationStepper, TargetNetUpdaterHook, Trainer

from torchrl_safety.envs import DoubleIntegratorEnv
from torchrl_safety.modules import CappedNormalParams, RainbowNetwork, greedy_policy
from torchrl_safety.objectives import AvoidBackup, CategoricalDQNLoss, SafetyA2CLoss, SafetyPPOLoss
from torchrl_safety.trainers import (
    EvaluationHook,
    GeometricGamma,
    ScheduleHook,
    StdCap,
    StepDecay,
    StepGamma,
    TemperatureReset,
    evaluate,
    log_scores,
    parameter_groups,
)

BATCH, TOTAL = 32, 320


class Run:
    """A small training run of Rainbow with a discount, a learning rate and an evaluation on hooks."""

    def __init__(self, total_frames=TOTAL, budget=TOTAL, logger=None, own_logger=None, interval=100):
        network = RainbowNetwork(2, 3, support=(-0.4, 1.0), hidden=(16,))
        policy = greedy_policy(network)
        self.loss = CategoricalDQNLoss(network, backup=AvoidBackup(), gamma=0.5)
        optimizer = torch.optim.Adam(parameter_groups(self.loss, {"value_network": 1e-3}))
        env, self.seen, self.measured = DoubleIntegratorEnv(4, seed=0, max_steps=20), [], []
        starts = torch.zeros(4, 2)
        self.trainer = Trainer(
            collector=Collector(
                TransformedEnv(env),  # TorchRL's collector does not save the state of a bare environment
                policy,
                frames_per_batch=BATCH,
                total_frames=total_frames,
                auto_register_policy_transforms=False,
            ),
            total_frames=total_frames,
            frame_skip=1,
            optim_steps_per_batch=1,
            loss_module=self.loss,
            optimizer=optimizer,
            optimization_stepper=DefaultOptimizationStepper(),
            logger=logger,
            progress_bar=False,
        )

        def measure():
            self.measured.append(self.trainer.collected_frames)
            return evaluate(DoubleIntegratorEnv(4), policy, starts=starts, max_steps=5).scores

        decay = StepDecay(optimizer, {"value_network": 0.5}, total_frames=budget, period=0.5)
        self.optimizer = optimizer
        ScheduleHook(StepGamma(budget), self.apply).register(self.trainer, "gamma")
        ScheduleHook(decay).register(self.trainer, "decay")
        self.evaluation = EvaluationHook(measure, interval=interval, logger=own_logger)
        self.evaluation.register(self.trainer)
        self.trainer.register_op("post_steps", self.save)

    def apply(self, gamma):
        self.loss.gamma = gamma
        self.seen.append((self.trainer.collected_frames, gamma))

    def save(self):
        self.file = io.BytesIO()
        torch.save(self.trainer.state_dict(), self.file)


def test_a_trainer_steps_schedules_before_the_updates_and_evaluates_when_due_and_at_the_end():
    run = Run()
    run.trainer.train()
    assert run.seen == [(frames, StepGamma(TOTAL).step(frames)) for frames in range(0, TOTAL + 1, BATCH)]
    assert float(run.loss.gamma) == pytest.approx(0.9999)
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(2.5e-4)
    # 100, 200 and 300 are first passed by 128, 224 and 320.
    assert run.measured == [128, 224, 320]
    assert [row["frames"] for row in run.evaluation.rows] == run.measured
    assert all(row["episodes"] == 4 for row in run.evaluation.rows)


def test_the_end_of_a_run_is_evaluated_though_it_is_no_multiple_of_the_interval():
    run = Run(interval=10_000)
    run.trainer.train()
    assert run.measured == [TOTAL]


@pytest.mark.parametrize("own", [True, False])
def test_scores_go_to_the_logger_of_the_hook_or_else_of_the_trainer(own, tmp_path):
    logger = CSVLogger("run", str(tmp_path))
    run = Run(**{"own_logger" if own else "logger": logger})
    run.trainer.train()
    (file,) = tmp_path.rglob("safe_rate.csv")
    assert file.parent.name == "evaluation"
    rows = [(int(step), float(value)) for step, value in csv.reader(file.open())]
    assert rows == [(row["frames"], row["safe_rate"]) for row in run.evaluation.rows]


def test_a_resumed_trainer_neither_goes_back_nor_measures_twice():
    run = Run()
    run.trainer.train()
    run.file.seek(0)
    # With this budget alone, the discount would be smaller and the learning rate larger.
    longer = Run(total_frames=TOTAL + 2 * BATCH, budget=4 * TOTAL)
    longer.trainer.load_state_dict(torch.load(run.file, weights_only=True))
    assert longer.evaluation.rows == run.evaluation.rows
    longer.trainer.train()
    assert StepGamma(4 * TOTAL).step(TOTAL + 2 * BATCH) == 0.999
    assert longer.seen == [(TOTAL + frames, 0.9999) for frames in (0, BATCH, 2 * BATCH)]
    assert longer.optimizer.param_groups[0]["lr"] == pytest.approx(2.5e-4)
    assert longer.measured == [TOTAL + 2 * BATCH]
    assert len(longer.evaluation.rows) == 4


def test_scores_reach_tensorboard_and_none_is_left_out(tmp_path):
    logger = TensorboardLogger("run", str(tmp_path))
    log_scores(logger, {"safe_rate": 0.75, "success_rate": None, "episodes": 4}, 100, prefix="evaluation/")
    logger.experiment.flush()
    events = EventAccumulator(str(Path(tmp_path) / "run")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["evaluation/episodes", "evaluation/safe_rate"]
    (event,) = events.Scalars("evaluation/safe_rate")
    assert (event.step, event.value) == (100, 0.75)


def test_an_interval_below_one_frame_is_refused():
    with pytest.raises(ValueError, match="interval is 0"):
        EvaluationHook(dict, interval=0)


class Watched:
    """As much of a trainer as a hook knows."""

    def __init__(self, frames: int) -> None:
        self.collected_frames, self.ops, self.modules = frames, {}, {}

    def register_op(self, moment, hook):
        self.ops[moment] = hook

    def register_module(self, name, hook):
        self.modules[name] = hook


def schedules(budget: int) -> dict:
    """Each schedule, with what reads its value where it is used and whether that rises or falls."""
    loss = torch.nn.Module()
    loss.log_alpha = torch.nn.Parameter(torch.zeros(()))
    loss.register_buffer("alpha_init", torch.tensor(0.1))
    optimizer = torch.optim.Adam([{"params": [loss.log_alpha], "lr": 1.0, "name": "log_alpha"}])
    head, discount = CappedNormalParams(std_cap=1.0), {}

    def gamma(schedule):
        return ScheduleHook(schedule, lambda value: discount.update(gamma=value)), lambda: discount["gamma"], 1

    cap, decay = StdCap(budget, start=1.0, end=0.1), StepDecay(optimizer, {"log_alpha": 0.5}, total_frames=budget)
    return {
        "StepGamma": gamma(StepGamma(budget)),
        "GeometricGamma": gamma(GeometricGamma(budget)),
        "TemperatureReset": gamma(TemperatureReset(StepGamma(budget), loss, optimizer)),
        "StdCap": (ScheduleHook(cap, head.set_std_cap), head.std_cap.item, -1),
        "StepDecay": (ScheduleHook(decay), lambda: optimizer.param_groups[0]["lr"], -1),
    }


@pytest.mark.parametrize("name", schedules(10))
def test_every_schedule_takes_effect_through_its_hook_and_does_not_go_back_on_resume(name):
    hook, value, sign = schedules(1000)[name]
    trainer, seen = Watched(0), []
    hook.register(trainer, name)
    assert trainer.modules == {name: hook}
    for moment, frames in (("setup", 0), *(("pre_optim_steps", frames) for frames in range(0, 401, 100))):
        trainer.collected_frames = frames
        trainer.ops[moment]()
        seen.append(sign * value())
    assert seen == sorted(seen)
    assert seen[0] < seen[-1]
    file = io.BytesIO()
    torch.save(hook.state_dict(), file)
    file.seek(0)
    longer, value, sign = schedules(100_000)[name]
    trainer = Watched(400)
    longer.register(trainer, name)
    longer.load_state_dict(torch.load(file, weights_only=True))
    trainer.ops["setup"]()
    assert sign * value() == pytest.approx(seen[-1], rel=1e-6)


@pytest.mark.parametrize("kind", [SafetyPPOLoss, SafetyA2CLoss])
def test_an_evaluation_runs_on_policy_too(kind, tmp_path):
    torch.manual_seed(0)
    module = TensorDictModule(MLP(in_features=2, out_features=3, num_cells=[8]), ["observation"], ["logits"])
    categorical = torch.distributions.Categorical
    actor = ProbabilisticActor(module, in_keys=["logits"], distribution_class=categorical, return_log_prob=True)
    loss = kind(actor, ValueOperator(MLP(in_features=2, out_features=1, num_cells=[8]), in_keys=["observation"]))
    env, starts = DoubleIntegratorEnv(4, seed=0, max_steps=20), torch.tensor([[0.0, 0.0], [0.9, 2.0]] * 2)
    settings = {"frames_per_batch": BATCH, "total_frames": 2 * BATCH, "auto_register_policy_transforms": False}

    class Stepper(DefaultOptimizationStepper):
        def step(self, trainer, sub_batch):
            return super().step(trainer, sub_batch).detach()

    trainer = Trainer(
        collector=Collector(env, actor, **settings),
        total_frames=2 * BATCH,
        frame_skip=1,
        optim_steps_per_batch=2,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), 1e-2),
        optimization_stepper=Stepper(),
        logger=CSVLogger("run", str(tmp_path)),
        progress_bar=False,
    )

    def targets(batch):
        with torch.no_grad():
            return loss.value_estimator(batch, params=loss.critic_network_params).reshape(-1)

    trainer.register_op("batch_process", targets)
    trainer.register_op("process_optim_batch", lambda batch: batch[torch.randperm(len(batch))[:16]])
    hook = EvaluationHook(
        lambda: evaluate(DoubleIntegratorEnv(4), actor, starts=starts, max_steps=5).scores, interval=BATCH
    )
    hook.register(trainer)
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    trainer.train()
    assert [row["frames"] for row in hook.rows] == [BATCH, 2 * BATCH]
    assert [row["safe_rate"] for row in hook.rows] == [0.5, 0.5]  # out of (.9, 2) nothing leads back
    assert any(not torch.equal(value, before[name]) for name, value in loss.state_dict().items())
    (file,) = tmp_path.rglob("safe_rate.csv")
    assert len(file.read_text().splitlines()) == 2


def test_an_evaluation_that_fails_stops_the_training():
    run = Run()
    EvaluationHook(
        lambda: evaluate(DoubleIntegratorEnv(4), lambda td: td, episodes=1, max_steps=1, safety_margin="g").scores,
        interval=BATCH,
    ).register(run.trainer, "other")
    with pytest.raises(KeyError, match="'g' is missing"):
        run.trainer.train()


def test_a_target_network_moves_at_its_period_also_with_one_update_per_batch():
    run, moved = Run(total_frames=6 * BATCH), []
    update = HardUpdate(run.loss, value_network_update_interval=2)
    run.trainer.register_op("post_optim", TargetNetUpdaterHook(update))

    def note():
        online, target = (run.loss.value_network_params, run.loss.target_value_network_params)
        weights = [key for key in online.keys(True, True) if key[-1].endswith(("mu", "sigma", "weight", "bias"))]
        assert len(weights) > 4
        moved.append(all(torch.equal(online[key], target[key]) for key in weights))

    run.trainer.register_op("post_steps", note)
    run.trainer.train()
    assert moved == [False, False, True] * 2  # to TorchRL, an interval of k is a period of k + 1
