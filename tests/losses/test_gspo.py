"""GSPO: by hand, its two forms, its limits, and sequences that span rows."""

import jax
import jax.numpy as jnp
import numpy as np

from harnessrl_jax.losses import (
    clipped_surrogate,
    gspo,
    gspo_token,
    reinforce,
    segment_mean_log_ratio,
    segment_size,
)

CLIP = {"clip_low": 0.2, "clip_high": 0.3}
ZEROS = jnp.zeros(4, jnp.int32)


def test_worked_by_hand():
    #   call      1          1        1      2
    #   ρ         4         1/2      nan    1/2
    #   s        √2         √2              1/2
    #   A         1         -1       nan    -1
    #   gain     1.3       -1.414           -0.8
    #   weight   0.5       0.5       0      1        Σ = 0.65 - 0.7071 - 0.8 = -0.8571
    logp = jnp.log(jnp.array([0.8, 0.2, jnp.nan, 0.2]))
    behaviour = jnp.log(jnp.array([0.2, 0.4, jnp.nan, 0.4]))
    advantage, weight = jnp.array([1.0, -1.0, jnp.nan, -1.0]), jnp.array([0.5, 0.5, 0.0, 1.0])
    loss = lambda x: gspo(x, behaviour, advantage, weight, jnp.array([1, 1, 1, 2]), **CLIP)
    np.testing.assert_allclose(loss(logp), (0.857107, 2.0), rtol=1e-5)
    # Only the second target's gain moves: -0.5 s shared by the two log-ratios of its mean.
    gradient = jax.grad(lambda x: loss(x).total)(logp)
    np.testing.assert_allclose(gradient, [0.5 * np.sqrt(2) / 2] * 2 + [0, 0], rtol=1e-5)


def row(seed=0, targets=4):
    rng = np.random.default_rng(seed)
    behaviour = rng.uniform(-3, -1, targets)
    return [jnp.asarray(x, jnp.float32) for x in (behaviour + rng.normal(size=targets) / 9, behaviour)]


def test_sequences_of_one_token_are_the_clipped_surrogate():
    logp, behaviour = row()
    advantage, weight = jnp.array([1.0, -1.0, 2.0, -0.5]), jnp.array([1.0, 2.0, 1.0, 0.5])
    loss = lambda x: gspo(x, behaviour, advantage, weight, jnp.arange(4), **CLIP)
    plain = lambda x: clipped_surrogate(x, behaviour, advantage, weight, **CLIP)
    np.testing.assert_allclose(loss(logp), plain(logp), rtol=1e-6)
    total = lambda f: jax.grad(lambda x: f(x).total)(logp)
    np.testing.assert_allclose(total(loss), total(plain), rtol=1e-6)


def test_both_forms_agree_where_a_sequence_has_one_advantage():
    logp, behaviour = row(1)
    segment, advantage = jnp.array([3, 8, 3, 8]), jnp.array([1.0, -2.0, 1.0, -2.0])
    counted = jnp.ones(4, bool)
    weight = 1 / segment_size(segment, counted)
    whole = lambda x: gspo(x, behaviour, advantage, weight, segment, **CLIP).total
    token = lambda x: (
        gspo_token(x, segment_mean_log_ratio(x, behaviour, segment, counted), advantage, weight, **CLIP).total
    )
    for got, want in zip(jax.value_and_grad(token)(logp), jax.value_and_grad(whole)(logp), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
        assert np.abs(want).sum() > 0.1


def test_a_role_keeps_the_ratio_of_its_whole_sequence_and_moves_its_own_tokens():
    logp, behaviour = row(2)
    log_ratio = segment_mean_log_ratio(logp, behaviour, ZEROS, jnp.ones(4, bool))
    action = jnp.array([1.0, 0.0, 0.0, 0.0])
    loss = lambda x: gspo_token(x, log_ratio, jnp.ones(4), action, clip_low=1.0, clip_high=9.0).total
    value, gradient = jax.value_and_grad(loss)(logp)
    np.testing.assert_allclose(value, -np.exp(log_ratio[0]), rtol=1e-6)
    np.testing.assert_allclose(gradient, [-np.exp(log_ratio[0]), 0, 0, 0], rtol=1e-6)


def test_on_policy_gradient_is_reinforce():
    logp, _ = row(3)
    advantage, weight = jnp.full(4, -1.5), jnp.full(4, 0.25)
    want = jax.grad(lambda x: reinforce(x, advantage, weight).total)(logp)
    got = jax.grad(lambda x: gspo(x, logp, advantage, weight, ZEROS, **CLIP).total)(logp)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_rollout_in_two_rows_is_one_sequence_when_the_rows_are_flattened():
    logp, behaviour = row(4, targets=6)
    advantage, weight = jnp.ones(6), jnp.full(6, 1 / 6)
    whole = gspo(logp, behaviour, advantage, weight, jnp.zeros(6, jnp.int32), **CLIP)
    rows = lambda x, fill: jnp.concatenate([x[:2], jnp.full(2, fill, x.dtype), x[2:]]).reshape(2, 4)
    cut = [rows(x, jnp.nan).reshape(-1) for x in (logp, behaviour, advantage)]
    flat = gspo(*cut, rows(weight, 0).reshape(-1), jnp.zeros(8, jnp.int32), **CLIP)
    np.testing.assert_allclose(flat, whole, rtol=1e-6)


def test_length_does_not_move_the_ratio():
    """A hundred tokens that are each 10 % more likely make a ratio of 1.1, not of 13780."""
    behaviour = jnp.full(100, -2.0)
    out = gspo(
        behaviour + np.log(1.1), behaviour, jnp.ones(100), jnp.full(100, 0.01), jnp.zeros(100, jnp.int32), **CLIP
    )
    np.testing.assert_allclose(out.total, -1.1, rtol=1e-5)
