"""Adapters: no change at first, W + s A B by hand, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.errors import ModelError
from harnessrl_jax.models import adapted, init_adapters

PARAMS = {"mlp": {"up": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}}, "norm": jnp.ones(3)}
UP = "mlp/up/kernel"


def make(where=lambda path: path == UP, rank=2):
    return init_adapters(PARAMS, jax.random.key(0), rank=rank, where=where)


def test_new_adapters_change_nothing_but_can_learn():
    adapters = make()
    assert {name: (part["a"].shape, part["b"].shape) for name, part in adapters.items()} == {UP: ((3, 2), (2, 4))}
    np.testing.assert_array_equal(adapted(PARAMS, adapters, scale=2.0)["mlp"]["up"]["kernel"], 1)
    gradient = jax.grad(lambda a: adapted(PARAMS, a, scale=2.0)["mlp"]["up"]["kernel"][0, 0])(adapters)[UP]
    assert np.asarray(gradient["b"]).any()


def test_several_adapters_add_by_hand():
    one = {UP: {"a": jnp.array([[1.0], [0], [2]]), "b": jnp.array([[1.0, 0, 0, 3]])}}
    two = {UP: {"a": jnp.array([[0.0], [1], [0]]), "b": jnp.array([[0.0, 1, 0, 0]])}}
    got = adapted(PARAMS, one, two, scale=0.5)
    want = 1 + 0.5 * np.array([[1, 0, 0, 3], [0, 1, 0, 0], [2, 0, 0, 6]])
    np.testing.assert_array_equal(got["mlp"]["up"]["kernel"], want)
    np.testing.assert_array_equal(got["mlp"]["up"]["bias"], 1)


def test_parameters_keep_their_type():
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    assert adapted(low, make(), scale=1.0)["mlp"]["up"]["kernel"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"where": lambda path: False}, r"`where` chose no parameter of mlp/up/bias, mlp/up/kernel, norm"),
        ({"where": lambda path: path == "norm"}, r"'norm' \[3\] is not a matrix; exclude it"),
        ({"rank": 0}, "rank must be at least 1, got 0"),
    ],
)
def test_impossible_adapters_are_refused(choice, message):
    with pytest.raises(ModelError, match=message):
        make(**choice)
