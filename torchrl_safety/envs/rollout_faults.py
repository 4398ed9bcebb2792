"""What a roll-out of an environment shows to be wrong with its margins, states, flags and ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from tensordict import unravel_key
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_safety.envs.base import END_CRITERIA, NativeEnv
from torchrl_safety.envs.probe import WHERE, Rollout, base_env, leaf_specs, reward_keys

# A truncated step is an ordinary one, so its observation moves no further than in ordinary steps. Three truncations
# that mostly do, thrice as far as the farthest of twenty others, are no chance.
JUMP, TRUNCATIONS, ORDINARY = 3.0, 3, 20


def rollout_faults(env: EnvBase, margins: Mapping[str, NestedKey], data: Rollout, end_criterion: str) -> Iterator[str]:
    """The faults of what was rolled out, one sentence each."""
    yield from _margin_faults(env, margins, data)
    base = base_env(env)
    if isinstance(base, NativeEnv):
        yield from _state_faults(base, margins, data)
    if data.steps:
        yield from _flag_faults(env, data)
        yield from _end_faults(env, margins, data, end_criterion)
        yield from _final_observation_faults(env, margins, data)


def _margin_faults(env: EnvBase, margins: Mapping[str, NestedKey], data: Rollout) -> Iterator[str]:
    for key in margins.values():
        places = dict(zip(WHERE, (data.at_reset(key), data.after(key))))
        if key in reward_keys(env):
            del places[WHERE[0]]  # TorchRL has no reward at reset
        values = {place: value for place, value in places.items() if value is not None}
        for place, value in values.items():
            broken = int((~value.isfinite()).sum())
            if broken:
                yield f"{key!r} is NaN or infinite in {broken} of {value.numel()} entries {place}: make it finite"
        # A key that an info reader does not find is written as 0, which would count as inside the target. A margin that
        # is an indicator, 0 or -1, may well start at 0, but is then often 0 later too.
        zeros = {place: float((value == 0).float().mean()) for place, value in values.items()}
        if zeros.get(WHERE[0]) == 1 and not 0.5 <= zeros.get(WHERE[1], 1.0) < 1:
            where = " and ".join(place for place, share in zeros.items() if share == 1)
            yield f"{key!r} is exactly 0 {where}, as what info lacks is: emit it there under this name"


def _state_faults(env: NativeEnv, margins: Mapping[str, NestedKey], data: Rollout) -> Iterator[str]:
    for name, key in margins.items():
        gaps = {}
        for place, read in zip(WHERE, (data.at_reset, data.after)):
            state, value = read(env.state_key), read(key)
            if state is None or value is None or not state.is_floating_point() or not value.is_floating_point():
                continue
            expected = getattr(env, name)(state)
            if value.numel() != expected.numel() or key in reward_keys(env):
                continue
            # A transform may have cast, so that only the precision of the coarser type can be asked for.
            slack = 100 * max(torch.finfo(tensor.dtype).eps for tensor in (state, value))
            gap = (value.reshape(expected.shape).double() - expected.double()).abs()
            gap = gap[gap.isfinite() & (gap > slack * (1 + expected.double().abs()))]
            if gap.numel():
                gaps[place] = float(gap.max())
        if gaps:
            yield (
                f"{key!r} is not env.{name}({env.state_key!r}) {' and '.join(gaps)}, up to {max(gaps.values()):.2g} "
                "apart: no transform may rewrite either; give it other out_keys, or carry the state under a state_key "
                "of its own"
            )


def _flags(env: EnvBase, data: Rollout) -> Iterator[dict[str, tuple[NestedKey, Tensor]]]:
    """For each group of done keys: its `done`, `terminated`, `truncated` `[T, *B, 1]` with their keys below next."""
    groups: dict[tuple[str, ...], dict[str, tuple[NestedKey, Tensor]]] = {}
    for key in env.done_keys:
        *parents, name = key if isinstance(key, tuple) else (key,)
        value = data.after(key)
        if value is not None:
            groups.setdefault(tuple(parents), {})[name] = (unravel_key(("next", key)), value)
    yield from groups.values()


def _flag_faults(env: EnvBase, data: Rollout) -> Iterator[str]:
    for group in _flags(env, data):
        if not {"done", "terminated"} <= group.keys():
            continue
        (done_key, done), (terminated_key, terminated) = group["done"], group["terminated"]
        truncated_key, truncated = group.get("truncated", (None, torch.zeros_like(terminated)))
        wrong = int((done != (terminated | truncated)).sum())
        if wrong:
            yield (
                f"{done_key!r} is not terminated | truncated in {wrong} of {done.numel()} steps: set truncated where a "
                "clock ended the episode, terminated where the task did, and done at both"
            )
        ends = int(terminated.sum())
        if ends > 1 and bool((terminated == truncated).all()):
            yield (
                f"{truncated_key!r} equals {terminated_key!r} in all {ends} steps that end an episode: set truncated "
                "for a clock only"
            )


def _end_faults(env: EnvBase, margins: Mapping[str, NestedKey], data: Rollout, end_criterion: str) -> Iterator[str]:
    safety = data.after(margins["safety_margin"])
    target = data.after(margins["target_margin"]) if "target_margin" in margins else None
    for group in _flags(env, data):
        if "terminated" not in group or safety is None or safety.numel() != group["terminated"][1].numel():
            continue
        key, terminated = group["terminated"]
        if end_criterion == "timeout":
            if terminated.any():
                yield (
                    f"{key!r} is True in {int(terminated.sum())} of {terminated.numel()} steps, where "
                    "end_criterion='timeout' never terminates: name the criterion of the environment"
                )
            continue
        goal = None if target is None or target.numel() != terminated.numel() else target.reshape(terminated.shape)
        if end_criterion == "reach_avoid" and goal is None:
            continue
        must = END_CRITERIA[end_criterion](safety.reshape(terminated.shape) < 0, goal)
        missed = int((must & ~terminated).sum())
        if missed:
            cause = f"{margins['safety_margin']!r} < 0"
            if end_criterion == "reach_avoid":
                cause += f" or {margins['target_margin']!r} >= 0"
            yield (
                f"{key!r} is False in {missed} of the {int(must.sum())} steps with {cause}: terminate there, or pass "
                "end_criterion='timeout' where episodes are meant to go on"
            )


def _final_observation_faults(env: EnvBase, margins: Mapping[str, NestedKey], data: Rollout) -> Iterator[str]:
    root = next((group for group in _flags(env, data) if "done" in group), None)
    if root is None:
        return
    ended = root["done"][1].flatten()
    truncated = root["truncated"][1].flatten() if "truncated" in root else torch.zeros_like(ended)
    truncated = truncated & ~root["terminated"][1].flatten() if "terminated" in root else truncated
    keys = [key for key, spec in leaf_specs(env).items() if spec.dtype.is_floating_point]
    keys = [key for key in keys if key not in {*margins.values(), *reward_keys(env)}]
    rows = (_rows(map(read, keys), len(ended)) for read in (data.before, data.after, data.follow))
    before, after, follow = rows
    if before is None or after is None or follow is None or not ended.any():
        return
    remedy = "hand back the last observation of the episode that ended, not the first of the next one"
    lost = int((~after[ended].isfinite().all(-1)).sum())
    if lost:
        yield f"the next observation is NaN or infinite at {lost} of {int(ended.sum())} ends of episodes: {remedy}"
    same = (after == follow).all(-1)[ended]
    stayed = (before == follow).all(-1)[ended]
    leaps = _leaps(before, after, truncated, ~ended)
    if same.all() and not stayed.all():
        yield f"the next observation is that of the following reset at all {len(same)} ends of episodes: {remedy}"
    elif leaps > JUMP:
        yield (
            f"the next observation leaps at truncations, {leaps:.1f} times as far as in any step within an episode, as "
            f"that of a reset does: {remedy}"
        )


def _rows(values: Iterable[Tensor | None], count: int) -> Tensor | None:
    """The values side by side, `[count, F]`."""
    columns = []
    for value in values:
        if value is None or value.numel() == 0 or value.numel() % count:
            return None
        columns.append(value.reshape(count, -1).double())
    return torch.cat(columns, -1) if columns else None


def _leaps(before: Tensor, after: Tensor, truncated: Tensor, ordinary: Tensor) -> float:
    """The median over truncations of their largest move, in units of the farthest ordinary move of a coordinate."""
    finite = before.isfinite().all(-1) & after.isfinite().all(-1)
    moves, truncated, ordinary = (after - before).abs(), truncated & finite, ordinary & finite
    if int(truncated.sum()) < TRUNCATIONS or int(ordinary.sum()) < ORDINARY:
        return 0.0
    farthest = moves[ordinary].amax(0)
    moving = farthest > 0
    return float((moves[truncated][:, moving] / farthest[moving]).amax(-1).median()) if moving.any() else 0.0
