import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)

from torchrl_safety.data.prioritized import PrioritizedSampler
from torchrl_safety.data.sequences import sequence_index

STORAGES = [LazyTensorStorage, LazyMemmapStorage, ListStorage]


def steps(start, n, ends):
    """Steps `start`, `start + 1`, … of one environment, of which those in `ends` end an episode."""
    t = torch.arange(start, start + n)
    done = torch.tensor([[i in ends] for i in t.tolist()])
    return TensorDict({"t": t, "next": {"done": done}}, [n])


def following(t, length, newest, ends):
    """The steps from `t` on that belong together, by hand."""
    found = []
    for step in range(t, t + length):
        if step > newest:
            break
        found.append(step)
        if step in ends:
            break
    return found


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("length", [1, 2, 3, 6, 9])
def test_a_sequence_goes_on_to_the_end_of_its_episode_or_to_the_newest_step(storage, length):
    generator = torch.Generator().manual_seed(length)
    ends = set(torch.nonzero(torch.rand(100, generator=generator) < 0.25).flatten().tolist())
    buffer = ReplayBuffer(storage=storage(8), collate_fn=lambda rows: rows)
    written = 0
    while written < 40:
        n = int(torch.randint(1, 5, (), generator=generator))
        buffer.extend(steps(written, n, ends))
        written += n
        first = torch.arange(len(buffer))
        index, valid = sequence_index(buffer.storage, first, length, cursor=buffer.writer._cursor)
        assert index.shape == valid.shape == (len(buffer), length)
        t = torch.stack([buffer.storage[i]["t"] for i in range(len(buffer))])
        for row in first.tolist():
            expected = following(int(t[row]), length, written - 1, ends)
            assert t[index[row]][valid[row]].tolist() == expected
            # What is not valid comes last and repeats the last step that is.
            assert valid[row].tolist() == [k < len(expected) for k in range(length)]
            assert t[index[row]][~valid[row]].tolist() == [expected[-1]] * (length - len(expected))


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("length", [1, 3, 6])
def test_a_sequence_keeps_to_its_environment(storage, length):
    generator = torch.Generator().manual_seed(length)
    ends = [set(torch.nonzero(torch.rand(100, generator=generator) < 0.25).flatten().tolist()) for _ in range(3)]
    buffer = TensorDictReplayBuffer(storage=storage(15, ndim=2), sampler=PrioritizedSampler(15), batch_size=60)
    written = 0
    while written < 25:
        n = int(torch.randint(2, 5, (), generator=generator))
        data = torch.stack([steps(written, n, ends[env]) for env in range(3)])
        data["env"] = torch.arange(3).unsqueeze(1).expand(3, n)
        buffer.extend(data)
        written += n
        first, _ = buffer.sampler.sample(buffer.storage, 60)
        index, valid = sequence_index(buffer.storage, first, length)
        content = buffer.storage[:]
        env, t = content["env"][index], content["t"][index]
        assert (env == env[:, :1]).all()
        for row in range(60):
            expected = following(int(t[row, 0]), length, written - 1, ends[int(env[row, 0])])
            assert t[row][valid[row]].tolist() == expected


def test_sequences_begin_at_the_steps_that_their_priorities_draw():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40),
        sampler=PrioritizedSampler(40, alpha=1.0, eps=0.0, generator=torch.Generator().manual_seed(0)),
        batch_size=4000,
    )
    buffer.extend(steps(0, 40, {9, 19, 29}))
    priority = torch.zeros(40)
    priority[[3, 18, 39]] = torch.tensor([1.0, 2.0, 1.0])
    buffer.update_priority(torch.arange(40), priority)
    first, _ = buffer.sampler.sample(buffer.storage, 4000)
    index, valid = sequence_index(buffer.storage, first, 4)
    share = torch.bincount(index[:, 0], minlength=40) / 4000
    assert (share - priority / 4).abs().max() < 4 * (0.25 / 4000) ** 0.5
    lengths = dict(zip(index[:, 0].tolist(), valid.sum(1).tolist()))
    assert lengths == {3: 4, 18: 2, 39: 1}


def test_flags_of_another_name_and_of_several_players_end_a_sequence():
    buffer = ReplayBuffer(storage=LazyTensorStorage(6))
    ends = torch.zeros(6, 2, dtype=torch.bool)
    ends[1, 0] = ends[4, 1] = True
    buffer.extend(TensorDict({"over": ends}, [6]))
    _, valid = sequence_index(buffer.storage, torch.tensor([0, 2, 5]), 3, done_key="over")
    assert valid.tolist() == [[True, True, False], [True, True, True], [True, False, False]]


def test_a_storage_that_cannot_know_its_newest_step_asks_for_the_cursor():
    whole = TensorDictReplayBuffer(storage=LazyTensorStorage(5), batch_size=2)
    whole.extend(steps(0, 7, set()))
    loaded = TensorDictReplayBuffer(storage=LazyTensorStorage(5), batch_size=2)
    loaded.load_state_dict(whole.state_dict())
    first = torch.arange(5)
    with pytest.raises(RuntimeError, match=r"LazyTensorStorage is full .* pass cursor=buffer\.writer\._cursor"):
        sequence_index(loaded.storage, first, 2)
    index, valid = sequence_index(loaded.storage, first, 2, cursor=loaded.writer._cursor)
    expected_index, expected_valid = sequence_index(whole.storage, first, 2)
    assert torch.equal(index, expected_index)
    assert torch.equal(valid, expected_valid)
    assert valid[:, 1].tolist() == [True, False, True, True, True]


@pytest.mark.parametrize("storage", STORAGES)
def test_missing_flags_are_named_with_what_is_there(storage):
    buffer = ReplayBuffer(storage=storage(4), collate_fn=lambda rows: rows)
    buffer.extend(TensorDict({"x": torch.zeros(3)}, [3]))
    with pytest.raises(KeyError, match=r"\('next', 'done'\) is not in the storage, which holds \['x'\]"):
        sequence_index(buffer.storage, torch.tensor([0]), 2)


def test_rows_that_are_no_tensordicts_are_refused():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    buffer.extend(torch.zeros(3))
    with pytest.raises(KeyError, match="the storage holds Tensor, not TensorDicts"):
        sequence_index(buffer.storage, torch.tensor([0]), 2)


def test_a_sequence_without_steps_is_refused():
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        sequence_index(LazyTensorStorage(4), torch.tensor([0]), 0)
