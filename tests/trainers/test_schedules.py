"""Laws of the schedules: what they are at each time, that they never go back, and that they touch what they name."""

from __future__ import annotations

import io
import itertools
import math

import pytest
import torch
from contracts import LOSSES
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import Bounded
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss

from torchrl_safety.modules import CappedNormalParams
from torchrl_safety.trainers import GeometricGamma, StdCap, StepDecay, StepGamma, TemperatureReset, parameter_groups


def saved(state_dict):
    """The state as it comes back from a file that may hold tensors and plain values only."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def sac_loss(*, head: nn.Module | None = None, **settings) -> SACLoss:
    network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2), head or NormalParamExtractor())
    module = TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"])
    actor = ProbabilisticActor(
        module,
        spec=Bounded(-1.0, 1.0, (1,)),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.critic = critic

        def forward(self, observation, action):
            return self.critic(torch.cat([observation, action], -1))

    return SACLoss(actor, ValueOperator(Critic(), in_keys=["observation", "action"]), **settings)


RATES = {"actor_network": 1e-4, "qvalue_network": 3e-4, "log_alpha": 1e-2}


def test_the_defaults_step_at_a_fifth_and_two_fifths_of_the_budget():
    schedule = StepGamma(1000)
    values = {frames: schedule.step(frames) for frames in (0, 199, 200, 399, 400, 999, 5000)}
    assert values == {0: 0.99, 199: 0.99, 200: 0.999, 399: 0.999, 400: 0.9999, 999: 0.9999, 5000: 0.9999}


@pytest.mark.parametrize("period", [0.1, 0.18, 0.2, 1 / 3])
def test_every_multiple_of_the_period_is_a_step_in_spite_of_rounding(period):
    total = 900_000
    schedule = StepGamma(total, gamma_start=0.5, ratio=0.5, period=period, gamma_end=1.0)
    for k in range(1, int(1 / period) + 1):
        assert schedule.step(round(k * period * total)) == pytest.approx(1 - 0.5 ** (k + 1), abs=1e-12)


def test_a_geometric_discount_shrinks_its_distance_to_one_equally_in_equal_times_and_ends_at_its_end():
    schedule = GeometricGamma(1000, gamma_start=0.9, gamma_end=0.999, fraction=0.5)
    distances = [1 - schedule.step(frames) for frames in range(0, 501, 50)]
    ratios = [after / before for before, after in itertools.pairwise(distances)]
    assert ratios == pytest.approx([0.01 ** (1 / 10)] * 10, rel=1e-6)
    assert schedule.gamma == 0.999
    assert schedule.step(1000) == 0.999


@pytest.mark.parametrize(
    ("make", "sign"),
    [
        (StepGamma, 1),
        (GeometricGamma, 1),
        (lambda total: StdCap(total, start=2.0, end=0.1, fraction=0.7), -1),
    ],
    ids=["step", "geometric", "std"],
)
def test_a_schedule_never_goes_back_and_continues_from_a_file_with_a_longer_budget(make, sign):
    first = make(1000)
    values = [first.step(frames) for frames in range(0, 451, 10)]
    assert values == sorted(values, key=lambda value: sign * value)
    assert len(set(values)) > 2
    longer = make(100_000)
    longer.load_state_dict(saved(first.state_dict()))
    assert longer.step(460) == values[-1]
    assert sign * longer.step(100_000) > sign * values[-1] or values[-1] == 0.9999
    assert first.step(0) == values[-1]


def test_the_cap_of_a_policy_falls_by_the_same_factor_in_equal_times():
    schedule = StdCap(100, start=1.0, end=1 / 16, fraction=0.5)
    assert [schedule.step(frames) for frames in (0, 25, 50, 100)] == [1.0, 0.25, 1 / 16, 1 / 16]


@pytest.mark.parametrize(
    ("schedule", "settings", "named"),
    [
        (StepGamma, {"gamma_start": 1.2}, "gamma_start=1.2"),
        (StepGamma, {"gamma_start": 0.99, "gamma_end": 0.9}, "gamma_end=0.9"),
        (StepGamma, {"ratio": 1.0}, "ratio is 1.0"),
        (StepGamma, {"period": 0.0}, "period is 0.0"),
        (StepGamma, {"total_frames": 0}, "total_frames is 0"),
        (StepGamma, {"total_frames": float("nan")}, "total_frames is nan"),
        (GeometricGamma, {"gamma_end": 1.0}, "gamma_end=1.0"),
        (GeometricGamma, {"gamma_start": -0.1}, "gamma_start=-0.1"),
        (GeometricGamma, {"fraction": 0.0}, "fraction is 0.0"),
        (GeometricGamma, {"total_frames": 0}, "total_frames is 0"),
        (StdCap, {"start": 0.1, "end": 0.2}, "start=0.1, end=0.2"),
        (StdCap, {"start": 1.0, "end": 0.0}, "end=0.0"),
        (StdCap, {"start": math.inf, "end": 1.0}, "start=inf"),
        (StdCap, {"start": 1.0, "end": 0.5, "fraction": -1}, "fraction is -1"),
    ],
)
def test_a_setting_out_of_range_is_named_with_its_value(schedule, settings, named):
    with pytest.raises(ValueError, match=named):
        schedule(**{"total_frames": 1000, **settings})


def test_every_learned_parameter_of_a_loss_is_in_exactly_one_group_with_its_rate():
    loss = sac_loss()
    groups = {group["name"]: group for group in parameter_groups(loss, RATES)}
    assert {name: group["lr"] for name, group in groups.items()} == RATES
    grouped = [id(parameter) for group in groups.values() for parameter in group["params"]]
    assert sorted(grouped) == sorted(map(id, loss.parameters()))
    assert groups["log_alpha"]["params"] == [loss.log_alpha]
    shapes = {name: {tuple(p.shape) for p in group["params"]} for name, group in groups.items()}
    assert shapes["actor_network"] == {(8, 2), (8,), (2, 8), (2,)}
    assert shapes["qvalue_network"] == {(2, 8, 3), (2, 8), (2, 1, 8), (2, 1)}


@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.loss.__name__)
def test_each_network_of_every_loss_learns_and_decays_at_a_rate_of_its_own(case):
    loss = case.build()
    networks = sorted({prefix.removesuffix("_params") for prefix in case.terms.values()})
    rates = {name: 0.5 * 2.0**-i for i, name in enumerate(networks)}
    optimizer = torch.optim.SGD(parameter_groups(loss, rates))
    StepDecay(optimizer, {networks[0]: 0.5}, total_frames=100, period=0.1).step(25)
    rates[networks[0]] *= 0.25
    before = {name: value.detach().clone() for name, value in loss.named_parameters()}
    for parameter in loss.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, value in loss.named_parameters():
        expected = before[name] - rates[name.split(".")[0].removesuffix("_params")]
        torch.testing.assert_close(value.detach(), expected)


@pytest.mark.parametrize(
    ("rates", "named"),
    [
        ({**RATES, "critic": 1e-3}, r"\['critic'\].*\['log_alpha', 'actor_network', 'qvalue_network'\]"),
        ({"actor_network": 1e-3, "log_alpha": 1e-3}, r"leaves out \['qvalue_network'\]"),
        ({**RATES, "log_alpha": 0.0}, r"learning_rates\['log_alpha'\] is 0.0"),
    ],
)
def test_names_and_rates_that_do_not_fit_the_loss_are_refused(rates, named):
    with pytest.raises(ValueError, match=named):
        parameter_groups(sac_loss(), rates)


def named_sgd(**rates: float) -> torch.optim.SGD:
    return torch.optim.SGD(
        [{"params": [nn.Parameter(torch.ones(1))], "lr": rate, "name": name} for name, rate in rates.items()]
    )


def test_each_group_decays_by_its_own_ratio_and_the_others_keep_their_rate():
    optimizer = named_sgd(actor=1.0, critic=0.5, temperature=0.25)
    schedule = StepDecay(optimizer, {"actor": 0.5, "critic": 0.1}, total_frames=100, period=0.1)
    for frames in range(0, 121, 5):
        rates = schedule.step(frames)
        expected = {"actor": 0.5 ** (frames // 10), "critic": 0.5 * 0.1 ** (frames // 10)}
        assert rates == pytest.approx(expected)
        actual = {group["name"]: group["lr"] for group in optimizer.param_groups}
        assert actual == pytest.approx({**expected, "temperature": 0.25})


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_a_rate_never_rises_on_resume_with_a_longer_budget_whichever_is_built_or_loaded_first(optimizer_first):
    optimizer = named_sgd(actor=1.0)
    schedule = StepDecay(optimizer, {"actor": 0.5}, total_frames=100, period=0.1)
    schedule.step(35)
    states = saved([optimizer.state_dict(), schedule.state_dict()])

    resumed = named_sgd(actor=1.0)
    if optimizer_first:
        resumed.load_state_dict(states[0])
    longer = StepDecay(resumed, {"actor": 0.5}, total_frames=1000, period=0.1)
    if not optimizer_first:
        resumed.load_state_dict(states[0])
    longer.load_state_dict(states[1])
    assert [longer.step(frames)["actor"] for frames in (36, 399, 400)] == [0.125, 0.125, 0.0625]
    assert resumed.param_groups[0]["lr"] == 0.0625


def test_a_rate_that_is_a_tensor_is_written_in_place():
    rate = torch.tensor(1.0)
    optimizer = torch.optim.Adam([{"params": [nn.Parameter(torch.ones(1))], "lr": rate, "name": "actor"}])
    schedule = StepDecay(optimizer, {"actor": 0.5}, total_frames=100)
    for frames in (20, 40):
        schedule.step(frames)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


@pytest.mark.parametrize(
    ("ratio", "named"), [({"actr": 0.5}, r"\['actr'\].*\['actor'\]"), ({"actor": 1.5}, r"ratio\['actor'\] is 1.5")]
)
def test_a_decay_of_an_unknown_group_or_by_no_share_is_refused(ratio, named):
    with pytest.raises(ValueError, match=named):
        StepDecay(named_sgd(actor=1.0), ratio, total_frames=10)


def one_optimizer(loss):
    optimizer = torch.optim.Adam(parameter_groups(loss, RATES))
    return optimizer, [optimizer]


def separate_optimizers(loss):
    networks = [parameter for parameter in loss.parameters() if parameter is not loss.log_alpha]
    optimizer = torch.optim.Adam([loss.log_alpha], 1e-2)
    return optimizer, [torch.optim.Adam(networks, 1e-3), optimizer]


def train(loss, optimizers):
    """An update with some gradient for every parameter."""
    for parameter in loss.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("build", [one_optimizer, separate_optimizers])
def test_a_jump_of_the_discount_resets_the_temperature_exactly_once_and_nothing_else(build):
    loss = sac_loss(alpha_init=0.1)
    initial = loss.log_alpha.item()
    optimizer, optimizers = build(loss)
    schedule = TemperatureReset(StepGamma(1000), loss, optimizer)
    resets = []
    for frames in range(0, 1000, 50):
        train(loss, optimizers)
        networks = {name: p.detach().clone() for name, p in loss.named_parameters() if name != "log_alpha"}
        before = loss.log_alpha.item()
        schedule.step(frames)
        if loss.log_alpha.item() != before:
            resets.append(frames)
            assert loss.log_alpha.item() == initial
            assert loss.log_alpha not in optimizer.state
        else:
            assert optimizer.state[loss.log_alpha]["step"] > 0
        others = [p for name, p in loss.named_parameters() if name != "log_alpha"]
        assert all(any(p in moved.state for moved in optimizers) for p in others)
        assert all(torch.equal(p, networks[name]) for name, p in loss.named_parameters() if name != "log_alpha")
    assert resets == [200, 400]


def test_the_first_update_after_a_reset_is_that_of_a_new_optimiser():
    fresh, worn = sac_loss(alpha_init=0.1), sac_loss(alpha_init=0.1)
    moves = []
    for loss, updates in ((fresh, 0), (worn, 7)):
        optimizer, optimizers = one_optimizer(loss)
        schedule = TemperatureReset(StepGamma(1000), loss, optimizer)
        for _ in range(updates):
            train(loss, optimizers)
        schedule.step(200)
        train(loss, optimizers)
        moves.append(loss.log_alpha.item())
    assert moves[0] == moves[1]


@pytest.mark.parametrize("frames", [150, 250])
def test_a_resumed_run_does_not_reset_the_temperature_where_the_discount_did_not_jump(frames):
    loss = sac_loss()
    optimizer, optimizers = one_optimizer(loss)
    schedule = TemperatureReset(StepGamma(1000), loss, optimizer)
    schedule.step(frames)
    train(loss, optimizers)
    states = saved([loss.state_dict(), optimizer.state_dict(), schedule.state_dict()])

    resumed = sac_loss()
    again, _ = one_optimizer(resumed)
    continued = TemperatureReset(StepGamma(1000), resumed, again)
    for part, state in zip((resumed, again, continued), states):
        part.load_state_dict(state)
    assert continued.step(frames + 10) == schedule.step(frames + 10)
    assert resumed.log_alpha.item() == loss.log_alpha.item() != 0.0
    assert again.state[resumed.log_alpha]["step"] == 1
    continued.step(400)
    assert resumed.log_alpha.item() == 0.0


def test_a_temperature_that_is_not_learned_cannot_be_reset():
    loss = sac_loss(fixed_alpha=True)
    optimizer = torch.optim.Adam(loss.parameters())
    with pytest.raises(ValueError, match="fixed_alpha=False"):
        TemperatureReset(StepGamma(10), loss, optimizer)
    with pytest.raises(ValueError, match="does not move log_alpha"):
        TemperatureReset(StepGamma(10), sac_loss(), optimizer)
    loss = sac_loss()
    with pytest.raises(ValueError, match="schedule is a GeometricGamma; only the jumps of a StepGamma"):
        TemperatureReset(GeometricGamma(10), loss, torch.optim.Adam(loss.parameters()))


@pytest.mark.parametrize("frames", [math.nan, -1])
def test_frames_that_are_no_number_of_frames_do_not_end_a_schedule(frames):
    for schedule in (GeometricGamma(10), StdCap(10, start=1.0, end=0.1)):
        with pytest.raises(ValueError, match=f"frames is {frames}"):
            schedule.step(frames)


def test_a_cap_reaches_the_loss_that_was_made_from_the_policy_and_its_checkpoint():
    head = CappedNormalParams(std_cap=1.0)
    loss = sac_loss(head=head)
    schedule = StdCap(100, start=1.0, end=0.1)
    head.set_std_cap(schedule.step(50))
    caps = [value for key, value in loss.actor_network_params.items(True, True) if "std_cap" in key]
    assert caps == [pytest.approx(0.1**0.5)]
    resumed = sac_loss(head=CappedNormalParams(std_cap=1.0))
    resumed.load_state_dict(saved(loss.state_dict()))
    again = [value for key, value in resumed.actor_network_params.items(True, True) if "std_cap" in key]
    assert torch.equal(again[0], caps[0])


def test_a_jump_resets_the_temperatures_of_both_players():
    loss = next(case for case in LOSSES if case.family == "game SAC").build(alpha_init=0.5)
    log_alphas = [loss.log_alpha, loss.log_alpha_disturbance]
    optimizer = torch.optim.Adam(log_alphas, 0.1)
    sum(log_alphas).backward()
    optimizer.step()
    schedule = TemperatureReset(StepGamma(1000), loss, optimizer)
    schedule.step(199)
    assert all(each.exp().item() < 0.46 for each in log_alphas)
    schedule.step(200)
    assert [each.exp().item() for each in log_alphas] == pytest.approx([0.5, 0.5])
    assert not optimizer.state
    with pytest.raises(ValueError, match="the optimizer does not move log_alpha"):
        TemperatureReset(StepGamma(1000), loss, torch.optim.Adam([loss.log_alpha]))
