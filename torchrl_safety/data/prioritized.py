"""Prioritized sampling for TorchRL's replay buffers."""

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

from torchrl_safety.data.item_records import ItemRecords
from torchrl_safety.data.priority_rows import (
    check_alpha,
    check_choice,
    check_range,
    check_size,
    checked_priorities,
    flat_slots,
    items_in,
    largest_priority,
    run_of,
    tensor_on,
)
from torchrl_safety.data.priority_tree import PriorityTree, group_of, last_row_of_each_slot
from torchrl_safety.data.ranks import RankTable

_STAMP = "priority_stamp"
_STATE_FILE = "sampler.pt"
# Up to so many rows one compiled loop is faster than torch's vectors, which then make up for their calls.
_FEW_ROWS = 128


class PrioritizedSampler(Sampler):
    r"""Draws items by their priority, in place of TorchRL's sampler of the same name.

    .. math:: P(j) = \frac{\ell_j}{\sum_i \ell_i}, \quad \ell_j = (p_j + \epsilon)^\alpha
        \text{ or } \mathrm{rank}(p_j)^{-\alpha}, \quad w_j = (N P(j))^{-\beta_k}, \quad
        \beta_k = \min(1, \beta + k (1 - \beta) / N_S)

    Schaul et al. 2015, "Prioritized Experience Replay", section 3.3 and equations 1 and 2. N is the number of items in
    the buffer, k the number of `sample()` calls so far. A new item gets the largest priority seen, 1 before the first
    update. NaN, infinite and negative priorities, and such whose leaves can overflow, are refused and change nothing
    (on CUDA a device-side assertion stops the program). Updates from a batch that aim at a slot written since it was
    drawn are dropped, as long as the batch holds the very `"index"` tensor drawn from a one-dimensional storage; else
    (`clone()`, another device) call `sampler.update_priority(index, priority, generation=batch["priority_stamp"])`.

    Args:
        max_capacity: number of items the storage can hold, over all its dimensions, or more.
        alpha: exponent of the priorities, >= 0; 0 draws uniformly. It can be set at any time.
        beta: exponent of the importance weights at the first draw, in [0, 1].
        eps: added to every priority, >= 0.
        beta_annealing_steps: N_S, `sample()` calls until beta is 1; beta stays where it is when `None`.
        weight_normalization: divide the weights by the largest of the `"batch"` or the `"buffer"`, or not (`None`).
        stratified: make one draw in each of B equal parts of the total.
        max_priority: a new item gets the largest priority `"ever"` seen, or the largest updated one in the `"buffer"`.
        variant: leaves from the priorities (`"proportional"`) or their `"rank"`, see :class:`~.ranks.RankTable`.
        sort_interval: for `"rank"`, draws after which the ranks are taken anew; 1 keeps them exact.
        generator: source of random numbers; if `None`, one seeded from torch's global generator.
        device: where the tree lives; that of the storage when `None`.

    Raises:
        ValueError: if a setting lies outside its range.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> sampler = PrioritizedSampler(100, alpha=0.6, beta=0.4)
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
        >>> index = rb.extend(TensorDict({"observation": torch.randn(10, 3)}, [10]))
        >>> batch = rb.sample()
        >>> rb.update_tensordict_priority(batch.set("td_error", torch.rand(4)))
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
        variant: Literal["proportional", "rank"] = "proportional",
        sort_interval: int = 10_000,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_range("alpha", alpha, 0.0, torch.inf)
        check_range("beta", beta, 0.0, 1.0)
        check_range("eps", eps, 0.0, torch.inf)
        if beta_annealing_steps is not None and not beta_annealing_steps >= 1:
            raise ValueError(f"beta_annealing_steps must be at least 1 or None, got {beta_annealing_steps}.")
        check_choice("weight_normalization", weight_normalization, ("batch", "buffer", None))
        check_choice("max_priority", max_priority, ("ever", "buffer"))
        check_choice("variant", variant, ("proportional", "rank"))
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
        self._records = ItemRecords(max_capacity, forgets_evicted=max_priority == "buffer", device=self.device)
        table = RankTable(sort_interval=sort_interval)
        self._ranks = table if variant == "rank" else None
        self._check_alpha(self._alpha, max_capacity, 1.0)
        # The last default priority, with its alpha and leaf.
        self._new_leaf = (-1.0, 0.0, 0.0)
        # What the buffer held when it was last seen; before that, it may hold anything.
        self._num_items = max_capacity
        # The index of the last draw and the version of its values, with which it need not be checked again.
        self._drawn: tuple[Tensor, int] | None = None
        # A buffer overwrites `_rng` with its own generator or None, so the sampler's own has another name.
        self._owns_generator = generator is None
        self._generator = _new_generator(None, self.device) if generator is None else generator

    def __repr__(self) -> str:
        return f"{type(self).__name__}(alpha={self._alpha}, beta={self.beta}, eps={self._eps}, device={self.device})"

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise RuntimeError(
                f"{type(self).__name__} cannot be shared between processes, its copies would differ: give it to "
                "torchrl.data.PrioritizedReplayBuffer(sampler=..., sync=False), to which other processes write while "
                "the one that built it samples and updates."
            )
        state = super().__getstate__()
        del state["_generator"]
        state["_drawn"] = None
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
        """Exponent of the priorities. Setting it gives all items the leaves they would have had with it from the start.

        That takes time in proportion to the capacity: set it now and then, not at every draw.
        """
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        check_range("alpha", value, 0.0, torch.inf)
        if value != self._alpha:
            self._check_alpha(float(value), self.max_size, self._largest())
            self._alpha = float(value)
            self._refill()

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
        check_range("beta", value, 0.0, 1.0)
        self._beta = float(value)

    @property
    def default_priority(self) -> float:
        """Priority p_max of a new item."""
        return self._records.default_priority().item()

    def priority_of(self, index: int | Tensor, *, storage: Storage | None = None) -> Tensor:
        """Priorities of items, float64 `[B]`, -1 where a slot is empty; `index` as in :meth:`update_priority`."""
        slot, _ = self._slots(index, storage, is_drawn=True)
        return self._records.priorities(slot)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor | tuple[Tensor, ...], dict[str, Tensor]]:
        """Draw `batch_size` items with replacement.

        Returns:
            The index `[B]`, or one `[B]` for each dimension of the storage, and `"priority_weight"` `[B]` in torch's
            default dtype with `"priority_stamp"` `[B]` int64.

        Raises:
            RuntimeError: if the buffer is empty, or all its priorities are 0 with eps = 0.
            ValueError: if `batch_size` is less than 1, or the storage can hold more items than the sampler.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}: ask for one item or more.")
        self._follow(storage)
        check_size(storage, self.max_size)
        self._num_items = num_items = items_in(storage)
        if num_items == 0:
            raise RuntimeError("the replay buffer is empty, so nothing can be sampled: add items before sampling.")
        if self._ranks is not None and self._ranks.is_due():
            self._refill()
        index, leaf = self._tree.find(self._uniform(batch_size))
        weight = self._weights(leaf, num_items)
        self._num_samples += 1
        info = {"priority_weight": weight, _STAMP: torch.full_like(index, self._records.time)}
        if storage.ndim > 1:
            return torch.unravel_index(index, storage.shape), info
        index.priority_stamp = self._records.time  # type: ignore[attr-defined]
        self._drawn = None if index.is_inference() else (index, index._version)
        return index, info

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
            ValueError: if a priority is NaN, infinite, negative or so large that sums of leaves can overflow, the
                indices are no integers, or the shapes do not match. Nothing has changed.
            IndexError: if an index lies beyond the items of the buffer (on a CPU). Nothing has changed.
        """
        self._follow(storage)
        if generation is None:
            generation = getattr(index, _STAMP, None)
        is_current = isinstance(generation, int) and generation >= self._records.time
        if is_current and isinstance(index, Tensor) and self._is_last_draw(index):
            if self._update_drawn(index, priority):
                return
            slot, applies = index, None
        else:
            slot, applies = self._slots(index, storage, is_drawn=generation is not None)
        alpha = self._alpha if self._ranks is None else 0.0
        priority, highest = checked_priorities(priority, slot, alpha=alpha, eps=self._eps, capacity=self.max_size)
        if not slot.numel():
            return
        if generation is not None and not is_current:
            is_fresh = self._records.is_fresh(slot, tensor_on(generation, torch.long, self.device).reshape(-1))
            applies = is_fresh if applies is None else applies & is_fresh
        if applies is not None:
            slot = torch.where(applies, slot, self.max_size)
        if self.device.type != "cpu":
            priority = priority.index_select(0, last_row_of_each_slot(slot))
        self._records.update(slot, priority, applies, highest=highest, is_drawn=generation is not None)
        leaf = self._leaf(priority)
        self._tree.write(slot, leaf if applies is None else torch.where(applies, leaf, 0.0))
        if self._ranks is not None:
            self._ranks.changed(slot.numel())

    def _update_drawn(self, slot: Tensor, priority: float | Tensor) -> bool:
        """Whether the items of the last draw got these priorities in a compiled loop; if not, nothing has changed."""
        kernels = self._tree.kernels()
        if kernels is None or self._ranks is not None or not 1 < slot.numel() <= _FEW_ROWS:
            return False
        if not isinstance(priority, Tensor) or priority.shape != slot.shape or priority.device.type != "cpu":
            return False
        if priority.dtype not in (torch.float32, torch.float64):
            return False
        largest = largest_priority(alpha=self._alpha, eps=self._eps, capacity=self.max_size)
        rows, known, tree = priority.numpy(force=True), self._records.array(), self._tree.arrays()
        highest = kernels.update(slot.numpy(), rows, self._alpha, self._eps, largest, known, *tree)
        if highest < 0:
            return False
        group = group_of(slot)
        self._tree.written(group)
        self._records.written(group, highest)
        return True

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Take note that items were written: each gets `default_priority`, and updates drawn before are stale.

        Raises:
            ValueError: if the storage can hold more items than the sampler.
        """
        self._follow(storage)
        if storage is not None:
            check_size(storage, self.max_size)
        self._num_items = self.max_size if storage is None else items_in(storage)
        run = run_of(index) if self.device.type == "cpu" else None
        if run is not None and run.start >= 0 and run.stop <= min(self._num_items, self.max_size):
            self._tree.write_run(run, self._leaf_of_new(self._records.write_run(run)))
        else:
            slot, applies = self._slots(index, storage)
            leaf = self._leaf(self._records.write(slot).reshape(1)).expand(slot.shape)
            self._tree.write(slot, leaf if applies is None else torch.where(applies, leaf, 0.0))
        if self._ranks is not None:
            self._ranks.changed(1 if isinstance(index, int) else index.numel())

    def resized(self, slot: Tensor, max_capacity: int) -> PrioritizedSampler:
        """A sampler of another capacity in which the items of these slots `[M]` come first, with their priorities.

        It goes on with the random numbers and the annealing of this one, which is of no use any more.

        Raises:
            ValueError: if there are more slots than the capacity, or so many items that sums of leaves can overflow.
        """
        if len(slot) > max_capacity:
            raise ValueError(f"max_capacity={max_capacity} is less than the {len(slot)} items to keep: keep fewer.")
        tree = PriorityTree(max_capacity, device=self.device)
        self._check_alpha(self._alpha, max_capacity, self._largest())
        sampler = copy(self)
        sampler._rng = self._rng  # a copy leaves the generator of its buffer behind
        sampler._tree = tree
        sampler._records = self._records.moved(slot.to(self.device), max_capacity)
        if self._ranks is not None:
            sampler._ranks = RankTable(sort_interval=self._ranks.sort_interval)
        sampler._num_items, sampler._drawn = len(slot), None
        sampler._refill()
        return sampler

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values with which another sampler continues the very same draws."""
        generator = self._rng if self._rng is not None else self._generator
        return {
            **self._fixed_settings(),
            "alpha": self._alpha,
            "beta": self._beta,
            "num_samples": self._num_samples,
            "records": self._records.state_dict(),
            "tree": self._tree.state_dict(),
            "ranks": None if self._ranks is None else self._ranks.state_dict(),
            "generator": generator.get_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state with its alpha and beta; the other settings remain those of this sampler.

        Raises:
            ValueError: if the state has another capacity, eps, `max_priority`, `variant` or kind of generator.
        """
        for name, value in self._fixed_settings().items():
            if state_dict[name] != value:
                raise ValueError(
                    f"the state was saved with {name}={state_dict[name]}, this sampler has {name}={value}: build it as "
                    "the saved one was."
                )
        self._tree.load_state_dict(state_dict["tree"])
        self._records.load_state_dict(state_dict["records"])
        if self._ranks is not None:
            self._ranks.load_state_dict(state_dict["ranks"])
        self._alpha, self._beta = state_dict["alpha"], state_dict["beta"]
        self._num_samples = state_dict["num_samples"]
        self._num_items, self._drawn = self.max_size, None
        generator = self._rng if self._rng is not None else self._generator
        generator.set_state(state_dict["generator"].cpu())

    def dumps(self, path: str | Path) -> None:
        """Save the state into the folder `path`."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), path / _STATE_FILE)

    def loads(self, path: str | Path) -> None:
        """Load the state that `dumps` saved into the folder `path`."""
        self.load_state_dict(torch.load(Path(path) / _STATE_FILE, weights_only=True, map_location="cpu"))

    def _fixed_settings(self) -> dict[str, Any]:
        generator = self._rng if self._rng is not None else self._generator
        return {
            "eps": self._eps,
            "max_priority": "buffer" if self._records.forgets_evicted else "ever",
            "variant": "proportional" if self._ranks is None else "rank",
            "generator_device": generator.device.type,
        }

    def _empty(self) -> None:
        self._tree.clear()
        self._records.clear()
        if self._ranks is not None:
            self._ranks.clear()
        self._num_items = 0

    def _leaf(self, priority: Tensor) -> Tensor:
        if self._ranks is not None:
            return self._ranks.leaf(priority, alpha=self._alpha)
        return (priority + self._eps).pow_(self._alpha)

    def _leaf_of_new(self, priority: float) -> float:
        """:meth:`_leaf` of the default priority, which seldom changes from write to write."""
        if self._ranks is not None or self._new_leaf[:2] != (priority, self._alpha):
            leaf = self._leaf(torch.tensor(priority, dtype=torch.float64, device="cpu")).item()
            self._new_leaf = priority, self._alpha, leaf
        return self._new_leaf[2]

    def _largest(self) -> Tensor:
        """The largest priority that an item has or can get by default, `[]` float64."""
        return torch.maximum(self._records.priorities().amax(), self._records.default_priority())

    def _check_alpha(self, alpha: float, capacity: int, priority: float | Tensor) -> None:
        # A rank's leaf is at most 1.
        check_alpha(alpha if self._ranks is None else 0.0, priority, eps=self._eps, capacity=capacity)

    def _refill(self) -> None:
        """Give every item its leaf anew."""
        priority = self._records.priorities()
        if self._ranks is None:
            leaf = self._leaf(priority)
        else:
            items, rest = priority.tensor_split([min(self._num_items, self.max_size)])
            leaf = torch.cat([self._ranks.sort(items, alpha=self._alpha), rest])
        self._tree.fill(torch.where(priority < 0, 0.0, leaf))

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

    def _is_last_draw(self, index: Tensor) -> bool:
        return self._drawn is not None and index is self._drawn[0] and index._version == self._drawn[1]

    def _slots(
        self, index: int | Tensor, storage: Storage | None, is_drawn: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        num_items = min(self._num_items if storage is None else items_in(storage), self.max_size)
        return flat_slots(
            index, storage, capacity=self.max_size, num_items=num_items, device=self.device, is_drawn=is_drawn
        )

    def _follow(self, storage: Storage | None) -> None:
        device = getattr(storage, "device", None)
        if not self._follows_storage or device is None or device == self._tree.device or device == "auto":
            return
        device = torch.device(device)
        if device.type != self.device.type or device.index not in (None, self.device.index):
            self._move_to(device)

    def _move_to(self, device: torch.device) -> None:
        tree = PriorityTree(self._tree.capacity, device=device)
        tree.load_state_dict(self._tree.state_dict())
        self._tree, self._records, self._drawn = tree, self._records.to(device), None
        if self._owns_generator:
            self._generator = _new_generator(self._generator, device)


def _new_generator(source: torch.Generator | None, device: torch.device) -> torch.Generator:
    """A generator on `device` seeded from `source`, or from torch's global generator."""
    origin = "cpu" if source is None else source.device
    seed = torch.randint(2**63 - 1, (), generator=source, device=origin).item()
    return torch.Generator(device).manual_seed(int(seed))


# `TensorDictReplayBuffer` updates priorities only where its sampler is an instance of TorchRL's class.
TorchRLPrioritizedSampler.register(PrioritizedSampler)
