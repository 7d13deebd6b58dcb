"""Small arrays, each operation compiled once and run once: compiling quickly matters more than running quickly."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)  # without __init__.py, a package lasts until the session ends
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
