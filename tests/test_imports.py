"""Imports go one way, and importing the package is light and silent."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchrl_safety

ROOT = Path(torchrl_safety.__file__).parent
SIBLINGS = ("objectives", "data", "modules", "envs")
LAYERS = (("clamped_affine",), ("backups",), ("returns", "categorical", "signals"), ("estimators",))
"""Of objectives, from the ground up; every other module there is a loss or a part of one and may import them all."""
HEAVY = ("hydra", "matplotlib", "mujoco", "gymnasium")


def module_name(path: Path) -> str:
    return ".".join((ROOT.name, *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported(source: str, name: str, *, is_package: bool = False, at_import_time: bool = False) -> Iterator[str]:
    """Absolute names that a module imports, `from` names included; without those in functions and `TYPE_CHECKING`."""
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if at_import_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if at_import_time and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        pending.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = name.split(".")[: len(name.split(".")) - node.level + is_package] if node.level else []
            base = ".".join([*parent, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imports_of(name: str, *, at_import_time: bool = False) -> set[str]:
    path = MODULES[name]
    is_package = path.name == "__init__.py"
    return set(imported(path.read_text(), name, is_package=is_package, at_import_time=at_import_time))


def part(name: str) -> str:
    """`objectives` of `torchrl_safety.objectives.dqn`; empty outside the package and for its root."""
    pieces = name.split(".")
    return pieces[1] if pieces[0] == ROOT.name and len(pieces) > 1 else ""


def height(name: str) -> int:
    """The layer of a module of objectives, or of a name imported from one."""
    pieces = name.split(".")
    stem = pieces[2] if len(pieces) > 2 else ""
    return next((i for i, layer in enumerate(LAYERS) if stem in layer), len(LAYERS))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import a.b, c", {"a.b", "c"}),
        ("from a import b as c", {"a.b"}),
        ("from . import b", {"p.q.b"}),
        ("from ..x import y", {"p.x.y"}),
        ("def f():\n    import inside", {"inside"}),
        ("if TYPE_CHECKING:\n    import checked\nelse:\n    import other", {"checked", "other"}),
    ],
)
def test_the_reader_of_imports_sees_every_form(source, expected):
    assert set(imported(source, "p.q.r")) == expected
    lazy = {"inside", "checked"}
    assert set(imported(source, "p.q.r", at_import_time=True)) == expected - lazy
    assert set(imported("from . import b", "p.q", is_package=True)) == {"p.q.b"}


@pytest.mark.parametrize("name", MODULES)
def test_siblings_import_neither_each_other_nor_what_stands_above_them(name):
    own = part(name)
    forbidden = {*SIBLINGS, "trainers"} - {own} if own != "trainers" else set()
    assert {target for target in imports_of(name) if part(target) in forbidden} == set()


@pytest.mark.parametrize("name", [name for name in MODULES if part(name) == "objectives" and name.count(".") == 2])
def test_objectives_stand_on_lower_layers_only(name):
    own = height(name)
    targets = {target for target in imports_of(name) if part(target) == "objectives"}
    allowed = {target for target in targets if height(target) < own or own == len(LAYERS)}
    assert targets - allowed == set()


@pytest.mark.parametrize("name", MODULES)
def test_the_package_needs_no_example_test_or_configuration_framework(name):
    roots = {target.split(".")[0] for target in imports_of(name)}
    assert not roots & {"examples", "tests", "benchmarks", "hydra", "omegaconf", "pytest", "hypothesis"}


@pytest.mark.parametrize("name", [name for name in MODULES if part(name) in (*SIBLINGS, "")])
def test_heavy_libraries_are_not_imported_with_a_module(name):
    roots = {target.split(".")[0] for target in imports_of(name, at_import_time=True)}
    assert not roots & set(HEAVY)


def in_a_fresh_interpreter(script: str) -> str:
    """What the script printed, to both streams."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, cwd=ROOT.parent, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_bare_package_loads_no_heavy_library():
    script = f"""
        import sys, warnings
        warnings.simplefilter("error")
        import torchrl_safety
        heavy = [name for name in {HEAVY!r} if name in sys.modules]
        assert not heavy, heavy
    """
    assert in_a_fresh_interpreter(script) == ""


def test_the_parts_load_silently_and_add_no_heavy_library_to_those_that_torchrl_loads():
    script = f"""
        import contextlib, io, sys, warnings
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchrl.objectives, torchrl.data, torchrl.modules
        before = set(sys.modules)
        warnings.simplefilter("error")
        import torchrl_safety.objectives, torchrl_safety.data, torchrl_safety.modules, torchrl_safety.envs
        added = {{name.split(".")[0] for name in set(sys.modules) - before}}
        assert not added & set({HEAVY!r}), added
    """
    assert in_a_fresh_interpreter(script) == ""


def test_the_parts_load_where_the_heavy_libraries_are_absent():
    script = f"""
        import sys, warnings
        sys.modules.update(dict.fromkeys({HEAVY!r}))
        warnings.simplefilter("ignore")
        import torchrl_safety.objectives, torchrl_safety.data, torchrl_safety.modules, torchrl_safety.envs
    """
    assert in_a_fresh_interpreter(script) == ""
