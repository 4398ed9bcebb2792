"""A wrong option of an example is one clear line, and leaves nothing behind."""

from __future__ import annotations

import re
from unittest import mock

import pytest
from omegaconf import OmegaConf
from runs import EXAMPLES, SCRIPTS, configuration, module, run, start

from torchrl_safety.trainers import TrainingRun

DEFAULTS = {script: configuration(script) for script in SCRIPTS}


def refusal(script, folder, *options: str) -> str:
    """The one line with which the script refuses the options."""
    with mock.patch.object(TrainingRun, "advance", side_effect=AssertionError(f"{options} trains")):
        code, out, err = run(script, folder, *options)
    assert code == 1, out
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1, err
    assert len(err) < 300
    assert not folder.exists()
    return err


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["problem=fly"], ["problem/fly", "avoid", "reach_avoid"]),
        (["env=pendulum9"], ["env/pendulum9", "double_integrator", "dubins_car"]),
        (["env.name=boat"], ["env.name is 'boat'; choose one of ['double_integrator', 'dubins_car', "]),
        (["resume=/nowhere/at/all"], ["/nowhere/at/all", "is no checkpoint"]),
        (["num_env=3"], ["num_env"]),
        (["env.dtt=3"], ["env.dtt"]),
        (["frames"], ["frames"]),
        (["+env.foo=1"], ["'+env.foo=1' adds an option that the script does not have"]),
        (["++foo=1"], ["++foo=1 adds foo, an option that the script does not have"]),
        (["++env.grid.foo=1", "++seed=2"], ["adds env.grid.foo, an option"]),
        (["++gamma={start:0.9,foo:1}"], ["adds gamma.foo, an option"]),
        (["++seed=-1"], ["seed is -1; give a whole number of at least 0"]),
        (["gamma.period=1e-320"], ["period is 1e-320; it must be positive"]),
        (["frames=ten"], ["frames is 'ten'; give a whole number of at least 1"]),
        (["~seed"], ["seed is missing"]),
        (["gamma=0.9"], ["gamma.start is missing, for gamma is 0.9"]),
        (["env.grid.nodes=1"], ["grid", "1"]),
        (["env.end_criterion=never"], ["env.end_criterion is 'never'; choose one of ['failure'"]),
    ],
)
def test_a_wrong_option_is_one_clear_complaint(tmp_path, script, options, words):
    complaint = refusal(script, tmp_path / "run", *options)
    for word in words:
        assert word in complaint


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        ("rainbow_safety", ["batch_size=4096"], "batch_size=4096, warmup_frames=2000"),
        ("rainbow_safety", ["frames=10"], "frames=10: need batch_size <= warmup_frames"),
        ("rainbow_safety", ["alpha=-1"], "alpha is -1; give a number of at least 0"),
        ("rainbow_safety", ["dueling=most"], "dueling"),
        ("rainbow_safety", ["problem.support=[1,0]"], "problem.support is [1, 0]; give two finite numbers"),
        ("rainbow_safety", ["epsilon.start=0"], "epsilon.end=0.1 is more than epsilon.start=0"),
        ("sac_safety", ["batch_size=4096"], "batch_size=4096, warmup_frames=2000"),
        ("sac_safety", ["frames=10"], "frames=10: need batch_size <= warmup_frames"),
        ("sac_safety", ["problem=return"], "problem.name is 'return'; choose one of ['avoid', 'reach_avoid']"),
        ("sac_safety", ["n_step=middle"], "n_step is 'middle'"),
        ("sac_safety", ["alpha.max=0.0001"], "max_alpha"),
        ("ppo_safety", ["minibatch=5000", "num_envs=8", "steps=16"], "minibatch=5000 is more than a batch"),
        ("ppo_safety", ["algorithm=sac"], "'algorithm/sac' Available options in 'algorithm': a2c ppo"),
        ("ppo_safety", ["problem=return"], "problem.name is 'return'; choose one of ['avoid', 'reach_avoid']"),
        ("ppo_safety", ["lmbda=1.5"], "lmbda is 1.5; give a number in [0, 1]"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_each_other_or_the_algorithm_are_named(tmp_path, script, options, words):
    assert words in refusal(script, tmp_path / "run", *options)


def leaves(options, path: str = ""):
    """The dotted names of all options."""
    for key, value in options.items():
        name = f"{path}.{key}" if path else key
        yield from leaves(value, name) if isinstance(value, dict) and value else [name]


OPTIONS = [
    (script, name)
    for script in SCRIPTS
    for name in leaves(OmegaConf.to_container(DEFAULTS[script], resolve=True))
    # What the environment checks itself, and what only another problem reads.
    if name not in ("resume", "evaluate", "env.max_steps") and not name.startswith("env.support.")
]
NEGATIVE = ("target_entropy", "problem.level")


@pytest.mark.parametrize(("script", "option"), OPTIONS)
def test_a_value_that_cannot_be_right_is_one_line_with_the_name_and_the_value(check, script, option):
    check(script)
    for value in (float("nan"), "junk", [None], *([] if option in NEGATIVE else [-7.5])):
        with pytest.raises(ValueError, match=rf"^{re.escape(option)} is {re.escape(repr(value))}; ") as caught:
            check(script, option, value)
        assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def check():
    """Checks the options of a script, one of them changed."""
    checks = {script: module(script)["check"] for script in SCRIPTS}

    def check(script, option=None, value=None):
        cfg = DEFAULTS[script].copy()
        if option is not None:
            OmegaConf.update(cfg, option, value)
        checks[script](cfg)

    return check


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_option_that_a_script_takes_is_read_by_it(script):
    parts = [script, "launch", "control_tasks"]
    text = "".join((EXAMPLES / f"{part}.py").read_text() for part in parts)
    for problem in ("avoid", "reach_avoid"):
        options = leaves(OmegaConf.to_container(configuration(script, f"problem={problem}"), resolve=True))
        unread = [name for name in options if not re.search(rf"cfg\.{re.escape(name)}\b", text)]
        assert [name for name in unread if not name.startswith("env.") and name not in ("resume", "evaluate")] == []


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_complaint_ends_the_process_with_an_error(tmp_path, script):
    process = start(script, tmp_path / "run", "frames=ten")
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (1, "")
    assert err == "error: frames is 'ten'; give a whole number of at least 1\n"


def test_an_interrupt_that_cannot_wait_is_one_line_too(capsys):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as left:
        module("ppo_safety")["command_line"](interrupted)
    assert left.value.code == 130
    assert len(capsys.readouterr().err.splitlines()) == 1
