"""Conflict metrics: known angles, nothing undefined, by hand on a partition."""

import jax
import numpy as np
import pytest

from harnessrl_jax.capo import UnitMap, UnitSlice, conflict

MAP = UnitMap(2, (UnitSlice("w{layer}", 0),))
EMPTY = np.zeros((2, 2, 3), bool)
CONFLICT = jax.jit(conflict, static_argnums=0)


def pair(action, args, rest=(0.0, 0.0)):
    gradients = {f"w{i}": np.array([action[i], args[i]]) for i in range(2)}
    return gradients | {"rest": np.array([[rest[0]], [rest[1]]])}


@pytest.mark.parametrize(
    ("action", "args", "cosine"),
    [([1.0, 0, 0], [0.0, 2, 0], 0), ([1.0, 2, 0], [-2.0, -4, 0], -1), ([1.0, 2, 3], [1.0, 2, 3], 1)],
)
def test_known_angles(action, args, cosine):
    found = CONFLICT(MAP, pair([action, action], [args, args]), EMPTY)
    np.testing.assert_allclose(found.cosine.value, cosine, atol=1e-6)
    np.testing.assert_allclose(found.cosine_layer.value, [cosine] * 2, atol=1e-6)
    np.testing.assert_allclose(found.mass.value, min(0, cosine), atol=1e-6)
    assert found.cosine.valid
    assert float(found.negative_layers) == (cosine < 0)


def test_a_gradient_of_0_gives_0_and_not_valid():
    zero, one = [0.0, 0, 0], [1.0, 0, 0]
    found = CONFLICT(MAP, pair([zero, one], [one, one]), EMPTY)
    np.testing.assert_array_equal(found.cosine_layer.value, [0, 1])
    np.testing.assert_array_equal(found.cosine_layer.valid, [False, True])
    nothing = CONFLICT(MAP, pair([zero, zero], [zero, zero]), EMPTY)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(nothing))
    assert not nothing.cosine.valid
    assert not nothing.cosine_all.valid
    assert not nothing.mass.valid
    half = pair([zero, zero], [one, zero])
    np.testing.assert_array_equal(CONFLICT(MAP, half, ~EMPTY).retained.valid, [False, True])
    assert not CONFLICT(MAP, half, EMPTY).retained.valid.any()
    assert not CONFLICT(MAP, half, EMPTY).mass.valid
    assert not nothing.jaccard_layer.valid.any()


def test_by_hand_on_a_partition():
    # Layer 0: unit 0 action-only, 1 shared, 2 args-only. Layer 1: unit 0 in neither.
    units = np.array([[[1, 1, 0], [0, 1, 1]], [[0, 1, 1], [0, 1, 1]]], bool)
    found = CONFLICT(MAP, pair([[1.0, 2, 2], [0.0, 0, 0]], [[1.0, -1, 1], [0.0, 0, 4]], rest=(3.0, -3.0)), units)
    np.testing.assert_allclose(found.cosine_layer.value[0], 1 / (3 * np.sqrt(3)), rtol=1e-6)
    np.testing.assert_allclose(found.norm, (3, np.sqrt(19)), rtol=1e-6)
    np.testing.assert_allclose(found.cosine_shared.value, -2 / np.sqrt(4 * 17), rtol=1e-6)
    np.testing.assert_allclose((found.cosine_action_only.value, found.cosine_args_only.value), (1, 1), rtol=1e-6)
    np.testing.assert_allclose(found.cosine_all.value, (1 - 9) / np.sqrt(18 * 28), rtol=1e-6)
    np.testing.assert_allclose(found.retained.value, (5 / 9, 18 / 19), rtol=1e-6)
    np.testing.assert_allclose(found.jaccard_layer.value, [1 / 3, 1], rtol=1e-6)
    sizes = (found.shared_layer, found.action_only_layer, found.args_only_layer, found.neither_layer)
    np.testing.assert_array_equal(sizes, [[1, 2], [1, 0], [1, 0], [0, 1]])


def test_mass_weighs_layers_by_their_size():
    found = CONFLICT(MAP, pair([[1.0, 0, 0], [2.0, 0, 0]], [[-1.0, 0, 0], [2.0, 0, 0]]), EMPTY)
    np.testing.assert_allclose(found.mass.value, -1 / 5, rtol=1e-6)
    assert float(found.negative_layers) == 0.5
