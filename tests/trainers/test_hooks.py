"""Laws of the hooks: what a TorchRL Trainer steps, applies, measures and saves while it runs."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchrl.collectors import Collector
from torchrl.envs import TransformedEnv
from torchrl.record import CSVLogger, TensorboardLogger
from torchrl.trainers import DefaultOptimizationStepper, Trainer

from torchrl_safety.envs import DoubleIntegratorEnv
from torchrl_safety.modules import RainbowNetwork, greedy_policy
from torchrl_safety.objectives import AvoidBackup, CategoricalDQNLoss
from torchrl_safety.trainers import (
    EvaluationHook,
    ScheduleHook,
    StepDecay,
    StepGamma,
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
