"""What NStepTransform refuses, and that it changes nothing then."""

from __future__ import annotations

import pytest
import torch
from nstep_frames import SIGNALS, assert_same, buffer_with, expected_rows, frames, one_stream
from tensordict import NonTensorData
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

from torchrl_safety.data.nstep import NStepTransform


def test_a_buffer_shared_between_processes_is_refused():
    with pytest.raises(RuntimeError, match="NStepTransform keeps replay-buffer write state"):
        TensorDictReplayBuffer(storage=LazyTensorStorage(10), transform=NStepTransform(3), shared=True)


def test_a_storage_of_two_batch_dimensions_is_refused():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100, ndim=2), transform=NStepTransform(3, num_envs=2))
    with pytest.raises(ValueError, match=r"storage has 2 batch dimensions; use a storage with ndim=1"):
        rb.extend(frames(2, 5))


@pytest.mark.parametrize(
    ("num_envs", "shape", "message"),
    [
        (None, (2, 5), r"batch shape \[2, 5\].*takes one stream.*set num_envs=2"),
        (2, (), r"batch shape \[\].*takes \[2\]"),
        (2, (5,), r"batch shape \[5\].*takes \[2\].*reshape"),
        (2, (5, 2), r"batch shape \[5, 2\].*\[2, T\]"),
        (2, (2, 5, 1), r"batch shape \[2, 5, 1\].*\[2, T\]"),
    ],
)
def test_another_layout_is_refused_with_the_shapes(num_envs, shape, message):
    batch = frames(1, 1)[0, 0].expand(shape)
    with pytest.raises(ValueError, match=message):
        NStepTransform(3, num_envs=num_envs).inv(batch)


def test_add_of_several_steps_is_refused():
    rb = buffer_with(NStepTransform(3))
    with pytest.raises(ValueError, match=r"one step, batch shape \[\].*got \[5\].*rb\.extend"):
        rb.add(frames(1, 5)[0])


def test_a_missing_signal_is_named_with_the_keys_that_are_there():
    with pytest.raises(KeyError, match=r"'cost' is missing.*done.*reward.*terminated.*Let the env write"):
        NStepTransform(3, signals=("cost",), num_envs=2).inv(frames(2, 5))


def test_missing_end_flags_are_named():
    for names in (["terminated"], ["done", "truncated"]):
        batch = frames(2, 5).exclude(*[("next", name) for name in names])
        with pytest.raises(KeyError, match=r"needs \('next', 'terminated'\).*'next' holds.*reward"):
            NStepTransform(3, num_envs=2).inv(batch)


@pytest.mark.parametrize("name", ["reward", "done", "terminated"])
def test_entries_without_a_feature_dimension_are_refused(name):
    batch = frames(4, 5)
    batch["next", name] = batch["next", name].squeeze(-1)
    with pytest.raises(ValueError, match=rf"{name}.*unsqueeze.*\[\*B, 1\]"):
        NStepTransform(3, num_envs=4).inv(batch)


def test_a_refused_write_changes_nothing():
    batch = frames(2, 10, seed=13)
    transform = NStepTransform(3, signals=SIGNALS, num_envs=2)
    rows = [transform.inv(batch[:, :4])]
    with pytest.raises(KeyError, match=r"differ from those before them in the keys \['extra'\]"):
        transform.inv(batch[:, 4:].clone().set("extra", torch.zeros(2, 6, 1)))
    with pytest.raises(ValueError, match=r"'observation' changed from shape \[2, 1\].*to \[2, 3\].*rb\.empty"):
        transform.inv(batch[:, 4:].clone().set("observation", torch.zeros(2, 6, 3)))
    with pytest.raises(ValueError, match=r"'observation' changed from .*float32 to .*float64"):
        transform.inv(batch[:, 4:].clone().set("observation", torch.zeros(2, 6, 1).double()))
    rows.append(transform.inv(batch[:, 4:]))
    assert_same(torch.cat(rows), expected_rows(batch, 3))


def test_entries_that_are_no_tensors_are_named():
    batch = frames(2, 5).set("task", NonTensorData("push", batch_size=[2, 5]))
    with pytest.raises(TypeError, match=r"'task' is a NonTensor.*Exclude the entry"):
        NStepTransform(3, num_envs=2).inv(batch)


def test_data_that_is_no_tensordict_is_named():
    with pytest.raises(TypeError, match="takes frames as a TensorDict, got a Tensor"):
        ReplayBuffer(storage=LazyTensorStorage(8), transform=NStepTransform(3)).extend(torch.zeros(4))


def test_it_is_applied_once():
    rows = NStepTransform(3).inv(one_stream(6, terminated=[5]))
    with pytest.raises(ValueError, match='hold "steps" entries already'):
        NStepTransform(3).inv(rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_steps": 0}, r"n_steps must be an integer of at least 1, got 0"),
        ({"n_steps": 2.0}, r"n_steps must be .* got 2\.0"),
        ({"n_steps": True}, r"n_steps must be .* got True"),
        ({"n_steps": 3, "num_envs": 0}, r"num_envs must be .* got 0; None means one stream"),
        ({"n_steps": 3, "signals": "reward"}, r"write signals=\('reward',\)"),
        ({"n_steps": 3, "signals": ("valid",)}, r"'valid', which NStepTransform writes itself"),
        ({"n_steps": 3, "signals": ("reward", "reward")}, r"twice"),
        ({"n_steps": 3, "signals": (("a", 1),)}, r"strings"),
    ],
)
def test_settings_are_checked_when_it_is_built(arguments, message):
    with pytest.raises(ValueError, match=message):
        NStepTransform(**arguments)
