"""Schedules, evaluation, checkpoints and pictures."""

from torchrl_safety.trainers.checkpoints import Progress, catch_interrupt, find_checkpoint, make_checkpoint, rotation
from torchrl_safety.trainers.evaluation import (
    EpisodeEvaluator,
    Evaluation,
    binomial_interval,
    evaluate,
    evaluation_mode,
)
from torchrl_safety.trainers.exact_sets import ExactSetEvaluator, SetEvaluation, SetMetrics, set_metrics, state_value
from torchrl_safety.trainers.hooks import EvaluationHook, ScheduleHook, log_scores
from torchrl_safety.trainers.league import League, LeagueOpponent
from torchrl_safety.trainers.matches import CrossPlay, cross_play
from torchrl_safety.trainers.options import check_options
from torchrl_safety.trainers.plots import (
    plot_cross_play,
    plot_curves,
    plot_value_distribution,
    plot_value_map,
    save_gif,
)
from torchrl_safety.trainers.responses import BestResponse, best_response
from torchrl_safety.trainers.runs import TrainingRun
from torchrl_safety.trainers.schedules import (
    GeometricGamma,
    StdCap,
    StepDecay,
    StepGamma,
    TemperatureReset,
    parameter_groups,
)
from torchrl_safety.trainers.turns import UpdatePeriods

__all__ = [
    "BestResponse",
    "CrossPlay",
    "EpisodeEvaluator",
    "Evaluation",
    "EvaluationHook",
    "ExactSetEvaluator",
    "GeometricGamma",
    "League",
    "LeagueOpponent",
    "Progress",
    "ScheduleHook",
    "SetEvaluation",
    "SetMetrics",
    "StdCap",
    "StepDecay",
    "StepGamma",
    "TemperatureReset",
    "TrainingRun",
    "UpdatePeriods",
    "best_response",
    "binomial_interval",
    "catch_interrupt",
    "check_options",
    "cross_play",
    "evaluate",
    "evaluation_mode",
    "find_checkpoint",
    "log_scores",
    "make_checkpoint",
    "parameter_groups",
    "plot_cross_play",
    "plot_curves",
    "plot_value_distribution",
    "plot_value_map",
    "rotation",
    "save_gif",
    "set_metrics",
    "state_value",
]
