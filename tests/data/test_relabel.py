"""Hindsight at sample time: which goals a row can get, what changes with the goal, and what must not."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from scipy import stats
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from torchrl.envs.transforms import CatTensors, Compose

from torchrl_safety.data import GoalCondition, HindsightRelabel, NStepTransform, PrioritizedSampler

STRATEGIES = ("future", "final", "episode")
LAYOUTS = ("stream", "interleaved", "columns")
NUM_ENVS = {"stream": 1, "interleaved": 3, "columns": 3}


class Envs:
    """Envs whose measurement tells env, episode and step, with a record of every frame."""

    def __init__(self, num_envs: int, seed: int = 0, longest: int = 6, dtype: torch.dtype = torch.float32) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.num_envs, self.longest, self.dtype = num_envs, longest, dtype
        self.now = [[0, 0] for _ in range(num_envs)]
        self.left = [self.draw() for _ in range(num_envs)]
        self.written: list[tuple[int, int, int]] = []
        self.length: dict[tuple[int, int], int] = {}

    def draw(self) -> int:
        return int(torch.randint(1, self.longest + 1, (), generator=self.generator))

    def cut(self) -> None:
        """A reset of all envs in the middle of their episodes."""
        for env, (episode, step) in enumerate(self.now):
            if step:
                self.length[env, episode] = step
                self.now[env], self.left[env] = [episode + 1, 0], self.draw()

    def steps(self, num_steps: int) -> TensorDict:
        """Frames `[N, T]`, or `[T]` of one env."""
        states, ended = [], []
        for _ in range(num_steps):
            for env in range(self.num_envs):
                episode, step = self.now[env]
                self.written.append((env, episode, step))
                states.append([env, episode, step])
                ended.append(step + 1 == self.left[env])
                self.now[env][1] += 1
                if ended[-1]:
                    self.length[env, episode] = step + 1
                    self.now[env], self.left[env] = [episode + 1, 0], self.draw()
        state = torch.tensor(states, dtype=self.dtype)
        goal, done = torch.full_like(state, -1), torch.tensor(ended).unsqueeze(-1)
        following = {
            "achieved_goal": state + torch.tensor([0, 0, 1]),
            "desired_goal": goal.clone(),
            "reward": torch.full((len(state), 1), -7.0, dtype=self.dtype),
            "terminated": done & (state[:, 2:] % 2 == 0),  # a failure: no goal was reached
            "truncated": done & (state[:, 2:] % 2 == 1),
            "done": done,
        }
        frames = TensorDict({"achieved_goal": state, "desired_goal": goal, "next": following}, [len(state)])
        frames = frames.reshape(num_steps, self.num_envs).transpose(0, 1).contiguous()
        return frames[0] if self.num_envs == 1 else frames

    def kept(self, capacity: int) -> list[tuple[int, int, int]]:
        return self.written[-capacity:]

    def goals(self, frame: tuple[int, int, int], strategy: str, kept: list[tuple[int, int, int]]) -> set[int]:
        """The states that may give this frame its goal, by going through every frame that is there."""
        env, episode, step = frame
        length = self.length.get((env, episode))
        if length is None:
            return set()
        if strategy == "final":
            return {length}
        same = [other[2] for other in kept if other[:2] == (env, episode)]
        if strategy == "future":
            return {other + 1 for other in same if other >= step}
        return set(same) | {other + 1 for other in same}


def distance(transition):
    following = transition["next"]
    return (following["achieved_goal"] - following["desired_goal"]).abs().sum(-1, keepdim=True)


def reward(transition):
    return -distance(transition)


def reached(transition):
    return distance(transition) == 0


def relabel(layout="stream", seed=0, **settings) -> HindsightRelabel:
    if layout == "interleaved":
        settings.setdefault("num_envs", 3)
    settings.setdefault("terminated_fn", reached)
    settings.setdefault("share", 1.0)
    return HindsightRelabel(reward, generator=torch.Generator().manual_seed(seed), **settings)


def buffer_with(transform, capacity=12, batch_size=256, layout="stream", storage=LazyTensorStorage, sampler=None):
    ndim = {"ndim": 2} if layout == "columns" else {}
    rb = TensorDictReplayBuffer(
        storage=storage(capacity, **ndim),
        batch_size=batch_size,
        **({} if sampler is None else {"sampler": sampler}),
    )
    rb.set_rng(torch.Generator().manual_seed(1))
    return rb.append_transform(transform)


def rows_of(batch) -> list[tuple]:
    """(env, episode, step), goal, relabelled of each row."""
    state, goal = batch["achieved_goal"].long().tolist(), batch["desired_goal"].long().tolist()
    return list(zip(map(tuple, state), map(tuple, goal), batch["relabelled"].flatten().tolist()))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_goals_of_each_row_are_those_of_the_states_that_are_there_before_and_after_every_wrap(layout, strategy):
    capacity = 12 if layout == "columns" else 11  # 11 is no multiple of 3 envs
    envs = Envs(NUM_ENVS[layout], longest=5)
    rb = buffer_with(relabel(layout, strategy=strategy), capacity, batch_size=1500, layout=layout)
    seen_wraps = 0
    for turn in range(14):
        rb.extend(envs.steps(2 + turn % 2))
        kept = envs.kept(capacity)
        expected = {(frame, goal) for frame in kept for goal in envs.goals(frame, strategy, kept)}
        found = set()
        for frame, goal, is_relabelled in rows_of(rb.sample()):
            assert frame in kept
            assert is_relabelled == ((frame[0], frame[1]) in envs.length)
            assert goal[:2] == frame[:2] if is_relabelled else goal == (-1, -1, -1)
            if is_relabelled:
                found.add((frame, goal[2]))
        assert found == expected
        seen_wraps += len(envs.written) > capacity
    assert seen_wraps > 8


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_goal_is_of_another_episode_in_a_million_draws(layout, strategy):
    envs = Envs(NUM_ENVS[layout], longest=40)
    rb = buffer_with(relabel(layout, strategy=strategy), 1000 + 2 * (layout != "columns"), 14_000, layout)
    rb.extend(envs.steps(400))
    for _ in range(8):  # 9 cases of 112,000 rows
        rb.extend(envs.steps(37))
        batch = rb.sample()
        state, goal = batch["achieved_goal"], batch["desired_goal"]
        chosen = batch["relabelled"].squeeze(-1)
        length = torch.full((envs.num_envs, len(envs.written)), -1)
        for (env, episode), steps in envs.length.items():
            length[env, episode] = steps
        length = length[state[:, 0].long(), state[:, 1].long()]
        assert torch.equal(chosen, length >= 0)
        assert torch.equal(goal[chosen, :2], state[chosen, :2])
        assert torch.equal(batch["next", "desired_goal"][chosen], goal[chosen])
        assert (goal[~chosen] == -1).all()
        low = {"future": state[:, 2] + 1, "final": length, "episode": torch.zeros(len(state))}[strategy]
        assert ((goal[:, 2] >= low) & (goal[:, 2] <= length))[chosen].all()


def test_each_later_state_is_as_likely_as_any_other():
    envs = Envs(1)
    envs.left = [9]
    rb = buffer_with(relabel(), 9, batch_size=90_000)
    rb.extend(envs.steps(9))
    batch = rb.sample()
    for step in (0, 3, 7):
        goals = batch["desired_goal"][batch["achieved_goal"][:, 2] == step, 2].long() - step - 1
        counts = torch.bincount(goals, minlength=9 - step)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-4
        assert len(counts) == 9 - step


@pytest.mark.parametrize("batch_size", [1, 2, 50])
def test_the_share_is_met_on_average_and_at_every_place_of_a_batch(batch_size):
    envs = Envs(1)
    rb = buffer_with(relabel(share=0.3), 60, batch_size)
    rb.extend(envs.steps(60))
    draws = 300 if batch_size > 2 else 800
    counts, eligible = torch.zeros(batch_size), torch.zeros(batch_size)
    for _ in range(draws):
        batch = rb.sample()
        counts += batch["relabelled"].squeeze(-1)
        eligible += torch.tensor([frame[:2] in envs.length for frame, _, _ in rows_of(batch)])
    for count, total in zip(counts.tolist(), eligible.tolist()):
        assert stats.binomtest(int(count), int(total), 0.3).pvalue > 1e-4 / batch_size


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_of_nothing_or_all_is_exact(share):
    envs = Envs(1)
    rb = buffer_with(relabel(share=share), 40, 500)
    rb.extend(envs.steps(40))
    assert all(
        is_relabelled == (share == 1 and frame[:2] in envs.length) for frame, _, is_relabelled in rows_of(rb.sample())
    )


def test_what_depends_on_the_goal_is_recomputed_and_originals_stay_as_they_were():
    envs = Envs(1)
    rb = buffer_with(relabel(share=0.5), 40, 300)
    frames = envs.steps(40)
    rb.extend(frames)
    original = dict(zip(envs.written, frames))
    kinds = set()
    batch = rb.sample()
    assert "hindsight" not in batch.keys()  # noqa: SIM118
    for row, (frame, goal, is_relabelled) in zip(batch, rows_of(batch)):
        before = original[frame]
        following, was = row["next"], before["next"]
        assert torch.equal(row["achieved_goal"], before["achieved_goal"])
        assert torch.equal(following["truncated"], was["truncated"])
        if not is_relabelled:
            assert (following.select(*was.keys()) == was).all()
            assert torch.equal(row["desired_goal"], before["desired_goal"])
            continue
        gap = goal[2] - (frame[2] + 1)
        assert following["reward"].item() == -gap
        assert following["desired_goal"].tolist() == row["desired_goal"].tolist() == [float(x) for x in goal]
        failed = was["terminated"].item()
        assert following["terminated"].item() == (failed or gap == 0)
        assert following["done"].item() == (failed or gap == 0 or was["truncated"].item())
        kinds.add((failed, gap == 0))
    assert kinds >= {(False, False), (False, True), (True, True)}


def test_the_stored_frames_are_never_changed():
    envs = Envs(1)
    rb = buffer_with(relabel(), 20, 300)
    frames = envs.steps(20)
    written = frames.clone()
    rb.extend(frames)
    for _ in range(3):
        rb.sample()
    assert (frames == written).all()
    assert set(frames.keys()) == set(written.keys())
    stored = rb[:]
    assert (stored.select(*written.keys()) == written).all()
    assert "relabelled" not in stored.keys()  # noqa: SIM118


@pytest.mark.parametrize("layout", LAYOUTS)
def test_errors_of_relabelled_rows_leave_the_priorities_of_originals_alone(layout):
    envs = Envs(NUM_ENVS[layout])
    sampler = PrioritizedSampler(12, alpha=1.0, eps=0.0)
    rb = buffer_with(relabel(layout, share=0.5), 12, 16, layout, sampler=sampler)
    rb.extend(envs.steps(12 // NUM_ENVS[layout]))
    expected = [1.0] * 12
    is_seen = set()
    for turn in range(20):
        batch = rb.sample()
        batch["td_error"] = torch.full((16,), 2.0 + turn)
        index = batch["index"] if layout != "columns" else batch["index"][:, 0] * 3 + batch["index"][:, 1]
        before = batch["index"].clone()
        rb.update_tensordict_priority(batch)
        assert torch.equal(batch["index"], before)
        for slot, is_relabelled in zip(index.tolist(), batch["relabelled"].flatten().tolist()):
            is_seen.add(is_relabelled)
            if not is_relabelled:
                expected[slot] = 2.0 + turn
        assert sampler._tree.get(torch.arange(12)).tolist() == expected
    assert is_seen == {True, False}


def test_a_slot_that_was_rewritten_since_the_draw_keeps_its_new_priority():
    envs = Envs(1)
    sampler = PrioritizedSampler(12, alpha=1.0, eps=0.0)
    rb = buffer_with(relabel(share=0.5), 12, 64, sampler=sampler)
    rb.extend(envs.steps(12))
    batch = rb.sample()
    rb.extend(envs.steps(12))
    batch["td_error"] = torch.full((64,), 5.0)
    rb.update_tensordict_priority(batch)
    assert sampler._tree.get(torch.arange(12)).tolist() == [1.0] * 12


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage, LazyMemmapStorage])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_other_storages_give_the_same_samples(storage, n_steps):
    batches = []
    for kind in (LazyTensorStorage, storage):
        envs = Envs(1)
        rb = buffer_with(relabel(n_steps=n_steps, strategy="episode"), 15, 64, storage=kind)
        for length in (9, 8, 4):
            rb.extend(envs.steps(length))
            batch = rb.sample()
        batches.append(batch)
    first, second = batches
    assert first["relabelled"].any()
    assert set(first.keys(True, True)) == set(second.keys(True, True))
    for key in first.keys(True, True):
        assert torch.equal(first[key], second[key]), key


def test_float64_goals_keep_their_precision():
    envs = Envs(1, dtype=torch.float64)
    rb = buffer_with(relabel(), 30, 100)
    frames = envs.steps(30)
    for state in (frames, frames["next"]):
        state["achieved_goal"][:, 2] += 1e-12
    rb.extend(frames)
    batch = rb.sample()
    goal = batch["desired_goal"][batch["relabelled"].squeeze(-1)]
    assert goal.dtype == batch["next", "reward"].dtype == torch.float64
    assert (goal[:, 2] != goal[:, 2].round()).all()


def test_measurement_and_goal_may_be_elements_of_one_observation():
    condition = GoalCondition("observation", [1], "observation", [0])
    transform = HindsightRelabel(
        lambda row: (row["next", "observation"][..., 1:] - row["observation"][..., :1]).abs(),
        goal_conditions=condition,
        share=1.0,
    )
    rb = buffer_with(transform, 8, 200)
    state = torch.stack((torch.full((5,), -9.0), torch.arange(5.0)), -1)
    ends = torch.arange(4).unsqueeze(-1) == 3
    following = {"observation": state[1:], "reward": torch.zeros(4, 1), "terminated": ends, "done": ends}
    rb.extend(TensorDict({"observation": state[:-1], "next": following}, [4]))
    batch = rb.sample()
    assert (batch["observation"][:, 0] > batch["observation"][:, 1]).all()
    assert torch.equal(batch["next", "observation"][:, 0], batch["observation"][:, 0])
    expected = (batch["next", "observation"][:, 1] - batch["observation"][:, 0]).abs()
    assert torch.equal(batch["next", "reward"].squeeze(-1), expected)


def test_transforms_of_the_user_see_the_new_goal():
    envs = Envs(1)
    rb = buffer_with(relabel(), 30, 100)
    rb.append_transform(CatTensors(["achieved_goal", "desired_goal"], "observation", del_keys=False))
    rb.extend(envs.steps(30))
    batch = rb.sample()
    assert torch.equal(batch["observation"][:, 3:], batch["desired_goal"])
    assert (batch["desired_goal"][batch["relabelled"].squeeze(-1)] >= 0).all()


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_transform_in_front_is_refused_with_the_right_order(is_nested):
    cat = CatTensors(["achieved_goal", "desired_goal"], "observation", del_keys=False)
    chain = Compose(Compose(cat), relabel()) if is_nested else Compose(cat, relabel())
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, transform=chain)
    with pytest.raises(ValueError, match=r"CatTensors stands before HindsightRelabel.*insert_transform\(0"):
        rb.extend(Envs(1).steps(10))
    rb = buffer_with(relabel(), 10, 4)
    rb.extend(Envs(1).steps(10))
    rb.insert_transform(0, cat.clone())
    with pytest.raises(ValueError, match="CatTensors stands before HindsightRelabel"):
        rb.sample()


@pytest.mark.parametrize("is_first", [False, True])
def test_windows_made_at_write_time_are_refused(is_first):
    rb = buffer_with(relabel(), 10, 4)
    rb.insert_transform(0 if is_first else 1, NStepTransform(3))
    with pytest.raises(ValueError, match=r"NStepTransform and HindsightRelabel.*n_steps=n"):
        rb.extend(Envs(1).steps(2))


def windows(envs: Envs, kept: list, frame: tuple, goal: tuple | None, n_steps: int) -> tuple[list[float], bool, int]:
    """Rewards of a row's window, whether its last step terminated, and which step that is, in a plain loop."""
    rewards, terminated = [], False
    env, episode, step = frame
    for now in range(step, step + n_steps):
        if (env, episode, now) not in kept:
            break
        is_end = envs.length.get((env, episode)) == now + 1
        failed = is_end and now % 2 == 0
        rewards.append(-7.0 if goal is None else -abs(goal[2] - (now + 1)))
        terminated = failed or (goal is not None and goal[2] == now + 1)
        if terminated:
            break
    return rewards, terminated, step + len(rewards) - 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_are_those_of_a_plain_loop(layout, strategy):
    capacity = 24 if layout == "columns" else 23
    envs = Envs(NUM_ENVS[layout], longest=7)
    rb = buffer_with(relabel(layout, strategy=strategy, share=0.7, n_steps=3), capacity, 120, layout)
    for _ in range(9):
        rb.extend(envs.steps(4))
        kept = envs.kept(capacity)
        batch = rb.sample()
        assert batch["steps", "reward"].shape == (120, 3, 1)
        for row, (frame, goal, is_relabelled) in zip(batch, rows_of(batch)):
            rewards, terminated, last = windows(envs, kept, frame, goal if is_relabelled else None, 3)
            valid = [True] * len(rewards) + [False] * (3 - len(rewards))
            assert row["steps", "valid"].flatten().tolist() == valid
            assert row["steps", "reward"].flatten().tolist() == rewards + [0.0] * (3 - len(rewards))
            expected = [False] * (len(rewards) - 1) + [terminated] + [False] * (3 - len(rewards))
            assert row["steps", "terminated"].flatten().tolist() == expected
            following = row["next"]
            assert following["achieved_goal"].tolist() == [frame[0], frame[1], last + 1]
            assert following["desired_goal"].tolist() == list(goal)
            assert following["terminated"].item() == terminated
            assert following["reward"].item() == rewards[-1]


def test_a_saved_buffer_goes_on_with_the_same_goals_and_its_open_episodes():
    envs = Envs(3)
    rb = buffer_with(relabel("interleaved", strategy="episode", share=0.6), 31, 64, "interleaved")
    rb.extend(envs.steps(14))
    rb.sample()
    file = io.BytesIO()
    torch.save(rb.state_dict(), file)
    file.seek(0)
    other = buffer_with(relabel("interleaved", seed=9, strategy="episode", share=0.6), 31, 64, "interleaved")
    other.load_state_dict(torch.load(file, weights_only=True))
    more = envs.steps(5)
    for _ in range(3):
        one, two = rb.sample(), other.sample()
        assert (one == two).all()
        rb.extend(more)
        other.extend(more)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_a_copy_of_a_buffer_relabels_by_itself(duplicate):
    envs = Envs(1)
    rb = buffer_with(relabel(share=0.5), 20, 64, sampler=PrioritizedSampler(20))
    rb.extend(envs.steps(20))
    twin = duplicate(rb)
    assert torch.equal(rb.sample()["relabelled"], twin.sample()["relabelled"])
    twin.empty()
    twin.extend(Envs(1).steps(3))
    assert len(twin) == 3
    assert len(rb) == 20
    rb.sample()
    twin.sample()


def test_an_emptied_buffer_starts_anew():
    envs = Envs(1, longest=9)
    rb = buffer_with(relabel(), 12, 400)
    rb.extend(envs.steps(17))
    rb.empty()
    fresh = Envs(1, seed=3)
    rb.extend(fresh.steps(7))
    for frame, goal, is_relabelled in rows_of(rb.sample()):
        assert is_relabelled == (frame[:2] in fresh.length)
        assert goal[2] in (fresh.goals(frame, "future", fresh.written) or {-1})


@pytest.mark.filterwarnings("ignore:Using `add:UserWarning")
@pytest.mark.parametrize(
    ("kind", "layout"), [(ReplayBuffer, "stream"), (ReplayBuffer, "columns"), (TensorDictReplayBuffer, "stream")]
)
def test_single_steps_can_be_added(kind, layout):
    envs = Envs(NUM_ENVS[layout])
    ndim = {"ndim": 2} if layout == "columns" else {}
    rb = kind(storage=LazyTensorStorage(30, **ndim), batch_size=300)
    rb.append_transform(relabel(layout))
    for _ in range(13):
        step = envs.steps(1)
        rb.add(step[..., 0])
    assert any(is_relabelled for _, _, is_relabelled in rows_of(rb.sample()))
    for frame, goal, is_relabelled in rows_of(rb.sample()):
        goals = envs.goals(frame, "future", envs.kept(30))
        assert goal[2] in goals if is_relabelled else not goals


def test_one_step_of_each_env_is_added_to_interleaved_streams():
    envs = Envs(3)
    rb = buffer_with(relabel("interleaved"), 31, 300, "interleaved")
    for _ in range(14):
        rb.add(envs.steps(1)[:, 0])
    assert len(rb) == 31
    for frame, goal, is_relabelled in rows_of(rb.sample()):
        goals = envs.goals(frame, "future", envs.kept(31))
        assert goal[2] in goals if is_relabelled else not goals


def test_batches_drawn_ahead_by_another_thread_have_goals_of_their_episodes():
    envs = Envs(1, longest=4)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(15), batch_size=64, prefetch=2, transform=relabel(n_steps=2))
    rb.extend(envs.steps(10))
    for _ in range(40):
        rb.extend(envs.steps(3))
        for frame, goal, is_relabelled in rows_of(rb.sample()):
            if is_relabelled:
                assert goal[:2] == frame[:2]
                assert frame[2] < goal[2] <= envs.length[frame[:2]]


def test_a_reset_in_the_middle_ends_the_open_episodes():
    envs = Envs(3, longest=9)
    transform = relabel("interleaved", n_steps=2)
    rb = buffer_with(transform, 60, 2000, "interleaved")
    for _ in range(4):
        rb.extend(envs.steps(4))
        envs.cut()
        transform.end_episodes()
    batch = rb.sample()
    assert batch["relabelled"].all()
    assert torch.equal(batch["next", "achieved_goal"][:, :2], batch["achieved_goal"][:, :2])
    found = {(frame, goal[2]) for frame, goal, _ in rows_of(batch)}
    assert found == {(frame, goal) for frame in envs.written for goal in envs.goals(frame, "future", envs.written)}


def test_a_batch_longer_than_the_buffer_leaves_its_newest_frames():
    envs = Envs(1, longest=4)
    rb = buffer_with(relabel(), 10, 500)
    rb.extend(envs.steps(25))
    kept = envs.kept(10)
    found = {(frame, goal[2]) for frame, goal, is_relabelled in rows_of(rb.sample()) if is_relabelled}
    assert found == {(frame, goal) for frame in kept for goal in envs.goals(frame, "future", kept)}


def test_writes_that_pass_the_transform_by_are_noticed():
    rb = buffer_with(relabel(), 10, 4)
    rb.extend(Envs(1).steps(4))
    with pytest.raises(RuntimeError, match="stores in turn"):
        rb[0:2] = rb[2:4]
    rb.writer.extend(rb[:].clone())
    with pytest.raises(RuntimeError, match="numbered 4 frames, the buffer wrote 8"):
        rb.extend(Envs(1).steps(2))


def test_slots_that_hold_other_frames_are_noticed():
    rb = buffer_with(relabel(), 10, 200)
    rb.extend(Envs(1).steps(10))
    rb.storage._storage["hindsight"][:] += 1
    with pytest.raises(RuntimeError, match="not written in turn"):
        rb.sample()


def test_a_buffer_that_is_not_empty_or_not_written_in_turn_is_refused():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    rb.extend(Envs(1).steps(4))
    rb.append_transform(relabel())
    with pytest.raises(RuntimeError, match="empty buffer"):
        rb.sample()
    with pytest.raises(RuntimeError, match="empty buffer"):
        rb.extend(Envs(1).steps(4))
    writer = TensorDictMaxValueWriter(rank_key="rank")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), writer=writer, transform=relabel())
    with pytest.raises(ValueError, match="TensorDictMaxValueWriter"):
        rb.extend(Envs(1).steps(4))
    rb = TensorDictReplayBuffer(storage=ListStorage(), transform=relabel())
    with pytest.raises(ValueError, match="size that is set"):
        rb.extend(Envs(1).steps(4))


def test_frames_of_another_layout_are_refused():
    rb = buffer_with(relabel("interleaved"), 10, 4)
    with pytest.raises(ValueError, match="num_envs=3"):
        rb.extend(Envs(1).steps(4))
    with pytest.raises(KeyError, match="terminated"):
        rb.extend(Envs(3).steps(4).exclude(("next", "terminated")))
    rb = buffer_with(relabel(), 12, 4, "columns")
    rb.extend(Envs(3).steps(2))
    with pytest.raises(ValueError, match="4 envs, those before them of 3"):
        rb.extend(Envs(4).steps(2))


def test_a_call_outside_a_buffer_is_refused():
    with pytest.raises(RuntimeError, match="outside a replay buffer"):
        relabel()(Envs(1).steps(4))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"share": 1.5}, "share"),
        ({"share": True}, "share"),
        ({"strategy": "random"}, "strategy"),
        ({"num_envs": 0}, "num_envs"),
        ({"n_steps": 0}, "n_steps"),
        ({"signals": "reward"}, "signals"),
        ({"generator": 3}, "generator"),
        ({"goal_conditions": []}, "goal_conditions"),
    ],
)
def test_a_wrong_setting_is_named(settings, name):
    with pytest.raises(ValueError, match=name):
        HindsightRelabel(reward, **settings)


def test_a_missing_signal_is_named():
    rb = buffer_with(relabel(n_steps=2, signals=("cost",)), 10, 4)
    rb.extend(Envs(1).steps(10))
    with pytest.raises(KeyError, match="cost"):
        rb.sample()
