"""Mixtures of experts: the definition by hand, and choices of the sampler that are replayed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.errors import ModelError
from harnessrl_jax.models import DecoderConfig, Experts, extend, init_cache, init_params, row_hidden
from harnessrl_jax.models.mlp import Mixture

MIXTURE = Experts(count=4, active=2, renormalise=True)
CONFIG = DecoderConfig(
    vocab_size=20, hidden_size=8, layers=2, heads=2, kv_heads=1, head_dim=4, mlp_size=6, experts=MIXTURE
)
TOKENS = 5


def random_like(tree, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), tree)


@pytest.fixture(scope="module")
def params():
    return random_like(jax.eval_shape(lambda: init_params(CONFIG, jax.random.key(0))))


def by_hand(experts, params, x, chosen=None):
    """One token after the other, one expert after the other, in float64."""
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    bias = lambda name, e: params[name].get("bias", np.zeros(experts.count))[e]
    sigmoid = lambda v: 1 / (1 + np.exp(-v))
    rows = []
    for t, token in enumerate(np.asarray(x, np.float64)):
        scores = token @ params["router"]["kernel"] + params["router"].get("bias", 0.0)
        share = np.exp(scores) / np.exp(scores).sum()
        picked = np.argsort(-scores)[: experts.active] if chosen is None else chosen[t]
        whole = share[picked].sum() if experts.renormalise else 1.0
        out = 0.0
        for e in picked:
            gate, up = (token @ params[name]["kernel"][e] + bias(name, e) for name in ("gate", "up"))
            if experts.form == "silu":
                hidden = gate * sigmoid(gate) * up
            else:
                gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
                hidden = (up + 1) * gate * sigmoid(1.702 * gate)
            out = out + share[e] / whole * (hidden @ params["down"]["kernel"][e] + bias("down", e))
        rows.append(out)
    return np.stack(rows)


@pytest.mark.parametrize("form", ["silu", "clamped"])
@pytest.mark.parametrize("renormalise", [True, False])
def test_values_by_hand(form, renormalise):
    experts = dataclasses.replace(MIXTURE, form=form, renormalise=renormalise)
    module = Mixture(dataclasses.replace(CONFIG, experts=experts))
    x = 3.0 * np.random.default_rng(1).normal(size=(TOKENS, 8)).astype(np.float32)  # some reach the clamp
    params = random_like(jax.eval_shape(lambda: module.init(jax.random.key(0), x))["params"])
    for chosen in (None, np.random.default_rng(2).permuted(np.tile(np.arange(4), (TOKENS, 1)), axis=1)[:, :2]):
        want = by_hand(experts, params, x, chosen)
        np.testing.assert_allclose(module.apply({"params": params}, x, chosen), want, rtol=2e-5, atol=2e-4)


@pytest.fixture(scope="module")
def run(params):
    """Gradient of a sum over the row, with the row's hidden states and experts."""
    row = (jnp.arange(TOKENS), jnp.arange(TOKENS), jnp.full(TOKENS, TOKENS))

    def loss(params, experts):
        how = {"implementation": "dense", "collect": "experts", "experts": experts}
        hidden, chosen = row_hidden(CONFIG, params, *row, **how)
        return (hidden * jnp.arange(8.0)[None, :]).sum(), (hidden, jnp.stack(chosen, axis=1))

    compiled = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return lambda experts: compiled(params, experts)


def test_what_the_sampler_chose_is_replayed(params, run):
    (_, (free, chosen)), free_gradient = run(None)
    assert chosen.shape == (TOKENS, 2, 2)
    cache = init_cache(CONFIG, 1, 8)
    _, cache = extend(CONFIG, params, jnp.arange(TOKENS - 1)[None], jnp.array([0]), cache)
    _, cache = extend(CONFIG, params, jnp.array([[TOKENS - 1]]), jnp.array([TOKENS - 1]), cache)
    recorded = jnp.stack(cache.experts, axis=2)[0, :TOKENS]
    np.testing.assert_array_equal(np.sort(recorded, -1), np.sort(chosen, -1))
    (_, (same, _)), gradient = run(recorded)
    np.testing.assert_allclose(same, free, atol=1e-5)
    for got, want in zip(jax.tree.leaves(gradient), jax.tree.leaves(free_gradient), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-3, rtol=1e-4)
    assert np.abs(gradient["layers_0"]["experts"]["router"]["kernel"]).max() > 1e-3


@pytest.mark.parametrize("form", ["silu", "clamped"])
def test_every_expert_s_neurons_are_shown_and_who_was_asked(form):
    """By hand from the kernels of each expert, whether the router or the sampler chose."""
    module = Mixture(dataclasses.replace(CONFIG, experts=dataclasses.replace(MIXTURE, form=form)))
    x = 3.0 * np.random.default_rng(1).normal(size=(TOKENS, 8)).astype(np.float32)
    params = random_like(jax.eval_shape(lambda: module.init(jax.random.key(0), x))["params"])
    named = jax.tree.map(np.asarray, params)
    scores = x @ named["router"]["kernel"] + named["router"].get("bias", np.zeros(4))
    every = {name: np.einsum("th,ehu->teu", x, named[name]["kernel"]) for name in ("gate", "up")}
    every = {name: value + named[name].get("bias", np.zeros((4, 6))) for name, value in every.items()}
    gate, up = every["gate"], every["up"]
    if form == "clamped":
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7) + 1
    every["hidden"] = up * gate / (1 + np.exp(-gate * (1.702 if form == "clamped" else 1)))
    for chosen in (None, np.array([[0, 3]] * TOKENS)):
        asked = np.argsort(-scores, axis=1)[:, :2] if chosen is None else chosen
        for name, want in every.items():
            _, sown = module.apply({"params": params}, x, chosen, mutable=[name])
            (found,) = sown[name]["activation"]
            np.testing.assert_allclose(found.activation, want, rtol=2e-5, atol=2e-4, err_msg=name)
            np.testing.assert_array_equal(found.routed, [[e in row for e in range(4)] for row in asked])


def test_other_choices_give_another_row_and_train_their_experts(run):
    forced = jnp.broadcast_to(jnp.array([1, 3]), (TOKENS, 2, 2))
    (_, (hidden, chosen)), gradient = run(forced)
    np.testing.assert_array_equal(chosen, forced)
    assert np.abs(hidden - run(None)[0][1][0]).max() > 1e-2
    for name in ("gate", "up", "down"):
        moved = np.abs(gradient["layers_1"]["experts"][name]["kernel"]).max((1, 2)) > 0
        np.testing.assert_array_equal(moved, [False, True, False, True])


def test_misuse_is_refused():
    row = (CONFIG, {}, *(jnp.zeros(4, jnp.int32),) * 3)
    dense = (dataclasses.replace(CONFIG, experts=None), *row[1:])
    with pytest.raises(ModelError, match="the configuration has none"):
        row_hidden(*dense, experts=jnp.zeros((4, 2, 2), jnp.int32))
    with pytest.raises(ModelError, match=r"experts is \[4, 2, 3\], wanted \[slots, 2, 2\]"):
        row_hidden(*row, experts=jnp.zeros((4, 2, 3), jnp.int32))
    with pytest.raises(ModelError, match="active must be 1 to count = 4, got 5"):
        Experts(count=4, active=5, renormalise=True)
