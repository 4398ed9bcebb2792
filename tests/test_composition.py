"""Windows, prioritized replay and the categorical loss in one loop: what each hands to the next is what it needs."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from torchrl_safety.data import NStepTransform, PrioritizedSampler
from torchrl_safety.modules import RainbowNetwork
from torchrl_safety.objectives import AvoidBackup, CategoricalDQNLoss, DiscountedReturnBackup

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")
ATOMS = 11


def episode(length: int, end: str) -> TensorDict:
    """Frames `[T]` of reward 1 and safety margins 1, 0.9, ..., ended at the last one by `end`."""
    last = torch.arange(length).unsqueeze(-1) == length - 1
    flags = {name: last & (name == end) for name in ("terminated", "truncated")} | {"done": last}
    time = torch.arange(float(length)).unsqueeze(-1)
    after = {"observation": time + 1, "reward": torch.ones(length, 1), "safety_margin": 1 - time / 10, **flags}
    return TensorDict({"observation": time, "action": torch.zeros(length, dtype=torch.int64), "next": after}, [length])


def optimist(support: tuple[float, float], **settings) -> CategoricalDQNLoss:
    """A loss whose network gives every action in every state the largest value of the support."""
    network = RainbowNetwork(1, 2, support=support, atoms=ATOMS, hidden=(), dueling=None, noisy=False)
    with torch.no_grad():
        network.head.weight.zero_()
        network.head.bias.copy_(50.0 * (torch.arange(2 * ATOMS) % ATOMS == ATOMS - 1))
    return CategoricalDQNLoss(network, **settings)


def windows(frames: TensorDict, n_steps: int, signal: str) -> TensorDict:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100), transform=NStepTransform(n_steps, signals=(signal,))
    )
    buffer.extend(frames)
    return buffer[:]


def target_means(loss: CategoricalDQNLoss, batch: TensorDict) -> list[float]:
    return (loss.target_distribution(batch)[0] @ loss.support).tolist()


@pytest.mark.parametrize("n_steps", [1, 2, 3, 10])
def test_every_window_that_reaches_the_end_of_an_episode_is_worth_its_rewards_alone(n_steps):
    rows = windows(episode(5, "terminated"), n_steps, "reward")
    means = target_means(optimist((0.0, 100.0), backup=DiscountedReturnBackup(), gamma=1.0), rows)
    for start, mean in zip(rows["observation"].flatten().long().tolist(), means, strict=True):
        steps = min(n_steps, 5 - start)
        expected = steps if start + steps == 5 else 100  # 100 + steps, cut at the end of the support
        assert mean == pytest.approx(expected, abs=1e-4)


def test_a_window_cut_by_a_clock_continues_into_its_last_observation_only_if_asked_to():
    rows = windows(episode(3, "truncated"), 5, "safety_margin")
    assert target_means(optimist((-1.0, 1.0), backup=AvoidBackup(), gamma=1.0), rows) == pytest.approx([0.8] * 3)
    settings = {"backup": AvoidBackup(), "gamma": 0.5}
    going_on = optimist((-1.0, 1.0), bootstrap_on_truncation=True, **settings)
    stopping = optimist((-1.0, 1.0), **settings)
    margins = [1.0, 0.9, 0.8]
    for start, means in enumerate(zip(target_means(stopping, rows), target_means(going_on, rows), strict=True)):
        for mean, value in zip(means, (margins[-1], 0.5 * 0.8 + 0.5 * min(0.8, 1.0))):
            for margin in reversed(margins[start:-1]):
                value = 0.5 * margin + 0.5 * min(margin, value)
            assert mean == pytest.approx(value, abs=1e-4)


def test_the_discount_is_that_of_the_update_and_not_of_the_write():
    rows, loss = windows(episode(9, "terminated"), 3, "reward"), optimist((0.0, 10.0), backup=DiscountedReturnBackup())
    for gamma in (0.0, 0.5, 1.0):
        loss.gamma = gamma
        expected = min(1 + gamma + gamma**2 + gamma**3 * 10, 10)
        assert target_means(loss, rows)[0] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("n_steps", [None, 3])
def test_a_batch_as_large_as_the_number_of_atoms_or_actions_is_a_batch_of_rows(n_steps):
    loss = optimist((-1.0, 1.0), backup=AvoidBackup(), gamma=0.9)
    for size in (2, ATOMS):
        frames = episode(size, "terminated")
        batch = frames if n_steps is None else windows(frames, n_steps, "safety_margin").exclude("index")
        together = loss.target_distribution(batch)[0]
        assert together.shape == (size, ATOMS)
        alone = [loss.target_distribution(batch[i : i + 1])[0] for i in range(size)]
        torch.testing.assert_close(together, torch.cat(alone))


def test_the_priority_of_a_sampled_window_is_its_divergence_without_its_weight():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20),
        sampler=PrioritizedSampler(20, alpha=1.0, beta=1.0, eps=0.0, generator=torch.Generator().manual_seed(0)),
        transform=NStepTransform(3, signals=("safety_margin",)),
        batch_size=500,
        priority_key="td_error",
    )
    buffer.extend(episode(20, "terminated"))
    buffer.update_priority(torch.arange(20), torch.arange(1.0, 21.0))
    torch.manual_seed(0)
    loss = CategoricalDQNLoss(RainbowNetwork(1, 2, support=(-1.0, 1.0), atoms=ATOMS), backup=AvoidBackup())
    batch = buffer.sample()
    assert batch["priority_weight"].min() < 0.1
    unweighted = loss(batch.exclude("priority_weight"))
    assert loss(batch)["loss"] < unweighted["loss"]
    buffer.update_tensordict_priority(batch)
    everything = buffer[:].exclude("td_error", "priority_weight")
    loss(everything)
    assert set(batch["index"].tolist()) == set(range(20))
    leaves = buffer.sampler._tree.get(torch.arange(20))
    torch.testing.assert_close(leaves.float(), everything["td_error"].flatten())
