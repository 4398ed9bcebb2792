"""Laws of NStepTransform, against a loop over plain Python lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nstep_frames import (
    SIGNALS,
    assert_same,
    buffer_with,
    expected_rows,
    frames,
    one_stream,
    stored,
    with_ends,
    written,
)
from torchrl.data import LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer

from torchrl_safety.data.nstep import NStepTransform


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
