"""The main example on Gymnasium environments: every variant, both problems, going on, and showing what was learned."""

from __future__ import annotations

import csv
import json
import shutil
from unittest import mock

import pytest
import torch
from PIL import Image
from runs import checkpoints, configuration, metrics, run

from torchrl_safety.data import NStepTransform

SHORT = [
    "env=cartpole", "problem=return", "frames=400", "warmup_frames=80", "batch_size=16", "buffer_size=512",
    "hidden=[8]", "evaluations=2", "checkpoints=2", "rollouts=3", "rollout_steps=30", "updates=2",
]  # fmt: skip

PARTS = {
    "dqn": [],
    "ddqn": ["double"],
    "dueling": ["dueling"],
    "per": ["prioritized"],
    "nstep": ["n_steps"],
    "noisy": ["noisy"],
    "noisy_dueling_ddqn": ["double", "dueling", "noisy"],
    "c51": ["categorical"],
    "rainbow": ["categorical", "double", "dueling", "n_steps", "noisy", "prioritized"],
}
"""Variant -> the parts in which it differs from DQN."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gymnasium") / "run"
    code, out, err = run("rainbow_safety", folder, *SHORT)
    assert code == 0, err
    return folder, out


def test_a_run_leaves_its_return_its_model_its_distribution_and_a_film(finished):
    folder, out = finished
    summary = json.loads((folder / "summary.json").read_text())
    assert 8 <= summary["mean_return"] <= 30
    assert summary["mean_length"] == pytest.approx(summary["mean_return"]), "a cart is paid 1 for each step"
    assert f"{'mean return of the policy':<34}{summary['mean_return']:>10.4f}" in out
    assert [row["frames"] for row in metrics(folder)] == ["200", "400"]
    assert {"epsilon", "sigma", "beta", "value_entropy", "value_quantile_0.05"} <= metrics(folder)[0].keys()
    for name in ("returns", "value_distribution", "curves"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    with Image.open(folder / "policy.gif") as film:
        assert film.n_frames > 3
    assert {"torso.0.weight", "head.weight_sigma"} <= torch.load(folder / "model.pt", weights_only=True).keys()


def test_the_model_alone_is_measured_again(finished, tmp_path):
    folder, _ = finished
    summary = json.loads((folder / "summary.json").read_text())
    code, out, err = run("rainbow_safety", tmp_path / "unused", f"evaluate={folder}")
    assert (code, err) == (0, "")
    assert f"{'mean_return':<20}{summary['mean_return']:.4f}" in out
    assert not (tmp_path / "unused").exists()
    code, out, _ = run("rainbow_safety", tmp_path / "unused", f"evaluate={folder}", "rollouts=5")
    assert f"{'episodes':<20}5" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["evaluate=/nowhere/at/all"], "evaluate=/nowhere/at/all holds no config.yaml"),
        (["hidden=[9]"], "beside evaluate=: the run has hidden=[8]"),
    ],
)
def test_what_cannot_be_measured_again_is_one_line(finished, tmp_path, options, words):
    if not options[0].startswith("evaluate"):
        options = [f"evaluate={finished[0]}", *options]
    code, _, err = run("rainbow_safety", tmp_path / "unused", *options)
    assert code == 1
    assert err.startswith("error: ")
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_run_goes_on_with_new_episodes_and_no_window_of_an_old_one(finished, tmp_path):
    whole, _ = finished
    folder = shutil.copytree(whole, tmp_path / "run")
    clear = NStepTransform.clear
    with mock.patch.object(NStepTransform, "clear", autospec=True, side_effect=clear) as cleared:
        code, _, err = run("rainbow_safety", tmp_path / "unused", f"resume={checkpoints(folder)[0]}")
    assert code == 0, err
    assert cleared.call_count >= 1
    assert [row["frames"] for row in metrics(folder)] == ["200", "400"]
    assert metrics(folder)[0] == metrics(whole)[0]


@pytest.mark.parametrize(
    ("env", "problem"),
    [("lunar_lander", "return"), ("lunar_lander", "reach_avoid"), ("cartpole", "return"), ("dubins_car", "avoid")],
)
@pytest.mark.parametrize("variant", PARTS)
def test_a_variant_is_dqn_and_its_own_parts(variant, env, problem):
    parts = ("double", "dueling", "noisy", "prioritized", "n_steps", "categorical")
    options = [f"env={env}", f"problem={problem}"]
    plain, own = (configuration("rainbow_safety", *options, f"variant={name}") for name in ("dqn", variant))
    assert sorted(part for part in parts if plain[part] != own[part]) == sorted(PARTS[variant])
    assert [plain.double, plain.dueling, plain.noisy, plain.prioritized, plain.n_steps, plain.categorical] == [
        False, None, False, False, 1, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=[] if name in ("dqn", "noisy_dueling_ddqn") else pytest.mark.slow)
        for name in PARTS
        if name != "rainbow"
    ],
)
def test_every_variant_trains(tmp_path, variant):
    code, _, err = run("rainbow_safety", tmp_path / "run", *SHORT, f"variant={variant}", "video=false")
    assert code == 0, err
    row = metrics(tmp_path / "run")[-1]
    assert ("sigma" in row) == ("noisy" in PARTS[variant])
    assert float(row["epsilon"]) == pytest.approx(0.01)


def test_noise_may_explore_alone(tmp_path):
    options = [*SHORT, "epsilon.with_noise=false", "video=false"]
    assert run("rainbow_safety", tmp_path / "run", *options).code == 0
    assert [float(row["epsilon"]) for row in metrics(tmp_path / "run")] == [0, 0]


@pytest.mark.parametrize(("env", "problem"), [("lunar_lander", "reach_avoid"), ("cartpole", "avoid")])
def test_margins_of_gymnasium_environments_are_learned_and_rates_measured(tmp_path, env, problem):
    options = [*SHORT, f"env={env}", f"problem={problem}", "num_envs=8", "video=false"]
    code, _, err = run("rainbow_safety", tmp_path / "run", *options)
    assert code == 0, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0 <= summary["safe_rate"] <= 1
    assert (summary["success_rate"] is None) == (problem == "avoid")


def test_any_id_trains_for_return(tmp_path):
    options = [*SHORT, "env=gymnasium", "env.id=MountainCar-v0", "num_envs=8", "video=false"]
    code, _, err = run("rainbow_safety", tmp_path / "run", *options)
    assert code == 0, err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["mean_return"] == -30


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["env.id=Pendulum-v1"], "continuous actions"),
        (["problem=avoid"], "no safety_margin, which problem=avoid needs"),
        (["problem=avoid", "env.safety_margin=g_x"], "safety_margin='g_x' is not in info"),
        (["env=lunar_lander", "++env.gravity=-20"], "must be between -12 and 0"),
        (["++env.no_such_setting=1"], "no_such_setting"),
        (
            ["env.id=CarRacing-v3", "++env.continuous=false", "num_envs=1"],
            "images of shape (96, 96, 3), (height, width, channels), and the network reads (channels, height, width): "
            "register it with a wrapper that transposes them",
        ),
        (["env.id=no_such_module:Env-v0"], "no_such_module"),
        (["env=cartpole", "problem=reach_avoid"], "env=cartpole with end_criterion=env has no problem reach_avoid"),
        (["env=lunar_lander", "env.end_criterion=timeout"], "env.end_criterion is 'timeout'; choose one of"),
    ],
)
def test_an_environment_that_does_not_fit_is_one_line(tmp_path, options, words):
    code, _, err = run("rainbow_safety", tmp_path / "run", *SHORT, "env=gymnasium", *options)
    assert code == 1
    assert err.startswith("error: ")
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_set_read_with_caution_shrinks_with_the_level(tmp_path):
    options = ["frames=1500", "num_envs=16", "hidden=[16]", "warmup_frames=256", "batch_size=32", "buffer_size=1024"]
    options += ["env.grid.nodes=21", "rollouts=4", "rollout_steps=5", "evaluations=1"]
    assert run("rainbow_safety", tmp_path / "run", *options).code == 0
    with (tmp_path / "run" / "levels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for reading in ("quantile", "cvar"):
        false_safe = [float(row["false_safe"]) for row in rows if row["reading"] == reading]
        assert false_safe == sorted(false_safe)
    mean = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert float(rows[-1]["false_safe"]) == pytest.approx(mean["false_safe"], abs=0.01), "the whole mass is the mean"
