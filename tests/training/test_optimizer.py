"""The learning-rate schedule and the optimiser it drives."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from harnessrl_jax.training import learning_rate_schedule, make_optimizer, train_only


def test_constant_after_warm_up():
    rate = learning_rate_schedule(peak=0.4, warmup_steps=4, decay="constant", steps=10, final_fraction=0.1)
    np.testing.assert_allclose([rate(i) for i in (0, 1, 3, 4, 50)], [0.1, 0.2, 0.4, 0.4, 0.4], rtol=1e-6)


def test_cosine_ends_at_its_fraction_and_stays():
    rate = learning_rate_schedule(peak=1.0, warmup_steps=2, decay="cosine", steps=10, final_fraction=0.1)
    np.testing.assert_allclose([rate(i) for i in (0, 1, 5, 9, 20)], [0.5, 1.0, 0.55, 0.1, 0.1], rtol=1e-6)


def test_no_warm_up_starts_at_the_peak():
    rate = learning_rate_schedule(peak=1.0, warmup_steps=0, decay="constant", steps=1, final_fraction=0.1)
    assert rate(0) == 1.0


@pytest.mark.parametrize("norm", [0.1, 10.0])
def test_it_clips_then_decays_only_matrices(norm):
    optimizer = make_optimizer(learning_rate=0.1, b1=0.0, b2=0.0, eps=1.0, weight_decay=0.5, clip_norm=1.0)
    params = {"kernel": jnp.ones((1, 1)), "scale": jnp.ones(1)}
    gradient = {"kernel": jnp.full((1, 1), norm), "scale": jnp.zeros(1)}
    updates, _ = jax.jit(optimizer.update)(gradient, optimizer.init(params), params)
    clipped = min(norm, 1.0)
    np.testing.assert_allclose(updates["kernel"], -0.1 * (clipped / (clipped + 1) + 0.5), rtol=1e-5)
    np.testing.assert_array_equal(updates["scale"], 0)


def test_what_is_not_trained_gets_no_update_whatever_its_gradient():
    params = {"value_head": {"bias": jnp.ones(1)}, "embed": jnp.array([-0.0, 0.0, 2.0])}
    optimizer = train_only(optax.adamw(0.1, weight_decay=0.1), lambda path: path == "value_head/bias")
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(params), params)
    after = optax.apply_updates(params, updates)
    assert np.asarray(after["embed"]).tobytes() == np.asarray(params["embed"]).tobytes()
    assert after["value_head"]["bias"] != 1
