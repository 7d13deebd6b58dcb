"""Unit maps of heads, layers, experts, adapters: who owns what, and sums that undo the spreading."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.capo import (
    UnitMap,
    UnitSlice,
    Whole,
    adapter_units,
    expand,
    expert_units,
    head_units,
    layer_units,
    lora_units,
    unit_products,
)
from harnessrl_jax.errors import PartitionError
from harnessrl_jax.models import DecoderConfig, Experts, init_adapters, init_params

MODEL = DecoderConfig(
    vocab_size=12, hidden_size=8, layers=2, heads=4, kv_heads=2, head_dim=2, mlp_size=6, qkv_bias=True
)
SHAPES = jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0)))
EXPERTS = UnitMap(
    2,
    (
        UnitSlice("layers_{layer}/up", 2, expert_axis=0),
        UnitSlice("layers_{layer}/down", 1, expert_axis=0),
        UnitSlice("layers_{layer}/turned", 0, expert_axis=1),
    ),
)
EXPERT_SHAPES = {
    f"layers_{i}": {"up": jnp.zeros((3, 5, 4)), "down": jnp.zeros((3, 4, 5)), "turned": jnp.zeros((4, 3))}
    for i in range(2)
}


def masks(unit_map, params, units, rest=False):
    return expand(unit_map, params, jnp.asarray(units), jnp.array(rest))


def test_a_head_owns_its_channels_and_those_of_its_queries():
    family = head_units(2, heads=4, kv_heads=2, head_dim=2, bias=True)
    assert family.units(SHAPES) == 2
    found = masks(family, SHAPES, [[False, True], [True, False]])["layers_0"]["attn"]
    np.testing.assert_array_equal(found["q"]["kernel"], [[0, 0, 0, 0, 1, 1, 1, 1]])
    np.testing.assert_array_equal(found["q"]["bias"], [0, 0, 0, 0, 1, 1, 1, 1])
    np.testing.assert_array_equal(found["k"]["kernel"], [[0, 0, 1, 1]])
    np.testing.assert_array_equal(found["o"]["kernel"][:, 0], [0, 0, 0, 0, 1, 1, 1, 1])


def test_a_layer_owns_everything_under_it():
    family = layer_units(SHAPES, 2)
    assert (family.layers, family.units(SHAPES)) == (1, 2)
    found = masks(family, SHAPES, [[False, True]], rest=True)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(found["layers_0"]))
    assert all(np.asarray(leaf).all() for leaf in jax.tree.leaves((found["layers_1"], found["embed"])))


def test_an_expert_unit_owns_its_slice_of_its_expert():
    assert EXPERTS.units(EXPERT_SHAPES) == 12
    units = np.zeros((2, 12), bool)
    units[1, 1 * 4 + 3] = True  # unit 3 of expert 1
    found = masks(EXPERTS, EXPERT_SHAPES, units)
    assert not np.asarray(found["layers_0"]["up"]).any()
    np.testing.assert_array_equal(np.argwhere(found["layers_1"]["up"]), [[1, 0, 3]])
    np.testing.assert_array_equal(np.argwhere(found["layers_1"]["down"]), [[1, 3, 0]])
    np.testing.assert_array_equal(np.argwhere(found["layers_1"]["turned"]), [[3, 1]])


@pytest.mark.parametrize("form", ["silu", "clamped"])
def test_neurons_of_a_mixture_own_what_only_they_read_and_write(form):
    mixture = dataclasses.replace(MODEL, experts=Experts(count=3, active=2, renormalise=True, form=form))
    shapes = jax.eval_shape(lambda: init_params(mixture, jax.random.key(0)))
    family = expert_units(2, include_gate=True, bias=form == "clamped")
    assert family.units(shapes) == 3 * 6
    units = np.zeros((2, 18), bool)
    units[1, 2 * 6 + 4] = True  # neuron 4 of expert 2
    found = masks(family, shapes, units)
    owned = {"gate/kernel": [2, 0, 4], "up/kernel": [2, 0, 4], "down/kernel": [2, 4, 0]}
    owned |= {"gate/bias": [2, 4], "up/bias": [2, 4]} if form == "clamped" else {}
    seen = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        if np.asarray(leaf).any():
            seen[jax.tree_util.keystr(path, simple=True, separator="/")] = np.argwhere(leaf).tolist()
    assert seen == {f"layers_1/experts/{name}": [place] for name, place in owned.items()}


def test_adapters_have_an_owner_each_and_neurons_own_the_outer_factors():
    adapters = jax.eval_shape(lambda: init_adapters(SHAPES_AS_ARRAYS(), jax.random.key(0), rank=2, where=is_mlp))
    two = {"action": adapters, "args": adapters}
    found = masks(adapter_units(two), two, [[True, False]])
    assert all(np.asarray(leaf).all() for leaf in jax.tree.leaves(found["action"]))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(found["args"]))
    family = lora_units(2, include_gate=True)
    assert family.units(adapters) == 6
    found = masks(family, adapters, np.eye(6, dtype=bool)[[1, 4]], rest=True)
    np.testing.assert_array_equal(np.argwhere(found["layers_0/mlp/up/kernel"]["b"]), [[0, 1]])
    np.testing.assert_array_equal(np.argwhere(found["layers_1/mlp/down/kernel"]["a"]), [[4, 0]])
    assert np.asarray(found["layers_0/mlp/up/kernel"]["a"]).all()


def SHAPES_AS_ARRAYS():
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), SHAPES)


def is_mlp(path):
    return "/mlp/" in path


@pytest.mark.parametrize(
    ("family", "shapes"),
    [
        (head_units(2, heads=4, kv_heads=2, head_dim=2, bias=True), SHAPES),
        (layer_units(SHAPES, 2), SHAPES),
        (EXPERTS, EXPERT_SHAPES),
    ],
)
def test_products_over_units_are_those_over_masked_gradients(family, shapes):
    rng = np.random.default_rng(0)
    gradients = jax.tree.map(lambda leaf: rng.normal(size=(2, *leaf.shape)).astype(np.float32), shapes)
    products, rest = unit_products(family, gradients)
    assert products.shape == (2, 2, family.layers, family.units(shapes))
    dot = lambda mask: sum(
        (np.where(m, g[0], 0) * g[1]).sum()
        for m, g in zip(jax.tree.leaves(mask), jax.tree.leaves(gradients), strict=True)
    )
    nothing = np.zeros(products.shape[2:], bool)
    np.testing.assert_allclose(rest[0, 1], dot(masks(family, shapes, nothing, rest=True)), rtol=1e-4, atol=1e-4)
    for place in [(0, 0), (family.layers - 1, (products.shape[3] - 1) // 2)]:
        one = nothing.copy()
        one[place] = True
        np.testing.assert_allclose(products[0, 1][place], dot(masks(family, shapes, one)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (UnitSlice("w", 1, width=3), r"owns 'w', axis 1, whose 4 entries are not a multiple of the width 3"),
        (UnitSlice("w", 1, expert_axis=1), r"owns 'w', axis 1 for units and for experts; give two axes"),
        (Whole("w", 2, 2), r"owns 'w', unit 2, but there are 2; correct the number"),
    ],
)
def test_a_wrong_entry_is_refused(entry, message):
    with pytest.raises(PartitionError, match=message):
        UnitMap(1, (entry,)).units({"w": jnp.zeros((2, 4))})
