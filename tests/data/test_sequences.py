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
        index, valid = sequence_index(buffer.storage, first, length, cursor=buffer.writer._cursor)
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
    index, valid = sequence_index(buffer.storage, first, 4, cursor=buffer.writer._cursor)
    share = torch.bincount(index[:, 0], minlength=40) / 4000
    assert (share - priority / 4).abs().max() < 4 * (0.25 / 4000) ** 0.5
    lengths = dict(zip(index[:, 0].tolist(), valid.sum(1).tolist()))
    assert lengths == {3: 4, 18: 2, 39: 1}


def test_flags_of_another_name_and_of_several_players_end_a_sequence():
    buffer = ReplayBuffer(storage=LazyTensorStorage(6))
    ends = torch.zeros(6, 2, dtype=torch.bool)
    ends[1, 0] = ends[4, 1] = True
    buffer.extend(TensorDict({"over": ends}, [6]))
    _, valid = sequence_index(buffer.storage, torch.tensor([0, 2, 5]), 3, cursor=0, done_key="over")
    assert valid.tolist() == [[True, True, False], [True, True, True], [True, False, False]]


@pytest.mark.parametrize("storage", STORAGES)
def test_a_full_storage_asks_for_the_cursor(storage):
    buffer = ReplayBuffer(storage=storage(5), collate_fn=lambda rows: rows)
    buffer.extend(steps(0, 7, set()))
    with pytest.raises(RuntimeError, match=r"Storage is full.*: pass cursor=buffer\.writer\._cursor"):
        sequence_index(buffer.storage, torch.arange(5), 2)
    _, valid = sequence_index(buffer.storage, torch.arange(5), 2, cursor=buffer.writer._cursor)
    assert valid[:, 1].tolist() == [True, False, True, True, True]


@pytest.mark.parametrize("written", [3, 7])
@pytest.mark.parametrize("before", [0, 2, 9])
def test_what_was_written_before_a_load_does_not_move_the_newest_step(before, written):
    whole = TensorDictReplayBuffer(storage=LazyTensorStorage(5), batch_size=2)
    whole.extend(steps(0, written, set()))
    loaded = TensorDictReplayBuffer(storage=LazyTensorStorage(5), batch_size=2)
    if before:
        loaded.extend(steps(50, before, set()))
    loaded.load_state_dict(whole.state_dict())
    index, valid = sequence_index(loaded.storage, torch.arange(len(loaded)), 3, cursor=loaded.writer._cursor)
    t = loaded.storage[:]["t"]
    for row in range(len(loaded)):
        assert t[index[row]][valid[row]].tolist() == following(int(t[row]), 3, written - 1, set())
    if len(loaded) < 5:
        unaided, _ = sequence_index(loaded.storage, torch.arange(len(loaded)), 3)
        assert torch.equal(unaided, index)


def test_a_storage_that_was_emptied_begins_again():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(5), batch_size=2)
    buffer.extend(steps(0, 8, set()))
    buffer.empty()
    with pytest.raises(RuntimeError, match=r"the storage is empty.*add items first"):
        sequence_index(buffer.storage, torch.tensor([0]), 2)
    buffer.extend(steps(20, 3, set()))
    _, valid = sequence_index(buffer.storage, torch.arange(3), 2)
    assert valid[:, 1].tolist() == [True, True, False]


@pytest.mark.parametrize("storage", STORAGES)
def test_no_first_steps_give_no_sequences(storage):
    none = torch.zeros(0, dtype=torch.long)
    buffer = ReplayBuffer(storage=storage(5), collate_fn=lambda rows: rows)
    for _ in range(2):
        index, valid = sequence_index(buffer.storage, none, 3, cursor=buffer.writer._cursor)
        assert index.shape == valid.shape == (0, 3)
        assert (index.dtype, valid.dtype) == (torch.long, torch.bool)
        buffer.extend(steps(0, 5, set()))
    two_dim = LazyTensorStorage(6, ndim=2)
    index, valid = sequence_index(two_dim, (none, none), 3)
    assert [part.shape for part in (*index, valid)] == [(0, 3)] * 3
    assert sequence_index(two_dim, none.reshape(0, 2), 3)[0].shape == (0, 3, 2)


def test_the_index_of_a_batch_of_two_dimensions_serves_as_that_of_its_sampler():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2), batch_size=30)
    buffer.extend(torch.stack([steps(100 * env, 5, {100 * env + 2}) for env in range(3)]))
    batch = buffer.sample()
    assert batch["index"].shape == (30, 2)
    cursor = buffer.writer._cursor
    index, valid = sequence_index(buffer.storage, batch["index"], 3, cursor=cursor)
    apart, valid_apart = sequence_index(buffer.storage, batch["index"].unbind(-1), 3, cursor=cursor)
    assert torch.equal(index, torch.stack(apart, -1))
    assert torch.equal(valid, valid_apart)
    t = buffer.storage[:]["t"][index.unbind(-1)]
    for row, start in enumerate(batch["t"].tolist()):
        env = start // 100
        assert t[row][valid[row]].tolist() == following(start, 3, 100 * env + 4, {100 * env + 2})


@pytest.mark.parametrize(
    ("ndim", "first", "message"),
    [
        (1, torch.zeros(2, 2).long(), r"first has the shapes \[\[2, 2\]\] for a storage with ndim=1: pass integers"),
        (1, (torch.zeros(2).long(),) * 2, r"first has the shapes \[\[2\], \[2\]\] for a storage with ndim=1"),
        (1, torch.tensor(1), r"first has the shapes \[\[\]\] for a storage with ndim=1"),
        (2, torch.zeros(3).long(), r"first has the shapes \[\[3\]\] for a storage with ndim=2: pass a tuple of 2"),
        (2, torch.zeros(3, 3).long(), r"first has the shapes \[\[3, 3\]\] for a storage with ndim=2"),
        (1, torch.zeros(2), "first has dtype torch.float32: pass integers"),
        (1, torch.ones(2).bool(), "first has dtype torch.bool: pass integers"),
    ],
)
def test_first_steps_that_do_not_fit_the_storage_are_refused(ndim, first, message):
    with pytest.raises(ValueError, match=message):
        sequence_index(LazyTensorStorage(6, ndim=ndim), first, 2)


@pytest.mark.parametrize("bad", [-1, 3, 5])
def test_a_first_step_that_was_not_written_is_refused(bad):
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    buffer.extend(steps(0, 3, set()))
    with pytest.raises(IndexError, match=rf"first step {bad} is outside the storage: pass steps in \[0, 3\)"):
        sequence_index(buffer.storage, torch.tensor([0, bad]), 2)


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
