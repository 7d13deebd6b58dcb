"""The rule table: what it splits, and the words with which it refuses."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from harnessrl_jax.errors import ShardingError
from harnessrl_jax.models import DecoderConfig, init_params
from harnessrl_jax.training import (
    AXES,
    DECODER_RULES,
    ShardingRule,
    init_state,
    make_mesh,
    parameter_specs,
    place_batch,
    place_state,
    state_shardings,
)

TINY = DecoderConfig(
    vocab_size=16,
    hidden_size=8,
    layers=1,
    heads=2,
    kv_heads=2,
    head_dim=4,
    mlp_size=16,
    tie_embeddings=False,
    qkv_bias=True,
)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=2, fsdp=2, tensor=2, context=1)


def test_the_mesh_has_four_automatic_axes(mesh):
    assert mesh.axis_names == AXES
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize("sizes", [(2, 2, 1, 1), (0, 2, 2, 2)])
def test_sizes_must_use_every_device(sizes):
    with pytest.raises(
        ShardingError, match=r"mesh: data . x fsdp 2 x tensor . x context . asks for . devices, there are 8"
    ):
        make_mesh(**dict(zip(AXES, sizes, strict=True)))


def test_the_table_covers_the_decoder(mesh):
    specs = parameter_specs(jax.eval_shape(lambda key: init_params(TINY, key), jax.random.key(0)), mesh, DECODER_RULES)
    layer = specs["layers_0"]
    assert layer["attn"]["q"]["kernel"] == layer["mlp"]["up"]["kernel"] == PartitionSpec("fsdp", "tensor")
    assert layer["attn"]["o"]["kernel"] == layer["mlp"]["down"]["kernel"] == PartitionSpec("tensor", "fsdp")
    assert layer["attn"]["k"]["bias"] == PartitionSpec("tensor")
    assert layer["input_norm"]["scale"] == specs["final_norm"]["scale"] == PartitionSpec()
    assert specs["embed"]["embedding"] == PartitionSpec("tensor", "fsdp")
    assert specs["lm_head"]["kernel"] == PartitionSpec("fsdp", "tensor")


@pytest.mark.parametrize(
    ("params", "rules", "message"),
    [
        (
            {"adapter": {"kernel": np.zeros((4, 4))}},
            DECODER_RULES,
            r"no rule covers parameter 'adapter/kernel' \[4, 4\]; add a rule to the table",
        ),
        (
            {"embed": {"embedding": np.zeros((15, 8))}},
            DECODER_RULES,
            r"'embed/embedding' \[15, 8\] has an axis of 15 that mesh axis 'tensor' cannot cut into 2 equal parts",
        ),
        (
            {"w": np.zeros(4)},
            [ShardingRule("w", PartitionSpec("fsdp", "tensor"))],
            r"rule 'w' splits 2 axes, parameter 'w' \[4\] has 1; correct the rule",
        ),
    ],
)
def test_a_parameter_it_cannot_split_is_named(mesh, params, rules, message):
    with pytest.raises(ShardingError, match=message):
        parameter_specs(params, mesh, rules)


def test_a_rule_must_match_the_whole_path(mesh):
    with pytest.raises(ShardingError, match="no rule covers parameter 'teacher/embed/embedding'"):
        parameter_specs({"teacher": {"embed": {"embedding": np.zeros((4, 4))}}}, mesh, DECODER_RULES)


def test_moments_lie_like_their_parameters(toy, mesh):
    optimizer = optax.adamw(1e-3)
    state = init_state(toy.params(), optimizer, toy.capo())
    shardings = state_shardings(state, optimizer, mesh, DECODER_RULES)
    placed = place_state(state, shardings)
    adam = placed.opt_state[0]
    same = lambda tree: jax.tree.map(lambda leaf: leaf.sharding.spec, tree)
    assert same(adam.mu) == same(adam.nu) == same(placed.params)
    assert adam.mu["layers_0"]["mlp"]["down"]["kernel"].sharding.spec == PartitionSpec("tensor", "fsdp")
    assert adam.count.sharding.is_fully_replicated
    assert placed.capo.units.sharding.is_fully_replicated


def test_placing_copies(toy, mesh):
    optimizer = optax.sgd(1.0)
    state = init_state(jax.tree.map(np.asarray, toy.params()), optimizer, toy.capo())
    shardings = state_shardings(state, optimizer, mesh, DECODER_RULES)
    once = place_state(state, shardings)
    again = place_state(once, shardings)
    jax.jit(lambda tree: jax.tree.map(lambda x: x * 1, tree), donate_argnums=0, out_shardings=shardings)(again)
    np.testing.assert_array_equal(once.params["final_norm"]["scale"], state.params["final_norm"]["scale"])


def test_rows_lie_along_data_and_fsdp(toy, mesh):
    placed = place_batch(toy.batch(max_rows=8), mesh)
    assert placed.token.sharding.spec == PartitionSpec(("data", "fsdp"))
    with pytest.raises(ShardingError, match="6 rows cannot be spread evenly over data x fsdp = 4 devices"):
        place_batch(toy.batch(max_rows=6), mesh)
