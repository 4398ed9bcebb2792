"""Two players in one policy: who reads whose action, what is saved, and the simple disturbances."""

from __future__ import annotations

import io

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.data import Bounded, Categorical, OneHot, Unbounded
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import ProbabilisticActor, QValueActor, TanhNormal

from torchrl_safety.envs import AttackDefenseEnv, BicycleEnv, DoubleIntegratorEnv, NativeEnv, PursuitEvasionEnv
from torchrl_safety.modules import RandomDisturbance, TwoPlayerPolicy, ZeroDisturbance


def linear(in_keys: list[str], out_key: str, sizes: tuple[int, int]) -> TensorDictModule:
    return TensorDictModule(_Joined(*sizes), in_keys, [out_key])


class _Joined(nn.Linear):
    def forward(self, *parts: Tensor) -> Tensor:
        return super().forward(torch.cat(parts, -1))


class _Params(_Joined):
    """Location and scale of two entries."""

    def __init__(self, size: int) -> None:
        super().__init__(size, 4)
        self.extract = NormalParamExtractor()

    def forward(self, *parts: Tensor) -> tuple[Tensor, Tensor]:
        return self.extract(super().forward(*parts))


def gaussian(name: str, in_keys: list[str], size: int) -> ProbabilisticActor:
    network = _Params(size)
    parameters = [f"{name}_loc", f"{name}_scale"]
    return ProbabilisticActor(
        TensorDictModule(network, in_keys, parameters),
        in_keys=dict(zip(("loc", "scale"), parameters)),
        out_keys=[name],
        distribution_class=TanhNormal,
        return_log_prob=True,
        log_prob_keys=[f"{name}_log_prob"],
    )


def observations(*shape: int) -> TensorDict:
    return TensorDict({"observation": torch.randn(*shape, 3, generator=torch.Generator().manual_seed(0))}, shape)


def both(second_mover: bool = False) -> TwoPlayerPolicy:
    torch.manual_seed(0)
    seen = ["observation", "action"] if second_mover else ["observation"]
    return TwoPlayerPolicy(
        linear(["observation"], "action", (3, 2)),
        linear(seen, "disturbance", (5 if second_mover else 3, 2)),
        second_mover=second_mover,
    )


def test_each_player_acts_as_it_does_alone():
    policy = both()
    data = policy(observations(4, 5))
    assert set(data.keys()) == {"observation", "action", "disturbance"}
    assert torch.equal(data["action"], policy.controller(observations(4, 5))["action"])
    assert torch.equal(data["disturbance"], policy.disturbance(observations(4, 5))["disturbance"])
    assert policy.in_keys == ["observation"]


def test_a_second_mover_answers_the_action_that_was_taken():
    policy = both(second_mover=True)
    data = policy(observations(6))
    alone = policy.disturbance(observations(6).set("action", data["action"]))
    assert torch.equal(data["disturbance"], alone["disturbance"])
    with torch.no_grad():
        policy.controller.module.bias.add_(1)
    assert not torch.equal(policy(observations(6))["disturbance"], data["disturbance"])
    assert policy.in_keys == ["observation"]


def test_the_gradient_of_one_player_reaches_the_other_only_in_a_second_mover():
    for second_mover in (False, True):
        policy = both(second_mover)
        policy(observations(6))["disturbance"].sum().backward()
        assert (policy.controller.module.weight.grad is not None) == second_mover
        assert policy.disturbance.module.weight.grad is not None


def test_the_controller_is_the_deployable_part_and_is_saved_with_the_whole():
    policy = both()
    assert policy.controller is policy.module[0]
    file = io.BytesIO()
    torch.save(policy.state_dict(), file)
    file.seek(0)
    torch.manual_seed(5)
    other = TwoPlayerPolicy(linear(["observation"], "action", (3, 2)), linear(["observation"], "disturbance", (3, 2)))
    before = other(observations(4))
    other.load_state_dict(torch.load(file, weights_only=True))
    after = other(observations(4))
    for key in ("action", "disturbance"):
        assert torch.equal(after[key], policy(observations(4))[key])
        assert not torch.equal(after[key], before[key])
    deployed = linear(["observation"], "action", (3, 2))
    deployed.load_state_dict(policy.controller.state_dict())
    assert torch.equal(deployed(observations(4))["action"], policy(observations(4))["action"])


@pytest.mark.parametrize("second_mover", [False, True])
def test_a_policy_compiles_in_one_graph(second_mover):
    torch.compiler.reset()
    policy = both(second_mover)
    compiled = torch.compile(policy, fullgraph=True, backend="eager")
    got, want = compiled(observations(7)), policy(observations(7))
    for key in ("action", "disturbance"):
        torch.testing.assert_close(got[key], want[key])
    quiet = TwoPlayerPolicy(policy.controller, ZeroDisturbance(Bounded(-1.0, 1.0, (7, 2))))
    torch.compiler.reset()
    assert not torch.compile(quiet, fullgraph=True, backend="eager")(observations(7))["disturbance"].any()


@pytest.mark.parametrize("second_mover", [False, True])
def test_the_exploration_type_holds_for_both_players(second_mover):
    torch.manual_seed(0)
    seen, size = (["observation", "action"], 5) if second_mover else (["observation"], 3)
    policy = TwoPlayerPolicy(
        gaussian("action", ["observation"], 3), gaussian("disturbance", seen, size), second_mover=second_mover
    )
    keys = {"action", "disturbance", "action_log_prob", "disturbance_log_prob"}
    assert keys <= set(policy(observations(5)).keys())
    for kind, same in ((ExplorationType.DETERMINISTIC, True), (ExplorationType.RANDOM, False)):
        with set_exploration_type(kind):
            first, second = policy(observations(5)), policy(observations(5))
        for key in ("action", "disturbance"):
            assert torch.equal(first[key], second[key]) == same
        if same:
            torch.testing.assert_close(first["action"], first["action_loc"].tanh())


def test_what_the_controller_evaluated_is_there_for_the_disturbance():
    table = TensorDictModule(nn.Linear(3, 9), ["observation"], ["table"])

    def best(table: Tensor) -> Tensor:
        return table.unflatten(-1, (3, 3)).amin(-1).argmax(-1)

    def worst(table: Tensor, action: Tensor) -> Tensor:
        return table.unflatten(-1, (3, 3)).take_along_dim(action[..., None, None], -2).squeeze(-2).argmin(-1)

    answer = TensorDictModule(worst, ["table", "action"], ["disturbance"])
    policy = TwoPlayerPolicy(
        TensorDictSequential(table, TensorDictModule(best, ["table"], ["action"])), answer, second_mover=True
    )
    data = policy(observations(20))
    for values, u, d in zip(data["table"].tolist(), data["action"].tolist(), data["disturbance"].tolist()):
        rows = [values[3 * i : 3 * i + 3] for i in range(3)]
        assert min(rows[u]) == max(map(min, rows))
        assert rows[u][d] == min(rows[u])


def test_players_that_do_not_fit_are_refused():
    control, against = linear(["observation"], "action", (3, 2)), linear(["observation"], "disturbance", (3, 2))
    reading = linear(["observation", "action"], "disturbance", (5, 2))
    with pytest.raises(ValueError, match=r"the controller writes \['disturbance'\], not 'action'"):
        TwoPlayerPolicy(against, against)
    with pytest.raises(ValueError, match=r"the disturbance writes \['action'\], not 'disturbance'"):
        TwoPlayerPolicy(control, control)
    with pytest.raises(ValueError, match="the disturbance reads 'action' with second_mover=False"):
        TwoPlayerPolicy(control, reading)
    with pytest.raises(ValueError, match="the disturbance does not read 'action' with second_mover=True"):
        TwoPlayerPolicy(control, against, second_mover=True)
    with pytest.raises(ValueError, match="the controller reads 'disturbance', but it moves first"):
        TwoPlayerPolicy(linear(["observation", "disturbance"], "action", (5, 2)), against)
    greedy = [QValueActor(nn.Linear(3, 3), spec=Categorical(3), action_space="categorical") for _ in range(2)]
    greedy[1] = TensorDictModule(lambda x: (x, x), ["observation"], ["action_value", "disturbance"])
    with pytest.raises(ValueError, match=r"both players write \['action_value'\], and the second overwrites"):
        TwoPlayerPolicy(*greedy)


def test_other_and_nested_keys_are_taken():
    key = ("adversary", "action")
    policy = TwoPlayerPolicy(
        linear(["observation"], "control", (3, 2)),
        RandomDisturbance(Bounded(-1.0, 1.0, (5, 2)), out_key=key),
        action_key="control",
        disturbance_key=key,
    )
    data = policy(observations(5))
    assert data[key].shape == (5, 2)


ENVS = (
    lambda **settings: DoubleIntegratorEnv(6, max_disturbance=0.5, **settings),
    lambda **settings: PursuitEvasionEnv(6, **settings),
    lambda **settings: AttackDefenseEnv(6, **settings),
    lambda **settings: BicycleEnv(6, **settings),
)


@pytest.mark.parametrize("discrete", [True, False])
@pytest.mark.parametrize("build", ENVS, ids=["double integrator", "pursuit", "attack", "bicycle"])
def test_simple_disturbances_play_in_every_environment(build, discrete):
    env: NativeEnv = build(discrete=discrete, end_criterion="timeout", seed=0)
    spec = env.full_action_spec["disturbance"]
    act = TensorDictModule(lambda _: env.zero_action("action"), ["observation"], ["action"])
    zero = ZeroDisturbance(spec, zero_index=int(env.zero_action()[0]) if discrete else None)
    quiet = env.rollout(4, TwoPlayerPolicy(act, zero))
    assert not env.control(quiet["disturbance"], "disturbance").any()
    assert spec.is_in(quiet["disturbance"][:, 0])
    alone = env.dynamics(quiet["observation"], env.control(quiet["action"]))
    torch.testing.assert_close(quiet["next", "observation"], alone)
    noisy = env.rollout(4, TwoPlayerPolicy(act, RandomDisturbance(spec)))
    assert spec.is_in(noisy["disturbance"][:, 0])
    assert env.control(noisy["disturbance"], "disturbance").any()


def test_random_disturbances_are_uniform_within_their_bounds():
    low, high = torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 1.0])
    spec = Bounded(low.expand(3, 2), high.expand(3, 2), (3, 2))
    drawn = RandomDisturbance(spec, generator=torch.Generator().manual_seed(0))(TensorDict({}, [20_000]))["disturbance"]
    assert (drawn >= low).all()
    assert (drawn <= high).all()
    unit = (drawn - low) / (high - low)
    for column in unit.unbind(-1):  # 10 cells of 2000, standard deviation 42
        assert (column.histc(10, 0, 1) - 2000).abs().max() < 5 * 42.5
    indices = RandomDisturbance(Categorical(3, shape=(7,)), generator=torch.Generator().manual_seed(0))
    counts = indices(TensorDict({}, [30_000]))["disturbance"].bincount(minlength=4)
    assert counts[3] == 0
    assert (counts[:3] - 10_000).abs().max() < 5 * 82


@pytest.mark.parametrize("spec", [Bounded(-1.0, 1.0, (5, 2)), Categorical(9, shape=(5,))], ids=["box", "index"])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_disturbances_take_any_batch(spec, shape):
    size = spec.shape[1:]
    for policy in (RandomDisturbance(spec), ZeroDisturbance(spec, zero_index=4 if not size else None)):
        got = policy(TensorDict({}, shape))["disturbance"]
        assert got.shape == (*shape, *size)
        assert got.dtype == spec.dtype


def test_a_random_disturbance_follows_its_generator_and_continues_when_loaded():
    spec = Bounded(-1.0, 1.0, (5, 2), dtype=torch.float64)

    def draw(policy) -> Tensor:
        return policy(TensorDict({}, [5]))["disturbance"]

    seeded = [RandomDisturbance(spec, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(draw(seeded[0]), draw(seeded[1]))
    torch.manual_seed(1)
    first = draw(RandomDisturbance(spec))
    torch.manual_seed(1)
    assert torch.equal(draw(RandomDisturbance(spec)), first)
    file = io.BytesIO()
    torch.save(seeded[0].state_dict(), file)
    expected = [draw(seeded[0]) for _ in range(3)]
    file.seek(0)
    other = RandomDisturbance(spec)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert all(torch.equal(draw(other), want) for want in expected)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        assert not torch.equal(draw(other), draw(other))


def test_what_is_written_is_the_readers_to_change():
    policy = ZeroDisturbance(Bounded(-1.0, 1.0, (5, 2)))
    policy(TensorDict({}, [5]))["disturbance"].add_(1)
    assert not policy(TensorDict({}, [5]))["disturbance"].any()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ZeroDisturbance(Categorical(3)), r"zero_index=None must be one of 0\.\.2"),
        (lambda: ZeroDisturbance(Categorical(3), zero_index=3), r"zero_index=3 must be one of 0\.\.2"),
        (lambda: ZeroDisturbance(Categorical(3), zero_index=True), "zero_index=True must be one of"),
        (lambda: ZeroDisturbance(Bounded(-1.0, 1.0, (2,)), zero_index=0), "zero_index=0 is for a Categorical spec"),
        (lambda: ZeroDisturbance(Bounded(0.5, 1.0, (2,))), "0 is not between the bounds"),
        (lambda: ZeroDisturbance(OneHot(3)), "the spec is OneHot of torch.bool: give the leaf"),
        (lambda: RandomDisturbance(OneHot(3)), "the spec is OneHot"),
        (lambda: RandomDisturbance(Unbounded((2,))), "the spec is Unbounded"),
        (lambda: RandomDisturbance(Bounded(-torch.inf, 1.0, (2,))), "infinite bounds"),
        (lambda: RandomDisturbance(Bounded(0, 3, (2,), dtype=torch.int64)), "of torch.int64"),
        (lambda: RandomDisturbance(Bounded(-1.0, 1.0, (2,)), generator=3), "generator=3 must be a torch.Generator"),
    ],
)
def test_specs_and_settings_that_do_not_fit_are_named_with_their_remedy(build, message):
    with pytest.raises(ValueError, match=message):
        build()
