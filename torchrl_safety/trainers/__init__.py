"""Schedules, evaluation, checkpoints and pictures."""

from torchrl_safety.trainers.checkpoints import Progress, catch_interrupt, find_checkpoint, make_checkpoint, rotation
from torchrl_safety.trainers.evaluation import (
    Evaluation,
    ExactSetEvaluator,
    SetEvaluation,
    SetMetrics,
    evaluate,
    evaluation_mode,
    set_metrics,
    state_value,
)
from torchrl_safety.trainers.options import check_options
from torchrl_safety.trainers.plots import plot_curves, plot_value_map
from torchrl_safety.trainers.schedules import StepGamma

__all__ = [
    "Evaluation",
    "ExactSetEvaluator",
    "Progress",
    "SetEvaluation",
    "SetMetrics",
    "StepGamma",
    "catch_interrupt",
    "check_options",
    "evaluate",
    "evaluation_mode",
    "find_checkpoint",
    "make_checkpoint",
    "plot_curves",
    "plot_value_map",
    "rotation",
    "set_metrics",
    "state_value",
]
