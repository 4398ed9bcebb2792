"""Laws of NStepTransform, against a loop over plain Python lists."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict
from torchrl.data import LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.envs.transforms import CatTensors, Compose, DoubleToFloat, Transform

from torchrl_safety.data.nstep import NStepTransform

SIGNALS = ("reward", "safety_margin")


def frames(num_envs, length, seed=0, end=0.25):
    """Random frames `[N, T]` whose observation is a number that no other frame has."""
    rng = torch.Generator().manual_seed(seed)
    number = torch.arange(float(num_envs * length)).reshape(num_envs, length, 1)
    terminated = torch.rand(number.shape, generator=rng) < end / 2
    truncated = torch.rand(number.shape, generator=rng) < end / 2
    return with_ends(number, terminated, truncated, rng)


def with_ends(number, terminated, truncated, rng=None):
    noise = functools.partial(torch.randn, number.shape, generator=rng or torch.Generator().manual_seed(0))
    flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
    root = {"observation": number, "action": number.squeeze(-1).long(), "done": torch.zeros_like(terminated)}
    following = {"observation": number + 0.5, "reward": noise(), "safety_margin": noise(), **flags}
    return TensorDict({**root, "next": following}, number.shape[:-1])


def one_stream(length, *, terminated=(), truncated=()):
    """Frames `[T]` that end at the given steps."""
    marks = {"terminated": terminated, "truncated": truncated}
    flags = {name: torch.tensor([[t in steps] for t in range(length)]) for name, steps in marks.items()}
    return with_ends(torch.arange(float(length)).unsqueeze(-1), **flags)


def expected_rows(batch, n_steps, signals=SIGNALS):
    """The rows of frames `[N, T]`, one window at a time: `(last step, env, first step, row)`, in order."""
    num_envs, length = batch.batch_size
    rows = []
    for env in range(num_envs):
        for start in range(length):
            window = [start]
            while len(window) < n_steps and window[-1] < length and not batch["next", "done"][env, window[-1]]:
                window.append(window[-1] + 1)
            if window[-1] >= length:
                continue
            row = batch[env, start].clone()
            row["next"] = batch["next"][env, window[-1]].clone()
            padding = n_steps - len(window)
            for name in (*signals, "terminated"):
                values = [batch["next", name][env, t] for t in window]
                row["steps", name] = torch.stack(values + [torch.zeros_like(values[0])] * padding)
            row["steps", "valid"] = torch.tensor([[True]] * len(window) + [[False]] * padding)
            rows.append((window[-1], env, start, row))
    rows.sort(key=lambda entry: entry[:3])
    return torch.stack([entry[-1] for entry in rows]) if rows else None


def written(transform, pieces):
    """All rows that come out for these pieces, `[M]`."""
    rows = [row for row in map(transform.inv, pieces) if row is not None]
    return torch.cat(rows) if rows else None


def assert_same(rows, expected):
    assert (rows is None) == (expected is None)
    if expected is None:
        return
    assert rows.batch_size == expected.batch_size
    assert set(rows.keys(True, True)) == set(expected.keys(True, True))
    for key, value in expected.items(True, True):
        torch.testing.assert_close(rows[key], value, rtol=0, atol=0, msg=lambda text, key=key: f"{key}: {text}")


def buffer_with(*transforms, cls=TensorDictReplayBuffer, storage=LazyTensorStorage):
    rb = cls(storage=storage(1000), batch_size=8)
    for transform in transforms:
        rb.append_transform(transform)
    return rb


def stored(rb):
    rows = rb[:]
    return rows.exclude("index") if len(rb) else None


@pytest.mark.parametrize("n_steps", [1, 2, 3, 5])
@pytest.mark.parametrize("num_envs", [1, 2, 7])
@pytest.mark.parametrize("end", [0.0, 0.1, 0.6])
def test_rows_equal_those_of_a_loop_over_windows(n_steps, num_envs, end):
    """MATH §5: windows never cross the end of an episode or enter another environment's data."""
    batch = frames(num_envs, 23, seed=n_steps, end=end)
    for pieces in ([batch], batch.unbind(1), batch.split(4, 1)):
        transform = NStepTransform(n_steps, signals=SIGNALS, num_envs=num_envs)
        assert_same(written(transform, pieces), expected_rows(batch, n_steps))


@pytest.mark.parametrize("n_steps", [1, 3])
def test_one_stream_is_the_same_as_one_env(n_steps):
    batch = frames(1, 30, seed=5)
    for pieces in ([batch[0]], batch[0].unbind(0), batch[0].split(7)):
        transform = NStepTransform(n_steps, signals=SIGNALS)
        assert_same(written(transform, pieces), expected_rows(batch, n_steps))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(0, 2**16))
def test_rows_do_not_depend_on_how_the_frames_are_chunked(n_steps, num_envs, lengths, seed):
    batch = frames(num_envs, sum(lengths), seed=seed, end=0.3)
    pieces = batch.split(lengths, 1)
    pieces = [piece[:, 0] if piece.shape[1] == 1 else piece for piece in pieces]
    transform = NStepTransform(n_steps, signals=SIGNALS, num_envs=num_envs)
    assert_same(written(transform, pieces), expected_rows(batch, n_steps))


@pytest.mark.parametrize("kind", ["terminated", "truncated"])
@pytest.mark.parametrize("n_steps", [1, 2, 3, 8])
def test_every_frame_is_emitted_once_wherever_the_episode_ends(kind, n_steps):
    for end in range(6):
        batch = one_stream(6, **{kind: [end, 5]})
        for pieces in ([batch], batch.unbind(0)):
            rows = written(NStepTransform(n_steps, signals=SIGNALS), pieces)
            assert sorted(rows["observation"].flatten().tolist()) == [0, 1, 2, 3, 4, 5]
            same_episode = (rows["observation"] <= end) == (rows["next", "observation"] <= end + 0.5)
            assert same_episode.all()


def test_the_tail_is_flushed_at_the_end_of_an_episode():
    batch = one_stream(12, truncated=[11])
    rb = buffer_with(NStepTransform(3))
    assert len(rb.extend(batch[:11])) == 9
    assert len(rb.extend(batch[11:])) == 3
    assert rb[:]["steps", "valid"].sum(dim=(1, 2)).tolist() == [3] * 10 + [2, 1]


def test_terminated_moves_with_the_window_to_its_last_step():
    rows = NStepTransform(3).inv(one_stream(5, terminated=[4]))
    assert rows["next", "terminated"].flatten().tolist() == [False, False, True, True, True]
    assert rows["next", "observation"].flatten().tolist() == [2.5, 3.5, 4.5, 4.5, 4.5]
    assert rows["steps", "terminated"].squeeze(-1).int().tolist() == [
        [0, 0, 0],
        [0, 0, 0],
        [0, 0, 1],
        [0, 1, 0],
        [1, 0, 0],
    ]


def test_truncation_ends_the_window_without_terminating_it():
    rows = NStepTransform(4).inv(one_stream(4, truncated=[1]))
    assert rows["next", "truncated"].flatten().tolist() == [True, True]
    assert not rows["next", "terminated"].any()
    assert not rows["steps", "terminated"].any()
    assert rows["next", "done"].all()


def test_step_entries_keep_a_trailing_one_and_rows_no_step_count():
    rows = NStepTransform(3, signals=SIGNALS, num_envs=4).inv(frames(4, 10))
    for name in (*SIGNALS, "terminated", "valid"):
        assert rows["steps", name].shape == (len(rows), 3, 1)
    assert rows["steps", "valid"].dtype == rows["steps", "terminated"].dtype == torch.bool
    assert set(rows.keys()) - {"steps"} == {"observation", "action", "done", "next"}


def test_rows_come_by_time_then_env_then_age():
    number = torch.arange(6.0).reshape(2, 3, 1)
    ends = torch.zeros(2, 3, 1, dtype=torch.bool)
    ends[1, 1] = ends[:, 2] = True
    rows = NStepTransform(3, num_envs=2).inv(with_ends(number, ends, torch.zeros_like(ends)))
    assert rows["observation"].flatten().tolist() == [3, 4, 0, 1, 2, 5]


def test_one_step_windows_leave_at_once():
    transform = NStepTransform(1, num_envs=3)
    batch = frames(3, 4)
    for step in batch.unbind(1):
        rows = transform.inv(step)
        assert_same(rows.exclude("steps"), step)
        assert torch.equal(rows["steps", "reward"][:, 0], step["next", "reward"])


def test_a_signal_may_be_any_entry_of_next_with_its_own_dtype_and_shape():
    batch = frames(2, 9, seed=3)
    image = torch.randint(0, 255, (2, 9, 4, 4, 3), dtype=torch.uint8)
    batch["next", "camera", "image"] = image
    batch["next", "reward"] = batch["next", "reward"].double()
    batch["next", "reward"][0, 0] = torch.nan
    signals = ("observation", ("camera", "image"), "reward")
    rows = NStepTransform(3, signals=signals, num_envs=2).inv(batch)
    expected = expected_rows(batch.exclude(("next", "camera")), 3, signals=("observation", "reward"))
    for name in ("observation", "reward"):
        torch.testing.assert_close(rows["steps", name], expected["steps", name], rtol=0, atol=0, equal_nan=True)
    assert rows["steps", "camera", "image"].shape == (len(rows), 3, 4, 4, 3)
    assert rows["steps", "camera", "image"].dtype == torch.uint8
    env, step = divmod(int(rows["observation"][0]), 9)
    assert torch.equal(rows["steps", "camera", "image"][0, 0], image[env, step])


def test_padding_is_zero_even_where_the_next_episode_holds_nan():
    batch = one_stream(4, terminated=[1, 3])
    batch["next", "reward"][2:] = torch.nan
    rows = NStepTransform(4).inv(batch)
    assert torch.equal(rows["steps", "reward"][0, 2:], torch.zeros(2, 1))


def test_frames_without_a_done_or_a_truncated_entry_end_where_the_other_says():
    batch = one_stream(6, terminated=[2], truncated=[4])
    expected = NStepTransform(3).inv(batch)
    for name in ("done", "truncated"):
        rows = NStepTransform(3).inv(batch.exclude(("next", name)))
        assert_same(rows, expected.exclude(("next", name)))


def test_sampling_changes_nothing():
    rb = buffer_with(NStepTransform(3, num_envs=2))
    rb.extend(frames(2, 20))
    sample = rb.sample()
    assert_same(sample.exclude("index"), rb[sample["index"]].exclude("index"))


def test_overwriting_what_was_written_changes_no_later_row():
    batch = frames(2, 12, seed=1)
    transform = NStepTransform(3, signals=SIGNALS, num_envs=2)
    scratch, rows = batch[:, 0].clone(), []
    for step in batch.unbind(1):
        scratch.update_(step)
        rows.append(transform.inv(scratch))
    rows = torch.cat([row for row in rows if row is not None])
    assert_same(rows, expected_rows(batch, 3))


def test_overwriting_what_came_out_changes_no_later_row():
    batch = frames(2, 12, seed=1)
    transform = NStepTransform(3, signals=SIGNALS, num_envs=2)
    rows = []
    for step in batch.unbind(1):
        out = transform.inv(step)
        if out is not None:
            rows.append(out.clone())
            out.apply_(lambda value: value.zero_())
    assert_same(torch.cat(rows), expected_rows(batch, 3))


def test_a_long_chunk_is_not_kept_alive():
    transform = NStepTransform(3, num_envs=2)
    transform.inv(frames(2, 500))
    pending = transform.get_extra_state()["pending"]
    assert all(value.untyped_storage().nbytes() <= 2 * 2 * 8 for value in pending["root"].values())


def test_rows_carry_no_graph():
    batch = frames(2, 6)
    batch["action_value"] = torch.randn(2, 6, 3, requires_grad=True) * 2
    assert not NStepTransform(2, num_envs=2).inv(batch)["action_value"].requires_grad


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_add_stores_what_extend_stores(cls, storage):
    batch = frames(1, 20, seed=2)[0]
    rb = buffer_with(NStepTransform(3, signals=SIGNALS), cls=cls, storage=storage)
    counts = [len(rb.add(frame)) for frame in batch.unbind(0)]
    assert max(counts) == 3
    assert_same(stored(rb), expected_rows(batch.unsqueeze(0), 3))


def test_add_takes_one_step_of_every_env():
    batch = frames(3, 15, seed=2)
    rb = buffer_with(NStepTransform(4, signals=SIGNALS, num_envs=3))
    for step in batch.unbind(1):
        rb.add(step)
    assert_same(stored(rb), expected_rows(batch, 4))


def test_add_and_extend_may_alternate():
    batch = frames(1, 20, seed=9)[0]
    rb = buffer_with(NStepTransform(3, signals=SIGNALS))
    for index, piece in enumerate(batch.split([1, 5, 1, 1, 4, 1, 7])):
        rb.add(piece[0]) if index % 2 == 0 and len(piece) == 1 else rb.extend(piece)
    assert_same(stored(rb), expected_rows(batch.unsqueeze(0), 3))


def test_extend_stores_nothing_and_returns_no_index_while_windows_fill():
    rb = buffer_with(NStepTransform(3, num_envs=2))
    batch = frames(2, 3, end=0.0)
    assert len(rb.extend(batch[:, :2])) == len(rb.add(batch[:, 1])) - 2 == 0
    rb.empty()
    assert len(rb) == 0
    assert len(rb.extend(batch[:, :0])) == 0


def attach_appended(transform):
    return buffer_with(transform)


def attach_inserted(transform):
    return buffer_with().insert_transform(0, transform)


def attach_constructed(transform):
    return TensorDictReplayBuffer(storage=LazyTensorStorage(1000), transform=transform)


def attach_composed(transform):
    return TensorDictReplayBuffer(storage=LazyTensorStorage(1000), transform=Compose(Compose(transform)))


def attach_late(transform):
    return TensorDictReplayBuffer(storage=LazyTensorStorage(1000), transform_factory=lambda: transform)


def attach_behind_the_buffers_back(transform):
    rb = buffer_with()
    rb.transform.append(transform)
    return rb


ATTACHMENTS = (
    attach_appended,
    attach_inserted,
    attach_constructed,
    attach_composed,
    attach_late,
    attach_behind_the_buffers_back,
)


@pytest.mark.parametrize("attach", ATTACHMENTS)
@pytest.mark.parametrize("before", [1, 2, 10])
def test_nothing_stale_survives_empty(attach, before):
    batch = frames(2, 20, seed=4, end=0.1)
    rb = attach(NStepTransform(3, signals=SIGNALS, num_envs=2))
    rb.extend(batch[:, :before])
    rb.empty()
    rb.extend(batch[:, 10:])
    assert_same(stored(rb), expected_rows(batch[:, 10:], 3))
    rb.empty(empty_write_count=False)
    assert rb.write_count > 0
    rb.extend(batch[:, 5:])
    assert_same(stored(rb), expected_rows(batch[:, 5:], 3))


@pytest.mark.parametrize("attach", ATTACHMENTS)
def test_add_works_however_the_transform_was_attached(attach):
    batch = one_stream(7, terminated=[0, 4], truncated=[6])
    rb = attach(NStepTransform(3, signals=SIGNALS))
    for frame in batch.unbind(0):
        rb.add(frame)
    assert_same(stored(rb), expected_rows(batch.unsqueeze(0), 3))


def test_clear_forgets_the_frames_before_a_reset():
    batch = frames(2, 12, seed=4)
    transform = NStepTransform(3, signals=SIGNALS, num_envs=2)
    transform.inv(batch[:, :5])
    transform.clear()
    assert_same(written(transform, [batch[:, 5:]]), expected_rows(batch[:, 5:], 3))


def restored_by_state_dict(rb, fresh, tmp_path):
    torch.save(rb.state_dict(), tmp_path / "rb.pt")
    fresh.load_state_dict(torch.load(tmp_path / "rb.pt", weights_only=True))


def restored_by_dumps(rb, fresh, tmp_path):
    rb.dumps(tmp_path / "rb")
    fresh.loads(tmp_path / "rb")


@pytest.mark.parametrize("restore", [restored_by_state_dict, restored_by_dumps])
@pytest.mark.parametrize("cut", [1, 2, 9])
def test_a_checkpoint_in_the_middle_of_an_episode_continues_identically(restore, cut, tmp_path):
    batch = frames(2, 20, seed=6, end=0.05)
    make = functools.partial(NStepTransform, 4, signals=SIGNALS, num_envs=2)
    rb, fresh = buffer_with(make()), buffer_with(make())
    if restore is restored_by_dumps:
        rb.extend(frames(2, 6, seed=7, end=0.9))
        rb.transform[0].clear()
    before = len(rb)
    rb.extend(batch[:, :cut])
    restore(rb, fresh, tmp_path)
    rb.extend(batch[:, cut : cut + 1])
    for step in batch[:, cut:].unbind(1):
        fresh.extend(step)
    assert_same(stored(fresh)[before:], expected_rows(batch, 4))


def test_add_after_a_resume_may_end_the_episode(tmp_path):
    batch = one_stream(3, terminated=[2])
    rb, fresh = buffer_with(NStepTransform(5, signals=SIGNALS)), buffer_with(NStepTransform(5, signals=SIGNALS))
    rb.extend(batch[:2])
    restored_by_state_dict(rb, fresh, tmp_path)
    assert len(fresh.add(batch[2])) == 3
    assert_same(stored(fresh), expected_rows(batch.unsqueeze(0), 5))


def test_a_checkpoint_is_not_changed_by_later_writes():
    batch = frames(2, 8, seed=8)
    transform = NStepTransform(3, num_envs=2)
    transform.inv(batch[:, :4])
    state = transform.state_dict()
    kept = copy.deepcopy(state)
    transform.inv(batch[:, 4:])
    pending, expected = state["_extra_state"]["pending"], kept["_extra_state"]["pending"]
    assert all(torch.equal(pending["root"][key], value) for key, value in expected["root"].items())


@pytest.mark.parametrize(
    "other", [NStepTransform(2), NStepTransform(3, signals=("cost",)), NStepTransform(3, num_envs=2)]
)
def test_a_checkpoint_of_other_settings_is_refused(other):
    with pytest.raises(ValueError, match=r"The checkpoint was written with (n_steps|signals|num_envs)=.*build it with"):
        other.load_state_dict(NStepTransform(3).state_dict())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_a_copy_of_the_buffer_has_pending_frames_of_its_own(duplicate):
    batch = frames(2, 12, seed=11, end=0.1)
    rb = buffer_with(NStepTransform(3, signals=SIGNALS, num_envs=2))
    rb.extend(batch[:, :5])
    twin = duplicate(rb)
    twin.empty()
    twin.extend(batch[:, 3:])
    rb.extend(batch[:, 5:])
    assert_same(stored(rb), expected_rows(batch, 3))
    assert_same(stored(twin), expected_rows(batch[:, 3:], 3))


def test_other_transforms_see_frames_before_it_and_rows_when_sampling():
    class Doubled(Transform):
        def _inv_call(self, tensordict):
            return tensordict.set(("next", "reward"), tensordict["next", "reward"] * 2)

    batch = frames(2, 15, seed=12)
    joint = CatTensors(["observation", ("next", "observation")], "both", del_keys=False, sort=False)
    rb = buffer_with(NStepTransform(3, signals=SIGNALS, num_envs=2), Doubled(), joint)
    for step in batch.unbind(1):
        rb.extend(step)
    batch["next", "reward"] = batch["next", "reward"] * 2
    assert_same(rb[:].exclude("index", "both"), expected_rows(batch, 3))
    sample = rb.sample()
    assert torch.equal(sample["both"], torch.cat([sample["observation"], sample["next", "observation"]], -1))


def test_a_transform_that_would_invert_missing_rows_is_refused():
    rb = buffer_with(DoubleToFloat(in_keys_inv=["action"]), NStepTransform(3, num_envs=2))
    with pytest.raises(ValueError, match=r"DoubleToFloat stands before NStepTransform.*insert_transform\(0"):
        rb.extend(frames(2, 1, end=0.0))


def test_a_buffer_without_it_is_as_before_once_it_is_taken_out():
    rb = buffer_with(NStepTransform(3))
    rb.transform.pop()
    frame = frames(1, 1)[0, 0]
    assert int(rb.add(frame)) == 0
    assert_same(rb[:].exclude("index")[0], frame)
    rb.empty()
    assert len(rb) == 0


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
