"""The forms with one backward pass, on a small linen network: equal to the definition, or gated by slots."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.capo import (
    RoleMasks,
    UnitMap,
    UnitSlice,
    everything,
    fused_gradient,
    position_local,
    role_gradients,
    route,
)
from harnessrl_jax.errors import PartitionError

TOKENS, HIDDEN, UNITS = 7, 4, 6
MAP = UnitMap(1, (UnitSlice("up/kernel", 1), UnitSlice("up/bias", 0), UnitSlice("down/kernel", 0)))
ROLE = np.array([0, 1, -1, 1, 0, 1, 1])
WEIGHT = np.array([[1.0, -2, 9, 0.5, 3, -1, 2]])


class Net(nn.Module):
    """A table, two mixed MLPs that share no weight with each other, a scale, and a head of its own."""

    @nn.compact
    def __call__(self, token):
        x = nn.Embed(5, HIDDEN, name="table")(token)
        for name in ("up", "plain"):
            x = x + jnp.cumsum(x, axis=0) / TOKENS
            hidden = nn.silu(nn.Dense(UNITS, name=name)(x))
            x = x + nn.Dense(HIDDEN, name={"up": "down", "plain": "out"}[name])(hidden)
        return nn.LayerNorm(name="norm")(x)


TOKEN = jnp.array([0, 3, 1, 1, 4, 2, 0])


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def params():
    start = jax.eval_shape(lambda: Net().init(jax.random.key(0), TOKEN))
    rng = np.random.default_rng(0)
    tree = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), start)
    return tree["params"] | {"head": jnp.asarray(rng.normal(size=HIDDEN))}


def trunk(params):
    return Net().apply({"params": params}, TOKEN), jnp.array(7)


def head(params, features, beside):
    values = jnp.tanh(features @ params["head"]) * WEIGHT[0]
    return jnp.stack([jnp.where(role == ROLE, values, 0).sum() for role in range(2)]), beside


def losses(params):
    return head(params, *trunk(params))


def masks_of(rest):
    units = np.zeros((2, 1, UNITS), bool)
    units[0, 0, [0, 1, 2]], units[1, 0, [2, 3]] = True, True
    return RoleMasks(jnp.asarray(units), jnp.array([rest, rest]))


def assert_close(got, want, tolerance=1e-12):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance), got, want)


@partial(jax.jit, static_argnums=0)
def definition(unit_map, params, masks):
    return route(unit_map, role_gradients(losses, params)[0], masks)


@partial(jax.jit, static_argnums=0)
def fused(unit_map, params, masks):
    return fused_gradient(trunk, head, params, unit_map, masks, jnp.asarray(ROLE))


@pytest.mark.parametrize("rest", [True, False])
def test_fused_is_the_definition(params, rest):
    gradient, values, beside = fused(MAP, params, masks_of(rest))
    assert beside == 7
    want = definition(MAP, params, masks_of(rest))
    assert_close(gradient, want)
    assert_close(values, losses(params)[0])
    assert np.abs(want["up"]["kernel"]).max() > 0.01
    np.testing.assert_array_equal(gradient["up"]["bias"][4:], 0)
    assert (np.asarray(gradient["head"]) != 0).all() == rest


def test_fused_is_the_definition_for_units_that_no_dense_layer_owns(params):
    odd = UnitMap(1, (UnitSlice("norm/scale", 0), UnitSlice("table/embedding", 1)))
    masks = RoleMasks(jnp.array([[[True, True, False, False]], [[False, True, True, False]]]), jnp.array([True, True]))
    assert_close(fused(odd, params, masks)[0], definition(odd, params, masks))


def test_fused_makes_no_gradient_for_each_role(params):
    text = str(jax.make_jaxpr(partial(fused, MAP))(params, masks_of(True)))
    assert f"f64[2,{HIDDEN},{UNITS}]" not in text
    assert f"f64[2,{HIDDEN},{UNITS}]" in str(jax.make_jaxpr(partial(definition, MAP))(params, masks_of(True)))


def test_fused_in_bfloat16_sums_in_float32(params):
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    got, want = fused(MAP, low, masks_of(True))[0], definition(MAP, low, masks_of(True))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == jnp.bfloat16
        scale = np.abs(b.astype(np.float32)).max()
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=0, atol=0.03 * scale)


def by_slots(params, slots):
    """Gradients of up and down by slot, from networks that own a copy of both for every slot; then gated by hand."""

    def total(copies):
        x = params["table"]["embedding"][TOKEN]
        x = x + jnp.cumsum(x, axis=0) / TOKENS
        hidden = nn.silu(jnp.einsum("ti,tio->to", x, copies["up"]) + copies["bias"])
        x = x + jnp.einsum("ti,tio->to", hidden, copies["down"]) + params["down"]["bias"][None]
        x = x + jnp.cumsum(x, axis=0) / TOKENS
        hidden = nn.silu(x @ params["plain"]["kernel"] + params["plain"]["bias"][None])
        x = x + hidden @ params["out"]["kernel"] + params["out"]["bias"][None]
        x = nn.LayerNorm().apply({"params": params["norm"]}, x)
        return head(params, x, None)[0].sum()

    net, each = params, lambda leaf: jnp.broadcast_to(leaf, (TOKENS, *leaf.shape))
    copies = {"up": each(net["up"]["kernel"]), "bias": each(net["up"]["bias"]), "down": each(net["down"]["kernel"])}
    gradient = jax.jit(jax.grad(total))(copies)
    units = np.asarray(masks_of(True).units[:, 0])
    open_ = np.stack([units[[r for r in range(2) if slots[r, t]] or [0, 1]].all(axis=0) for t in range(TOKENS)])
    return {
        "up": (gradient["up"] * open_[:, None, :]).sum(0),
        "bias": (gradient["bias"] * open_).sum(0),
        "down": (gradient["down"] * open_[:, :, None]).sum(0),
    }


def local(params, masks, slots, unit_map=MAP):
    def total(params):
        return head(params, *position_local(trunk, unit_map, masks, slots)(params))[0].sum()

    return jax.grad(total)(params)


def test_position_local_sends_each_slot_to_the_units_of_its_roles(params):
    slots = np.stack([ROLE == 0, (ROLE == 1) | (np.arange(TOKENS) == 4)])  # slot 4 stands for both, slot 2 for none
    got = jax.jit(local)(params, masks_of(True), jnp.asarray(slots))
    want = by_slots(params, slots)
    assert_close((got["up"]["kernel"], got["up"]["bias"], got["down"]["kernel"]), tuple(want.values()))
    frozen = jax.jit(local)(params, masks_of(False), jnp.asarray(slots))
    assert_close(frozen["up"], got["up"])
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves((frozen["plain"], frozen["table"])))


def test_position_local_is_plain_where_masks_cover_everything(params):
    slots = jnp.asarray(np.stack([ROLE == 0, ROLE == 1]))
    plain = jax.jit(jax.grad(lambda params: losses(params)[0].sum()))(params)
    assert_close(jax.jit(local)(params, everything(2, 1, UNITS), slots), plain)


def test_position_local_refuses_units_that_no_dense_layer_owns(params):
    odd = UnitMap(1, (UnitSlice("norm/scale", 0),))
    masks = RoleMasks(jnp.ones((2, 1, HIDDEN), bool), jnp.ones(2, bool))
    with pytest.raises(PartitionError, match="units own 'norm/scale', which is not a kernel or bias of an nn"):
        local(params, masks, jnp.ones((2, TOKENS), bool), odd)
