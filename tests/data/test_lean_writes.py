"""What the lean buffer writes, against its parent, TorchRL's."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler
from torchrl.envs.transforms import UnsqueezeTransform

from torchrl_safety.data import LeanReplayBuffer, NStepTransform, PrioritizedSampler, lean

CAPACITY = 20


def frames(length: int, start: int = 0, **more: torch.Tensor) -> TensorDict:
    step = torch.arange(start, start + length)
    flags = {name: torch.zeros(length, 1, dtype=torch.bool) for name in ("done", "terminated")}
    following = {"observation": step.float().unsqueeze(-1) + 1, "reward": -step.float().unsqueeze(-1), **flags}
    return TensorDict({"observation": step.float().unsqueeze(-1), "next": following, **more}, [length])


def both(make_sampler=lambda: PrioritizedSampler(CAPACITY), **settings):
    for kind in (TensorDictReplayBuffer, LeanReplayBuffer):
        made = {name: value() for name, value in settings.items()}
        yield kind(storage=LazyTensorStorage(CAPACITY), sampler=make_sampler(), batch_size=4, **made)


def contents(buffer):
    return buffer.storage.get(torch.arange(len(buffer)))


def same(one, other):
    assert list(one.keys(True, True)) == list(other.keys(True, True))
    assert (one == other).all()


@pytest.fixture
def short_ways(monkeypatch):
    """Counts the writes that took the short way."""
    taken = []
    copies = lean._copies

    def counted(items, data, start, capacity):
        found = copies(items, data, start, capacity)
        if "next" in data and found is not None:
            taken.append(len(data))
        return found

    monkeypatch.setattr(lean, "_copies", counted)
    return taken


@pytest.mark.parametrize("make_sampler", [lambda: PrioritizedSampler(CAPACITY), RandomSampler])
@pytest.mark.parametrize(
    "transform",
    [
        lambda: None,
        lambda: NStepTransform(2),
        lambda: UnsqueezeTransform(-1, in_keys=["observation"], in_keys_inv=["observation"]),
    ],
)
def test_slots_and_contents_are_those_of_the_parent_round_the_end(make_sampler, transform, short_ways):
    parent, buffer = both(make_sampler, transform=transform)
    start = 0
    for length in (3, 7, 1, 20, 9, 15, 4):
        written, given = frames(length, start), frames(length, start)
        index = parent.extend(written)
        assert torch.equal(buffer.extend(given), index)
        assert list(given.keys(True)) == list(written.keys(True))  # what the caller passed is left alone alike
        assert len(buffer) == len(parent)
        assert buffer.write_count == parent.write_count
        same(contents(buffer), contents(parent))
        start += length
    assert len(short_ways) >= 6  # all but the first, which makes the storage


def test_new_items_get_the_largest_priority_and_older_batches_are_stale():
    _, buffer = both()
    index = buffer.extend(frames(20))
    buffer.update_priority(index, torch.arange(20.0))
    batch = buffer.sample(20)
    again = buffer.extend(frames(5, 20))
    assert buffer.sampler.priority_of(again).tolist() == [19.0] * 5
    buffer.update_tensordict_priority(batch.set("td_error", torch.full((20,), 3.0)))
    assert buffer.sampler.priority_of(again).tolist() == [19.0] * 5
    assert buffer.sampler.priority_of(batch["index"][batch["index"] > 4]).eq(3).all()


def test_priorities_that_come_with_the_frames_are_set():
    for update, expected in ((None, [1.0, 2.0, 3.0]), (False, [1.0, 1.0, 1.0])):
        parent, buffer = both()
        for each in (parent, buffer):
            each.extend(frames(3, td_error=torch.tensor([1.0, 2.0, 3.0])), update_priority=update)
            assert each.sampler.priority_of(torch.arange(3)).tolist() == expected


def test_wrong_priorities_are_refused():
    _, buffer = both()
    buffer.extend(frames(1))
    with pytest.raises(RuntimeError, match=r"'td_error' are no priorities: priority is -1.0.*update_priority=False"):
        buffer.extend(frames(2, td_error=torch.tensor([1.0, -1.0])))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.set("observation", data["observation"].double()),
        lambda data: data.set("observation", data["observation"].expand(-1, 2)),
        lambda data: data.exclude("observation"),
        lambda data: data.set("extra", torch.zeros(3)),
        lambda data: data.set("observation", data["observation"].requires_grad_()),
        lambda data: frames(CAPACITY + 3),
    ],
    ids=["dtype", "shape", "fewer", "more", "gradient", "too many"],
)
def test_frames_of_another_kind_are_taken_or_refused_as_by_the_parent(change, request):
    parent, buffer = both()
    results = []
    for each in (parent, buffer):
        each.extend(frames(4))
        try:
            each.extend(change(frames(3, 4)))
        except (RuntimeError, KeyError, ValueError) as error:
            results.append(type(error))
        else:  # where an entry was left out, anything may stand
            results.append(contents(each).detach().exclude(*["observation"] if "fewer" in request.node.name else []))
    if isinstance(results[0], type):
        assert results[1] is results[0]
    else:
        same(results[1], results[0])


def test_of_a_write_longer_than_the_buffer_the_last_rows_stay():
    threads = torch.get_num_threads()
    buffer = LeanReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=4)
    buffer.extend(frames(7))
    try:
        torch.set_num_threads(2)
        index = buffer.extend(frames(25_000))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(index, (torch.arange(25_000) + 7) % 10_000)
    kept = contents(buffer)[index[-10_000:]]
    last = torch.arange(15_000.0, 25_000).unsqueeze(-1)
    assert torch.equal(kept["observation"], last)
    assert torch.equal(kept["next", "reward"], -last)


@pytest.mark.parametrize("transform", [lambda: None, lambda: NStepTransform(2)])
def test_a_single_frame_is_for_add(transform):
    _, buffer = both(transform=transform)
    with pytest.raises(RuntimeError, match=r"got a single one of shape \[\]; use add\(frame\)"):
        buffer.extend(frames(1)[0])
    for frame in frames(2).unbind(0):
        buffer.add(frame)
    assert len(buffer) > 0


def test_a_buffer_that_went_back_to_when_it_was_empty_is_written_as_a_new_one():
    for buffer in both():
        empty = buffer.state_dict()
        buffer.extend(frames(3))
        buffer.load_state_dict(empty)
        buffer.extend(frames(2, 7))
        assert contents(buffer)["observation"].flatten().tolist() == [7, 8]


def test_a_write_changes_nothing_of_what_was_drawn():
    _, buffer = both(RandomSampler)
    buffer.extend(frames(20))
    batch = buffer.sample()
    before = batch.clone()
    buffer.extend(frames(20, 20))
    same(batch, before)


@pytest.mark.parametrize("rows", [slice(0, 15), slice(12, 20)], ids=["in both parts", "behind"])
def test_rows_of_the_storage_itself_are_copied_whole_or_refused(rows):
    """Written round the end, the first part may lie over rows that the second one copies."""
    parent, buffer = both(RandomSampler)
    for each in (parent, buffer):
        each.extend(frames(20))
        each.extend(frames(14, 20))
        with pytest.raises(RuntimeError, match="single memory location"):
            each.extend(each[rows])
    same(contents(buffer), contents(parent))
