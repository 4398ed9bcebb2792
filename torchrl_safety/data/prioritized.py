"""Proportional prioritized sampling for TorchRL's replay buffers."""

from __future__ import annotations

from copy import copy
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torchrl.data.replay_buffers.samplers import PrioritizedSampler as TorchRLPrioritizedSampler
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_safety.data.priority_tree import PriorityTree

_STAMP = "priority_stamp"
_STATE_FILE = "sampler.pt"


class PrioritizedSampler(Sampler):
    r"""Draws items in proportion to a power of their priority, in place of TorchRL's sampler of the same name.

    .. math:: P(j) = \frac{(p_j + \epsilon)^\alpha}{\sum_i (p_i + \epsilon)^\alpha}, \quad
        w_j = (N P(j))^{-\beta_k}, \quad \beta_k = \min(1, \beta + k (1 - \beta) / N_S)

    Schaul et al. 2015, "Prioritized Experience Replay", equations 1 and 2. N is the number of items in the buffer and
    k the number of `sample()` calls so far. A new item gets the largest priority seen, 1 before the first update.
    NaN, infinite and negative priorities are refused and change nothing (on CUDA, where looking would mean waiting,
    a device-side assertion stops the program). `"priority_stamp"` in a batch tells when it was drawn: updates from
    it that aim at a slot written since are dropped. `update_tensordict_priority` knows the stamp as long as the batch
    holds the very `"index"` tensor drawn from a one-dimensional storage. After `clone()`, a move to another device or
    slicing, call `sampler.update_priority(index, priority, generation=batch["priority_stamp"])`. Without a stamp an
    update always applies.

    Args:
        max_capacity: number of items the storage can hold, over all its dimensions.
        alpha: exponent of the priorities, >= 0; 0 draws uniformly.
        beta: exponent of the importance weights at the first draw, in [0, 1].
        eps: added to every priority, >= 0.
        beta_annealing_steps: N_S, `sample()` calls until beta is 1; beta stays where it is when `None`.
        weight_normalization: divide the weights by the largest of the `"batch"` or the `"buffer"`, or not (`None`).
        stratified: make one draw in each of B equal parts of the total.
        max_priority: what a new item gets: the largest priority `"ever"` seen, or that of the items in the `"buffer"`
            whose priority was updated, so that an evicted outlier is forgotten.
        generator: source of random numbers; if `None`, one seeded from torch's global generator.
        device: where the tree lives; that of the storage when `None`.

    Raises:
        ValueError: if a setting lies outside its range.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> sampler = PrioritizedSampler(100, alpha=0.6, beta=0.4)
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
        >>> index = rb.extend(TensorDict({"observation": torch.randn(10, 3)}, [10]))
        >>> batch = rb.sample()
        >>> batch["td_error"] = torch.rand(4)
        >>> rb.update_tensordict_priority(batch)
        >>> batch["priority_weight"].shape
        torch.Size([4])
    """

    #: How `TensorDictReplayBuffer` reduces a priority with more than one entry an item.
    reduction = "max"

    def __init__(
        self,
        max_capacity: int,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-6,
        *,
        beta_annealing_steps: int | None = None,
        weight_normalization: Literal["batch", "buffer"] | None = "batch",
        stratified: bool = False,
        max_priority: Literal["ever", "buffer"] = "ever",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        _check_range("alpha", alpha, 0.0, torch.inf)
        _check_range("beta", beta, 0.0, 1.0)
        _check_range("eps", eps, 0.0, torch.inf)
        if beta_annealing_steps is not None and not beta_annealing_steps >= 1:
            raise ValueError(f"beta_annealing_steps must be at least 1 or None, got {beta_annealing_steps}.")
        _check_choice("weight_normalization", weight_normalization, ("batch", "buffer", None))
        _check_choice("max_priority", max_priority, ("ever", "buffer"))
        if not isinstance(generator, torch.Generator | None):
            raise ValueError(
                f"generator must be a torch.Generator or None, got {generator!r}: seed one with manual_seed."
            )
        self._alpha, self._beta, self._eps = float(alpha), float(beta), float(eps)
        self._beta_annealing_steps = beta_annealing_steps
        self._weight_normalization = weight_normalization
        self._stratified = stratified
        self._num_samples = 0
        self._follows_storage = device is None
        self._tree = PriorityTree(max_capacity, device="cpu" if device is None else device)
        # Priorities that came with an update, 0 for the rest; only its largest leaf is asked for.
        self._updated = PriorityTree(max_capacity, device=self.device) if max_priority == "buffer" else None
        self._highest = torch.full((), -1.0, dtype=torch.float64, device=self.device)
        # What the buffer held when it was last seen; before that, it may hold anything.
        self._num_items = max_capacity
        # Time counts the writes. The last entry is for rows that are passed over.
        self._time = 0
        self._written_at = torch.zeros(max_capacity + 1, dtype=torch.long, device=self.device)
        # A buffer overwrites `_rng` with its own generator or None, so the sampler's own has another name.
        self._owns_generator = generator is None
        self._generator = _new_generator(None, self.device) if generator is None else generator

    def __repr__(self) -> str:
        return f"{type(self).__name__}(alpha={self._alpha}, beta={self.beta}, eps={self._eps}, device={self.device})"

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise RuntimeError(
                f"{type(self).__name__} cannot be shared between processes, its copies would differ: sample and update "
                "in the process that owns the buffer."
            )
        state = super().__getstate__()
        del state["_generator"]
        state["generator_state"] = (str(self._generator.device), self._generator.get_state())
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = copy(state)
        device, generator_state = state.pop("generator_state")
        self.__dict__.update(state)
        self._generator = torch.Generator(device)
        self._generator.set_state(generator_state)

    @property
    def max_size(self) -> int:
        """Number of items the sampler has slots for."""
        return self._tree.capacity

    @property
    def device(self) -> torch.device:
        """Where the tree lives."""
        return self._tree.device

    @property
    def alpha(self) -> float:
        """Exponent of the priorities."""
        return self._alpha

    @property
    def beta(self) -> float:
        """Exponent of the importance weights at the next draw; can be set where it is not annealed."""
        if self._beta_annealing_steps is None:
            return self._beta
        return min(1.0, self._beta + self._num_samples * (1.0 - self._beta) / self._beta_annealing_steps)

    @beta.setter
    def beta(self, value: float) -> None:
        if self._beta_annealing_steps is not None:
            raise ValueError(
                f"beta cannot be set to {value} while it is annealed over {self._beta_annealing_steps} draws: build "
                "the sampler with beta_annealing_steps=None to set it yourself."
            )
        _check_range("beta", value, 0.0, 1.0)
        self._beta = float(value)

    @property
    def default_priority(self) -> float:
        """Priority p_max of a new item."""
        return self._new_priority().item()

    @torch.no_grad()
    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor | tuple[Tensor, ...], dict[str, Tensor]]:
        """Draw `batch_size` items with replacement.

        Returns:
            The index `[B]`, or one `[B]` for each dimension of the storage, and `"priority_weight"` `[B]` in torch's
            default dtype with `"priority_stamp"` `[B]` int64.

        Raises:
            RuntimeError: if the buffer is empty, or all its priorities are 0 with eps = 0.
            ValueError: if `batch_size` is less than 1.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}: ask for one item or more.")
        self._follow(storage)
        self._num_items = num_items = len(storage)
        if num_items == 0:
            raise RuntimeError("the replay buffer is empty, so nothing can be sampled: add items before sampling.")
        index, leaf = self._tree.find(self._uniform(batch_size))
        weight = self._weights(leaf, num_items)
        self._num_samples += 1
        info = {"priority_weight": weight, _STAMP: torch.full_like(index, self._time)}
        if storage.ndim > 1:
            return torch.unravel_index(index, storage.shape), info
        index.priority_stamp = self._time  # type: ignore[attr-defined]
        return index, info

    @torch.no_grad()
    def update_priority(
        self,
        index: int | Tensor,
        priority: float | Tensor,
        *,
        storage: Storage | None = None,
        generation: int | Tensor | None = None,
    ) -> None:
        """Give items a new priority; of rows with the same index the last one wins.

        Args:
            index: items, integers `[]` or `[B]`, or `[B, ndim]` for a storage of `ndim > 1`; negative ones are passed
                over.
            priority: unweighted errors, finite and not negative: `[B]`, `[B, 1]` or one for all, any dtype.
            storage: the storage of the items; needed where it has several dimensions.
            generation: `"priority_stamp"` of the batch, int or `[B]`; read off `index` where that carries it.

        Raises:
            ValueError: if a priority is NaN, infinite or negative, the indices are no integers, or the shapes do not
                match. Nothing has changed.
            IndexError: if an index lies beyond the items of the buffer (on a CPU). Nothing has changed.
        """
        self._follow(storage)
        if generation is None:
            generation = getattr(index, _STAMP, None)
        slot, applies = self._slots(index, storage, is_drawn=generation is not None)
        priority = self._priorities(priority, slot)
        if not slot.numel():
            return
        if generation is not None and not (isinstance(generation, int) and generation >= self._time):
            stamp = _tensor(generation, torch.long, self.device).reshape(-1)
            is_fresh = self._written_at.index_select(0, slot) <= stamp
            applies = is_fresh if applies is None else applies & is_fresh
        leaf = (priority + self._eps).pow_(self._alpha)
        counts = applies
        if slot.numel() == 1:
            # `TensorDictReplayBuffer.add` hands a new item's default priority back as if it were an error.
            known = self._tree.get(slot.clamp_max(self.max_size - 1))
            is_news = (leaf - known).abs() > 1e-6 * known
            counts = is_news if applies is None else applies & is_news
        self._tree.set(slot, leaf, where=applies)
        if self._updated is None:
            seen = priority if counts is None else torch.where(counts, priority, -1.0)
            self._highest = torch.maximum(self._highest, seen.amax())
        else:
            self._updated.set(slot, priority, where=counts)

    @torch.no_grad()
    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Take note that items were written: each gets `default_priority`, and updates drawn before are stale."""
        self._follow(storage)
        self._num_items = self.max_size if storage is None else len(storage)
        slot, applies = self._slots(index, storage)
        self._time += 1
        self._written_at.scatter_(0, slot, self._time)
        if self._updated is not None:
            self._updated.set(slot, 0.0, where=applies)
        self._tree.set(slot, (self._new_priority() + self._eps).pow_(self._alpha), where=applies)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values with which another sampler continues the very same draws."""
        generator = self._rng if self._rng is not None else self._generator
        return {
            "alpha": self._alpha,
            "eps": self._eps,
            "beta": self._beta,
            "num_samples": self._num_samples,
            "time": self._time,
            "written_at": self._written_at.clone(),
            "highest": self._highest.clone(),
            "tree": self._tree.state_dict(),
            "updated": None if self._updated is None else self._updated.state_dict(),
            "generator": generator.get_state(),
            "generator_device": generator.device.type,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state; the number of annealing steps and the other settings remain those of this sampler.

        Raises:
            ValueError: if the state has another capacity, alpha, eps, `max_priority` or kind of generator.
        """
        generator = self._rng if self._rng is not None else self._generator
        mine = {"alpha": self._alpha, "eps": self._eps, "generator_device": generator.device.type}
        for name, value in mine.items():
            if state_dict[name] != value:
                raise ValueError(
                    f"the state was saved with {name}={state_dict[name]}, this sampler has {name}={value}: build it as "
                    "the saved one was."
                )
        if (state_dict["updated"] is None) != (self._updated is None):
            raise ValueError("the state was saved with another max_priority: build the sampler as the saved one was.")
        self._tree.load_state_dict(state_dict["tree"])
        if self._updated is not None:
            self._updated.load_state_dict(state_dict["updated"])
        self._beta = state_dict["beta"]
        self._num_samples = state_dict["num_samples"]
        self._num_items = self.max_size
        self._time = state_dict["time"]
        self._written_at.copy_(state_dict["written_at"])
        self._highest.copy_(state_dict["highest"])
        generator.set_state(state_dict["generator"].cpu())

    def dumps(self, path: str | Path) -> None:
        """Save the state into the folder `path`."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), path / _STATE_FILE)

    def loads(self, path: str | Path) -> None:
        """Load the state that `dumps` saved into the folder `path`."""
        self.load_state_dict(torch.load(Path(path) / _STATE_FILE, weights_only=True, map_location="cpu"))

    def _empty(self) -> None:
        self._tree.clear()
        if self._updated is not None:
            self._updated.clear()
        self._highest.fill_(-1.0)
        # What was drawn before is stale in every slot.
        self._num_items = 0
        self._time += 1
        self._written_at.fill_(self._time)

    def _new_priority(self) -> Tensor:
        if self._updated is None:
            return torch.where(self._highest < 0, 1.0, self._highest)
        highest = self._updated.max
        return torch.where(highest > 0, highest, 1.0)

    def _uniform(self, batch_size: int) -> Tensor:
        generator = self._rng if self._rng is not None else self._generator
        u = torch.rand(batch_size, dtype=torch.float64, device=generator.device, generator=generator)
        if self._stratified:
            u = u.add_(torch.arange(batch_size, device=u.device)).div_(batch_size)
        return u

    def _weights(self, leaf: Tensor, num_items: int) -> Tensor:
        # The largest weight belongs to the smallest leaf, so N and the total cancel in the normalised forms.
        if self._weight_normalization == "batch":
            ratio = leaf / leaf.amin()
        elif self._weight_normalization == "buffer":
            ratio = leaf / self._tree.min
        else:
            ratio = leaf * (num_items / self._tree.total)
        return ratio.pow_(-self.beta).to(torch.get_default_dtype())

    def _slots(
        self, index: int | Tensor, storage: Storage | None, is_drawn: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Flat slots `[B]`, and which of them are items (`None`: all are). The rest are moved behind the last slot.

        A slot that was drawn and is empty now belongs to a buffer that was emptied since: no mistake.
        """
        if isinstance(index, Tensor) and (index.is_floating_point() or index.dtype == torch.bool):
            raise ValueError(f"index has dtype {index.dtype}: pass integers, such as mask.nonzero() of a bool mask.")
        slot = _tensor(index, torch.long, self.device)
        if storage is not None and storage.ndim > 1 and slot.ndim > 1:
            stride = torch.ones(storage.ndim, dtype=torch.long, device=self.device)
            for dim, size in reversed(list(enumerate(storage.shape))[1:]):
                stride[:dim] *= size
            slot = (slot * stride).sum(-1)
        slot = slot.reshape(-1)
        if not slot.numel():
            return slot, None
        num_items = min(self._num_items if storage is None else len(storage), self.max_size)
        if slot.device.type == "cpu":
            lowest, highest = slot.aminmax()
            if highest.item() >= num_items and not is_drawn:
                raise IndexError(
                    f"index {highest.item()} names an empty slot, the buffer holds {num_items} items and the sampler "
                    f"has max_capacity={self.max_size}: pass indices of items that were written."
                )
            if lowest.item() >= 0 and highest.item() < num_items:
                return slot, None
        is_item = (slot >= 0) & (slot < num_items)
        return torch.where(is_item, slot, self.max_size), is_item

    def _priorities(self, priority: float | Tensor, slot: Tensor) -> Tensor:
        priority = _tensor(priority, torch.float64, self.device)
        if priority.numel() not in (1, slot.numel()):
            raise ValueError(
                f"priority has shape {list(priority.shape)} for {slot.numel()} indices: pass one priority for each "
                "index, or one for all; for indices of several dimensions also pass the storage."
            )
        priority = priority.detach().reshape(-1).expand(slot.shape)
        if priority.device.type == "cuda":
            torch._assert_async(((priority >= 0) & (priority < torch.inf)).all())
        elif priority.numel():
            lowest, highest = (bound.item() for bound in priority.aminmax())
            if not (lowest >= 0 and highest < torch.inf):
                bad = lowest if not lowest >= 0 else highest
                raise ValueError(
                    f"priority is {bad}: pass finite errors that are not negative, such as the unweighted |TD error|; "
                    "nothing was changed."
                )
        return priority

    def _follow(self, storage: Storage | None) -> None:
        device = getattr(storage, "device", None)
        if not self._follows_storage or device is None or device == "auto":
            return
        device = torch.device(device)
        if device.type != self.device.type or device.index not in (None, self.device.index):
            self._move_to(device)

    def _move_to(self, device: torch.device) -> None:
        self._tree = _tree_on(self._tree, device)
        self._updated = None if self._updated is None else _tree_on(self._updated, device)
        self._highest = self._highest.to(device)
        self._written_at = self._written_at.to(device)
        if self._owns_generator:
            self._generator = _new_generator(self._generator, device)


def _tensor(value: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(value, int | float):
        # A number sent to an accelerator by `as_tensor` would be waited for.
        return torch.full((), value, dtype=dtype, device=device)
    return torch.as_tensor(value, dtype=dtype, device=device)


def _tree_on(tree: PriorityTree, device: torch.device) -> PriorityTree:
    moved = PriorityTree(tree.capacity, device=device)
    moved.load_state_dict(tree.state_dict())
    return moved


def _new_generator(source: torch.Generator | None, device: torch.device) -> torch.Generator:
    """A generator on `device` seeded from `source`, or from torch's global generator."""
    origin = "cpu" if source is None else source.device
    seed = torch.randint(2**63 - 1, (), generator=source, device=origin).item()
    return torch.Generator(device).manual_seed(int(seed))


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not (low <= value <= high) or value == torch.inf:
        raise ValueError(f"{name} must lie in [{low:g}, {high:g}] and be finite, got {value}.")


def _check_choice(name: str, value: str | None, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}.")


# `TensorDictReplayBuffer` updates priorities only where its sampler is an instance of TorchRL's class.
TorchRLPrioritizedSampler.register(PrioritizedSampler)
