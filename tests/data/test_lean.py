"""The lean buffer against its parent, TorchRL's, on the same data and random numbers."""

import contextlib
import copy
import threading

import pytest
import torch
from tensordict import NonTensorData, TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler
from torchrl.data.replay_buffers.writers import TensorDictRoundRobinWriter
from torchrl.envs.transforms import Transform, UnsqueezeTransform

from torchrl_safety.data import HindsightRelabel, LeanReplayBuffer, PrioritizedSampler, lean

CAPACITY = 40


class Reversed(Transform):
    """Puts the rows of a sample in reverse order, the index of the storage among them."""

    def forward(self, tensordict):
        return tensordict.flip(0)


def frames(length: int, start: int = 0) -> TensorDict:
    step = torch.arange(start, start + length)
    inner = TensorDict({"position": torch.randn(length, 5, 2)}, [length, 5])
    following = {"observation": torch.randn(length, 3), "reward": step.double().unsqueeze(-1), "agents": inner}
    return TensorDict({"observation": torch.randn(length, 3), "step": step, "next": following}, [length])


def prioritized(**settings):
    return PrioritizedSampler(CAPACITY, generator=torch.Generator().manual_seed(3), **settings)


def both(make_storage=None, make_sampler=prioritized, **settings):
    """The parent and the lean buffer, each with parts of its own."""
    for kind in (TensorDictReplayBuffer, LeanReplayBuffer):
        storage = LazyTensorStorage(CAPACITY) if make_storage is None else make_storage()
        generator = None if make_sampler is prioritized else torch.Generator().manual_seed(4)
        made = {name: value() if callable(value) else value for name, value in settings.items()}
        yield kind(storage=storage, sampler=make_sampler(), generator=generator, **{"batch_size": 16} | made)


def assert_same(lean_result, result):
    assert type(lean_result) is type(result)
    if isinstance(result, tuple):
        assert_same(lean_result[0], result[0])
        lean_result, result = (TensorDict(dict(pair[1])) for pair in (lean_result, result))
    assert list(lean_result.keys(True, True)) == list(result.keys(True, True))
    assert (lean_result == result).all()
    assert lean_result.batch_size == result.batch_size
    assert lean_result.device == result.device
    assert lean_result.is_locked == result.is_locked
    assert lean_result.names == result.names
    for key, value in result.items(True, True):
        assert lean_result.get(key).dtype == value.dtype, key
    for key, value in result.items(True):
        if isinstance(value, TensorDict):
            assert lean_result.get(key).batch_size == value.batch_size, key


def counted_rows(monkeypatch) -> list[int]:
    """Grows with each batch that takes the short way."""
    calls: list[int] = []
    gather = lean._rows

    def rows(*args):
        calls.append(1)
        return gather(*args)

    monkeypatch.setattr(lean, "_rows", rows)
    return calls


@pytest.mark.parametrize("make_sampler", [prioritized, RandomSampler])
@pytest.mark.parametrize("return_info", [False, True])
@pytest.mark.parametrize("transform", [None, Reversed, lambda: UnsqueezeTransform(-1, in_keys=["step"])])
def test_batches_are_those_of_the_parent(make_sampler, return_info, transform, monkeypatch):
    parent, buffer = both(make_sampler=make_sampler, transform=transform or (lambda: None))
    calls = counted_rows(monkeypatch)
    for start in (0, 15, 30, 45):  # partly filled, then full, then around
        written = frames(15, start)
        assert parent.extend(written.clone()).tolist() == buffer.extend(written.clone()).tolist()
        for _ in range(3):
            batch, lean_batch = (each.sample(return_info=return_info) for each in (parent, buffer))
            assert_same(lean_batch, batch)
            error = torch.rand(16)
            for each, drawn in ((parent, batch), (buffer, lean_batch)):
                drawn = drawn[0] if return_info else drawn
                each.update_tensordict_priority(drawn.set("td_error", error))
    assert calls
    if make_sampler is prioritized:
        every = torch.arange(CAPACITY)
        assert torch.equal(buffer.sampler.priority_of(every), parent.sampler.priority_of(every))


@pytest.mark.parametrize(
    "settings",
    [
        {"make_storage": lambda: LazyMemmapStorage(CAPACITY)},
        {"make_storage": lambda: ListStorage(CAPACITY)},
        {"prefetch": 2},
        {"collate_fn": lambda: lambda rows: rows.apply(lambda value: value + 1)},
        {"writer": lambda: TensorDictRoundRobinWriter(track_generations=True)},
        {"make_sampler": lambda: prioritized(weight_normalization=None, stratified=True)},
    ],
    ids=["memmap", "list", "prefetch", "collate", "generations", "stratified"],
)
def test_other_settings_work_as_in_the_parent(settings):
    parent, buffer = both(**settings)
    written = frames(30)
    for each in (parent, buffer):
        each.extend(written.clone())
    for _ in range(3):
        batch, lean_batch = parent.sample(), buffer.sample()
        assert_same(lean_batch, batch)


def test_a_storage_of_two_dimensions_works_as_in_the_parent():
    torch.manual_seed(0)
    parent, buffer = both(lambda: LazyTensorStorage(CAPACITY, ndim=2))
    written = frames(20).reshape(4, 5)
    for each in (parent, buffer):
        each.extend(written.clone())
    batch, lean_batch = parent.sample(), buffer.sample()
    assert_same(lean_batch, batch)
    for each in (parent, buffer):
        each.update_tensordict_priority(batch.clone().set("td_error", torch.arange(16.0)))
    every = torch.cartesian_prod(torch.arange(4), torch.arange(5))
    assert torch.equal(
        buffer.sampler.priority_of(every, storage=buffer.storage),
        parent.sampler.priority_of(every, storage=parent.storage),
    )


def test_entries_that_are_no_tensors_are_kept():
    parent, buffer = both()
    written = frames(10).set("task", NonTensorData("reach", batch_size=[10]))
    for each in (parent, buffer):
        each.extend(written.clone())
    batch, lean_batch = parent.sample(), buffer.sample()
    assert list(lean_batch["task"]) == list(batch["task"]) == ["reach"] * 16
    assert_same(lean_batch.exclude("task"), batch.exclude("task"))


def test_names_of_dimensions_are_kept():
    parent, buffer = both()
    written = TensorDict({"observation": torch.randn(10, 3)}, [10], names=["time"])
    for each in (parent, buffer):
        each.extend(written.clone())
    assert_same(buffer.sample(), parent.sample())


def test_a_batch_has_memory_of_its_own():
    _, buffer = both()
    buffer.extend(frames(20))
    stored = buffer[:].clone()
    batch = buffer.sample()
    batch.apply_(lambda value: value.fill_(7))
    assert (buffer[:] == stored).all()


@pytest.mark.parametrize("shape", [[16], [16, 1], [16, 3]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_priorities_are_those_of_the_parent(shape, dtype):
    parent, buffer = both()
    written, error = frames(20), (torch.rand(shape) * 9).to(dtype)
    for each in (parent, buffer):
        each.extend(written.clone())
        each.update_tensordict_priority(each.sample().set("td_error", error))
    every = torch.arange(20)
    priorities = buffer.sampler.priority_of(every)
    assert torch.equal(priorities, parent.sampler.priority_of(every))
    assert priorities.unique().numel() > 3


def test_priorities_of_single_items_and_without_errors_are_those_of_the_parent():
    parent, buffer = both()
    for each in (parent, buffer):
        each.extend(frames(20))
        batch = each.sample()
        each.update_tensordict_priority(batch[0].set("td_error", torch.tensor([5.0])))
        each.update_tensordict_priority(batch[1:])  # without an error: the default
    every = torch.arange(20)
    assert torch.equal(buffer.sampler.priority_of(every), parent.sampler.priority_of(every))


def test_an_update_of_a_slot_that_was_rewritten_is_dropped():
    _, buffer = both()
    buffer.extend(frames(CAPACITY))
    batch = buffer.sample().set("td_error", torch.full((16,), 9.0))
    buffer.extend(frames(CAPACITY))
    buffer.update_tensordict_priority(batch)
    assert buffer.sampler.priority_of(torch.arange(CAPACITY)).max().item() == 1.0


@pytest.mark.parametrize("priority", [torch.full((16,), float("nan")), torch.full((16,), -1.0)])
def test_bad_priorities_are_refused(priority):
    _, buffer = both()
    buffer.extend(frames(20))
    with pytest.raises(ValueError, match="priority is"):
        buffer.update_tensordict_priority(buffer.sample().set("td_error", priority))


@pytest.mark.parametrize(
    ("settings", "wanted", "fill"),
    [({"batch_size": None}, None, True), ({}, None, False), ({}, -1, True)],
    ids=["no batch size", "empty", "negative"],
)
def test_errors_are_those_of_the_parent(settings, wanted, fill):
    caught = []
    for each in both(**settings):
        if fill:
            each.extend(frames(20))
        with pytest.raises((RuntimeError, ValueError)) as error, pytest.warns() if wanted else contextlib.nullcontext():
            each.sample(wanted)
        caught.append((error.type, str(error.value)))
    assert caught[0] == caught[1]


def test_another_batch_size_is_warned_of_once():
    _, buffer = both()
    buffer.extend(frames(20))
    with pytest.warns(UserWarning, match="conflicting batch_sizes"):
        assert len(buffer.sample(8)) == 8
    assert len(buffer.sample()) == 16


def test_a_state_beyond_the_items_fails_as_in_the_parent():
    """Rows that were never written must not be handed out."""
    full, _ = both()
    full.extend(frames(CAPACITY))
    for each in both():
        each.extend(frames(2))
        each.sampler.load_state_dict(full.sampler.state_dict())
        with pytest.raises(IndexError):
            each.sample()


def test_copies_and_threads_draw_on():
    parent, buffer = both()
    written = frames(CAPACITY)
    for each in (parent, buffer):
        each.extend(written.clone())
    assert_same(copy.deepcopy(buffer).sample(), buffer.sample())
    failures = []

    def work():
        try:
            for _ in range(20):
                drawn = buffer.sample()
                assert torch.equal(drawn["step"], written["step"][drawn["index"]])
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_relabelling_goes_through_the_short_way(monkeypatch):
    """Transforms that look for the buffer that samples find it."""

    def reward(transition):
        following = transition["next"]
        return -(following["achieved_goal"] - following["desired_goal"]).abs()

    def relabel():
        return HindsightRelabel(reward, share=1.0, generator=torch.Generator().manual_seed(5))

    parent, buffer = both(transform=relabel)
    calls = counted_rows(monkeypatch)
    state, goal, end = torch.randn(21, 1), torch.randn(20, 1), torch.arange(1, 21).unsqueeze(-1) % 5 == 0
    flags = {"terminated": torch.zeros_like(end), "truncated": end, "done": end, "reward": torch.zeros(20, 1)}
    following = {"achieved_goal": state[1:], "desired_goal": goal, **flags}
    written = TensorDict({"achieved_goal": state[:-1], "desired_goal": goal, "next": following}, [20])
    for each in (parent, buffer):
        each.extend(written.clone())
    batch, lean_batch = parent.sample(), buffer.sample()
    assert calls
    assert batch["relabelled"].all()
    assert_same(lean_batch, batch)
    assert_same(buffer.sample(), parent.sample())


class InRows(Transform):
    """Arranges a batch `[B]` as `[B / width, width]`."""

    def __init__(self, width, lock=False):
        super().__init__()
        self.width, self.lock = width, lock

    def forward(self, tensordict):
        rows = tensordict.reshape(-1, self.width)
        return rows.lock_() if self.lock else rows


class InParts(Transform):
    """Makes two of a batch."""

    def forward(self, tensordict):
        return tensordict.split(8)


@pytest.mark.parametrize("lock", [False, True])
def test_index_and_weights_enter_batches_that_transforms_arranged_anew(lock):
    parent, buffer = both(transform=lambda: InRows(1, lock))
    for each in (parent, buffer):
        torch.manual_seed(0)
        each.extend(frames(CAPACITY))
    batch = buffer.sample()
    assert_same(batch, parent.sample())
    assert batch["index"].shape == batch.batch_size == (16, 1)


def test_batches_that_have_no_place_for_the_index_say_so():
    for transform, wanted in ((InRows(2), "does not fit"), (InParts(), "made a tuple of the batch")):
        _, buffer = both()
        buffer.extend(frames(CAPACITY))
        buffer.append_transform(transform)
        with pytest.raises(RuntimeError, match=wanted):
            buffer.sample()
