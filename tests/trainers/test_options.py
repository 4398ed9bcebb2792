"""Options of the wrong kind are named before anything is built."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from torchrl_safety.trainers import check_options


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("flags", [True, False], [1, "maybe", None]),
        ("whole", [1, 10**9], [0, -1, 2.0, True, "3", None, 10**30]),
        ("counts", [0, 1, 10**9], [-1, 2.0, False, "3", None, 10**30]),
        ("numbers", [0, -3, 1e300], [float("inf"), -float("inf"), float("nan"), True, "1", None]),
        ("positive", [1, 1e-9], [0, -1.0, float("inf"), float("nan"), True, "x"]),
        ("limits", [None, 1, 1e-9], [0, -1.0, float("inf"), float("nan"), True, "x"]),
        ("amounts", [0, 0.0, 2.5], [-1e-9, float("inf"), float("nan"), True, "x", None]),
        ("shares", [0, 1, 0.5], [-0.1, 1.1, float("nan"), False, "x"]),
        ("intervals", [[-1, 1], (0.0, 0.5)], [[1, -1], [1, 1], [0], [0, 1, 2], [0, float("inf")], ["0", "1"], 3, "01"]),
        ("widths", [[128, 1], (3,), []], [8, [8.0], [0], "88", [True], ["8"], None]),
        ("corners", [[-1.2, 0, 3], (1,)], [1.0, "12", ["1"], [float("nan")], [True], None]),
        ("nodes", [2, 201, [61, 61, 36]], [1, -3, 2.5, [61, 1], [2.0], "21", True, None]),
        ("labels", [["x", "v"], ("x", "y", "heading")], [["x"], [1, 2], "xv", None, 3]),
        ("device", ["cpu", "cpu:0"], ["abacus", "meta", "", 0, 1.5, None, ["cpu"]]),
    ],
)
def test_each_kind_takes_what_it_names_and_nothing_else(kind, good, bad):
    for value in good:
        check_options({"a": {"b": value}}, **{kind: "a.b"})
    for value in bad:
        with pytest.raises(ValueError, match=r"^a\.b is .*; give ") as caught:
            check_options({"a": {"b": value}}, **{kind: "a.b"})
        assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "lr.start is missing; give it"),
        ({"lr": {"end": 1}}, "lr.start is missing; give it"),
        ({"lr": 0.1}, "lr.start is missing, for lr is 0.1; give it"),
        ({"lr": [1, 2]}, r"lr.start is missing, for lr is \[1, 2\]; give it"),
    ],
)
def test_an_option_that_is_not_there_is_named(config, message):
    for given in (config, OmegaConf.create(config)):
        with pytest.raises(ValueError, match=message):
            check_options(given, positive="lr.start")


def test_a_choice_is_one_of_those_that_are_named():
    choices = {"a.b": {"mean": 1, None: 2}}
    for value in ("mean", None):
        check_options({"a": {"b": value}}, choices=choices)
    for value in ("max", True, ["mean"], {}):
        with pytest.raises(ValueError, match=r"^a\.b is .*; choose one of \['mean', null\]$") as caught:
            check_options({"a": {"b": value}}, choices=choices)
        assert repr(value) in str(caught.value)


def test_configurations_of_omegaconf_are_read_like_mappings():
    config = OmegaConf.create({"lr": {"start": 1e-3}, "frames": "many", "hidden": [8, 8], "support": [0, 1]})
    check_options(config, positive="lr.start", widths="hidden", intervals="support")
    with pytest.raises(ValueError, match="frames is 'many'"):
        check_options(config, positive="lr.start", whole="frames")
