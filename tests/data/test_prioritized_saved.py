"""A prioritized sampler that was saved, loaded, copied or moved goes on as it would have."""

import copy
import io
import pickle

import pytest
import torch
from prioritized_buffers import items, leaf_of, leaves, make
from torchrl.data import LazyTensorStorage

from torchrl_safety.data import prioritized
from torchrl_safety.data.prioritized import PrioritizedSampler


def lived_in(**settings):
    settings = {"beta_annealing_steps": 40, "max_priority": "buffer", **settings}
    buffer = make(50, 0, storage=LazyTensorStorage, **settings)
    continue_with(buffer, 20)
    return buffer


def continue_with(buffer, rounds):
    record = []
    for i in range(rounds):
        buffer.extend(items(7, 7 * i))
        batch = buffer.sample()
        batch["td_error"] = (batch["x"] * 0.37).sin().abs()
        record.append(torch.cat([batch["index"].float(), batch["priority_weight"]]))
        buffer.update_tensordict_priority(batch)
    return torch.stack(record)


def through_the_sampler(buffer, other, path):
    torch.save({"sampler": buffer.sampler.state_dict(), "buffer": buffer.state_dict()}, path / "state.pt")
    loaded = torch.load(path / "state.pt", weights_only=True)
    other.load_state_dict(loaded["buffer"])
    other.sampler.load_state_dict(loaded["sampler"])


def through_the_buffer(buffer, other, path):
    stream = io.BytesIO()
    torch.save(buffer.state_dict(), stream)
    stream.seek(0)
    other.load_state_dict(torch.load(stream, weights_only=True))


def through_a_folder(buffer, other, path):
    buffer.dumps(path / "folder")
    other.loads(path / "folder")


@pytest.mark.parametrize("travel", [through_the_sampler, through_the_buffer, through_a_folder])
@pytest.mark.parametrize("max_priority", ["ever", "buffer"])
def test_a_loaded_sampler_continues_the_very_same_draws(travel, max_priority, tmp_path):
    """MATH §5: β, k and the generator are in the state."""
    buffer = lived_in(max_priority=max_priority)
    other = make(50, 0, beta_annealing_steps=40, max_priority=max_priority, generator=torch.Generator().manual_seed(99))
    travel(buffer, other, tmp_path)
    assert other.sampler.beta == buffer.sampler.beta == pytest.approx(0.4 + 20 * 0.6 / 40)
    assert torch.equal(continue_with(other, 30), continue_with(buffer, 30))


def test_a_loaded_sampler_knows_which_slots_were_rewritten_since_an_older_batch(tmp_path):
    buffer, other = make(4, batch_size=200), make(4, 0, batch_size=200)
    buffer.extend(items(1))
    older = buffer.sample()
    buffer.extend(items(1))  # slot 1, before the save
    through_the_buffer(buffer, other, tmp_path)
    newer = other.sample()
    other.extend(items(1))  # slot 2, after the load
    for batch, priority, expected in ((older, 9.0, (9, 1, 1, 9)), (newer, 7.0, (7, 7, 1, 7))):
        stamp = batch["priority_stamp"]
        other.sampler.update_priority(batch["index"].clone(), priority, generation=stamp, storage=other.storage)
        torch.testing.assert_close(leaves(other), torch.tensor([leaf_of(p) for p in expected]).double())


def test_a_loaded_sampler_has_the_beta_that_was_set_by_hand(tmp_path):
    buffer, other = make(4), make(4, 0)
    buffer.sampler.beta = 0.9
    through_the_buffer(buffer, other, tmp_path)
    assert other.sampler.beta == 0.9


def test_a_copied_sampler_continues_the_very_same_draws_on_its_own():
    buffer = lived_in()
    other = copy.deepcopy(buffer.sampler)
    ours, _ = buffer.sampler.sample(buffer.storage, 100)
    theirs, _ = other.sample(buffer.storage, 100)
    assert torch.equal(ours, theirs)
    other.update_priority(torch.arange(50), 0.0)
    assert not torch.equal(other._tree.total, buffer.sampler._tree.total)


def test_a_state_of_other_settings_is_refused():
    state = make(4).sampler.state_dict()
    with pytest.raises(ValueError, match=r"saved with eps=1e-06, this sampler has eps=0\.5"):
        PrioritizedSampler(4, eps=0.5).load_state_dict(state)
    with pytest.raises(ValueError, match="saved with max_priority=ever, this sampler has max_priority=buffer"):
        PrioritizedSampler(4, max_priority="buffer").load_state_dict(state)
    with pytest.raises(ValueError, match="saved with variant=proportional, this sampler has variant=rank"):
        PrioritizedSampler(4, variant="rank").load_state_dict(state)
    with pytest.raises(ValueError, match="capacity 4, this one has capacity 5"):
        PrioritizedSampler(5).load_state_dict(state)


@pytest.mark.parametrize("max_priority", ["ever", "buffer"])
def test_the_tree_follows_its_storage_to_another_device(max_priority):
    class Elsewhere:
        device, ndim = "meta", 1

        def __len__(self):
            return 10

    sampler = make(10, max_priority=max_priority).sampler
    nothing = torch.zeros(0)
    sampler.update_priority(nothing.long(), nothing, storage=Elsewhere())
    assert {sampler.device.type, sampler._records.default_priority().device.type} == {"meta"}
    kept = PrioritizedSampler(10, device="cpu")
    kept.update_priority(nothing.long(), nothing, storage=Elsewhere())
    assert kept.device.type == "cpu"


def test_a_sampler_is_not_handed_to_another_process(monkeypatch):
    sampler = make(4).sampler
    assert "alpha=0.6" in repr(pickle.loads(pickle.dumps(sampler)))
    monkeypatch.setattr(prioritized, "get_spawning_popen", lambda: object())
    with pytest.raises(RuntimeError, match="cannot be shared between processes"):
        pickle.dumps(sampler)
