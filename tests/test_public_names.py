"""The public names that users write down keep their arguments, their order and their defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module

import pytest
import torch

import torchrl_safety
from torchrl_safety import data, envs, modules, objectives, trainers
from torchrl_safety.objectives import backups

NEEDED = inspect.Parameter.empty

# Written as the call is: what stands before the star may be given by position.
SIGNATURES: tuple[tuple[Callable, Callable], ...] = (
    (objectives.ClampedAffine, lambda slope, offset, low, high: ...),
    (objectives.ClampedAffine.constant, lambda value: ...),
    (objectives.ClampedAffine.identity_like, lambda value: ...),
    (objectives.AvoidBackup, lambda: ...),
    (objectives.ReachBackup, lambda: ...),
    (objectives.ReachAvoidBackup, lambda terminal_type="all": ...),
    (objectives.LipschitzReachAvoidBackup, lambda: ...),
    (objectives.DiscountedReturnBackup, lambda: ...),
    (objectives.Backup.step_map, lambda self, signals, *, gamma, terminated: ...),
    (objectives.lambda_return, lambda step_map, next_value, *, lmbda, done=None, time_dim=-2: ...),
    (objectives.n_step_return, lambda step_map, next_value, *, valid=None, time_dim=-2: ...),
    (objectives.project_categorical, lambda atoms, probs, support: ...),
    (backups.avoid_target, lambda g, v_next, not_done, gamma: ...),
    (backups.reach_avoid_target, lambda g, l, v_next, not_done, gamma, terminal_type="all": ...),  # noqa: E741
    (backups.target, lambda mode, g, v_next, not_done, gamma, l=None, terminal_type="all": ...),  # noqa: E741
    (backups.check_terminal_type, lambda terminal_type: ...),
    (
        objectives.CategoricalDQNLoss,
        # No backup means DiscountedReturnBackup, see below.
        lambda value_network, *, backup=None, double=True, priority="kl", n_step="last", reduction="mean": ...,
    ),
    (objectives.CategoricalDQNLoss, lambda value_network, *, bootstrap_on_truncation=False: ...),
    *(
        (loss, lambda value_network, *, num_disturbances=None, backup=None, terminal_type=None: ...)
        for loss in (
            objectives.IsaacsDQNLoss,
            objectives.GameplayDQNLoss,
            objectives.IsaacsCategoricalDQNLoss,
            objectives.GameplayCategoricalDQNLoss,
        )
    ),
    *(
        (loss, lambda actor_network, disturbance_network, qvalue_network, *, pessimism="per_player": ...)
        for loss in (objectives.IsaacsSACLoss, objectives.GameplaySACLoss)
    ),
    *(
        (loss, lambda actor_network, disturbance_network, critic_network, *, disturbance_settings=None: ...)
        for loss in (objectives.IsaacsPPOLoss, objectives.GameplayPPOLoss)
    ),
    (data.PriorityTree, lambda capacity, *, device=None: ...),
    (data.PrioritizedSampler, lambda max_capacity, alpha=0.6, beta=0.4, eps=1e-6: ...),
    (data.PrioritizedSampler, lambda *, beta_annealing_steps=None, weight_normalization="batch", stratified=False: ...),
    (data.PrioritizedSampler, lambda *, max_priority="ever", generator=None: ...),
    (data.PrioritizedSampler, lambda *, variant="proportional", sort_interval=10_000: ...),
    (data.GoalCondition, lambda measurement_key, measurement_index, goal_key, goal_index: ...),
    (
        data.HindsightTransform,
        lambda reward_fn, *, terminated_fn=None, goal_conditions=None, strategy="final", num_goal_samples=4: ...,
    ),
    (data.HindsightTransform, lambda reward_fn, *, keep_failures=True, generator=None: ...),
    (data.HindsightRelabel, lambda reward_fn, *, terminated_fn=None, goal_conditions=None, share=0.8: ...),
    (data.HindsightReplayBuffer, lambda *, capacity=10_000, strategy="final", num_goal_samples=4: ...),
    (data.HindsightPrioritizedReplayBuffer, lambda *, alpha=0.6, beta=0.4, beta_annealing_steps=1_000_000: ...),
    (data.HindsightReplayBuffer.sample, lambda self, batch_size=None, *, sequence_length=1, n_steps=1, gamma=0.99: ...),
    (data.HindsightReplayBuffer.resize, lambda self, capacity: ...),
    (data.HindsightReplayBuffer.generate_hindsight, lambda self, trajectory_length: ...),
    (data.NStepTransform, lambda n_steps, *, signals=("reward",): ...),
    (modules.NoisyLinear, lambda in_features, out_features, *, sigma_init=0.5: ...),
    (modules.reset_noise, lambda module: ...),
    (modules.DuelingHead, lambda mode="mean": ...),
    (modules.RainbowNetwork, lambda in_features, num_actions, *, support, atoms=51, hidden=(128, 128): ...),
    (modules.RainbowNetwork, lambda *, dueling="mean", noisy=True, sigma_init=0.5, encoder=None: ...),
    (modules.RainbowNetwork, lambda *, head_hidden=(), noisy_hidden=True: ...),
    (modules.RainbowNetwork.quantile, lambda self, logits, level: ...),
    (modules.RainbowNetwork.cvar, lambda self, logits, level: ...),
    (modules.NatureCNN, lambda in_shape: ...),
    (modules.categorical_quantile, lambda probs, support, level: ...),
    (modules.categorical_cvar, lambda probs, support, level: ...),
    (modules.distribution_statistics, lambda logits, support, *, levels=(0.05, 0.5, 0.95): ...),
    (modules.greedy_policy, lambda network, *, action_key="action", spec=None, risk="mean", level=None: ...),
    (modules.greedy_game_policy, lambda network, *, num_disturbances=None, player=None: ...),
    (modules.export_policy, lambda policy, path, example_observation, *, format="torch": ...),
    (
        envs.DoubleIntegratorEnv,
        lambda num_envs=1, *, problem="avoid", discrete=True, dt=0.05, max_control=1.0, max_disturbance=0.0: ...,
    ),
    (envs.DoubleIntegratorEnv.exact_value, lambda self, state: ...),
    (envs.DoubleIntegratorEnv.exact_safe, lambda self, state: ...),
    (envs.SafetyGymEnv, lambda env, num_envs=1, *, safety_margin=None, target_margin=None, max_steps=None: ...),
    (envs.SafetyGymEnv, lambda *, end_criterion=None, seed=0, device="cpu": ...),
    (envs.LunarLanderEnv, lambda num_envs=1, *, problem="return": ...),
    (envs.CartPoleEnv, lambda num_envs=1, *, problem="return": ...),
    (envs.PursuitEvasionEnv, lambda num_envs=1, *, problem="avoid", discrete=True: ...),
    (envs.AttackDefenseEnv, lambda num_envs=1, *, problem="reach_avoid", discrete=True: ...),
    (envs.BicycleEnv, lambda num_envs=1, *, problem="avoid", discrete=True, max_disturbance=0.1: ...),
    (envs.SplitPlayers, lambda ctrl_action_dim: ...),
    (
        modules.TwoPlayerPolicy,
        lambda controller, disturbance, *, second_mover=False, action_key="action", disturbance_key="disturbance": ...,
    ),
    (trainers.League, lambda env, controller, disturbance, *, max_steps, controllers=5, disturbances=5: ...),
    (trainers.League, lambda *, problem="avoid", rationality=3.0, generator=None: ...),
    (trainers.League.step, lambda self, frames: ...),
    (trainers.best_response, lambda env, controller, budget, *, max_steps, problem="avoid", league=None: ...),
    (trainers.StepGamma, lambda total_frames: ...),
    (trainers.UpdatePeriods, lambda loss, *, controller=1, disturbance=1, alternating=False: ...),
    (trainers.set_metrics, lambda predicted, exact: ...),
)


@pytest.mark.parametrize(("named", "fixed"), SIGNATURES, ids=[named.__qualname__ for named, _ in SIGNATURES])
def test_arguments_keep_their_names_order_and_defaults(named, fixed):
    call = named.__init__ if isinstance(named, type) else named  # a metaclass may hide the signature of the class
    expected, actual = (dict(inspect.signature(function).parameters) for function in (fixed, call))
    if call is not named:
        del actual["self"]
    for name, parameter in expected.items():
        assert name in actual
        assert actual[name].default == parameter.default, name
    by_position = [name for name, parameter in expected.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert list(actual)[: len(by_position)] == by_position
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    added = [parameter for name, parameter in actual.items() if name not in expected and parameter.kind not in kinds]
    if by_position or not expected:
        assert [parameter.name for parameter in added if parameter.default is NEEDED] == []


def test_a_categorical_loss_without_a_backup_learns_the_discounted_return():
    network = modules.RainbowNetwork(2, 3, support=(-1.0, 1.0))
    assert isinstance(objectives.CategoricalDQNLoss(network).backup, objectives.DiscountedReturnBackup)


def test_the_modes_of_the_functional_targets_keep_their_spelling():
    assert (backups.AVOID, backups.REACH_AVOID) == ("avoid", "reach-avoid")


@pytest.mark.parametrize(
    ("backup", "signals"),
    [
        (objectives.AvoidBackup, ("safety_margin",)),
        (objectives.ReachBackup, ("target_margin",)),
        (objectives.ReachAvoidBackup, ("safety_margin", "target_margin")),
        (objectives.LipschitzReachAvoidBackup, ("safety_margin", "target_margin")),
        (objectives.DiscountedReturnBackup, ("reward",)),
    ],
)
def test_the_signals_of_a_backup_keep_their_names(backup, signals):
    assert issubclass(backup, objectives.Backup)
    assert tuple(backup().signals) == signals


def test_the_metrics_of_a_set_keep_their_names():
    exact = torch.tensor([True, False])
    metrics = trainers.set_metrics(exact, exact)
    assert (metrics.iou, metrics.false_safe, metrics.false_unsafe) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("part", torchrl_safety.__all__)
def test_every_exported_name_exists_and_says_what_it_is(part):
    module = import_module(f"torchrl_safety.{part}")
    for name in module.__all__:
        assert inspect.getdoc(getattr(module, name)), name
