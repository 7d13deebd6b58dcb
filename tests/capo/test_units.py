"""The unit map: what it accepts, and the words with which it refuses."""

import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.capo import UnitMap, UnitSlice, decoder_units, expand, unit_products
from harnessrl_jax.errors import PartitionError


def test_it_counts_the_units(toy):
    assert toy.unit_map.units(toy.params) == 8


@pytest.mark.parametrize(
    ("unit_map", "message"),
    [
        (
            UnitMap(1, (UnitSlice("layers_{layer}/mlp/up/kernal", 1),)),
            r"layer 0 owns 'layers_0/mlp/up/kernal', but the parameters have no such path; "
            r"the nearest is 'layers_0/mlp/up/kernel' \[4, 8\]; correct the map's path",
        ),
        (decoder_units(3, include_gate=True), r"layer 2 owns 'layers_2/mlp/gate/kernel'.*no such path"),
        (
            UnitMap(1, (UnitSlice("layers_{layer}/mlp/up/kernel", 2),)),
            r"'layers_0/mlp/up/kernel', axis 2, but its shape is \[4, 8\]; wanted 0 to 1; correct the map's axis",
        ),
        (
            UnitMap(1, (UnitSlice("layers_{layer}/mlp/up/kernel", 1), UnitSlice("layers_{layer}/mlp/down/kernel", 1))),
            r"every slice must hold the same number of units, but layers_0/mlp/up/kernel \[4, 8\] has 8, "
            r"layers_0/mlp/down/kernel \[8, 4\] has 4; correct the axes",
        ),
        (UnitMap(2, (UnitSlice("mix", 0),)), r"'mix', which the map names twice; put \{layer\} into the path"),
        (UnitMap(0, (UnitSlice("mix", 0),)), r"names no parameter \(0 layers, 1 slices a layer\)"),
    ],
)
def test_a_wrong_map_says_what_and_where(toy, unit_map, message):
    with pytest.raises(PartitionError, match=message):
        unit_map.units(toy.params)


def test_expand_keeps_ranks_and_marks_owned_slices(toy):
    masks = expand(toy.unit_map, toy.params, jnp.asarray(toy.units[0]), jnp.array(True))
    assert masks["mix"].shape == (1, 1)
    assert masks["mix"].all()
    np.testing.assert_array_equal(masks["layers_1"]["mlp"]["gate"]["kernel"], toy.units[0, 1][None])
    np.testing.assert_array_equal(masks["layers_1"]["mlp"]["down"]["kernel"], toy.units[0, 1][:, None])


def test_products_worked_by_hand():
    unit_map = UnitMap(1, (UnitSlice("a", 1), UnitSlice("b", 0)))
    gradients = {
        "a": jnp.array([[[1.0, 2], [3, 4]], [[1, 1], [10, 10]]]),
        "b": jnp.array([[5.0, 6], [2, 3]]),
        "other": jnp.array([[[1.0, 2]], [[3, 4]]]),
    }
    units, rest = unit_products(unit_map, gradients)
    np.testing.assert_array_equal(units[0, 1], [[1 + 30 + 10, 2 + 40 + 18]])
    np.testing.assert_array_equal(units[0, 0], [[1 + 9 + 25, 4 + 16 + 36]])
    np.testing.assert_array_equal(units[1, 0], units[0, 1])
    np.testing.assert_array_equal(rest, [[5, 11], [11, 25]])
