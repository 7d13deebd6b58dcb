"""Low-rank adapters under routing: masks on the outer factors, and one adapter a role."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.capo import RoleMasks, adapter_units, lora_units, reference_gradient, role_gradients, route
from harnessrl_jax.models import adapted, init_adapters

SCALE = 0.5


def trained(toy, seed):
    """Adapters of every MLP kernel, away from their initial 0."""
    start = init_adapters(toy.params, jax.random.key(seed), rank=2, where=lambda path: "/mlp/" in path)
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), start)


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def assert_close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), got, want)


@pytest.mark.parametrize("rest", [True, False])
def test_neurons_are_routed_by_their_outer_factors(toy, rest):
    adapters, family = trained(toy, 0), lora_units(2, include_gate=True)
    losses = lambda adapters: toy.losses(adapted(toy.params, adapters, scale=SCALE))
    masks = RoleMasks(jnp.asarray(toy.units), jnp.array([rest, rest]))
    apart = jax.jit(lambda a: role_gradients(losses, a)[0])(adapters)
    routed = route(family, apart, masks)
    assert_close(routed, jax.jit(lambda a: reference_gradient(losses, a, family, masks)[0])(adapters))
    # By hand, from the gradients of the adapted kernels: W = W0 + s A B.
    whole = adapted(toy.params, adapters, scale=SCALE)
    full = jax.jit(lambda p: role_gradients(toy.losses, p)[0])(whole)["layers_1"]["mlp"]
    up, down = adapters["layers_1/mlp/up/kernel"], adapters["layers_1/mlp/down/kernel"]
    of_b = sum(np.where(toy.units[r, 1], SCALE * up["a"].T @ full["up"]["kernel"][r], 0) for r in range(2))
    of_a = sum(np.where(toy.units[r, 1][:, None], SCALE * full["down"]["kernel"][r] @ down["b"].T, 0) for r in range(2))
    assert_close(routed["layers_1/mlp/up/kernel"]["b"], of_b)
    assert_close(routed["layers_1/mlp/down/kernel"]["a"], of_a)
    assert np.asarray(routed["layers_1/mlp/up/kernel"]["a"]).any() == rest


def test_two_adapters_learn_a_role_each(toy):
    two = {"action": trained(toy, 1), "args": trained(toy, 2)}
    losses = lambda two: toy.losses(adapted(toy.params, *two.values(), scale=SCALE))
    masks = RoleMasks(jnp.array([[[True, False]], [[False, True]]]), jnp.zeros(2, bool))
    apart = jax.jit(lambda two: role_gradients(losses, two)[0])(two)
    routed = route(adapter_units(two), apart, masks)
    for role, name in enumerate(two):
        assert_close(routed[name], jax.tree.map(lambda leaf, role=role: leaf[role], apart[name]))
        assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(routed[name]))
