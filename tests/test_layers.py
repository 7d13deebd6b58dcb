"""The order of the floors, as docs/ARCHITECTURE.md states it, holds in the code."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
TABLE = re.findall(r"^\| `(\w+)` \| (\w+) \|", (ROOT / "docs/ARCHITECTURE.md").read_text(), re.MULTILINE)
ORDER = [module for module, _ in TABLE]
HOST = {module for module, floor in TABLE if floor == "host"}
DEVICE = {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}


def files(module):
    folder = ROOT / "harnessrl_jax" / module
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def imports(path):
    """Absolute names of everything that a file imports, wherever the import stands in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def offences(module, names):
    """Imports that point down the list, or that bring JAX to a host module."""
    allowed = set(ORDER[: ORDER.index(module) + 1]) | {"__version__"}
    for name in names:
        package, *rest = name.split(".")
        if package == "harnessrl_jax" and rest and rest[0] not in allowed:
            yield name
        if module in HOST and package in DEVICE:
            yield name


@pytest.mark.parametrize("module", ORDER)
def test_imports_point_up(module):
    found = {(path.name, name) for path in files(module) for name in offences(module, imports(path))}
    assert not found


def test_offences_are_seen():
    assert list(offences("trajectories", ["harnessrl_jax.gateway.app", "jax.numpy", "numpy"])) == [
        "harnessrl_jax.gateway.app",
        "jax.numpy",
    ]


def test_every_module_has_a_floor():
    present = {
        path.stem
        for path in (ROOT / "harnessrl_jax").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert present - {"__init__"} == set(ORDER)


def loaded(statement):
    script = f"import sys; {statement}; print(' '.join(m for m in {sorted(DEVICE)} if m in sys.modules))"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("module", ["harnessrl_jax", *(f"harnessrl_jax.{module}" for module in sorted(HOST))])
def test_host_modules_load_no_jax(module):
    assert loaded(f"import {module}") == []


def test_a_loaded_jax_is_seen():
    assert "jax" in loaded("import jax")
