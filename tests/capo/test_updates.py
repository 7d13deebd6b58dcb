"""Masked updates: outside the partition not a bit moves, whatever the optimiser remembers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from harnessrl_jax.capo import forget_moments, freeze_outside
from harnessrl_jax.errors import PartitionError

ADAMW = optax.adamw(0.1, weight_decay=0.1)
PARAMS = {"w": jnp.array([[1.0, -2, -0.0, 1e-30], [3, 4, 5, 6]]), "free": jnp.array([1.0, 2])}
GRADS = jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.5), PARAMS)
TRAINED = {"w": jnp.array([[True, False, False, False]]), "free": jnp.array([True])}
NONE = {"w": jnp.array([[False]]), "free": jnp.array([False])}


def bits(tree):
    return [np.asarray(leaf).view(np.uint32) for leaf in jax.tree.leaves(tree)]


def masked(gradients, trained):
    return jax.tree.map(lambda g, mask: jnp.where(mask, g, 0), gradients, trained)


def test_outside_the_mask_not_a_bit_moves():
    optimizer = freeze_outside(ADAMW)
    params, state = PARAMS, optimizer.init(PARAMS)
    for trained in (TRAINED, TRAINED, NONE):  # the last after a refresh, with momentum left over
        updates, state = optimizer.update(masked(GRADS, trained), state, params, trained=trained)
        after = optax.apply_updates(params, updates)
        for old, new, mask in zip(bits(params), bits(after), jax.tree.leaves(trained), strict=True):
            moved = old != new
            assert not moved[~np.broadcast_to(mask, moved.shape)].any()
            assert moved[np.broadcast_to(mask, moved.shape)].all()
        params = after


def test_masked_gradients_alone_do_not_freeze():
    state = ADAMW.init(PARAMS)
    updates, state = ADAMW.update(masked(GRADS, TRAINED), state, PARAMS)
    assert np.abs(updates["w"][1, 1]) > 1e-3  # weight decay
    updates, _ = ADAMW.update(masked(GRADS, NONE), state, PARAMS)
    assert np.abs(updates["free"]).min() > 1e-2  # momentum


def test_an_update_without_a_mask_is_refused():
    optimizer = freeze_outside(ADAMW)
    with pytest.raises(PartitionError, match=r"called without `trained`; pass trained=masks\.trained"):
        optimizer.update(GRADS, optimizer.init(PARAMS), PARAMS)


@pytest.mark.parametrize("optimizer", [ADAMW, optax.chain(optax.clip_by_global_norm(1.0), ADAMW), optax.sgd(0.1, 0.9)])
def test_leaving_units_lose_their_moments(optimizer):
    _, state = optimizer.update(GRADS, optimizer.init(PARAMS), PARAMS)
    left = {"w": jnp.array([[False, True, False, False]]), "free": jnp.array([False])}
    after = forget_moments(optimizer, state, left)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    moments = [leaf for leaf in jax.tree.leaves(after) if leaf.shape == (2, 4)]
    assert moments
    for leaf in moments:
        np.testing.assert_array_equal(np.asarray(leaf == 0), np.broadcast_to(left["w"], (2, 4)))
    counts = lambda tree: [leaf for leaf in jax.tree.leaves(tree) if leaf.shape == ()]
    assert [int(c) for c in counts(after)] == [int(c) for c in counts(state)]
