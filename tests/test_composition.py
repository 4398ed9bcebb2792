"""What the parts hand to each other is what the next one needs."""

from __future__ import annotations

import pytest
import torch
from contracts import BACKUPS, OPERATORS, random_signals
from gym_envs import MARGINS, GymDoubleIntegrator, wrap
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator

from torchrl_safety.data import NStepTransform, PrioritizedSampler
from torchrl_safety.envs import DoubleIntegratorEnv
from torchrl_safety.modules import RainbowNetwork
from torchrl_safety.objectives import (
    AvoidBackup,
    CategoricalDQNLoss,
    DiscountedReturnBackup,
    ReachAvoidDQNLoss,
    SafetySACLoss,
)
from torchrl_safety.trainers import evaluate

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


class Says(torch.nn.Module):
    """A critic whose value is the action."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return action + self.shift


class Wide(torch.nn.Module):
    """A policy that pushes to the right, within a wide spread."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loc = observation[..., :1] * 0 + 1 + self.shift
        return loc, torch.ones_like(loc)


def test_policy_critics_buffer_and_environment_speak_of_actions_in_the_units_of_the_environment():
    env = DoubleIntegratorEnv(16, discrete=False, max_control=2.5, seed=0, end_criterion="timeout")
    actor = ProbabilisticActor(
        TensorDictModule(Wide(), ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": env.action_spec.space.low[0], "high": env.action_spec.space.high[0]},
    )
    torch.manual_seed(0)
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        frames = env.rollout(8, actor)
    assert frames["action"].max() > 2.2
    assert frames["action"].min() < -1.2
    gained = frames["next", "observation"][..., 1:] - frames["observation"][..., 1:]
    torch.testing.assert_close(gained, 0.05 * frames["action"], rtol=1e-4, atol=1e-5)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(200), transform=NStepTransform(1, signals=("reward",), num_envs=16)
    )
    buffer.extend(frames)
    rows = buffer[:]
    assert sorted(rows["action"].flatten().tolist()) == sorted(frames["action"].flatten().tolist())

    critic = ValueOperator(Says(), in_keys=["observation", "action"])
    loss = SafetySACLoss(actor, critic, backup=DiscountedReturnBackup(), gamma=1.0, target_entropy=-1.0)
    rows["steps", "reward"].zero_()
    torch.manual_seed(1)
    losses = loss(rows)
    torch.manual_seed(1)
    targets, draws = [], []
    for _ in range(2):  # whichever of its two draws the loss makes first
        with torch.no_grad():
            draws.append(actor.get_dist(rows["next"].select("observation")).rsample())
        targets.append((rows["action"] - draws[-1]).abs())
    assert any(torch.allclose(rows["td_error"].flatten(), target.flatten(), atol=1e-5) for target in targets)
    log_prob, alpha = -losses["entropy"], losses["alpha"]
    values = [(alpha * log_prob - losses["loss_actor"] - draw.mean()).item() for draw in draws]
    assert min(map(abs, values)) < 1e-4

    with torch.no_grad():
        mode = 2.5 * torch.tanh(torch.ones(()))
        found = evaluate(env, actor, starts=torch.zeros(16, 2), max_steps=4).states[:, -1, 1]
    torch.testing.assert_close(found, (4 * 0.05 * mode).expand(16), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bootstrap", [False, True])
def test_windows_of_a_gymnasium_environment_carry_its_reward_and_info_into_the_target(bootstrap):
    env = wrap(GymDoubleIntegrator(max_steps=6))
    env.set_seed(0)
    torch.manual_seed(0)
    frames = env.rollout(60, break_when_any_done=False)
    assert frames["next", "truncated"].any()
    assert frames["next", "terminated"].any()
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100), transform=NStepTransform(4, signals=("reward", "l_x"))
    )
    buffer.extend(frames)
    network = TensorDictModule(MLP(in_features=2, out_features=3, num_cells=[8]), ["observation"], ["action_value"])
    loss = ReachAvoidDQNLoss(network, gamma=0.9, bootstrap_on_truncation=bootstrap)
    loss.set_keys(**MARGINS)
    rows, operator = buffer[:], OPERATORS["ReachAvoidBackup(terminal_type='all')"]
    with torch.no_grad():
        values = network(rows["next"].select("observation"))["action_value"].amax(-1, keepdim=True)
    targets = loss.value_estimator.value_estimate(rows, next_value=values)
    starts = {tuple(state): t for t, state in enumerate(frames["observation"].tolist())}
    for state, value, target in zip(rows["observation"].tolist(), values, targets):
        first = last = starts[tuple(state)]
        while last - first < 3 and not frames["next", "done"][last]:
            last += 1
        expected = value.item()
        for t in reversed(range(first, last + 1)):
            step = {"safety_margin": frames["next", "reward"][t], "target_margin": frames["next", "l_x"][t]}
            ended = t == last and frames["next", "terminated" if bootstrap else "done"][t].item()
            expected = operator(step, expected, 0.9, ended)
        assert target.item() == pytest.approx(expected, abs=1e-5)
    assert loss(rows)["loss"].isfinite()


@pytest.mark.parametrize(
    ("backup", "signals"),
    [case for case in BACKUPS if "Lipschitz" not in repr(case[0]) and "'g'" not in repr(case[0])],
    ids=lambda value: repr(value) if not isinstance(value, tuple) else "",
)
def test_a_step_that_is_cut_with_a_probability_is_worth_a_smaller_discount(backup, signals):
    margins, value = random_signals(signals, (200, 1)), torch.randn(200, 1, dtype=torch.float64)
    goes_on, ended = torch.zeros(200, 1, dtype=torch.bool), torch.ones(200, 1, dtype=torch.bool)
    for gamma, cut in ((0.99, 0.02), (1.0, 0.1), (0.5, 1.0)):
        terminal = backup.step_map(margins, gamma=gamma, terminated=ended)(value)
        mean = cut * terminal + (1 - cut) * backup.step_map(margins, gamma=gamma, terminated=goes_on)(value)
        discounted = backup.step_map(margins, gamma=gamma * (1 - cut), terminated=goes_on)(value)
        torch.testing.assert_close(mean, discounted)
