"""Names of captured activations: what is found, and the words for what does not fit. Shapes only, nothing runs."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from harnessrl_jax.capo import (
    ABSOLUTE,
    POSITIVE_SHARE,
    RELU,
    Attachment,
    UnitMap,
    UnitSlice,
    expand,
    head_norm,
    layer_units,
    probe_row,
)
from harnessrl_jax.errors import PartitionError


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def mlp():
    return {"up": {"kernel": shape(4, 8)}, "down": {"kernel": shape(8, 4)}}


PARAMS = {f"block_{i}": {"mlp": mlp(), "attn": {"q": shape(4, 6, 2), "o": shape(6, 2, 4)}} for i in range(2)}
SHOWN = {
    f"block_{i}": {
        "mlp": {"hidden": (shape(3, 5, 8),), "twice": (shape(3, 5, 8), shape(3, 5, 4))},
        "attn": {"mixed": (shape(3, 5, 12),)},
        "__call__": ((shape(3, 5, 4), shape(3, 5, 4)),),
    }
    for i in range(2)
}
UP, DOWN = UnitSlice("block_{layer}/mlp/up/kernel", 1), UnitSlice("block_{layer}/mlp/down/kernel", 0)
NEURONS = Attachment(reads=("block_{layer}/mlp/hidden",), statistic=RELU, unit_map=UnitMap(2, (UP, DOWN)))
HEADS = Attachment(
    reads=("block_{layer}/attn/mixed",),
    statistic=head_norm(3),
    unit_map=UnitMap(2, (UnitSlice("block_{layer}/attn/q", 1, width=2), UnitSlice("block_{layer}/attn/o", 0, width=2))),
)


def test_neurons_heads_and_layers_fit():
    assert NEURONS.check(PARAMS, SHOWN) == 8
    assert HEADS.check(PARAMS, SHOWN) == 3
    residual = Attachment(
        reads=("block_{layer}/__call__/0/1",),
        statistic=POSITIVE_SHARE,
        unit_map=dataclasses.replace(layer_units(PARAMS, 2), slices=tuple(whole_layers())),
    )
    assert residual.check(PARAMS, SHOWN) == 2
    assert [layer.shape for layer in jax.eval_shape(residual.activations, SHOWN)] == [(3, 5, 4)] * 2


def whole_layers():
    named = {f"layers_{i}": block for i, block in enumerate(PARAMS.values())}
    for entry in layer_units(named, 2).slices:
        yield dataclasses.replace(entry, path=entry.path.replace("layers_", "block_"))


def test_several_activations_are_combined_in_their_order():
    shown = {"block_0": {"mlp": {"gate": (jnp.arange(4.0),), "up": (jnp.full(4, 2.0),)}}}
    both = Attachment(
        reads=("block_{layer}/mlp/gate", "block_{layer}/mlp/up"),
        combine=lambda gate, up: gate - up,
        statistic=ABSOLUTE,
        unit_map=UnitMap(1, (UP,)),
    )
    np.testing.assert_array_equal(both.activations(shown)[0], [-2, -1, 0, 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"reads": ("block_{layer}/mlp/hiden",)},
            r"layer 0 reads 'block_0/mlp/hiden', which the model did not capture; "
            r"the nearest is 'block_0/mlp/hidden/0' \[3, 5, 8\]; correct the name, or `sow`",
        ),
        (
            {"reads": ("block_{layer}/mlp/twice",)},
            r"layer 0 reads 'block_0/mlp/twice', which was captured 2 times, with shapes \[3, 5, 8\], \[3, 5, 4\]; "
            r"name one of them, as in 'block_0/mlp/twice/0'",
        ),
        (
            {"reads": ("block_{layer}/attn/mixed",)},
            r"layer 0 reads block_0/attn/mixed \[3, 5, 12\], of which the statistic makes 12 units, but the map wants "
            r"8, owners of block_0/mlp/up/kernel \[4, 8\], block_0/mlp/down/kernel \[8, 4\]; name the activation",
        ),
        (
            {"unit_map": UnitMap(3, (UP, DOWN))},
            r"layer 2 owns 'block_2/mlp/up/kernel', but the parameters have no such path; the nearest is",
        ),
        (
            {"unit_map": UnitMap(2, (UP, UnitSlice("block_{layer}/mlp/down/kernel", 1)))},
            r"block_0/mlp/up/kernel \[4, 8\] has 8, block_0/mlp/down/kernel \[8, 4\] has 4.*correct the axes",
        ),
        (
            {"unit_map": UnitMap(2, (UnitSlice("block_{layer}/attn/q", 3),))},
            r"layer 0 owns 'block_0/attn/q', axis 3, but its shape is \[4, 6, 2\]; wanted 0 to 2",
        ),
        (
            {"unit_map": UnitMap(2, (UnitSlice("block_{layer}/attn/q", 1, width=4),))},
            r"layer 0 owns 'block_0/attn/q', axis 1, whose 6 entries are not a multiple of the width 4",
        ),
    ],
)
def test_a_wrong_attachment_says_what_and_where(change, message):
    with pytest.raises(PartitionError, match=message):
        dataclasses.replace(NEURONS, **change).check(PARAMS, SHOWN)


def test_several_names_need_a_function():
    with pytest.raises(PartitionError, match=r"reads 2 activations \(a, b\) and has no `combine`"):
        dataclasses.replace(NEURONS, reads=("a", "b"))


def test_one_of_two_captures_can_be_named():
    named = dataclasses.replace(NEURONS, reads=("block_{layer}/mlp/twice/1",))
    assert [layer.shape for layer in jax.eval_shape(named.activations, SHOWN)] == [(3, 5, 4)] * 2


def test_nothing_captured_is_said():
    with pytest.raises(PartitionError, match="which the model did not capture; nothing was captured; correct"):
        NEURONS.check(PARAMS, {})


@pytest.mark.parametrize("box", [nnx.Param, lambda leaf: nn.Partitioned(leaf, names=(None, None))])
def test_boxes_around_arrays_have_no_name(box):
    params = {f"block_{i}": {"mlp": mlp()} for i in range(2)}
    filled = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), params)
    boxed = jax.tree.map(box, filled)
    assert NEURONS.check(boxed, SHOWN) == 8
    units = jnp.eye(2, 8, dtype=bool)
    masks, plain = (expand(NEURONS.unit_map, tree, units, jnp.array(False)) for tree in (boxed, filled))
    assert [leaf.tolist() for leaf in jax.tree.leaves(masks)] == [leaf.tolist() for leaf in jax.tree.leaves(plain)]


def test_the_probe_of_a_batch_is_the_sum_of_its_rows_at_their_sources():
    rng = np.random.default_rng(0)
    hidden = [jnp.asarray(rng.normal(size=(3, 5, 8)), jnp.float32) for _ in range(2)]
    shown = {f"block_{i}": {"mlp": {"hidden": (layer,)}} for i, layer in enumerate(hidden)}
    source, role = jnp.asarray(rng.integers(0, 5, (3, 4))), jnp.asarray(rng.integers(0, 2, (3, 4)))
    probed = jnp.asarray(rng.random((3, 4)) < 0.7)
    found = NEURONS.probe(shown, source, role, probed)
    rows = [probe_row([layer[i][source[i]] for layer in hidden], role[i], probed[i], statistic=RELU) for i in range(3)]
    np.testing.assert_allclose(found.total, sum(row.total for row in rows), rtol=1e-6)
    np.testing.assert_array_equal(found.tokens, sum(row.tokens for row in rows))
    assert found.tokens[0, 0, 0] + found.tokens[1, 0, 0] == probed.sum()
