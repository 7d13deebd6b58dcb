"""Loss weights of one author: what the other wrote is never trained, and the rollout keeps its weight if asked."""

import jax
import numpy as np

from harnessrl_jax import losses
from harnessrl_jax.losses import reinforce

authored_weight = jax.jit(losses.authored_weight, static_argnames="trained")
keep_segment_weight = jax.jit(losses.keep_segment_weight)

WEIGHT = np.array([0.25, 0.25, 0.25, 0.25, 1.0, 0.0], np.float32)
AUTHOR = np.array([0, 1, 1, 0, 1, 0])
ROLLOUT = np.array([6, 6, 6, 6, 2, 2])


def test_worked_by_hand():
    weight = authored_weight(WEIGHT, AUTHOR, trained=0)
    np.testing.assert_array_equal(weight, [0.25, 0, 0, 0.25, 0, 0])
    kept = keep_segment_weight(WEIGHT, AUTHOR == 0, ROLLOUT)
    np.testing.assert_allclose(kept, [0.5, 0, 0, 0.5, 0, 0])  # the second rollout has nothing left


def test_tokens_of_the_other_author_are_never_read():
    loss = lambda x: reinforce(x, np.ones(6, np.float32), authored_weight(WEIGHT, AUTHOR, trained=0)).total
    value, gradient = jax.jit(jax.value_and_grad(loss))(np.where(AUTHOR == 0, -1.0, np.nan).astype(np.float32))
    np.testing.assert_array_equal((value, *gradient), (0.5, -0.25, 0, 0, -0.25, 0, 0))


def test_a_rollout_of_the_trained_author_alone_is_unchanged():
    np.testing.assert_array_equal(authored_weight(WEIGHT, np.zeros(6, np.int32), trained=0), WEIGHT)
    np.testing.assert_allclose(keep_segment_weight(WEIGHT, np.ones(6, bool), ROLLOUT), WEIGHT, rtol=1e-6)


def test_the_weight_of_each_rollout_is_kept_in_any_order_and_padding_gets_none():
    rng = np.random.default_rng(0)
    weight = np.where(rng.random(40) < 0.2, 0, rng.uniform(0.5, 2, 40)).astype(np.float32)
    rollout, kept = rng.integers(0, 4, 40), rng.random(40) < 0.6
    padded = np.where(weight > 0, rollout, -1)
    out = np.asarray(keep_segment_weight(weight, kept, padded))
    for each in range(4):
        np.testing.assert_allclose(out[rollout == each].sum(), weight[rollout == each].sum(), rtol=1e-5)
    np.testing.assert_array_equal(out[~kept | (weight == 0)], 0)
    order = rng.permutation(40)
    again = keep_segment_weight(*(x[order] for x in (weight, kept, padded)))
    np.testing.assert_allclose(again, out[order], rtol=1e-5)
