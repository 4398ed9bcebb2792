"""Whether an environment gives the safety losses what they take for granted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tensordict import unravel_key
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import MultiOneHot, OneHot, TensorSpec
from torchrl.envs import (
    BinarizeReward,
    ClipTransform,
    EnvBase,
    FrameSkipTransform,
    GymLikeEnv,
    LineariseRewards,
    ObservationNorm,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SignTransform,
    TimeMaxPool,
    Transform,
    VecNorm,
    VecNormV2,
)
from torchrl.envs.utils import check_env_specs

from torchrl_safety.envs.base import END_CRITERIA, NativeEnv
from torchrl_safety.envs.gym import SafetyGymEnv
from torchrl_safety.envs.probe import (
    RAISED,
    WHERE,
    Rollout,
    base_env,
    gym_layers,
    leaf_specs,
    one_line,
    reward_keys,
    roll_out,
    transforms_of,
    undisturbed,
)
from torchrl_safety.envs.rollout_faults import rollout_faults

__all__ = ["check_safety_env", "safety_env_faults"]

NORMALISERS = (
    ObservationNorm,
    VecNorm,
    VecNormV2,
    RewardScaling,
    RewardClipping,
    RewardSum,
    BinarizeReward,
    SignTransform,
    LineariseRewards,
    ClipTransform,
    TimeMaxPool,
)
GYM_NORMALISERS = ("NormalizeReward", "ClipReward")


def check_safety_env(
    env: EnvBase,
    *,
    steps: int = 200,
    safety_margin: NestedKey = "safety_margin",
    target_margin: NestedKey | None = None,
    end_criterion: str | None = None,
    seed: int = 0,
) -> None:
    r"""Raise one error that lists every fault of an environment, a sentence each, or return if there is none.

    Random actions are rolled out, and what comes back must be what the backups of this package (Fisac et al. 2019;
    Hsu et al. 2021) take for granted: :math:`g(s')` and :math:`l(s')` `[*B, 1]`, finite, also after a reset, of the
    state that was reached, by no normaliser touched; :math:`g(s') < 0 \Rightarrow` terminated; done = terminated or
    truncated; the true final observation at an end; index actions; TorchRL's own `check_env_specs`.

    What the roll-outs do not meet is not checked: let `steps` cover some truncations. Flags that coincide where a
    clock runs out at a failure are no fault, termination wins. The random states of torch, NumPy, a
    :class:`NativeEnv` and a Gymnasium environment are put back afterwards. A running episode is lost and statistics of
    a VecNorm move on, so check before you train. Those inside a SerialEnv or ParallelEnv stay seeded, and their
    transforms are not seen: check one of them alone as well.

    Args:
        env: any TorchRL environment with a fixed batch size `[*B]`.
        steps: length of the roll-out, in steps of all environments of the batch.
        safety_margin: key of g in the observations, or of the reward.
        target_margin: key of l; None takes `"target_margin"` where the specs have it.
        end_criterion: `"failure"` (terminated where g < 0), `"reach_avoid"` (also where l >= 0) or `"timeout"` (never);
            None takes that of a :class:`NativeEnv` or :class:`SafetyGymEnv`, else `"failure"`.
        seed: of the environment and the actions.

    Raises:
        ValueError: the faults, or a setting out of range.

    Example:
        >>> from torchrl.envs import ObservationNorm, TransformedEnv
        >>> from torchrl_safety.envs import DoubleIntegratorEnv, check_safety_env
        >>> env = DoubleIntegratorEnv(8, max_steps=20)
        >>> check_safety_env(env)
        >>> wrong = TransformedEnv(env, ObservationNorm(0.0, 0.5, in_keys=["safety_margin"]))
        >>> check_safety_env(wrong)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: TransformedEnv has 2 faults:
        - ObservationNorm changes 'safety_margin': take the key out of its in_keys, ...
        - 'safety_margin' is not env.safety_margin('observation') at reset and after a step, ...
    """
    settings = {"steps": steps, "safety_margin": safety_margin, "target_margin": target_margin}
    faults = safety_env_faults(env, **settings, end_criterion=end_criterion, seed=seed)
    if faults:
        count = "a fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise ValueError("\n- ".join([f"{type(env).__name__} has {count}:", *faults]))


def safety_env_faults(
    env: EnvBase,
    *,
    steps: int = 200,
    safety_margin: NestedKey = "safety_margin",
    target_margin: NestedKey | None = None,
    end_criterion: str | None = None,
    seed: int = 0,
) -> list[str]:
    """The faults that :func:`check_safety_env` would raise, empty if there is none; its arguments and their meaning.

    Raises:
        ValueError: a setting out of range.

    Example:
        >>> from torchrl_safety.envs import DoubleIntegratorEnv
        >>> from torchrl_safety.envs.checks import safety_env_faults
        >>> safety_env_faults(DoubleIntegratorEnv(8), target_margin="l_x")
        ["target_margin='l_x' is in no observation or reward spec, which hold ['observation', 'reward', \
'safety_margin']: let the environment write it, or name its key with target_margin=..."]
    """
    base = base_env(env)
    margins = {"safety_margin": unravel_key(safety_margin)}
    if target_margin is None and "target_margin" in env.observation_spec.keys(True, True):
        target_margin = "target_margin"
    if target_margin is not None:
        margins["target_margin"] = unravel_key(target_margin)
    if end_criterion is None:
        named = base.end_criterion if isinstance(base, NativeEnv | SafetyGymEnv) else "failure"
        end_criterion = named if named in END_CRITERIA else "failure"
    _check_settings(steps, end_criterion, margins)

    wiring = [*_margin_spec_faults(env, margins)]
    faults = [*_action_faults(env), *_normaliser_faults(env, margins)]
    with undisturbed(env, seed):
        data, stopped = roll_out(env, steps, seed)
        wiring += [*stopped, *_leaf_faults(env, margins, data)]
        if not wiring:
            wiring += _torchrl_faults(env)
    return [*wiring, *faults, *rollout_faults(env, margins, data, end_criterion)]


def _check_settings(steps: int, end_criterion: str, margins: Mapping[str, NestedKey]) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r} must be a whole number of at least 1, the length of the roll-out")
    if end_criterion not in END_CRITERIA:
        raise ValueError(f"end_criterion={end_criterion!r} is unknown: choose one of {', '.join(END_CRITERIA)}")
    if end_criterion == "reach_avoid" and "target_margin" not in margins:
        raise ValueError("end_criterion='reach_avoid' needs a target: name its key with target_margin=...")


def _margin_spec_faults(env: EnvBase, margins: Mapping[str, NestedKey]) -> Iterator[str]:
    leaves, column = leaf_specs(env), [*env.batch_size, 1]
    for name, key in margins.items():
        spec = leaves.get(key)
        if spec is None:
            yield (
                f"{name}={key!r} is in no observation or reward spec, which hold {sorted(map(str, leaves))}: "
                f"let the environment write it, or name its key with {name}=..."
            )
            continue
        if list(spec.shape) != column:
            yield (
                f"the spec of {key!r} has shape {list(spec.shape)}, not {column}: give the margin a trailing dimension "
                "of 1, for an info entry with Unbounded((1,)) and np.array([value], np.float32)"
            )
        if not spec.dtype.is_floating_point:
            yield f"the spec of {key!r} has dtype {spec.dtype}: a margin is a distance, make it floating-point"


def _leaf_faults(env: EnvBase, margins: Mapping[str, NestedKey], data: Rollout) -> Iterator[str]:
    rewards, column = reward_keys(env), (*env.batch_size, 1)
    for key, spec in leaf_specs(env).items():
        shapes = {tuple(spec.shape), column} if key in margins.values() else {tuple(spec.shape)}
        places = {WHERE[1]: [step.get("next") for step in data.steps]}
        if key not in rewards:
            places = {WHERE[0]: data.resets, **places}
        found: dict[str, list[str]] = {}
        for place, tensordicts in places.items():
            for tensordict in tensordicts:
                problem = _leaf_problem(tensordict.get(key, None), spec, shapes)
                if problem:
                    found.setdefault(problem, []).append(place)
                    break
        for problem, where in found.items():
            yield f"{key!r} {problem} {' and '.join(where)}: {_leaf_remedy(problem, key in margins.values())}"


def _leaf_problem(value: Any, spec: TensorSpec, shapes: set[tuple[int, ...]]) -> str:
    if value is None:
        return "is missing"
    if not isinstance(value, Tensor):
        return ""
    problems = []
    if -1 not in spec.shape and tuple(value.shape) not in shapes:
        problems.append(f"has shape {list(value.shape)}, its spec {list(spec.shape)},")
    if value.dtype != spec.dtype:
        problems.append(f"has dtype {value.dtype}, its spec {spec.dtype},")
    return " and ".join(problems)


def _leaf_remedy(problem: str, is_margin: bool) -> str:
    if problem == "is missing":
        return "write it there too"
    return "emit np.array([value], np.float32) in info, or what else the spec says" if is_margin else "make them agree"


def _torchrl_faults(env: EnvBase) -> Iterator[str]:
    try:
        check_env_specs(env)
    except RAISED as error:
        yield f"check_env_specs of TorchRL raises {type(error).__name__}, {one_line(error)}: correct specs or data"


def _action_faults(env: EnvBase) -> Iterator[str]:
    for key, spec in env.full_action_spec.items(True, True):
        if isinstance(spec, OneHot | MultiOneHot):
            yield (
                f"the spec of {key!r} is {type(spec).__name__}, in which tied actions add up to several at once: use "
                "indices, as GymEnv(..., categorical_action_encoding=True) does"
            )


def _normaliser_faults(env: EnvBase, margins: Mapping[str, NestedKey]) -> Iterator[str]:
    base = base_env(env)
    skips = base.wrapper_frame_skip if isinstance(base, GymLikeEnv) else 1
    for origin in margins.values():
        key = origin
        for transform in reversed([*transforms_of(env)]):
            sources = dict(zip(_keys(transform, "out_keys"), _keys(transform, "in_keys")))
            if key in sources and isinstance(transform, NORMALISERS):
                yield (
                    f"{type(transform).__name__} changes {origin!r}: take the key out of its in_keys, a margin must "
                    "keep its zero and scale"
                )
            key = sources.get(key, key)  # through a RenameTransform, say
            if isinstance(transform, FrameSkipTransform):
                skips = max(skips, transform.frame_skip)
        if key not in reward_keys(base):
            continue
        if skips > 1:
            yield (
                f"frame_skip={skips} adds up {origin!r}, which is the reward, over frames: use 1, or hand the margin "
                "on in info"
            )
        for name in (type(layer).__name__ for layer in gym_layers(env)):
            if name in GYM_NORMALISERS:
                yield f"{name} changes {origin!r}, which is the reward: take the wrapper off, or normalise elsewhere"


def _keys(transform: Transform, name: str) -> list[NestedKey]:
    return [unravel_key(key) for key in getattr(transform, name, None) or ()]
