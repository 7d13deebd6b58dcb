"""Every family against `transformers`, from files that it wrote (tests/data/make_parity.py): rows, trees, the cache."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.models import extend, init_cache, logits, row_hidden
from harnessrl_jax.trajectories import trees
from harnessrl_jax.weights import load_model

FOLDER = Path(__file__).parents[1] / "data" / "parity"
FAMILIES = ("qwen2", "llama3", "qwen3", "qwen3_moe", "gpt_oss")
SLOTS = 96
CHUNK = 8


def stored(family):
    """The sequences, and the logits that `transformers` gives after each of their tokens."""
    with np.load(FOLDER / family / "logits.npz") as file:
        tokens, logits = file["tokens"], file["logits"]
    lengths = (tokens >= 0).sum(1)
    return [t[:n] for t, n in zip(tokens, lengths, strict=True)], [x[:n] for x, n in zip(logits, lengths, strict=True)]


def merged(sequences):
    """One row in which shared prefixes stand once, and the slots of each sequence in it."""
    tree, leaf = trees.build(sequences)
    return _row(tree.token, tree.depth, tree.subtree_end), [trees.path(tree, int(node)) for node in leaf]


def side_by_side(sequences):
    """One row in which every sequence is a tree of its own, and the slots of each sequence in it."""
    ends = np.cumsum([len(s) for s in sequences])
    paths = [np.arange(end - len(s), end) for s, end in zip(sequences, ends, strict=True)]
    depth = np.concatenate([np.arange(len(s)) for s in sequences])
    end = np.concatenate([np.full(len(s), end) for s, end in zip(sequences, ends, strict=True)])
    return _row(np.concatenate(sequences), depth, end), paths


def _row(token, depth, end):
    """Tokens, positions and subtree ends, padded."""
    missing = SLOTS - len(token)
    padding = np.arange(len(token), SLOTS) + 1
    row = (np.pad(token, (0, missing)), np.pad(depth, (0, missing)), np.concatenate([end, padding]))
    return tuple(part.astype(np.int32) for part in row)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    """(configuration, parameters, sequences, wanted logits, compiled logits of a row)."""
    config, params = load_model(FOLDER / request.param)
    run = lambda *row: logits(config, params, row_hidden(config, params, *row, block=16)[0])
    return config, params, *stored(request.param), jax.jit(run)


@pytest.mark.parametrize("lay", [side_by_side, merged])
def test_logits_are_those_of_transformers(model, lay):
    _, _, sequences, wanted, run = model
    row, paths = lay(sequences)
    got = np.asarray(run(*row))
    for path, want in zip(paths, wanted, strict=True):
        np.testing.assert_allclose(got[path], want, atol=1e-4, rtol=0)


def test_the_cache_gives_the_same(model):
    config, params, sequences, wanted, _ = model
    run = jax.jit(lambda *new: extend(config, params, *new))
    head = jax.jit(lambda hidden: logits(config, params, hidden))
    cache = init_cache(config, len(sequences), 32)
    tokens = np.stack([np.pad(s, (0, 24 - len(s))) for s in sequences])
    parts = []
    for start in range(0, 24, CHUNK):
        position = jnp.full(len(sequences), start)
        hidden, cache = run(tokens[:, start : start + CHUNK], position, cache)
        parts.append(head(hidden))
    got = np.concatenate(parts, axis=1)
    for row, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(row[: len(want)], want, atol=1e-4, rtol=0)
