"""A tree in pieces gives the loss and gradient of the same tree in one long row, in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.models import Experts, init_params
from harnessrl_jax.training import decoder_row_fn
from harnessrl_jax.training.prefix_parts import Piece, prefix_gradient
from harnessrl_jax.training.rows import Row

PREFIX, PART, PARTS, TARGETS = 12, 10, 3, 7
HOW = {"temperature": 0.7, "implementation": "blockwise", "remat": "attention"}


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def tree():
    """Depth and subtree end: a path, under which each part is a path with one branch; the last part leaves it early."""
    parent = list(range(-1, PREFIX - 1))
    for part, above in enumerate((PREFIX - 1, PREFIX - 1, 4)):
        start = PREFIX + part * PART
        parent += [above, *range(start, start + PART - 1)]
        parent[start + 6] = start + 2
    depth, end = np.zeros(len(parent), int), np.arange(1, len(parent) + 1)
    for slot, above in enumerate(parent):
        depth[slot] = depth[above] + 1 if above >= 0 else 0
    for slot in reversed(range(1, len(parent))):
        end[parent[slot]] = max(end[parent[slot]], end[slot])
    return depth, end


def pieces(model, rng):
    """The prefix, the parts and the whole row, with the same targets."""
    depth, end = tree()
    token = rng.integers(0, model.vocab_size, len(depth))
    shape = len(depth), model.layers, model.experts.active
    experts = rng.integers(0, model.experts.count, shape).astype(np.uint8)
    fields = {name: np.zeros(0) for name in Row._fields}

    def row(slots, source, target, weight):
        values = dict(token=token[slots], position=depth[slots], subtree_end=end[slots])
        values |= dict(source=source - slots[0], target=target, weight=weight, experts=experts[slots])
        return Row(**(fields | {name: jnp.asarray(value) for name, value in values.items()}))

    ranges = [np.arange(PREFIX), *(np.arange(PREFIX + i * PART, PREFIX + (i + 1) * PART) for i in range(PARTS))]
    targets = [
        (rng.choice(slots, TARGETS), rng.integers(0, model.vocab_size, TARGETS), rng.normal(size=TARGETS))
        for slots in ranges
    ]
    made = [Piece(row(slots, *target), jnp.asarray(slots)) for slots, target in zip(ranges, targets)]
    whole = row(np.arange(len(depth)), *(np.concatenate(each) for each in zip(*targets)))
    return made[0], jax.tree.map(lambda *each: jnp.stack(each), *made[1:]), whole


def loss(output, row):
    return (row.weight * jnp.sin(3 * output.logp)).sum() + (row.weight * output.entropy).sum()


def test_pieces_give_the_gradient_of_one_long_row(decoder_job):
    """Of a mixture whose slots are told where to go, which is the most that a row can hold."""
    model = dataclasses.replace(decoder_job.MODEL, layers=2, experts=Experts(count=3, active=1, renormalise=False))
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(scale=0.3, size=x.shape) + (x.ndim == 1)), shapes)
    prefix, parts, whole = pieces(model, rng)
    quick = {"compiler_options": decoder_job.QUICK}
    in_pieces = jax.jit(lambda p: prefix_gradient(model, p, prefix, parts, loss, **HOW), **quick)
    row_fn = decoder_row_fn(model, collect=None, **HOW)
    in_one = jax.jit(jax.value_and_grad(lambda p: loss(row_fn(p, whole), whole)), **quick)
    (value, gradient), (wanted, wanted_gradient) = in_pieces(params), in_one(params)
    np.testing.assert_allclose(value, wanted, rtol=1e-12)
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(wanted_gradient), strict=True
    ):
        assert np.abs(want).max() > 1e-3
        np.testing.assert_allclose(
            got, want, atol=1e-12 * np.abs(want).max(), rtol=0, err_msg=jax.tree_util.keystr(path)
        )
