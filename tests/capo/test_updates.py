"""Masked updates: outside the partition not a bit moves, whatever the optimiser remembers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from harnessrl_jax.capo import UnitFactors, UnitMap, UnitSlice, forget_moments, freeze_outside, routed_updates
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


def test_factors_scale_the_update_and_0_freezes():
    optimizer = freeze_outside(ADAMW)
    plain, _ = ADAMW.update(GRADS, ADAMW.init(PARAMS), PARAMS)
    soft = {"w": jnp.array([[2.0, 0.5, 0.1, 0.0]]), "free": jnp.array([1.0])}
    updates, _ = optimizer.update(GRADS, optimizer.init(PARAMS), PARAMS, trained=soft)
    np.testing.assert_allclose(updates["w"], plain["w"] * soft["w"], rtol=1e-6)
    after = optax.apply_updates(PARAMS, updates)
    assert (bits(after["w"])[0] == bits(PARAMS["w"])[0])[:, 3].all()


def test_factors_on_gradients_would_be_divided_out():
    adam = optax.adam(0.1)
    first, _ = adam.update(GRADS, adam.init(PARAMS), PARAMS)
    scaled, _ = adam.update(jax.tree.map(lambda g: 0.1 * g, GRADS), adam.init(PARAMS), PARAMS)
    np.testing.assert_allclose(scaled["w"], first["w"], rtol=1e-5)


MAP = UnitMap(1, (UnitSlice("w", 1),))
FIRST = UnitFactors(jnp.array([[True, True, False, False]]), jnp.array(True))
SECOND = UnitFactors(jnp.array([[True, False, True, False]]), jnp.array(False))


@pytest.fixture(scope="module", params=["adamw", "sgd", "clipped"])
def routed(request):
    optimizers = {
        "adamw": ADAMW,
        "sgd": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, 0.9)),
        "clipped": optax.chain(optax.clip_by_global_norm(1.0), ADAMW),
    }
    optimizer = routed_updates(optimizers[request.param], MAP)

    @jax.jit
    def step(gradients, state, params, factors):
        updates, state = optimizer.update(gradients, state, params, factors=factors)
        return optax.apply_updates(params, updates), state

    return optimizer, step


def gradient_of(factors):
    return masked(GRADS, {"w": factors.units[0][None], "free": factors.rest[None]})


def test_routed_updates_freeze_forget_and_resume(routed):
    optimizer, step = routed
    params, state = PARAMS, optimizer.init(PARAMS)
    for factors in (FIRST, FIRST, SECOND, SECOND):
        after, state = step(gradient_of(factors), state, params, factors)
        moved = np.asarray(after["w"]).view(np.uint32) != np.asarray(params["w"]).view(np.uint32)
        np.testing.assert_array_equal(moved, np.broadcast_to(factors.units, (2, 4)))
        assert (np.asarray(after["free"] != params["free"]) == bool(factors.rest)).all()
        params = after
    for leaf in jax.tree.leaves(state):
        if leaf.shape == (2, 4):  # unit 1 left the partition, unit 3 was never in it
            np.testing.assert_array_equal(leaf[:, [1, 3]], 0)
            assert (leaf[:, [0, 2]] != 0).all()


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_routed_updates_without_signal_change_nothing(routed, value):
    optimizer, step = routed
    params, state = step(gradient_of(FIRST), optimizer.init(PARAMS), PARAMS, FIRST)
    after, same = step(jax.tree.map(lambda g: jnp.full_like(g, value), GRADS), state, params, SECOND)
    for got, want in zip(jax.tree.leaves((after, same)), jax.tree.leaves((params, state)), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def test_routed_updates_want_factors_and_a_map_that_fits():
    optimizer = routed_updates(ADAMW, MAP)
    with pytest.raises(PartitionError, match="called without `factors`; pass factors=UnitFactors"):
        optimizer.update(GRADS, optimizer.init(PARAMS), PARAMS)
    with pytest.raises(PartitionError, match="no such path"):
        routed_updates(ADAMW, UnitMap(1, (UnitSlice("v", 0),))).init(PARAMS)
