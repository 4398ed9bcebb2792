"""One Box action in two parts: bounds, the way there and back, and the environment at the end of it."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import ActionScaling, Compose, EnvBase, GymEnv, GymWrapper, TransformedEnv
from torchrl.envs.utils import ExplorationType, check_env_specs, set_exploration_type
from torchrl.modules import ProbabilisticActor, TanhNormal

from torchrl_safety.envs import SplitPlayers
from torchrl_safety.modules import RandomDisturbance, TwoPlayerPolicy


class Echo(gymnasium.Env):
    """Its observation is the joint action that it received: two entries in ±2 and ±3, and one in [-.5, 1.5]."""

    action_space = gymnasium.spaces.Box(np.float32([-2, -3, -0.5]), np.float32([2, 3, 1.5]))
    observation_space = gymnasium.spaces.Box(-10, 10, (3,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        return np.asarray(action, np.float32), 0.0, False, False, {}


def split(ctrl_action_dim: int = 2, **settings) -> EnvBase:
    return TransformedEnv(GymWrapper(Echo()), SplitPlayers(ctrl_action_dim, **settings))


def act(env: EnvBase, control, disturbance) -> list[float]:
    actions = {"action": torch.tensor(control), "disturbance": torch.tensor(disturbance)}
    return env.step(env.reset().update(actions))["next", "observation"].tolist()


def test_each_part_keeps_its_own_bounds():
    spec = split().full_action_spec
    assert set(spec.keys()) == {"action", "disturbance"}
    assert spec["action"].space.low.tolist() == [-2, -3]
    assert spec["action"].space.high.tolist() == [2, 3]
    assert (spec["disturbance"].space.low.tolist(), spec["disturbance"].space.high.tolist()) == ([-0.5], [1.5])
    other = split(1).full_action_spec
    assert (other["action"].shape, other["disturbance"].shape) == ((1,), (2,))
    check_env_specs(split())
    check_env_specs(split(1))


def test_actions_arrive_in_their_own_units_in_the_order_of_the_players():
    assert act(split(), [2.0, -3.0], [1.5]) == [2, -3, 1.5]
    assert act(split(1), [2.0], [-3.0, 1.5]) == [2, -3, 1.5]


def test_with_scaled_actions_plus_and_minus_one_are_the_bounds():
    env = TransformedEnv(GymWrapper(Echo()), Compose(ActionScaling(), SplitPlayers(2)))
    spec = env.full_action_spec
    for key in ("action", "disturbance"):
        assert (spec[key].space.high == 1).all()
        assert (spec[key].space.low == -1).all()
    assert act(env, [1.0, -1.0], [1.0]) == pytest.approx([2, -3, 1.5])
    assert act(env, [0.0, 0.5], [0.0]) == pytest.approx([0, 1.5, 0.5])


def controller(env: EnvBase) -> ProbabilisticActor:
    network = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
    spec = env.full_action_spec["action"]
    return ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        out_keys=["action"],
        spec=spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": spec.space.low, "high": spec.space.high},
    )


def test_a_policy_built_from_the_spec_reaches_the_bounds():
    torch.manual_seed(0)
    env = split()
    policy = controller(env)
    with torch.no_grad():
        policy.module[0].module[0].bias.copy_(torch.tensor([9.0, -9.0, 0.0, 0.0]))
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        action = policy(env.reset())["action"]
    torch.testing.assert_close(action, torch.tensor([2.0, -3.0]), atol=1e-3, rtol=0)


def test_roll_outs_and_collectors_hold_both_actions_as_the_players_wrote_them():
    torch.manual_seed(0)
    env = split()
    policy = TwoPlayerPolicy(controller(env), RandomDisturbance(env.full_action_spec["disturbance"]))
    data = env.rollout(20, policy)
    settings = {"frames_per_batch": 20, "total_frames": 20, "auto_register_policy_transforms": False}
    collector = Collector(split(), policy, **settings)
    (batch,) = [batch.clone() for batch in collector]
    collector.shutdown()
    for frames in (data, batch):
        assert frames["action"].shape == (20, 2)
        assert frames["disturbance"].shape == (20, 1)
        joint = torch.cat((frames["action"], frames["disturbance"]), -1)
        torch.testing.assert_close(frames["next", "observation"], joint)


def test_there_and_back_is_where_it_began():
    data = TensorDict({"action": torch.randn(4, 5, 7), "other": torch.ones(4, 5)}, [4, 5])
    there = SplitPlayers(3)(data.clone())
    assert (there["action"].shape, there["disturbance"].shape) == ((4, 5, 3), (4, 5, 4))
    back = SplitPlayers(3).inv(there)
    assert set(back.keys()) == {"action", "other"}
    assert torch.equal(back["action"], data["action"])
    assert "disturbance" in there.keys()  # noqa: SIM118, what the policy wrote is left alone


def test_a_replay_buffer_gives_back_what_was_stored():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), transform=SplitPlayers(2), batch_size=10)
    data = TensorDict({"action": torch.arange(20.0).reshape(10, 2), "disturbance": -torch.arange(10.0)[:, None]}, [10])
    buffer.extend(data)
    assert buffer.storage[:]["action"].shape == (10, 3)
    sample = buffer.sample()
    torch.testing.assert_close(sample["action"][:, :1], -2 * sample["disturbance"])


def test_keys_of_other_names_and_nested_ones_are_taken():
    env = split(2, disturbance_key=("adversary", "action"))
    check_env_specs(env)
    assert ("adversary", "action") in env.full_action_spec.keys(True, True)
    data = env.rollout(3)
    assert data["adversary", "action"].shape == (3, 1)


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match=f"ctrl_action_dim={size} must be a whole number of at least 1"):
        SplitPlayers(size)


def test_what_cannot_be_split_is_named_with_its_remedy():
    with pytest.raises(ValueError, match="'action' has 3 entries, of which ctrl_action_dim=3 are the controller's"):
        split(3).full_action_spec  # noqa: B018, specs are made on first use
    with pytest.raises(ValueError, match="only a continuous action can be split"):
        TransformedEnv(GymEnv("CartPole-v1"), SplitPlayers(1)).full_action_spec  # noqa: B018
    with pytest.raises(ValueError, match="joint action at 'action' has 2 entries"):
        SplitPlayers(2)(TensorDict({"action": torch.zeros(5, 2)}, [5]))
    env = split()
    with pytest.raises(KeyError, match=r"'disturbance' is missing.*let both players act"):
        env.step(env.reset().set("action", torch.zeros(2)))
    with pytest.raises(ValueError, match="'action' has 1 entries, ctrl_action_dim=2"):
        env.step(env.reset().update({"action": torch.zeros(1), "disturbance": torch.zeros(2)}))
    with pytest.raises(KeyError, match=r"'action' is missing.*joint action"):
        SplitPlayers(2)(TensorDict({}, [5]))
