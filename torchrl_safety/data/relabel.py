"""Hindsight at sample time: a share of each batch is relabelled, originals stay in the buffer as they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer, RoundRobinWriter, TensorStorage

from torchrl_safety.data.frames import Key, end_flags, following_of, positive, public, time_major
from torchrl_safety.data.goals import RELABELLED, GoalCondition, GoalRelabel, TransitionFunction, over_features
from torchrl_safety.data.nstep import TERMINATED, VALID, _check_signals
from torchrl_safety.data.pending import calling_method
from torchrl_safety.data.prioritized import _new_generator
from torchrl_safety.data.sampled import SampledTransform
from torchrl_safety.data.streams import DRAWS, Span, Streams

_FRAME = "hindsight"
_FLAGS = tuple(("next", name) for name in ("terminated", "truncated", "done"))
_FOREIGN = (
    "The buffer holds frames that were not written in turn through this HindsightRelabel; put it into an empty buffer, "
    "let nothing else write to its storage, and load a saved buffer with the state of its transforms."
)


class HindsightRelabel(SampledTransform):
    r"""Relabels a share of each sampled batch with goals that the same episode went on to achieve.

    .. math:: (S_t, A_t, S_{t+1}) \to (S_t', A_t, S_{t+1}'), \qquad g' = m_k, \quad
        k \sim U\{t+1..T+1\},\ k = T+1\ \text{or}\ k \sim U\{1..T+1\}

    for "future", "final" and "episode" (Andrychowicz et al. 2017, "Hindsight Experience Replay", section 4.5). Each
    row is relabelled with probability `share`, rows of an episode that is still open are not. A sample costs O(batch).
    It must be the first transform of the buffer, so that the others see the new goal. ``"relabelled"`` in a sample,
    bool `[B, 1]`, tells which rows were; ``rb.update_tensordict_priority`` passes those over. ``rb[:]`` shows frames as
    they were written. With `n_steps` above 1, a sampled row spans that many steps in the layout of
    :class:`NStepTransform`, all with one goal, cut at the first termination. Call :meth:`end_episodes` when envs are
    reset in the middle of an episode.

    Args:
        reward_fn, terminated_fn, target_margin_fn, goal_conditions, keep_failures: as in :class:`GoalRelabel`.
        share (float): probability that a row is relabelled, in [0, 1].
        strategy (str): which states give the goal: "future", "final" or "episode".
        num_envs (int or None): None for one stream, written as `[]` or `[T]`. N for N envs, written as `[N]` or
            `[N, T]`; a storage with ndim=1 then holds the N frames of a step side by side. With ndim=2 it may be None.
        n_steps (int): longest window, in env steps.
        signals (sequence of keys): entries of ``"next"`` to keep step by step, `[*B, *]`, where `n_steps` is above 1.
        generator (torch.Generator or None): source of random numbers; None makes one from torch's global one.

    Raises:
        ValueError: for a setting out of range, frames of another layout, or transforms in another order.
        RuntimeError: for a buffer that others write to as well, or that does not write its slots in turn.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> relabel = HindsightRelabel(lambda transition: -(transition["next", "desired_goal"] - 3).abs(), share=1.0)
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(9), transform=relabel, batch_size=4)
        >>> state, goal = torch.arange(4.0).unsqueeze(-1), torch.full((3, 1), 9.0)
        >>> flags = {"reward": torch.zeros(3, 1), "done": torch.tensor([[False], [False], [True]])}
        >>> following = {"achieved_goal": state[1:], "desired_goal": goal, "terminated": flags["done"], **flags}
        >>> _ = rb.extend(TensorDict({"achieved_goal": state[:-1], "desired_goal": goal, "next": following}, [3]))
        >>> batch = rb.sample()
        >>> bool((batch["desired_goal"] > batch["achieved_goal"]).all() & (batch["desired_goal"] <= 3).all())
        True
    """

    def __init__(
        self,
        reward_fn: TransitionFunction | None,
        *,
        terminated_fn: TransitionFunction | None = None,
        target_margin_fn: TransitionFunction | None = None,
        goal_conditions: GoalCondition | Sequence[GoalCondition] | None = None,
        share: float = 0.8,
        strategy: Literal["future", "final", "episode"] = "future",
        keep_failures: bool = True,
        num_envs: int | None = None,
        n_steps: int = 1,
        signals: Sequence[NestedKey] = ("reward",),
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.relabel = GoalRelabel(
            reward_fn,
            terminated_fn=terminated_fn,
            target_margin_fn=target_margin_fn,
            goal_conditions=goal_conditions,
            keep_failures=keep_failures,
        )
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(f"share must lie in [0, 1], got {share!r}; 0.8 relabels four rows of five.")
        if strategy not in DRAWS:
            raise ValueError(f"strategy must be one of {tuple(DRAWS)}, got {strategy!r}.")
        if not isinstance(generator, torch.Generator | None):
            raise ValueError(f"generator must be a torch.Generator or None, got {generator!r}; seed one, or leave it.")
        self.share = float(share)
        self.strategy = strategy
        self.num_envs = None if num_envs is None else positive("num_envs", num_envs, remedy="None means one stream")
        self.n_steps = positive("n_steps", n_steps, remedy="1 keeps ordinary one-step transitions")
        self.signals = _check_signals(signals)
        self.generator = _new_generator(None, torch.device("cpu")) if generator is None else generator
        self._streams: Streams | None = None
        # What the buffer's count of writes was when the streams began.
        self._uncounted = 0
        self._is_writing = self._has_failed = False

    def __repr__(self) -> str:
        settings = f"strategy={self.strategy!r}, share={self.share}, num_envs={self.num_envs}, n_steps={self.n_steps}"
        return f"{type(self).__name__}({settings})"

    def clear(self) -> None:
        """Forgets the streams, as when the buffer is emptied."""
        self._streams, self._has_failed = None, False

    def end_write(self, is_stored: bool) -> None:
        """Takes note of a write that failed after its frames were numbered: TorchRL counts its slots as written."""
        self._has_failed |= self._is_writing and not is_stored
        self._is_writing = False

    def end_episodes(self) -> None:
        """Ends the open episodes at their newest frames, as when envs are reset in the middle of an episode."""
        if self._streams is not None:
            self._streams.end_episodes()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Relabels what its buffer sampled; what is read from the buffer by index passes unchanged."""
        buffer, method = calling_method("_sample", "__getitem__")
        if buffer is None and calling_method()[0] is None:
            raise RuntimeError(
                "HindsightRelabel was called outside a replay buffer, where there are no episodes to take goals from; "
                "give it to a buffer: rb.insert_transform(0, HindsightRelabel(...))."
            )
        if buffer is None or method != "_sample":
            return tensordict
        if next(iter(buffer.transform.transforms)) is not self:
            self.check_place(buffer)
        rows = _dense(tensordict)
        if rows.ndim == 1:
            return self._rows(buffer, rows)
        return self._rows(buffer, rows.reshape(-1)).reshape(rows.batch_size)

    def _rows(self, buffer: ReplayBuffer, rows: TensorDictBase) -> TensorDictBase:
        """What a sample `[B]` becomes; its tensors are its own and are written to."""
        streams, frame = self._streams, rows.pop(_FRAME, None)
        if streams is None or frame is None:
            raise RuntimeError(_FOREIGN)
        position, entry = frame.to(streams.bounds.device).unbind(-1)
        generator = self.generator
        uniform = torch.rand(2, len(position), dtype=torch.float64, generator=generator, device=generator.device)
        chance, uniform = uniform.to(position.device, non_blocking=True).unbind(0)
        # Transforms run after the sampling lock is released; what is read here must not be overwritten meanwhile.
        with buffer._replay_lock:
            self._check_slots(buffer, streams)
            newest = self._num_stored(buffer) - 1
            oldest = newest - streams.capacity + 1
            span = Span(position, *streams.bounds_of(entry), oldest, streams.num_envs)
            has_goals = (span.end >= position).logical_and_(position >= oldest)
            if streams.num_frames > newest + 1:  # another thread has numbered frames that it did not write yet
                has_goals &= span.end <= newest
            is_chosen = (chance < self.share).logical_and_(has_goals)
            at, is_start = DRAWS[self.strategy](uniform, span)
            goals = self._goals(buffer, torch.where(is_chosen, at, position), is_start, is_chosen)
            if self.n_steps > 1:
                last = torch.where(has_goals, span.end, newest - (newest - position) % streams.num_envs)
                last = torch.where(position >= oldest, last, position)
                rows, is_valid = self._windows(buffer, rows, position, last)
        is_relabelled = is_chosen.unsqueeze(-1)
        if self.n_steps == 1:
            self.relabel.relabel_(rows, goals, is_relabelled)
        else:
            goals = [goal.unsqueeze(1).expand(-1, self.n_steps, *goal.shape[1:]) for goal in goals]
            self.relabel.relabel_(rows, goals, is_relabelled.unsqueeze(-1))
            rows = self._joined(rows, is_valid)
        return rows.set(RELABELLED, is_relabelled)

    def _goals(self, buffer: ReplayBuffer, at: Tensor, is_start: Tensor | None, is_chosen: Tensor) -> list[Tensor]:
        """What the states after the frames at these positions `[B]` measure, or before them where `is_start`."""
        storage = buffer.storage
        if isinstance(storage, TensorStorage):
            frames, slots = storage._storage, self._slot(buffer, at)
        else:
            frames, slots = self._read(buffer, at), torch.arange(len(at), device=at.device)
        _check_read(_At(frames, slots), at, is_chosen)
        conditions = self.relabel.goal_conditions
        following = _At(frames.get("next"), slots)
        goals = [condition.measurement(following) for condition in conditions]
        if is_start is not None:
            before = _At(frames, slots)
            starts = [condition.measurement(before) for condition in conditions]
            is_start = is_start.unsqueeze(-1)
            goals = [torch.where(over_features(is_start, goal), start, goal) for start, goal in zip(starts, goals)]
        return goals

    def _windows(
        self, buffer: ReplayBuffer, rows: TensorDictBase, position: Tensor, last: Tensor
    ) -> tuple[TensorDictBase, Tensor]:
        """Frames `[B, n]` from each row on, and which of them exist; a row's own frame stands in for the rest."""
        ahead = torch.arange(self.n_steps, device=position.device) * self._known.num_envs
        position, last = position.unsqueeze(1), last.unsqueeze(1)
        is_valid = (position + ahead <= last) | (ahead == 0)
        at = torch.where(is_valid, position + ahead, position)[:, 1:]
        following = self._read(buffer, at.flatten()).reshape(at.shape)
        _check_read(following, at, is_valid[:, 1:])
        return torch.cat([rows.unsqueeze(1), following.exclude(_FRAME)], 1), is_valid

    def _slot(self, buffer: ReplayBuffer, position: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        slot = position % self._known.capacity
        if buffer.storage.ndim == 1:
            return slot
        return slot // self._known.num_envs, slot % self._known.num_envs

    def _read(self, buffer: ReplayBuffer, position: Tensor) -> TensorDictBase:
        """Frames of the buffer at these positions `[M]`."""
        frames = buffer.storage.get(self._slot(buffer, position))
        return torch.stack(frames) if isinstance(frames, list) else _dense(frames)

    def _joined(self, frames: TensorDictBase, is_valid: Tensor) -> TensorDictBase:
        """Windows of frames `[B, n]` as n-step rows `[B]`, cut at the first termination."""
        following = frames.get("next")
        ends = _signal(following, TERMINATED).squeeze(-1) & is_valid
        is_valid = is_valid & (ends.long().cumsum(1) == ends.long())
        last = is_valid.sum(1) - 1
        rows = frames.exclude("next")[:, 0].clone()
        rows.set("next", following[torch.arange(len(last), device=last.device), last])
        for signal in (*self.signals, TERMINATED):
            value = _signal(following, signal)
            is_missing = ~is_valid.reshape(is_valid.shape + (1,) * (value.ndim - 2))
            rows.set(("steps", *signal), value.masked_fill(is_missing, 0))
        return rows.set(("steps", *VALID), is_valid.unsqueeze(-1))

    @torch.no_grad()
    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        buffer, method = calling_method()
        if buffer is None or method not in ("add", "extend"):
            raise RuntimeError(
                "HindsightRelabel numbers the frames that a replay buffer stores in turn; write them with rb.extend or "
                "rb.add, neither outside a buffer nor to chosen slots."
            )
        num_envs, name = self.num_envs, type(self).__name__
        if buffer.storage.ndim == 2 and num_envs is None and tensordict.ndim:
            num_envs = tensordict.batch_size[0]
        flags = tensordict.select(*_FLAGS, strict=False)
        _, ended = end_flags(following_of(time_major(flags, num_envs, name)), name)
        if self._streams is None:
            self.relabel.check(tensordict, at_start=self.strategy == "episode")
            for signal in self.signals if self.n_steps > 1 else ():
                _signal(tensordict.get("next"), signal)
        streams, self._is_writing = self._streams_of(buffer, ended), True
        frame = streams.extend(ended).to(ended.device)
        if tensordict.ndim == 2 and buffer.storage.ndim == 1:
            tensordict = tensordict.transpose(0, 1).reshape(-1)
        elif tensordict.ndim == 2:
            frame = frame.transpose(0, 1)
        return tensordict.copy().set(_FRAME, frame.reshape(*tensordict.batch_size, 2))

    def _streams_of(self, buffer: ReplayBuffer, ended: Tensor) -> Streams:
        """The streams that frames `[T, N]` go on with, once the buffer is what they take it for."""
        if self._streams is None:
            self._streams, self._uncounted = _new_streams(buffer, ended), buffer.write_count
        if ended.shape[1] != self._streams.num_envs:
            raise ValueError(
                f"The frames are of {ended.shape[1]} envs, those before them of {self._streams.num_envs}; keep the "
                "number of envs, or empty the buffer (rb.empty()) first."
            )
        self._check_slots(buffer, self._streams)
        if self._num_stored(buffer) != self._streams.num_frames:
            raise RuntimeError(
                f"HindsightRelabel numbered {self._streams.num_frames} frames, the buffer wrote "
                f"{self._num_stored(buffer)}; let nothing else write to it, and call rb.empty()."
            )
        return self._streams

    def _check_slots(self, buffer: ReplayBuffer, streams: Streams) -> None:
        """Raises unless the slots of the buffer are those that were numbered, each filled."""
        _check_capacity(buffer, streams)
        if self._has_failed:
            raise RuntimeError(
                "A write of the buffer failed after HindsightRelabel had numbered its frames, so slots hold parts of "
                "frames; call rb.empty() and start anew, or load a saved state."
            )

    @property
    def _known(self) -> Streams:
        if self._streams is None:
            raise RuntimeError(_FOREIGN)
        return self._streams

    def _num_stored(self, buffer: ReplayBuffer) -> int:
        """Frames that the buffer wrote since it was empty, over all envs."""
        width = self._known.num_envs if buffer.storage.ndim == 2 else 1
        return (buffer.write_count - self._uncounted) * width

    def get_extra_state(self) -> dict[str, Any]:
        """The streams and the source of random numbers, as plain values."""
        return {
            "streams": None if self._streams is None else self._streams.state_dict(),
            "uncounted": self._uncounted,
            "has_failed": self._has_failed,
            "generator": self.generator.get_state(),
            "generator_device": self.generator.device.type,
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Continues from :meth:`get_extra_state`."""
        device = self.generator.device.type
        if state["generator_device"] != device:
            raise ValueError(
                f"The checkpoint was written with a generator on {state['generator_device']}, this one is on {device}; "
                "build HindsightRelabel with one like the former."
            )
        streams = state["streams"]
        if streams is not None and self.num_envs not in (None, streams["num_envs"]):
            raise ValueError(
                f"The checkpoint was written with num_envs={streams['num_envs']}, this HindsightRelabel has "
                f"num_envs={self.num_envs}; build it with the former."
            )
        streams = None if streams is None else Streams.from_state_dict(streams)
        buffer = calling_method()[0]
        if streams is not None and buffer is not None:
            _check_capacity(buffer, streams)
        self._streams = streams
        self._uncounted, self._has_failed = state["uncounted"], state["has_failed"]
        self.generator.set_state(state["generator"].cpu())


class _At:
    """Entries of a TensorDict at some places, each gathered when it is asked for: a state for goal conditions."""

    ndim = 1

    def __init__(self, entries: TensorDictBase, index: Any) -> None:
        self._entries = entries
        self._index = index
        self.keys = entries.keys

    def get(self, key: NestedKey, default: Any = None) -> Any:
        """The entry `[B, *]`, or the default where there is none."""
        value = self._entries.get(key, None)
        if value is None:
            return default
        index = self._index
        return value.index_select(0, index) if isinstance(index, Tensor) else value[index]


def _dense(frames: TensorDictBase) -> TensorDictBase:
    """The frames in memory of their own, also where they are a stack of those that a storage holds."""
    return frames.contiguous() if isinstance(frames, LazyStackedTensorDict) else frames


def _check_read(frames: TensorDictBase | _At, position: Tensor, where: Tensor) -> None:
    """Raises RuntimeError if slots that were read hold other frames than those expected."""
    frame = frames.get(_FRAME, None)
    if frame is None:
        raise RuntimeError(_FOREIGN)
    found = frame.select(-1, 0)
    if found.device.type == "cuda":
        torch._assert_async(((found == position) | ~where).all())  # looking would mean waiting
    elif not torch.equal(found, position) and not bool(((found == position) | ~where).all()):
        raise RuntimeError(_FOREIGN)


def _signal(following: TensorDictBase, signal: Key) -> Tensor:
    value = following.get(signal, None)
    if value is None:
        present = sorted(map(str, following.keys(True, True)))
        raise KeyError(
            f"Signal {public(signal)!r} is missing: 'next' holds {present}. Let the env write "
            f"{('next', *signal)!r}, or name the signals to keep: HindsightRelabel(..., signals=(...))."
        )
    return value


def _new_streams(buffer: ReplayBuffer, ended: Tensor) -> Streams:
    """Streams for the empty buffer that frames `[T, N]` are about to enter."""
    storage, num_envs = buffer.storage, ended.shape[1]
    if len(storage):
        raise RuntimeError(_FOREIGN)
    if not isinstance(buffer.writer, RoundRobinWriter):
        raise ValueError(
            f"The writer is a {type(buffer.writer).__name__}; HindsightRelabel finds goals where slots are written in "
            "turn: use RoundRobinWriter or TensorDictRoundRobinWriter."
        )
    if storage.ndim > 2 or storage.max_size >= 2**48:
        raise ValueError(
            f"The storage has {storage.ndim} batch dimensions and max_size={storage.max_size}; HindsightRelabel takes "
            "one or two, and a size that is set."
        )
    device = getattr(storage, "device", None)
    device = ended.device if device in (None, "auto") else torch.device(device)
    return Streams(num_envs, _capacity(buffer, num_envs), device)


def _capacity(buffer: ReplayBuffer, num_envs: int) -> int:
    """Number of slots of a buffer, over all dimensions of its storage."""
    capacity = buffer.storage.max_size
    # TorchRL rounds up to whole steps.
    return capacity if buffer.storage.ndim == 1 else -(-capacity // num_envs) * num_envs


def _check_capacity(buffer: ReplayBuffer, streams: Streams) -> None:
    capacity = _capacity(buffer, streams.num_envs)
    if capacity != streams.capacity:
        raise ValueError(
            f"HindsightRelabel follows a buffer of {streams.capacity} slots, this one has {capacity}; load the state "
            "into a buffer of the size that the saved one had."
        )
