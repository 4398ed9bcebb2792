import pytest
import torch

from torchrl_safety.data.item_records import _LATEST, ItemRecords


def records(capacity=4, **settings):
    return ItemRecords(capacity, **{"forgets_evicted": False, "device": torch.device("cpu"), **settings})


def test_times_that_no_longer_fit_in_four_bytes_still_tell_old_from_new():
    known = records()
    known.time = _LATEST - 1
    known.write(torch.tensor([0]))  # the last time that fits
    before = known.time
    known.write(torch.tensor([1]))
    between = known.time
    known.write(torch.tensor([2]))
    assert between > 2**31 - 1
    slots = torch.arange(4)
    for stamp, expected in (
        (before - 1, [False, False, False, True]),
        (before, [True, False, False, True]),
        (between, [True, True, False, True]),
        (known.time, [True, True, True, True]),
    ):
        assert known.is_fresh(slots, torch.tensor(stamp)).tolist()[:3] == expected[:3]
    loaded = records()
    loaded.load_state_dict(known.state_dict())
    assert (
        loaded.is_fresh(slots, torch.tensor(between)).tolist() == known.is_fresh(slots, torch.tensor(between)).tolist()
    )


@pytest.mark.parametrize("forgets_evicted", [False, True])
def test_a_default_priority_is_not_mistaken_for_an_update(forgets_evicted):
    known = records(forgets_evicted=forgets_evicted)
    known.write_run(slice(0, 4))
    known.update(torch.tensor([1]), torch.tensor([0.5], dtype=torch.float64), None)
    assert known.default_priority().item() == 0.5
    known.update(torch.tensor([2]), torch.tensor([1.0], dtype=torch.float64), None)  # what it has already
    assert known.default_priority().item() == 0.5
    assert known.priorities().tolist() == [1.0, 0.5, 1.0, 1.0]
    known.update(torch.tensor([2]), torch.tensor([1.5], dtype=torch.float64), None)
    assert known.default_priority().item() == 1.5


def test_moved_records_are_the_same():
    known = records(forgets_evicted=True)
    known.write(torch.tensor([3, 1]))
    known.update(torch.tensor([3, 1]), torch.tensor([2.0, 6.0], dtype=torch.float64), None)
    moved = known.to(torch.device("cpu"))
    assert moved.priorities().tolist() == [-1.0, 6.0, -1.0, 2.0]
    assert (moved.default_priority().item(), moved.time) == (6.0, 1)


@pytest.mark.parametrize("forgets_evicted", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_an_update_to_zero_is_an_update(forgets_evicted, rows):
    known = records(8, forgets_evicted=forgets_evicted)
    known.write_run(slice(0, 4))
    assert known.default_priority().item() == 1.0
    known.update(torch.arange(4), torch.zeros(4, dtype=torch.float64), None)
    assert known.default_priority().item() == 0.0
    new = slice(4, 4 + rows)
    assert known.write_run(new) == 0.0
    assert known.priorities().tolist() == [0.0] * (4 + rows) + [-1.0] * (4 - rows)
    # What a buffer hands back for its new item is no update of it.
    known.update(torch.tensor([4]), torch.zeros(1, dtype=torch.float64), None)
    assert known.priorities(torch.tensor([4])).tolist() == [0.0]
    loaded = records(8, forgets_evicted=forgets_evicted)
    loaded.load_state_dict(known.state_dict())
    for each in (known, loaded):
        each.write_run(slice(0, 4))  # the items that were updated are gone
        assert each.default_priority().item() == (1.0 if forgets_evicted else 0.0)
        each.update(torch.tensor([5]), torch.tensor([0.25], dtype=torch.float64), None)
        assert each.default_priority().item() == 0.25
