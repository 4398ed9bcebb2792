"""Laws of episodes: what counts as safe and as success, where an episode ends, and what the rates are worth."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import gymnasium
import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import (
    EnvBase,
    ExplorationType,
    GymWrapper,
    RenameTransform,
    SerialEnv,
    TransformedEnv,
    exploration_type,
)
from torchrl.modules import ProbabilisticActor, TanhNormal

from torchrl_safety.envs import DoubleIntegratorEnv, SafetyGymEnv
from torchrl_safety.modules import NoisyLinear
from torchrl_safety.trainers import EpisodeEvaluator, binomial_interval, evaluate, evaluation_mode

RUNNING, TERMINATED, TRUNCATED = range(3)


class ScriptEnv(EnvBase):
    """Plays written episodes: row `i` has the margins `g[i]`, `l[i]` `[T + 1]` and the ends `[T]`.

    The state is the row and the time. A reset of its own begins the next row.
    """

    _supports_set_state = True

    def __init__(self, g, l, ends, *, batch=(), target=True):  # noqa: E741
        super().__init__(batch_size=batch)
        self.g, self.l, self.ends, self.target, self.row = g, l, ends, target, 0
        column = (*batch, 1)
        margins = {"safety_margin": Unbounded(column)} | ({"target_margin": Unbounded(column)} if target else {})
        self.observation_spec = Composite({"observation": Unbounded((*batch, 2)), **margins}, shape=batch)
        self.state_spec = Composite({"observation": Unbounded((*batch, 2))}, shape=batch)
        flags = {key: Categorical(2, shape=column, dtype=torch.bool) for key in ("done", "terminated", "truncated")}
        self.full_done_spec = Composite(flags, shape=batch)
        self.action_spec = Categorical(2, shape=batch)
        self.reward_spec = Unbounded(column)

    def _entries(self, state):
        row, step = state.long().unbind(-1)
        step = step.clamp(max=self.g.shape[1] - 1)
        entries = {"observation": state, "safety_margin": self.g[row, step].unsqueeze(-1)}
        if self.target:
            entries["target_margin"] = self.l[row, step].unsqueeze(-1)
        return entries

    def _reset(self, tensordict=None, set_state=False, **_):
        if set_state:
            state = tensordict["observation"].clone()
        else:
            rows = torch.arange(self.row, self.row + self.numel()).reshape(self.batch_size) % len(self.g)
            self.row += self.numel()
            state = torch.stack([rows, torch.zeros_like(rows)], -1).float()
        return TensorDict(self._entries(state), self.batch_size)

    def _step(self, tensordict):
        state = tensordict["observation"] + torch.tensor([0.0, 1.0])
        row, step = state.long().unbind(-1)
        end = self.ends[row, (step - 1).clamp(max=self.ends.shape[1] - 1)].unsqueeze(-1)
        flags = {"terminated": end == TERMINATED, "truncated": end == TRUNCATED, "done": end != RUNNING}
        return TensorDict(
            {**self._entries(state), **flags, "reward": torch.zeros(*self.batch_size, 1)}, self.batch_size
        )

    def _set_seed(self, seed):
        return seed


def still(tensordict):
    return tensordict.set("action", torch.zeros(tensordict.batch_size, dtype=torch.int64))


def every_script(steps):
    """Every episode of so many steps: the signs of both margins at all times, and every end at every place."""
    signs = list(itertools.product([-1.0, 0.0], repeat=steps + 1))
    rows = list(itertools.product(signs, signs, itertools.product(range(3), repeat=steps)))
    return tuple(torch.tensor(column) for column in zip(*rows))


def by_hand(g, l, ends, max_steps):  # noqa: E741
    """One episode in plain Python: (safe, success, length)."""
    safe, success, step = g[0] >= 0, g[0] >= 0 and l[0] >= 0, 0
    while step < max_steps:
        step += 1
        safe = safe and g[step] >= 0
        success = success or (safe and l[step] >= 0)
        if ends[step - 1] != RUNNING:
            break
    return safe, success, step


def starts_of(count):
    return torch.stack([torch.arange(count), torch.zeros(count, dtype=torch.int64)], -1).float()


@pytest.mark.parametrize("max_steps", [1, 2])
def test_each_episode_is_judged_as_by_hand_with_every_end_at_every_place(max_steps):
    g, l, ends = every_script(2)  # noqa: E741
    env = ScriptEnv(g, l, ends)
    starts = starts_of(len(g))
    for row, script in enumerate(zip(g.tolist(), l.tolist(), ends.tolist())):
        found = evaluate(env, still, starts=starts[row : row + 1], max_steps=max_steps)
        assert (bool(found.safe_episodes), bool(found.success_episodes), found.mean_length) == by_hand(
            *script, max_steps
        )


@pytest.mark.parametrize("batch", [(), (1,), (64,), (2, 5), (3000,)])
def test_the_batch_of_the_environment_changes_nothing(batch):
    g, l, ends = every_script(3)  # noqa: E741
    chosen = torch.randperm(len(g), generator=torch.Generator().manual_seed(0))[: 200 if len(batch) < 2 else 201]
    g, l, ends = g[chosen], l[chosen], ends[chosen]  # noqa: E741
    env = ScriptEnv(g, l, ends, batch=batch)
    judged = [by_hand(*script, 3) for script in zip(g.tolist(), l.tolist(), ends.tolist())]
    safe, success, length = (sum(column) for column in zip(*judged))
    by_starts = evaluate(env, still, starts=starts_of(len(g)), max_steps=3)
    assert (by_starts.safe_episodes, by_starts.success_episodes) == (safe, success)
    assert by_starts.safe_rate == safe / len(g)
    assert by_starts.success_rate == success / len(g)
    assert by_starts.mean_length == pytest.approx(length / len(g))
    assert by_starts.episodes == len(g)
    for row, (_, _, steps) in enumerate(judged):
        assert by_starts.states[row].tolist() == [[row, min(time, steps)] for time in range(4)]


@pytest.mark.parametrize("batch", [(), (7,)])
def test_without_starts_the_resets_of_the_environment_begin_the_episodes(batch):
    g, l = torch.zeros(20, 4), -torch.ones(20, 4)  # noqa: E741
    g[3, 2] = -1
    env = ScriptEnv(g, l, torch.zeros(20, 3, dtype=torch.int64), batch=batch)  # no episode ends early
    found = evaluate(env, still, episodes=15, max_steps=3)
    assert found.states[:, 0, 0].tolist() == list(range(15))
    assert (found.safe_episodes, found.episodes, found.mean_length) == (14, 15, 3.0)


def test_without_a_target_margin_there_is_no_success():
    g = torch.zeros(4, 3)
    found = evaluate(ScriptEnv(g, g, torch.zeros(4, 2).long(), target=False), still, episodes=4, max_steps=2)
    assert (found.success_rate, found.success_interval, found.success_episodes) == (None, None, None)
    assert found.scores["success_rate"] is None


def test_a_target_margin_that_is_named_or_declared_is_never_passed_over():
    g = torch.zeros(4, 3)
    ends = torch.zeros(4, 2).long()
    with pytest.raises(KeyError, match=r"the key .l_x. is missing.*target_margin=\.\.\."):
        evaluate(ScriptEnv(g, g, ends), still, episodes=4, max_steps=2, target_margin="l_x")

    class AtStepsOnly(ScriptEnv):
        def reset(self, *args, **settings):
            return super().reset(*args, **settings).exclude("target_margin")

    with pytest.raises(KeyError, match="the key 'target_margin' is missing"):
        evaluate(AtStepsOnly(g, g, ends), still, episodes=4, max_steps=2)


def test_a_margin_that_is_no_number_is_not_safe():
    g = torch.tensor([[0.0, float("nan"), 0.0], [0.0, 0.0, 0.0]])
    env = ScriptEnv(g, g, torch.zeros(2, 2).long(), batch=(2,))
    found = evaluate(env, still, starts=starts_of(2), max_steps=2)
    assert (found.safe_episodes, found.success_episodes) == (1, 2)


class Strict(gymnasium.Env):
    """Fails at its third step, with the margin on the reward and in the info; refuses a step beyond the end."""

    observation_space = gymnasium.spaces.Box(-1, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    running = False

    def reset(self, *, seed=None, options=None):
        self.time, self.running = 0, True
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.running
        self.time += 1
        self.running = self.time < 3
        return np.full(1, self.time, np.float32), 2.5 - self.time, not self.running, False, {}


def gym_env():
    return GymWrapper(Strict(), categorical_action_encoding=True)


@pytest.mark.parametrize("make", [gym_env, lambda: SerialEnv(3, gym_env)], ids=["one", "batch"])
def test_a_gymnasium_environment_with_the_margin_on_its_reward_is_evaluated_and_never_stepped_beyond_an_end(make):
    env = make()
    found = evaluate(env, still, episodes=5, max_steps=10, safety_margin="reward")
    assert (found.episodes, found.safe_rate, found.mean_length) == (5, 0.0, 3.0)
    assert found.states.shape == (5, 11, 1)
    assert found.states[0].squeeze(-1).tolist() == [0, 1, 2, *[3] * 8]
    assert evaluate(env, still, episodes=5, max_steps=2, safety_margin="reward").safe_rate == 1.0
    assert evaluate(
        env, still, episodes=1, max_steps=2, safety_margin="reward", target_margin="reward"
    ).success_rate == (1.0)


def test_an_environment_that_cannot_be_put_into_a_state_refuses_starts():
    with pytest.raises(ValueError, match=r"cannot be reset to given starts.*episodes=\.\.\."):
        evaluate(gym_env(), still, starts=torch.zeros(1, 1), max_steps=1, safety_margin="reward")


def test_an_interval_is_that_of_scipys_exact_test():
    for total in (1, 2, 7, 100, 1000):
        for count in {0, 1, total // 3, total - 1, total}:
            for confidence in (0.5, 0.95, 0.999):
                expected = binomtest(count, total).proportion_ci(confidence, method="exact")
                assert binomial_interval(count, total, confidence=confidence) == pytest.approx(expected, abs=1e-9)


def test_at_the_ends_of_an_interval_so_extreme_a_count_has_half_of_the_remaining_probability():
    def probability(counts, total, p):
        return float(sum(math.comb(total, k) * p**k * (1 - p) ** (total - k) for k in counts))

    for total in range(1, 8):
        for count in range(total + 1):
            low, high = map(Fraction, binomial_interval(count, total, confidence=0.9))
            if count:
                assert probability(range(count, total + 1), total, low) == pytest.approx(0.05)
            if count < total:
                assert probability(range(count + 1), total, high) == pytest.approx(0.05)
    assert binomial_interval(0, 3)[0] == 0.0
    assert binomial_interval(3, 3)[1] == 1.0


def test_an_interval_covers_the_true_rate_with_its_confidence_at_every_rate():
    for total in (1, 5, 12):
        intervals = [binomial_interval(k, total, confidence=0.8) for k in range(total + 1)]
        for rate in (0.0, 0.05, 0.3, 0.5, 0.91, 1.0):
            mass = [math.comb(total, k) * rate**k * (1 - rate) ** (total - k) for k in range(total + 1)]
            covered = sum(m for m, (low, high) in zip(mass, intervals) if low <= rate <= high)
            assert covered >= 0.8 - 1e-12


def test_the_rates_come_with_their_intervals():
    g = torch.zeros(10, 2)
    g[:3, 1] = -1
    env = ScriptEnv(g, g, torch.zeros(10, 1).long(), batch=(4,))
    found = evaluate(env, still, starts=starts_of(10), max_steps=1, confidence=0.8)
    assert found.safe_interval == binomial_interval(7, 10, confidence=0.8)
    assert found.success_interval == binomial_interval(10, 10, confidence=0.8)
    assert found.scores == {
        "mean_return": None,
        "std_return": None,
        "safe_rate": 0.7,
        "safe_rate_low": found.safe_interval[0],
        "safe_rate_high": found.safe_interval[1],
        "success_rate": 1.0,
        "success_rate_low": found.success_interval[0],
        "success_rate_high": 1.0,
        "episodes": 10,
        "mean_length": 1.0,
        "seconds": found.seconds,
    }
    assert found.seconds > 0


def constant_control(index: int):
    return lambda tensordict: tensordict.set("action", torch.full(tensordict.batch_size, index))


@pytest.mark.parametrize("num_envs", [1, 3, 4])
def test_safe_means_that_no_margin_on_the_way_is_negative(num_envs):
    starts = torch.tensor([[0.0, 0.0], [0.0, 1.5], [0.5, 0.1], [-0.9, -0.01]])
    env = DoubleIntegratorEnv(num_envs)
    # Without control the mass drifts: x(T) = x + v T.
    after = starts[:, 0] + starts[:, 1] * 0.05 * 100
    result = evaluate(env, constant_control(1), starts=starts, max_steps=100)
    assert result.safe_rate == (after.abs() <= 1).float().mean().item() == 0.75
    assert result.success_rate is None


def test_a_failure_before_the_target_is_no_success_and_one_after_it_is():
    # The first passes the target at rest and then hits the wall; the second never gets there; the third starts inside.
    starts = torch.tensor([[-0.1, 0.0], [0.9, 0.0], [0.0, 0.0]])
    env = DoubleIntegratorEnv(3, problem="reach_avoid")
    result = evaluate(env, constant_control(2), starts=starts, max_steps=200)
    assert result.safe_rate == 0.0
    assert result.success_rate == pytest.approx(2 / 3)


@pytest.mark.parametrize("end_criterion", ["failure", "timeout"])
def test_coming_back_to_the_target_after_a_failure_is_no_success(end_criterion):
    def go_home(tensordict):
        return tensordict.set("action", 1 - tensordict["observation"].sum(-1).sign().long())

    starts = torch.tensor([[-0.9, -1.2], [-0.5, 0.0]])  # the first leaves the walls before it can turn
    env = DoubleIntegratorEnv(2, problem="reach_avoid", end_criterion=end_criterion)
    result = evaluate(env, go_home, starts=starts, max_steps=400)
    assert (result.safe_rate, result.success_rate) == (0.5, 0.5)


@pytest.mark.parametrize("max_steps", [None, 5])
def test_an_ended_episode_stays_where_it_ended(max_steps):
    env = DoubleIntegratorEnv(2, max_steps=max_steps)
    result = evaluate(env, constant_control(2), starts=torch.tensor([[0.9, 0.5], [-0.5, 0.0]]), max_steps=50)
    states = result.states
    assert states.shape == (2, 51, 2)
    outside = (states[0, :, 0].abs() > 1).nonzero()[0].item()
    assert torch.equal(states[0, outside:], states[0, outside].expand(51 - outside, 2))
    if max_steps is not None:
        assert torch.equal(states[1, 5:], states[1, 5].expand(46, 2))
        assert result.mean_length == (outside + 5) / 2


def test_a_state_under_a_key_of_its_own_takes_the_starts_and_is_recorded():
    starts = torch.tensor([[0.0, 0.0], [0.0, 1.5]])
    env = DoubleIntegratorEnv(2, state_key="state")
    plain = evaluate(DoubleIntegratorEnv(2), constant_control(1), starts=starts, max_steps=20)
    named = evaluate(env, constant_control(1), starts=starts, max_steps=20, state_key="state")
    assert torch.equal(named.states, plain.states)
    assert named.safe_rate == plain.safe_rate


def test_evaluation_draws_nothing_from_the_global_generator():
    env = DoubleIntegratorEnv(3, seed=0)
    before = torch.get_rng_state()
    evaluate(env, constant_control(2), episodes=7, max_steps=60)
    assert torch.equal(torch.get_rng_state(), before)


def test_noise_is_off_in_evaluation_and_every_mode_is_put_back():
    head, frozen = NoisyLinear(2, 3), nn.Dropout().eval()
    policy = nn.Sequential(head, frozen)
    noisy = policy(torch.ones(2))
    with evaluation_mode(policy):
        assert not head.training
        assert torch.equal(policy(torch.ones(2)), head.weight_mu.sum(1) + head.bias_mu)
        assert not policy(torch.ones(2)).requires_grad
    assert head.training
    assert not frozen.training
    assert torch.equal(policy(torch.ones(2)), noisy)


def test_evaluation_uses_the_means_of_a_noisy_policy():
    head = NoisyLinear(2, 3, sigma_init=50.0)

    class Argmax(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = head

        def forward(self, observation):
            return self.head(observation).argmax(-1)

    starts = torch.rand(64, 2, generator=torch.Generator().manual_seed(0)) - 0.5
    policy = TensorDictModule(Argmax(), in_keys=["observation"], out_keys=["action"])
    env = DoubleIntegratorEnv(64)
    first = evaluate(env, policy, starts=starts, max_steps=5).states
    head.reset_noise()
    assert torch.equal(first, evaluate(env, policy, starts=starts, max_steps=5).states)


class Weak(nn.Module):
    """Location minus the mean of the observation, and a standard deviation of 1."""

    def forward(self, observation):
        return -observation.mean(-1, keepdim=True), torch.ones_like(observation[..., :1])


class LessIsMore(nn.Module):
    """Logits that prefer to brake."""

    def forward(self, observation):
        velocity = observation[..., 1:]
        return torch.cat([velocity, torch.zeros_like(velocity), -velocity], -1)


def gaussian_actor(env):
    module = TensorDictModule(Weak(), in_keys=["observation"], out_keys=["loc", "scale"])
    return ProbabilisticActor(
        module,
        spec=Bounded(-1.0, 1.0, (1,)),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        default_interaction_type=ExplorationType.RANDOM,
    )


def categorical_actor(env):
    module = TensorDictModule(LessIsMore(), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(
        module,
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        default_interaction_type=ExplorationType.RANDOM,
    )


@pytest.mark.parametrize(("actor", "discrete"), [(gaussian_actor, False), (categorical_actor, True)])
def test_a_stochastic_policy_acts_deterministically_and_its_exploration_comes_back(actor, discrete):
    env = DoubleIntegratorEnv(8, discrete=discrete)
    policy = actor(env)
    starts = torch.rand(8, 2, generator=torch.Generator().manual_seed(0)) - 0.5
    outside = exploration_type()
    found = evaluate(env, policy, starts=starts, max_steps=10).states
    assert exploration_type() == outside

    state, expected = starts, [starts]
    for _ in range(10):
        control = -state[:, 1:].sign() if discrete else torch.tanh(-state.mean(-1, keepdim=True))
        state = env.dynamics(state, control)
        expected.append(state)
    assert torch.allclose(found, torch.stack(expected, 1), atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"max_steps": 1}, "either starts .* or episodes"),
        ({"max_steps": 1, "episodes": 2, "starts": torch.zeros(2, 2)}, "either starts .* or episodes"),
        ({"max_steps": 1, "episodes": 0}, "episodes is 0"),
        ({"max_steps": 0, "episodes": 1}, "max_steps is 0"),
        ({"max_steps": 1, "episodes": 1, "confidence": 1.0}, "confidence is 1.0"),
        ({"max_steps": 1, "starts": torch.zeros(0, 2)}, r"starts has shape \[0, 2\]"),
        ({"max_steps": 1, "starts": torch.zeros(4, 3)}, r"observation has shape \(4, 3\)"),
    ],
)
def test_settings_that_make_no_evaluation_are_refused(settings, fault):
    with pytest.raises(ValueError, match=fault):
        evaluate(DoubleIntegratorEnv(4), constant_control(1), **settings)


@pytest.mark.parametrize(("count", "total"), [(-1, 3), (4, 3), (0, 0)])
def test_an_interval_of_no_count_is_refused(count, total):
    with pytest.raises(ValueError, match=f"count={count} of total={total}"):
        binomial_interval(count, total)


def test_margins_may_stand_under_other_keys_and_a_missing_one_is_named():
    starts = torch.tensor([[0.0, 0.0], [0.0, 1.5]])
    env = DoubleIntegratorEnv(2)
    expected = evaluate(env, constant_control(1), starts=starts, max_steps=50).safe_rate
    renamed = TransformedEnv(env, RenameTransform(["safety_margin"], ["margin"]))
    assert (
        evaluate(renamed, constant_control(1), starts=starts, max_steps=50, safety_margin="margin").safe_rate
        == expected
    )
    with pytest.raises(KeyError, match=r"safety_margin.*_reset and in _step"):
        evaluate(renamed, constant_control(1), starts=starts, max_steps=1)


def test_an_evaluation_prints_its_rates_and_not_its_states():
    env = DoubleIntegratorEnv(3, seed=0)
    found = evaluate(env, env.rand_action, episodes=3, max_steps=4)
    assert "states=[3, 5, 2]" in repr(found)
    assert f"safe_rate={found.safe_rate!r}" in repr(found)
    assert "tensor" not in repr(found)


def pushes(tensordict):
    """Right where the pole leans right."""
    return tensordict.set("action", (tensordict["observation"][..., 2] > 0).long())


def test_returns_are_the_sums_of_the_rewards_of_each_episode():
    found = evaluate(
        SafetyGymEnv("CartPole-v1", 3, seed=5),
        pushes,
        episodes=3,
        max_steps=40,
        safety_margin=None,
        reward="reward",
        state_key=None,
    )
    expected = []
    for seed in (5, 6, 7):
        env = gymnasium.make("CartPole-v1")
        observation, _ = env.reset(seed=seed)
        total, over, steps = 0.0, False, 0
        while not over and steps < 40:
            observation, reward, terminated, truncated, _ = env.step(int(observation[2] > 0))
            total, over, steps = total + reward, terminated or truncated, steps + 1
        expected.append(total)
    assert found.returns.tolist() == expected
    assert found.scores["mean_return"] == pytest.approx(sum(expected) / 3)
    assert (found.states, found.safe_rate, found.success_rate, found.safe_interval) == (None, None, None, None)
    assert "states=None, " in repr(found)


def test_what_follows_an_end_is_not_part_of_a_return():
    zeros = torch.zeros(2, 4)
    env = ScriptEnv(zeros, zeros, torch.tensor([[0, 1, 0], [0, 0, 1]]), batch=(2,))
    step = env._step
    env._step = lambda tensordict: step(tensordict).set("reward", torch.ones(2, 1))
    found = evaluate(env, still, starts=starts_of(2), max_steps=3, reward="reward")
    assert found.returns.tolist() == [2.0, 3.0]


def test_a_target_without_a_safety_margin_and_starts_without_a_key_are_refused():
    env = DoubleIntegratorEnv(2, problem="reach_avoid")
    with pytest.raises(ValueError, match="target_margin is 'target_margin', but safety_margin None"):
        evaluate(env, still, episodes=2, max_steps=3, safety_margin=None, target_margin="target_margin")
    with pytest.raises(ValueError, match="state_key is None, so that starts have no place"):
        evaluate(env, still, starts=torch.zeros(2, 2), max_steps=3, state_key=None)


def test_an_episode_evaluator_meets_the_same_episodes_each_time():
    env = SafetyGymEnv("CartPole-v1", 2)
    measure = EpisodeEvaluator(env, episodes=5, max_steps=50, seed=3, safety_margin=None, reward="reward")
    first = measure(pushes)
    env.rollout(7)
    assert measure(pushes).returns.tolist() == first.returns.tolist()
    other = EpisodeEvaluator(env, episodes=5, max_steps=50, seed=4, safety_margin=None, reward="reward")
    assert other(pushes).returns.tolist() != first.returns.tolist()


@pytest.mark.parametrize("name", ["safety_margin", "target_margin", "reward"])
def test_what_is_not_one_number_for_each_episode_is_refused(name):
    env = DoubleIntegratorEnv(3, problem="reach_avoid")
    with pytest.raises(ValueError, match=rf"the {name} 'observation' has shape \[3, 2\]; give one number"):
        evaluate(
            env,
            lambda td: td.set("action", torch.ones(3, dtype=torch.int64)),
            episodes=3,
            max_steps=2,
            **{name: "observation"},
        )
