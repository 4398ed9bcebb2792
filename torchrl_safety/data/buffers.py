"""A hindsight replay buffer with the surface of MATLAB's `rlHindsightReplayMemory`."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.data import Composite, LazyTensorStorage, TensorSpec
from torchrl.data.replay_buffers.samplers import RandomSampler, Sampler

from torchrl_safety.data.frames import positive
from torchrl_safety.data.goals import RELABELLED, GoalCondition, TransitionFunction
from torchrl_safety.data.hindsight import HindsightTransform
from torchrl_safety.data.lean import LeanReplayBuffer
from torchrl_safety.data.successors import Successors, TrajectoryNumbers

_LINKS_FILE = "successors.pt"

VALID = "valid"
"""Entry of a sample that tells which steps of a sequence exist."""

STAMP = "priority_stamp"
"""Under which a prioritized sampler notes on an index when it was drawn."""

SIGNALS = ("reward", "safety_margin", "target_margin", "terminated")
"""What n-step rows keep of each step, where the frames hold it."""


class HindsightReplayBuffer(LeanReplayBuffer):
    r"""A replay buffer for goal-conditioned tasks that draws uniformly and adds hindsight copies as episodes end.

    A TorchRL replay buffer with a :class:`HindsightTransform` in it, and what MATLAB's `rlHindsightReplayMemory` does
    beyond that: sequences and n-step returns at sample time, resizing, validation, hindsight on demand. See the
    transform for goals, layouts (`num_envs`) and what is recomputed. Source: Andrychowicz et al. 2017.

    Args:
        observation_spec: entries of a state of one env, ``env.observation_spec_unbatched``.
        action_spec: the entry ``"action"`` of one env, ``env.action_spec_unbatched``, or a Composite with every entry
            that belongs to the action.
        reward_fn, terminated_fn, goal_conditions: see :class:`HindsightTransform`; as are `target_margin_fn`,
            `strategy` (``"final"``, ``"episode"``, ``"future"``, ``"random"``), `num_goal_samples`, `keep_failures`
            and `num_envs`.
        capacity: how many items are kept, copies among them.
        batch_size: rows of a sample, where :meth:`sample` is not told.
        generator: source of random numbers, for goals and samples; if None, one seeded from torch's global one.

    Raises:
        ValueError: for settings out of range, specs of several envs, and frames of a recurrent policy, which hindsight
            does not support: their hidden states were computed from the goal that is replaced.

    Example:
        >>> import torch
        >>> from torchrl_safety.data import HindsightReplayBuffer
        >>> from torchrl_safety.envs import BitFlipEnv
        >>> env = BitFlipEnv(2, bits=3)
        >>> def reached(transition):
        ...     state = transition["next"]
        ...     return (state["achieved_goal"] == state["desired_goal"]).all(-1, keepdim=True)
        >>> buffer = HindsightReplayBuffer(
        ...     env.observation_spec_unbatched,
        ...     env.action_spec_unbatched,
        ...     lambda transition: reached(transition).float() - 1,
        ...     reached,
        ...     num_envs=2,
        ... )
        >>> index = buffer.extend(env.rollout(3, break_when_any_done=False))
        >>> batch = buffer.sample(8, sequence_length=2)
        >>> batch.shape, batch["valid"].shape
        (torch.Size([8, 2]), torch.Size([8, 2, 1]))
    """

    def __init__(
        self,
        observation_spec: Composite,
        action_spec: TensorSpec,
        reward_fn: TransitionFunction | None,
        terminated_fn: TransitionFunction | None = None,
        goal_conditions: GoalCondition | Sequence[GoalCondition] | None = None,
        capacity: int = 10_000,
        *,
        target_margin_fn: TransitionFunction | None = None,
        strategy: str = "final",
        num_goal_samples: int = 4,
        keep_failures: bool = True,
        num_envs: int | None = None,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.observation_spec = observation_spec
        self.action_spec = action_spec if isinstance(action_spec, Composite) else Composite(action=action_spec)
        _refuse_batched("observation_spec", self.observation_spec)
        _refuse_batched("action_spec", self.action_spec)
        generator = _generator_from(None) if generator is None else generator
        capacity = positive("capacity", capacity, remedy="10000 is the default")
        hindsight = HindsightTransform(
            reward_fn,
            terminated_fn=terminated_fn,
            target_margin_fn=target_margin_fn,
            goal_conditions=goal_conditions,
            strategy=strategy,
            num_goal_samples=num_goal_samples,
            keep_failures=keep_failures,
            num_envs=num_envs,
            generator=_generator_from(generator),  # loading replaces the buffer's own
        )
        hindsight.numbers = TrajectoryNumbers()
        super().__init__(
            storage=LazyTensorStorage(capacity),
            sampler=self._make_sampler(capacity),
            transform=hindsight,
            batch_size=batch_size,
            generator=generator,
        )
        self.hindsight = hindsight
        self._successors = Successors(capacity)
        self._wanted = (1, 1, 1.0)

    def _make_sampler(self, capacity: int) -> Sampler:
        return RandomSampler()

    @property
    def _numbers(self) -> TrajectoryNumbers:
        numbers = self.hindsight.numbers
        assert numbers is not None, "set by the constructor"
        return numbers

    @property
    def capacity(self) -> int:
        """How many items the buffer keeps."""
        return self._storage.max_size

    def extend(self, tensordicts: TensorDictBase, *, update_priority: bool | None = None) -> Tensor:
        """Store frames, and the hindsight copies of the episodes that they end; returns the slots of all new items."""
        _refuse_recurrent(tensordicts)
        with self._replay_lock:  # else a sample in between would follow links that are not there yet
            self._numbers.take()  # what a write that failed has left
            index = super().extend(tensordicts, update_priority=update_priority)
            self._successors.write(index.flatten(), *self._numbers.take())
        return index

    def empty(self, empty_write_count: bool = True) -> None:
        """Drop every item, and the episodes that are still open."""
        with self._replay_lock:
            super().empty(empty_write_count)
            self._successors.clear()

    def sample(  # type: ignore[override]
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        *,
        sequence_length: int = 1,
        n_steps: int = 1,
        gamma: float = 0.99,
    ) -> Any:
        r"""A batch of items, of sequences of consecutive steps, or of n-step transitions.

        With `n_steps` n > 1, the row of step t spans :math:`k = \min(n, \text{steps left in its trajectory})`: its
        ``"next"`` is that of step :math:`t+k-1`, but for the reward :math:`\sum_{i<k} \gamma^i r_{t+i}`; what stands in
        ``("next", "discount")`` `[*B, 1]` is :math:`\gamma^k`; ``("steps", ...)`` holds the scalars of each step as
        :class:`NStepTransform` does, for losses that compose a backup over them.

        Args:
            batch_size: B; that of the constructor if None.
            return_info: whether to give what the sampler says too.
            sequence_length: L; with 1 the batch has shape `[B]`, else `[B, L]`.
            n_steps: longest window n.
            gamma: discount of the n-step reward, in [0, 1].

        Returns:
            The batch, with bool ``"valid"`` `[*B, 1]`: False for steps of a sequence beyond the end of its trajectory,
            which repeat its last step. A copy is followed by the copy of the next step with the same goal, if any.
        """
        positive("sequence_length", sequence_length, remedy="1 gives single items")
        positive("n_steps", n_steps, remedy="1 gives one-step transitions")
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma must lie in [0, 1], got {gamma}.")
        with self._replay_lock:
            self._wanted = (sequence_length, n_steps, gamma)
            return super().sample(batch_size, return_info)

    def _sample(self, batch_size: int) -> tuple[TensorDictBase, dict[str, Any]]:
        length, n_steps, gamma = self._wanted
        if length == n_steps == 1:
            return self._sample_steps(batch_size)
        with self._replay_lock, self._write_lock:
            index, info = self._sampler.sample(self._storage, batch_size)
            slot, exists = self._successors.follow(index, length + n_steps - 1)
            rows = self._storage.get(slot)
        ended = rows["next", "done"].squeeze(-1).long()
        exists = exists & (ended.cumsum(-1) - ended == 0)  # a relabelled step may end its trajectory
        last = exists.sum(-1, keepdim=True) - 1
        position = torch.arange(slot.shape[1], device=slot.device).minimum(last)
        draw = torch.arange(len(slot), device=slot.device).reshape(-1, 1, 1)
        batch = _windows(rows[draw, position.unfold(-1, n_steps, 1)], exists.unfold(-1, n_steps, 1), gamma)
        batch.set(VALID, exists[:, :length].unsqueeze(-1))
        for name, value in info.items():
            info[name] = value.unsqueeze(-1).expand(-1, length)
        # Steps that are not there have the index -1, which an update of priorities passes over.
        info["index"] = torch.where(exists[:, :length], slot.gather(1, position)[:, :length], -1)
        if length == 1:
            batch, info = batch[:, 0], {name: value[:, 0] for name, value in info.items()}
        if (stamp := getattr(index, STAMP, None)) is not None:
            info["index"].priority_stamp = stamp
        return self._transform(batch.unlock_()), info

    def _sample_steps(self, batch_size: int) -> tuple[TensorDictBase, dict[str, Any]]:
        """Single steps, none of which follows another."""
        with self._replay_lock, self._write_lock:
            index, info = self._sampler.sample(self._storage, batch_size)
            batch = self._gather(index, {}) if self._is_lean() else self._storage.get(index)
        batch.set(VALID, torch.ones(len(index), 1, dtype=torch.bool, device=index.device))
        info["index"] = index
        return self._transform(batch.unlock_()), info

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Give the items of a sample the priorities that stand in it; in sequences, each step its own."""
        if data.ndim < 2:
            super().update_tensordict_priority(data)
            return
        index = data.get("index")
        rows = data.reshape(-1).set("index", index.reshape(-1))
        vars(rows["index"]).update(vars(index))
        super().update_tensordict_priority(rows)

    def all_experiences(self) -> TensorDictBase:
        """Every item, the oldest first, copied."""
        return self._storage.get(self._by_age()).exclude("index").clone() if len(self) else TensorDict({}, [0])

    def _by_age(self) -> Tensor:
        """Slots from the oldest item to the newest."""
        number, start = len(self), self._writer._cursor if len(self) == self.capacity else 0
        return torch.arange(start, start + number) % max(number, 1)

    def validate(self, experiences: TensorDictBase) -> None:
        """Check frames before they are written.

        Args:
            experiences: frames `[*B]` with the entries of the specs, their next state, reward and end flags.

        Raises:
            ValueError: with one sentence for each mismatch.
        """
        faults = self._faults(experiences)
        if faults:
            raise ValueError("\n".join(faults))

    def generate_hindsight(self, trajectory_length: int) -> TensorDictBase:
        """The copies that hindsight makes of the newest frames, `[M]`; nothing is stored.

        Args:
            trajectory_length: how many frames of each env; where an episode ends among them, they are several episodes.

        Raises:
            ValueError: if the buffer does not hold as many.
        """
        positive("trajectory_length", trajectory_length, remedy="give the number of steps of the newest episode")
        slots = self._by_age()
        originals = slots[~self._storage.get(slots)[RELABELLED].flatten()] if len(self) else slots
        wanted = trajectory_length * (self.hindsight.num_envs or 1)
        if len(originals) < wanted:
            raise ValueError(
                f"trajectory_length={trajectory_length} needs {wanted} frames, the buffer holds {len(originals)} "
                f"beside {len(slots) - len(originals)} copies; give a smaller one, or the buffer a larger capacity."
            )
        chosen = originals[-wanted:]
        frames = self._storage.get(chosen).exclude(RELABELLED)
        if self._successors.breaks(chosen, frames["next", "done"].flatten(), self.hindsight.num_envs or 1):
            raise ValueError(
                f"the newest {trajectory_length} frames are of more than one stream, between which no episode ended "
                "(the transform was cleared): give a smaller trajectory_length."
            )
        if self.hindsight.num_envs is not None:
            frames = frames.reshape(trajectory_length, -1).transpose(0, 1)
        return self.hindsight.copies_of(frames)

    def _faults(self, experiences: TensorDictBase) -> list[str]:
        batch = experiences.batch_size
        places: list[tuple[Composite, tuple[str, ...]]] = [
            (self.observation_spec, ()),
            (self.action_spec, ()),
            (self.observation_spec, ("next",)),
        ]
        faults = []
        for composite, place in places:
            for key, spec in composite.items(True, True):
                path = unravel_key((*place, *((key,) if isinstance(key, str) else key)))
                faults += _mismatch(experiences, path, batch, spec)
        for name in ("reward", "terminated", "done"):
            value = experiences.get(("next", name), None)
            if value is None:
                faults.append(f"Entry ('next', {name!r}) is missing; write what the env gave.")
            elif value.shape != (*batch, 1):
                faults.append(f"Entry ('next', {name!r}) has shape {list(value.shape)}, expected {[*batch, 1]}.")
        return faults

    def resize(self, capacity: int) -> None:
        """Change the capacity; the newest items stay, in their order and with their priorities."""
        positive("capacity", capacity, remedy="give the number of items to keep")
        with self._replay_lock, self._write_lock:
            kept = self._by_age()[-capacity:]
            items = self._storage.get(kept).clone() if len(kept) else None
            sampler = self._resized_sampler(kept, capacity)
            self._successors = self._successors.moved(kept, capacity)
            self.set_storage(LazyTensorStorage(capacity))
            self._writer.register_storage(self._storage)
            written = self._writer._write_count
            self._writer._empty()
            if items is not None:
                self._writer.extend(items)
            self._writer._write_count = written  # the items that stay were counted when they came
            self._storage.attach(self)  # from here on the sampler hears of writes
            self.set_sampler(sampler)
            self.set_rng(self._rng)

    def _resized_sampler(self, kept: Tensor, capacity: int) -> Sampler:
        return self._sampler

    def save(self, path: str | Path) -> None:
        """Write everything into one file; a process killed meanwhile leaves the earlier file as it was."""
        path = Path(path).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        with part.open("wb") as file:
            torch.save(self.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)

    def load(self, path: str | Path) -> None:
        """Continue from :meth:`save`, in a buffer built with the same settings.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if the file was saved with other settings; nothing has changed.
        """
        self.load_state_dict(torch.load(Path(path).expanduser(), weights_only=True))

    def state_dict(self) -> dict[str, Any]:
        """Items, open episodes, priorities, links between steps and random state: copies, tensors and plain values."""
        with self._replay_lock:
            parts = {**super().state_dict(), "successors": self._successors.state_dict()}
            return {**copy.deepcopy(parts), "settings": self._settings()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; raises ValueError, with nothing changed, if it has other settings."""
        state = dict(state_dict)
        self._check_settings(state.pop("settings"))
        successors = state.pop("successors")
        with self._replay_lock:
            super().load_state_dict(state)
            self._successors.load_state_dict(successors)

    def dumps(self, path: str | Path) -> None:
        """Save into a folder, as TorchRL's buffers do."""
        with self._replay_lock:
            super().dumps(path)
            links = {"settings": self._settings(), "successors": self._successors.state_dict()}
            torch.save(links, Path(path) / _LINKS_FILE)

    def loads(self, path: str | Path) -> None:
        """Continue from :meth:`dumps`."""
        links = torch.load(Path(path) / _LINKS_FILE, weights_only=True)
        self._check_settings(links["settings"])
        with self._replay_lock:
            super().loads(path)
            self._successors.load_state_dict(links["successors"])

    def _settings(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, "capacity": self.capacity, **self.hindsight._settings()}

    def _check_settings(self, saved: dict[str, Any]) -> None:
        for name, value in self._settings().items():
            if saved.get(name) != value:
                raise ValueError(
                    f"the state is of a buffer with {name}={saved.get(name)!r}, this one has {name}={value!r}; build "
                    "it as the saved one was" + (f", and resize({value}) it afterwards" * (name == "capacity")) + "."
                )


def _generator_from(source: torch.Generator | None) -> torch.Generator:
    """A generator seeded from another one, or from torch's global one."""
    return torch.Generator().manual_seed(int(torch.randint(2**63 - 1, (), generator=source)))


def _refuse_recurrent(frames: TensorDictBase) -> None:
    for key in frames.keys(True, True):
        name = key if isinstance(key, str) else key[-1]
        if name.startswith("recurrent_state"):
            raise ValueError(
                f"The frames hold {key!r}, the hidden state of a recurrent policy, which was computed from the goal "
                "that hindsight replaces: use a policy without memory, or a buffer without hindsight."
            )


def _refuse_batched(name: str, spec: Composite) -> None:
    if spec.shape:
        raise ValueError(
            f"{name} describes a batch {list(spec.shape)} of envs; give that of one env, env.{name}_unbatched."
        )


def _mismatch(frames: TensorDictBase, path: Any, batch: torch.Size, spec: TensorSpec) -> list[str]:
    value = frames.get(path, None)
    if not isinstance(value, Tensor):
        return [f"Entry {path!r} is missing; write what the spec {type(spec).__name__} describes."]
    shape = torch.Size([*batch, *spec.shape])
    if value.shape != shape:
        return [
            f"Entry {path!r} has shape {list(value.shape)}, expected {list(shape)}: the batch and the spec's shape."
        ]
    if value.dtype != spec.dtype:
        return [f"Entry {path!r} has type {value.dtype}, expected {spec.dtype}; convert it."]
    inside = spec.expand(shape).is_in(value)
    return [] if inside else [f"Entry {path!r} has values outside {spec}; clip them, or widen the spec."]


def _windows(rows: TensorDictBase, exists: Tensor, gamma: float) -> TensorDictBase:
    """n-step rows `[*B]` of windows `[*B, n]`, of whose steps the first ones exist."""
    first = rows[..., 0].copy()
    n_steps = exists.shape[-1]
    if n_steps == 1:
        return first
    length = exists.sum(-1, keepdim=True)
    last = (length - 1).clamp(min=0)
    flat = rows["next"].flatten(0, exists.ndim - 2)
    at_last = flat[torch.arange(len(flat), device=last.device), last.flatten()]
    following = at_last.reshape(exists.shape[:-1])
    existing = exists.unsqueeze(-1)
    signals = {name: value for name, value in rows["next"].items() if name in SIGNALS}
    steps = {name: value.masked_fill(~existing, 0) for name, value in signals.items()}
    powers = torch.arange(n_steps, device=length.device).to(following["reward"].dtype).reshape(-1, 1)
    following.set("reward", (steps["reward"] * gamma**powers).sum(-2))
    following.set("discount", gamma ** length.to(following["reward"].dtype))
    first.set("next", following)
    first.set("steps", TensorDict({**steps, "valid": existing}, exists.shape))
    return first
