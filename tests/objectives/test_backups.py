"""Laws of the backups, against the operators written in Python floats and the numeric cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from contracts import BACKUPS, CASE_BACKUPS, CASES, LAWS, OPERATORS, SIGNALS, random_signals
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from torchrl_safety.objectives import (
    AvoidBackup,
    Backup,
    ClampedAffine,
    LipschitzReachAvoidBackup,
    ReachAvoidBackup,
    backups,
)

PRECISIONS = [(torch.float32, 1e-5), (torch.float64, 1e-10)]
NUMBERS = st.floats(-10, 10, allow_subnormal=False)
GAMMAS = st.one_of(st.sampled_from([0.0, 1.0, 0.9999]), st.floats(0, 1, allow_subnormal=False))
every_backup = pytest.mark.parametrize(("backup", "names"), BACKUPS, ids=[repr(b) for b, _ in BACKUPS])
SIGNAL_VALUES = st.fixed_dictionaries(dict.fromkeys(SIGNALS, NUMBERS))


def one_step(backup, signals, gamma, terminated=False, dtype=torch.float64):
    """The map of a single step, from Python floats."""
    tensors = {name: torch.tensor([value], dtype=dtype) for name, value in signals.items()}
    return backup.step_map(tensors, gamma=gamma, terminated=torch.tensor([terminated]))


def at(step, value):
    return step(torch.tensor([value], dtype=step.slope.dtype)).item()


@every_backup
def test_a_backup_reads_the_signals_of_its_contract(backup, names):
    assert backup.signals == names
    assert isinstance(backup, Backup)
    unread = {name: torch.full((2, 1), math.nan) for name in SIGNALS if name not in names}
    signals = random_signals(names, (2, 1)) | unread
    step = backup.step_map(signals, gamma=0.9, terminated=torch.zeros(2, 1, dtype=torch.bool))
    assert step(torch.zeros(2, 1, dtype=torch.float64)).isfinite().all()


@every_backup
@given(signals=SIGNAL_VALUES, value=NUMBERS, gamma=GAMMAS, terminated=st.booleans())
@LAWS
def test_the_step_map_is_the_operator(backup, names, signals, value, gamma, terminated):
    expected = OPERATORS[repr(backup)](signals, value, gamma, terminated)
    assert at(one_step(backup, signals, gamma, terminated), value) == pytest.approx(expected, abs=1e-12)


@every_backup
@given(signals=SIGNAL_VALUES, one=NUMBERS, other=NUMBERS, gamma=GAMMAS)
@LAWS
def test_a_step_contracts_by_gamma_and_is_monotone(backup, names, signals, one, other, gamma):
    step = one_step(backup, signals, gamma)
    low, high = at(step, min(one, other)), at(step, max(one, other))
    assert 0 <= high - low <= gamma * abs(one - other) + 1e-13


@every_backup
@pytest.mark.parametrize("after", [math.nan, math.inf, -math.inf])
def test_a_terminal_map_ignores_what_follows(backup, names, after):
    signals = {name: values.item() for name, values in random_signals(names, (1,)).items()}
    step = one_step(backup, signals, 0.9, terminated=True)
    expected = OPERATORS[repr(backup)](signals, 0.0, 0.9, terminated=True)
    assert at(step, after) == expected
    following = one_step(backup, dict.fromkeys(names, after), 0.9)
    assert at(step @ following, after) == expected


@every_backup
def test_without_discount_left_a_running_step_ignores_the_value(backup, names):
    signals = {name: values.item() for name, values in random_signals(names, (1,)).items()}
    expected = OPERATORS[repr(backup)](signals, 0.0, 0.0)
    assert at(one_step(backup, signals, 0.0), math.inf) == expected


@given(signals=SIGNAL_VALUES, value=NUMBERS, gamma=GAMMAS)
@LAWS
def test_avoid_is_at_most_the_margin_and_never_less_than_undiscounted(signals, value, gamma):
    target = at(one_step(AvoidBackup(), signals, gamma), value)
    assert min(signals["safety_margin"], value) - 1e-12 <= target <= signals["safety_margin"]


@given(signals=SIGNAL_VALUES, value=NUMBERS, gamma=GAMMAS)
@LAWS
def test_reach_avoid_lies_between_anchor_and_margin_and_never_above_undiscounted(signals, value, gamma):
    g, l = signals["safety_margin"], signals["target_margin"]  # noqa: E741
    target = at(one_step(ReachAvoidBackup(), signals, gamma), value)
    assert min(g, l) - 1e-12 <= target <= min(g, max(l, value)) + 1e-12


@given(signals=SIGNAL_VALUES, value=NUMBERS, gamma=st.floats(0.01, 1))
@LAWS
def test_the_lipschitz_operator_has_the_undiscounted_sign(signals, value, gamma):
    discounted = at(one_step(LipschitzReachAvoidBackup(), signals, gamma), value)
    assert (discounted >= 0) == (min(signals["safety_margin"], max(signals["target_margin"], value)) >= 0)


def test_loitering_safely_forever_is_no_win():
    step = one_step(ReachAvoidBackup(), {"safety_margin": 1.0, "target_margin": -1.0}, 0.9)
    value = 1.0
    for _ in range(300):
        value = at(step, value)
    assert value == pytest.approx(-1.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["seed"]))
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_one_step_targets_match_the_cases(case, dtype, tolerance):
    terminal_g = {"reach_avoid_terminal_g": ReachAvoidBackup(terminal_type="g")}
    every = CASE_BACKUPS | terminal_g
    assert set(case["td0"]) == set(every)
    for name, expected in case["td0"].items():
        backup = every[name]
        signals = {n: torch.tensor(case[n], dtype=dtype).unsqueeze(-1) for n in backup.signals}
        ended = torch.tensor(case["terminated"]).unsqueeze(-1)
        step = backup.step_map(signals, gamma=case["gamma"], terminated=ended)
        target = step(torch.tensor(case["next_value"], dtype=dtype).unsqueeze(-1)).squeeze(-1)
        assert target.dtype == dtype
        error = (target.double() - torch.tensor(expected, dtype=torch.float64)).abs().max()
        assert error <= tolerance * max(map(abs, expected)), name


@every_backup
@pytest.mark.parametrize("shape", [(1,), (4, 1), (2, 3, 1), (2, 3, 4, 1), (0, 1)])
@pytest.mark.parametrize("flag", [torch.bool, torch.int64, torch.float32])
def test_every_batch_shape_and_kind_of_flag_gives_the_loop(backup, names, shape, flag):
    signals, value = random_signals(names, shape), random_signals(("value",), shape, seed=1)["value"]
    ended = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.5
    target = backup.step_map(signals, gamma=0.9, terminated=ended.to(flag))(value)
    assert target.shape == shape
    for i, result in enumerate(target.flatten().tolist()):
        single = {name: signal.flatten()[i].item() for name, signal in signals.items()}
        expected = OPERATORS[repr(backup)](single, value.flatten()[i].item(), 0.9, ended.flatten()[i].item())
        assert result == pytest.approx(expected, abs=1e-12)


@every_backup
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", [0.9, torch.tensor(0.9, dtype=torch.float64)], ids=["number", "double"])
def test_the_signals_keep_their_dtype_whatever_gamma_is(backup, names, dtype, gamma):
    signals = random_signals(names, (3, 1), dtype=dtype)
    step = backup.step_map(signals, gamma=gamma, terminated=torch.tensor([[True], [False], [False]]))
    assert {part.dtype for part in step.parts} == {dtype}
    assert step(torch.zeros(3, 1, dtype=dtype)).dtype == dtype


@every_backup
def test_one_minus_gamma_is_taken_in_gammas_own_precision(backup, names):
    signals, value = random_signals(names, (50, 1), dtype=torch.float32), torch.zeros(50, 1)
    ended, gamma = torch.zeros(50, 1, dtype=torch.bool), 1 - 1e-7
    kinds = (gamma, torch.tensor(gamma, dtype=torch.float64))
    number, double = (backup.step_map(signals, gamma=kind, terminated=ended)(value) for kind in kinds)
    assert torch.equal(number, double)


@every_backup
def test_gamma_may_differ_from_step_to_step(backup, names):
    signals, gamma = random_signals(names, (5, 1)), torch.linspace(0, 1, 5, dtype=torch.float64).unsqueeze(-1)
    ended, value = torch.zeros(5, 1, dtype=torch.bool), torch.ones(5, 1, dtype=torch.float64)
    together = backup.step_map(signals, gamma=gamma, terminated=ended)(value)
    for i in range(5):
        single = {name: signal[i].item() for name, signal in signals.items()}
        expected = OPERATORS[repr(backup)](single, 1.0, gamma[i].item())
        assert together[i].item() == pytest.approx(expected, abs=1e-12)


@every_backup
def test_gradients_flow_through_a_step(backup, names):
    signals = random_signals(names, (6, 1), seed=3)
    ended = torch.tensor([[False]] * 5 + [[True]])

    def target(value, *margins):
        return backup.step_map(dict(zip(names, margins)), gamma=0.7, terminated=ended)(value)

    value = random_signals(("value",), (6, 1), seed=4)["value"]
    assert torch.autograd.gradcheck(target, [x.requires_grad_() for x in (value, *signals.values())])


@every_backup
def test_the_gradient_reaches_the_value_only_where_the_step_goes_on(backup, names):
    signals = {name: torch.zeros(2, 1) for name in names}
    value = torch.zeros(2, 1, requires_grad=True)
    step = backup.step_map(signals, gamma=0.7, terminated=torch.tensor([[False], [True]]))
    wide = ClampedAffine(step.slope, step.offset, step.low - 1, step.high + 1)
    (gradient,) = torch.autograd.grad(wide(value).sum(), value)
    assert_close(gradient, torch.tensor([[0.7], [0.0]]))


@every_backup
def test_a_step_can_be_vmapped(backup, names):
    signals, value = random_signals(names, (4, 3, 1)), random_signals(("value",), (4, 3, 1), seed=1)["value"]
    ended = torch.rand(4, 3, 1, generator=torch.Generator().manual_seed(2)) < 0.3

    def target(signals, value, ended):
        return backup.step_map(signals, gamma=0.9, terminated=ended)(value)

    assert_close(torch.vmap(target)(signals, value, ended), target(signals, value, ended))


@every_backup
def test_a_step_compiles_without_graph_breaks(backup, names):
    signals, value = random_signals(names, (4, 1)), random_signals(("value",), (4, 1), seed=1)["value"]
    ended, gamma = torch.tensor([[True], [False], [False], [True]]), torch.tensor(0.9, dtype=torch.float64)

    def target(signals, value, ended, gamma):
        return backup.step_map(signals, gamma=gamma, terminated=ended)(value)

    torch.compiler.reset()
    compiled = torch.compile(target, fullgraph=True, backend="eager")
    assert_close(compiled(signals, value, ended, gamma), target(signals, value, ended, gamma))


@every_backup
def test_a_step_lives_on_any_device(backup, names):
    signals = {name: torch.zeros(4, 1, device="meta") for name in names}
    ended = torch.zeros(4, 1, dtype=torch.bool, device="meta")
    target = backup.step_map(signals, gamma=0.9, terminated=ended)(torch.zeros(4, 7, device="meta"))
    assert target.device.type == "meta"
    assert target.shape == (4, 7)


@every_backup
def test_a_missing_signal_is_named_with_the_remedy(backup, names):
    for name in names:
        signals = {n: torch.zeros(2, 1) for n in (*names, "other") if n != name}
        present = ", ".join(repr(n) for n in sorted(signals))
        with pytest.raises(KeyError, match=rf"{name}.* is missing; present: \[.*other.*\].*set_keys") as caught:
            backup.step_map(signals, gamma=0.9, terminated=torch.zeros(2, 1, dtype=torch.bool))
        assert present in caught.value.args[0]


@every_backup
@pytest.mark.parametrize(("signal", "flag"), [((3,), (3, 1)), ((3, 1), (3,)), ((2, 1), (3, 1)), ((3, 3), (3, 1))])
def test_signals_and_flags_of_different_shapes_are_refused(backup, names, signal, flag):
    signals = {name: torch.zeros(signal) for name in names}
    with pytest.raises(ValueError, match=r"has shape .* terminated .*unsqueeze\(-1\)"):
        backup.step_map(signals, gamma=0.9, terminated=torch.zeros(flag, dtype=torch.bool))


@every_backup
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_a_signal_that_is_no_floating_point_number_is_refused(backup, names, dtype):
    signals = {name: torch.ones(2, 1, dtype=dtype) for name in names}
    with pytest.raises(ValueError, match=rf"signal '{names[0]}' has dtype {dtype}.*\.float\(\)"):
        backup.step_map(signals, gamma=0.9, terminated=torch.zeros(2, 1, dtype=torch.bool))


@every_backup
@pytest.mark.parametrize("shape", [(3,), (1, 3, 1), (2, 1)])
def test_a_gamma_that_would_enlarge_the_batch_is_refused(backup, names, shape):
    signals = {name: torch.zeros(3, 1) for name in names}
    with pytest.raises(ValueError, match=r"gamma has shape .* does not fit \[3, 1\]"):
        backup.step_map(signals, gamma=torch.zeros(shape), terminated=torch.zeros(3, 1, dtype=torch.bool))


@every_backup
@pytest.mark.parametrize("gamma", [-0.1, 99, float("nan")])
def test_a_gamma_that_is_no_discount_is_refused(backup, names, gamma):
    signals = {name: torch.zeros(3, 1) for name in names}
    with pytest.raises(ValueError, match=rf"gamma is {gamma}: it must lie in \[0, 1\]"):
        backup.step_map(signals, gamma=gamma, terminated=torch.zeros(3, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match=rf"gamma is {gamma}"):
        backups.avoid_target(0.5, 0.5, 1, gamma)


def test_every_backup_has_a_name_of_its_own_and_an_operator():
    assert [repr(backup) for backup, _ in BACKUPS] == list(OPERATORS)


KINDS = {
    "numpy float32": (lambda x: np.asarray(x, np.float32), np.float32, 1e-6),
    "numpy float64": (lambda x: np.asarray(x, np.float64), np.float64, 1e-12),
    "numpy view": (lambda x: np.asarray(x, np.float64)[::-1][::-1], np.float64, 1e-12),
    "read-only": (lambda x: np.frombuffer(np.asarray(x, np.float64).tobytes()), np.float64, 1e-12),
    "list": (list, np.float64, 1e-12),
    "torch float32": (lambda x: torch.tensor(x, dtype=torch.float32), torch.float32, 1e-6),
    "torch float64": (lambda x: torch.tensor(x, dtype=torch.float64), torch.float64, 1e-12),
}
G, L, V, GOES_ON = [0.5, -0.2, 1.0, 0.3], [-1.0, 0.4, 2.0, 0.1], [0.7, -2.0, 0.2, 9.0], [1, 1, 0, 0]


def functional_cases():
    """`(call(g, l, v, not_done), name of its operator)` for each way to ask for a target."""
    return [
        (lambda g, l, v, go: backups.avoid_target(g, v, go, 0.9), "AvoidBackup()"),  # noqa: E741
        (lambda g, l, v, go: backups.target(backups.AVOID, g, v, go, 0.9), "AvoidBackup()"),  # noqa: E741
        (lambda g, l, v, go: backups.target("avoid", g, v, go, 0.9, l=l), "AvoidBackup()"),  # noqa: E741
        (
            lambda g, l, v, go: backups.reach_avoid_target(g, l, v, go, 0.9),  # noqa: E741
            "ReachAvoidBackup(terminal_type='all')",
        ),
        (
            lambda g, l, v, go: backups.target(backups.REACH_AVOID, g, v, go, 0.9, l),  # noqa: E741
            "ReachAvoidBackup(terminal_type='all')",
        ),
        (
            lambda g, l, v, go: backups.reach_avoid_target(g, l, v, go, 0.9, "g"),  # noqa: E741
            "ReachAvoidBackup(terminal_type='g')",
        ),
        (
            lambda g, l, v, go: backups.target("reach-avoid", g, v, go, 0.9, l, terminal_type="g"),  # noqa: E741
            "ReachAvoidBackup(terminal_type='g')",
        ),
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flag", [bool, int, float])
@pytest.mark.filterwarnings("error")
def test_the_functional_targets_are_the_operators_on_arrays_and_tensors(kind, flag):
    make, dtype, tolerance = KINDS[kind]
    flags = [flag(x) for x in GOES_ON]
    going_on = torch.tensor(flags) if kind.startswith("torch") else np.array(flags)
    for call, name in functional_cases():
        result = call(make(G), make(L), make(V), going_on)
        assert isinstance(result, torch.Tensor if kind.startswith("torch") else np.ndarray)
        assert result.dtype == dtype
        for i, single in enumerate(result.tolist()):
            signals = {"safety_margin": G[i], "target_margin": L[i]}
            assert single == pytest.approx(OPERATORS[name](signals, V[i], 0.9, not flags[i]), abs=tolerance)


@pytest.mark.parametrize("flag", [True, False, 1, 0, 1.0, 0.0, np.bool_(True), np.float32(0)])
def test_the_functional_targets_take_python_numbers(flag):
    for call, name in functional_cases():
        for i in range(4):
            signals = {"safety_margin": G[i], "target_margin": L[i]}
            expected = OPERATORS[name](signals, V[i], 0.9, not flag)
            assert float(call(G[i], L[i], V[i], flag)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "gamma", [0.9, np.float32(0.9), np.float64(0.9), np.array(0.9), torch.tensor(0.9), torch.tensor([0.9] * 4)]
)
def test_the_discount_of_a_functional_target_promotes_nothing(gamma):
    result = backups.avoid_target(np.asarray(G, np.float32), np.asarray(V, np.float32), 1, gamma)
    assert str(result.dtype).endswith("float32")
    for i, single in enumerate(result.tolist()):
        expected = OPERATORS["AvoidBackup()"]({"safety_margin": G[i]}, V[i], 0.9)
        assert single == pytest.approx(expected, abs=1e-6)


def test_a_python_number_takes_the_precision_of_the_arrays_beside_it():
    margin = np.float32([0.1, 0.2])
    assert backups.avoid_target(margin, 0.7, True, 0.9).dtype == np.float32
    assert backups.avoid_target(0.7, torch.tensor([0.1]), True, 0.9).dtype == torch.float32
    assert backups.reach_avoid_target(margin, np.float64([0.1, 0.2]), 0.7, True, 0.9).dtype == np.float64
    assert backups.avoid_target(np.array([1, 2]), 0.5, True, 0.9).dtype == np.float64


def test_the_inputs_of_a_functional_target_are_left_alone():
    g, v = np.array(G), np.array(V)
    backups.avoid_target(g, v, 1, 0.9)[:] = 7.0
    assert g.tolist() == G
    assert v.tolist() == V


def test_the_functional_targets_differentiate():
    value = torch.tensor([-1.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(backups.avoid_target(torch.tensor([1.0]), value, 1, 0.75), value)
    assert gradient.item() == 0.75


def test_the_functional_targets_compile_without_graph_breaks_and_can_be_vmapped():
    arrays = (*(torch.tensor(x, dtype=torch.float64) for x in (G, L, V)), torch.tensor(GOES_ON))
    for call, name in functional_cases():
        torch.compiler.reset()
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        assert_close(compiled(*arrays), call(*arrays), msg=name)
        assert_close(torch.vmap(call)(*arrays), call(*arrays), msg=name)


@pytest.mark.parametrize("mode", ["reach_avoid", "AVOID", "", None])
def test_an_unknown_mode_is_refused_with_the_choices(mode):
    with pytest.raises(ValueError, match=r"mode is .*choose one of \['avoid', 'reach-avoid'\]"):
        backups.target(mode, 0.5, 0.5, 1, 0.9)


def test_reach_avoid_needs_the_target_margin():
    with pytest.raises(ValueError, match="needs the target margin: pass l="):
        backups.target(backups.REACH_AVOID, 0.5, 0.5, 1, 0.9)


@pytest.mark.parametrize("terminal_type", ["l", "ALL", "", None])
def test_an_unknown_terminal_type_is_refused_with_the_choices(terminal_type):
    message = r"terminal_type is .*choose one of \['all', 'g'\]"
    with pytest.raises(ValueError, match=message):
        backups.check_terminal_type(terminal_type)
    with pytest.raises(ValueError, match=message):
        ReachAvoidBackup(terminal_type)
    with pytest.raises(ValueError, match=message):
        backups.reach_avoid_target(0.5, 0.5, 0.5, 1, 0.9, terminal_type)


def test_a_known_terminal_type_is_passed_on():
    assert [backups.check_terminal_type(name) for name in ("all", "g")] == ["all", "g"]


def test_functional_inputs_that_would_enlarge_the_batch_are_refused():
    flat, column = np.zeros(3), np.zeros((3, 1))
    for g, v, going_on, gamma in [
        (flat, column, 1, 0.9),
        (flat, flat, column, 0.9),
        (flat, flat, 1, column),
        (torch.zeros(3, 1), torch.zeros(3), 1, 0.9),
    ]:
        with pytest.raises(ValueError, match=r"same number of dimensions, because \[B\] beside \[B, 1\]"):
            backups.avoid_target(g, v, going_on, gamma)
