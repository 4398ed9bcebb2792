"""The hindsight buffers, saved to files and states and loaded again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch
from hindsight_buffers import EACH, KINDS, frames_of, make, trajectories
from line_goals import assert_same

from torchrl_safety.data import HindsightPrioritizedReplayBuffer


@EACH
def test_a_saved_buffer_goes_on_as_the_one_that_was_not(kind, tmp_path):
    batch = frames_of(2, 40, end=0.1)
    buffer = make(kind, 60, num_envs=2, strategy="future", batch_size=4)
    for piece in batch[:, :25].split(5, dim=1):
        buffer.extend(piece)
        sample = buffer.sample()
        buffer.update_priority(sample["index"], torch.rand(4))
    buffer.save(tmp_path / "deep" / "buffer.pt")
    other = make(kind, 60, num_envs=2, seed=9, strategy="future", batch_size=4)
    other.load(tmp_path / "deep" / "buffer.pt")
    for each in (buffer, other):
        each.extend(batch[:, 25:])
    assert_same(other.all_experiences(), buffer.all_experiences())
    for _ in range(3):
        assert_same(other.sample(sequence_length=3, n_steps=2), buffer.sample(sequence_length=3, n_steps=2))


@EACH
def test_a_file_of_another_buffer_is_refused_and_changes_nothing(kind, tmp_path):
    buffer, batch = make(kind, 30), frames_of(1, 10)[0]
    buffer.extend(batch)
    buffer.save(tmp_path / "buffer.pt")
    other = make(kind, 31)
    other.extend(batch[:4])
    before = other.all_experiences()
    with pytest.raises(
        ValueError, match="capacity=30, this one has capacity=31; build it as the saved one was, and resize"
    ):
        other.load(tmp_path / "buffer.pt")
    assert_same(other.all_experiences(), before)
    with pytest.raises(FileNotFoundError):
        other.load(tmp_path / "none.pt")


@EACH
def test_a_folder_of_torchrl_holds_the_links_too(kind, tmp_path):
    buffer, batch = make(kind, 9), frames_of(1, 30, end=0.2)[0]
    buffer.extend(batch)
    buffer.dumps(tmp_path / "buffer")
    other = make(kind, 9)
    other.extend(batch[:7])
    other.loads(tmp_path / "buffer")
    follows = trajectories(batch.unsqueeze(0))
    assert_same(other.all_experiences(), buffer.all_experiences())
    lengths = set()
    for row in other.sample(100, sequence_length=3):
        numbers = row["frame"][row["valid"]].tolist()
        lengths.add(len(numbers))
        assert numbers == follows[numbers[0]][: len(numbers)]
    assert 3 in lengths


@EACH
def test_a_state_is_not_changed_by_later_writes(kind):
    buffer, batch = make(kind, 8), frames_of(1, 20, end=0.0)[0]
    buffer.extend(batch[:8])
    state, before = buffer.state_dict(), buffer.all_experiences()
    buffer.extend(batch[8:13])
    other = make(kind, 8)
    other.load_state_dict(state)
    assert_same(other.all_experiences(), before)


@EACH
def test_a_state_of_other_settings_or_of_the_other_buffer_is_refused_with_nothing_changed(kind):
    batch = frames_of(1, 10)[0]
    states = [make(kind, strategy="future").state_dict(), make(KINDS[1 - KINDS.index(kind)]).state_dict()]
    for state, name in zip(states, ("strategy", "kind")):
        buffer = make(kind)
        buffer.extend(batch)
        before = buffer.all_experiences()
        with pytest.raises(ValueError, match=f"the state is of a buffer with {name}="):
            buffer.load_state_dict(state)
        assert_same(buffer.all_experiences(), before)


SAVER = """
import sys
from hindsight_buffers import frames_of, make
from torchrl_safety.data import HindsightPrioritizedReplayBuffer
buffer = make(HindsightPrioritizedReplayBuffer, 20_000)
batch = frames_of(1, 4000, end=0.01)[0]
while True:
    buffer.extend(batch)
    buffer.save(sys.argv[1])
    print(len(buffer), flush=True)
"""


@pytest.mark.slow
def test_a_kill_while_saving_leaves_the_earlier_file_readable(tmp_path):
    path = tmp_path / "buffer.pt"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for wait in (0.0, 0.004, 0.02, 0.05):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(path)], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdout is not None
        while not process.stdout.readline().strip().isdigit():  # of what is told, the lengths after each save
            assert process.poll() is None
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        process.wait()
        buffer = make(HindsightPrioritizedReplayBuffer, 20_000)
        buffer.load(path)
        assert len(buffer) > 4000
        assert buffer.sample(5).batch_size == torch.Size([5])


def test_the_state_of_a_buffer_is_tensors_and_plain_values(tmp_path):
    buffer = make(HindsightPrioritizedReplayBuffer)
    buffer.extend(frames_of(1, 10)[0])
    torch.save(buffer.state_dict(), tmp_path / "state.pt")
    other = make(HindsightPrioritizedReplayBuffer)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_same(other.all_experiences(), buffer.all_experiences())
