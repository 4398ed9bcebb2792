"""Options of the wrong kind are named before anything is built."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from torchrl_safety.trainers import check_options


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("flags", [True, False], [1, "maybe", None]),
        ("whole", [1, 10**9], [0, -1, 2.0, True, "3", None]),
        ("positive", [1, 1e-9], [0, -1.0, float("inf"), float("nan"), True, "x"]),
        ("shares", [0, 1, 0.5], [-0.1, 1.1, float("nan"), False, "x"]),
    ],
)
def test_each_kind_takes_what_it_names_and_nothing_else(kind, good, bad):
    for value in good:
        check_options({"a": {"b": value}}, **{kind: "a.b"})
    for value in bad:
        with pytest.raises(ValueError, match=r"^a\.b is .*; give ") as caught:
            check_options({"a": {"b": value}}, **{kind: "a.b"})
        assert repr(value) in str(caught.value)


def test_configurations_of_omegaconf_are_read_like_mappings():
    config = OmegaConf.create({"lr": {"start": 1e-3}, "frames": "many"})
    check_options(config, positive="lr.start")
    with pytest.raises(ValueError, match="frames is 'many'"):
        check_options(config, positive="lr.start", whole="frames")
