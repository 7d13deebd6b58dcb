import importlib
import pathlib
import re

import pytest

import harnessrl_jax

ROOT = pathlib.Path(__file__).parents[1]
PARTS = ("attention", "capo", "losses", "models", "training", "trajectories")


def test_the_parts_are_found_without_importing_them_by_hand():
    assert harnessrl_jax.__all__ == ["__version__", *PARTS]
    assert harnessrl_jax.losses.clipped_surrogate.__module__ == "harnessrl_jax.losses.clipped"


def test_an_unknown_part_is_named():
    with pytest.raises(AttributeError, match=r"has no attribute 'loses'; its parts are .*losses"):
        _ = harnessrl_jax.loses


@pytest.mark.parametrize("part", PARTS)
def test_public_names_exist_and_are_sorted(part):
    module = importlib.import_module(f"harnessrl_jax.{part}")
    assert all(hasattr(module, name) for name in module.__all__)
    assert list(module.__all__) == sorted(
        module.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name)
    )


def test_the_version_is_the_changelogs():
    top = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert top is not None
    assert top[1] == harnessrl_jax.__version__
    assert f'version = "{harnessrl_jax.__version__}"' in (ROOT / "pyproject.toml").read_text()
