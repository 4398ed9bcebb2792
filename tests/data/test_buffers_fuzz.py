"""Random interleavings of everything a buffer can do, beside a plain list that does the same."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
from hindsight_buffers import frames_of, make
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from line_goals import relabelled

from torchrl_safety.data import HindsightPrioritizedReplayBuffer

ALPHA, BETA, EPS, ANNEALING = 0.7, 0.3, 0.01, 50


class Item:
    """One item of the plain list."""

    def __init__(self, frame, goal, priority, follows):
        self.number, self.goal, self.priority, self.follows = int(frame["frame"]), float(goal), priority, follows
        self.reward, self.done = float(frame["next", "reward"]), bool(frame["next", "done"])


class Buffers(RuleBasedStateMachine):
    """A buffer of hindsight with the final goal, for one stream of frames, and the list `items`, oldest first."""

    @initialize(capacity=st.integers(1, 30), seed=st.integers(0, 1000))
    def start(self, capacity, seed):
        self.capacity, self.items, self.episode, self.highest, self.draws, self.written = capacity, [], [], None, 0, 0
        self.source = frames_of(1, 400, seed=seed, end=0.25)[0]
        self.buffer = self.make()
        self.slots: dict[int, Item] = {}
        self.cursor = 0

    def make(self):
        priorities = {"alpha": ALPHA, "beta": BETA, "eps": EPS, "beta_annealing_steps": ANNEALING}
        return make(HindsightPrioritizedReplayBuffer, self.capacity, batch_size=4, **priorities)

    def put(self, item):
        self.items = [*self.items, item][-self.capacity :]
        self.slots[self.cursor] = item
        self.cursor = (self.cursor + 1) % self.capacity

    @property
    def default(self):
        return 1.0 if self.highest is None else self.highest

    @rule(length=st.integers(1, 9))
    def extend(self, length):
        frames = self.source[self.written % 380 : self.written % 380 + length]
        self.written += length
        self.buffer.extend(frames)
        rows, copies, last = [], [], self.episode[-1] if self.episode else None
        for frame in frames:
            item = Item(frame, frame["desired_goal"], self.default, None)
            if last is not None:
                last.follows = item
            last = item
            rows.append(item)
            self.episode.append(item)
            self.frames_open = [*getattr(self, "frames_open", []), frame]
            if item.done:
                goal, before = frame["next", "achieved_goal"], None
                for each in self.frames_open:
                    copy = relabelled(each, goal)
                    made = Item(copy, goal, self.default, None)
                    if before is not None and not before.done:
                        before.follows = made
                    copies.append(made)
                    before = made
                self.episode, self.frames_open, last = [], [], None
        for item in [*rows, *copies]:
            self.put(item)

    def steps_from(self, slot, length):
        """The items of a sequence that starts in a slot: the steps of its trajectory that the list still holds."""
        held, items = set(map(id, self.items)), [self.slots[slot]]
        while len(items) < length and not items[-1].done and id(items[-1].follows) in held:
            items.append(items[-1].follows)
        return items

    @precondition(lambda self: self.items)
    @rule(length=st.integers(1, 4))
    def sample(self, length):
        batch = self.buffer.sample(sequence_length=length)
        beta = min(1.0, BETA + self.draws * (1 - BETA) / ANNEALING)
        self.draws += 1
        leaves = [(self.slots[int(i)].priority + EPS) ** ALPHA for i in batch["index"].reshape(4, -1)[:, 0]]
        weights = batch["priority_weight"].reshape(4, -1)[:, 0].tolist()
        assert weights == pytest.approx([(leaf / min(leaves)) ** -beta for leaf in leaves], rel=1e-5)
        for row in batch.reshape(4, length):
            items = self.steps_from(int(row["index"][0]), length)
            assert row["valid"].flatten().tolist() == [True] * len(items) + [False] * (length - len(items))
            for step, item in zip(row, items):
                found = (int(step["frame"]), float(step["desired_goal"]), float(step["next", "reward"]))
                assert found == (item.number, item.goal, item.reward)

    @precondition(lambda self: self.items)
    @rule(data=st.data())
    def update(self, data):
        where = data.draw(st.lists(st.integers(0, len(self.items) - 1), min_size=2, max_size=6))
        priorities = data.draw(st.lists(st.floats(0, 10), min_size=len(where), max_size=len(where)))
        self.buffer.update_priority(torch.tensor(where), torch.tensor(priorities, dtype=torch.float64))
        for slot, priority in zip(where, priorities):
            self.slots[slot].priority = priority
        self.highest = max([*priorities, -1 if self.highest is None else self.highest])

    @rule(capacity=st.integers(1, 30))
    def resize(self, capacity):
        self.buffer.resize(capacity)
        self.capacity, self.items = capacity, self.items[-capacity:]
        self.slots = dict(enumerate(self.items))
        self.cursor = len(self.items) % capacity

    @rule()
    def empty(self):
        self.buffer.empty()
        self.items, self.slots, self.cursor, self.episode, self.frames_open = [], {}, 0, [], []
        self.highest = None

    @rule()
    def save_and_load(self):
        with tempfile.TemporaryDirectory() as folder:
            self.buffer.save(os.path.join(folder, "buffer.pt"))
            self.buffer = self.make()
            self.buffer.load(os.path.join(folder, "buffer.pt"))

    @invariant()
    def the_same_items_with_the_same_priorities_in_the_same_order(self):
        if not hasattr(self, "buffer"):
            return
        assert len(self.buffer) == len(self.items)
        if self.items:
            found = self.buffer.all_experiences()
            assert found["frame"].flatten().tolist() == [item.number for item in self.items]
            assert found["desired_goal"].flatten().tolist() == [item.goal for item in self.items]
            priorities = self.buffer.sampler.priority_of(self.buffer._by_age())
            assert priorities.tolist() == pytest.approx([item.priority for item in self.items])
        assert self.buffer.sampler.default_priority == pytest.approx(self.default)

    @invariant()
    def every_step_is_followed_by_the_next_of_its_trajectory(self):
        if not hasattr(self, "buffer") or not self.items:
            return
        slots, exist = self.buffer._successors.follow(torch.arange(len(self.items)), 2)
        for slot, (_, following), (_, exists) in zip(range(len(slots)), slots.tolist(), exist.tolist()):
            items = self.steps_from(slot, 2)
            if not self.slots[slot].done:
                assert exists == (len(items) == 2), f"slot {slot}"
            if len(items) == 2:
                assert self.slots[following] is items[1], f"slot {slot}"


def run(machine, examples, steps):
    options = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=options)


def test_a_buffer_agrees_with_a_plain_list_after_every_step():
    run(Buffers, 10, 30)
