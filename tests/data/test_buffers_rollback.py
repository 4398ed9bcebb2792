"""The fuzz of the buffers with files that are loaded long after they were saved."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import pytest
from hypothesis.stateful import precondition, rule
from test_buffers_fuzz import Buffers, run

MODEL = ("items", "slots", "cursor", "episode", "frames_open", "highest", "draws")


class Rollback(Buffers):
    """A buffer that may go back to what it was at its last save, as long as its capacity is that of the file."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.file = Path(self.folder.name) / "buffer.pt"
        self.saved = None
        self.frames_open = []

    def teardown(self):
        self.folder.cleanup()

    @rule()
    def save(self):
        self.buffer.save(self.file)
        self.saved = self.capacity, copy.deepcopy({name: getattr(self, name) for name in MODEL})

    @precondition(lambda self: self.saved is not None)
    @rule()
    def load(self):
        capacity, model = self.saved
        if capacity != self.capacity:
            with pytest.raises(ValueError, match=f"capacity={capacity}, this one has capacity={self.capacity}"):
                self.buffer.load(self.file)
            return
        self.buffer.load(self.file)
        vars(self).update(copy.deepcopy(model))


def test_a_buffer_agrees_with_a_plain_list_also_after_it_went_back_to_a_file():
    run(Rollback, 5, 25)


@pytest.mark.slow
def test_a_buffer_agrees_with_a_plain_list_over_ten_thousand_steps_with_files():
    run(Rollback, 100, 100)
