"""The critic's losses: by hand, and that the clip only ever raises the loss."""

import jax
import jax.numpy as jnp
import numpy as np

from harnessrl_jax import losses

value_loss = jax.jit(losses.value_loss)
clipped_value_loss = jax.jit(losses.clipped_value_loss, static_argnames="clip")

VALUE = np.array([1.0, 0.0, 2.0, np.nan])
RETURN = np.array([0.0, 1.0, 0.0, np.nan])
OLD = np.array([0.9, -1.0, 0.5, np.nan])
WEIGHT = np.array([1.0, 2.0, 1.0, 0.0])


def test_worked_by_hand():
    # Errors 1, -1, 2: ½ (1 + 2 · 1 + 4)
    np.testing.assert_allclose(value_loss(VALUE, RETURN, WEIGHT), (3.5, 4))
    # Moves 0.1, 1, 1.5 held to 0.5: held values 1, -0.5, 1 with errors 1, -1.5, 1; the larger error counts.
    out = clipped_value_loss(VALUE, OLD, RETURN, WEIGHT, clip=0.5)
    np.testing.assert_allclose(out, (0.5 * (1 + 2 * 2.25 + 4), 4))
    gradient = jax.jit(jax.grad(lambda x: clipped_value_loss(x, OLD, RETURN, WEIGHT, clip=0.5).total))(VALUE)
    np.testing.assert_allclose(gradient, [1, 0, 2, 0])  # the second has moved far enough towards its return


def test_a_clip_out_of_reach_is_the_plain_loss():
    out = clipped_value_loss(VALUE, OLD, RETURN, WEIGHT, clip=9.0)
    np.testing.assert_allclose(out, value_loss(VALUE, RETURN, WEIGHT))


def test_the_clip_never_lowers_the_loss():
    rng = np.random.default_rng(0)
    value, old, target = rng.normal(size=(3, 200)).astype(np.float32)
    each = lambda loss: jax.jit(jax.vmap(lambda weight: loss(weight).total))(np.eye(200))
    plain = each(lambda weight: value_loss(value, target, weight))
    clipped = each(lambda weight: clipped_value_loss(value, old, target, weight, clip=0.3))
    assert (clipped >= plain).all()
    assert (clipped > plain).any()


def test_the_warm_start_finds_the_mean_return():
    """A head with one parameter, trained on Monte-Carlo returns, predicts their weighted mean."""
    mean = (0.0 + 2 * 1.0 + 0.0) / 4
    head = lambda v: value_loss(jnp.broadcast_to(v, 4), RETURN, WEIGHT).total
    gradient = jax.jit(jax.grad(head))(np.float32(mean))
    np.testing.assert_allclose(gradient, 0, atol=1e-7)
