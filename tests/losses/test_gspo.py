"""GSPO: by hand, its two forms, its limits, and sequences that span rows."""

import jax
import numpy as np

from harnessrl_jax import losses
from harnessrl_jax.losses import reinforce

CLIP = {"clip_low": 0.2, "clip_high": 0.3}
ZEROS = np.zeros(4, np.int32)


def compiled(loss):
    """The same function, giving (sum, gradient by its first argument)."""

    def run(*arguments, **settings):
        of = lambda x: (lambda out: (out.total, out))(loss(x, *arguments[1:], **settings))
        (_, out), gradient = jax.value_and_grad(of, has_aux=True)(arguments[0])
        return tuple(out), gradient

    return jax.jit(run, static_argnames=("clip_low", "clip_high"))


gspo, gspo_token, clipped_surrogate = map(compiled, (losses.gspo, losses.gspo_token, losses.clipped_surrogate))
segment_mean_log_ratio = jax.jit(losses.segment_mean_log_ratio)


def test_worked_by_hand():
    #   call      1          1        1      2
    #   ρ         4         1/2      nan    1/2
    #   s        √2         √2              1/2
    #   A         1         -1       nan    -1
    #   gain     1.3       -1.414           -0.8
    #   weight   0.5       0.5       0      1        Σ = 0.65 - 0.7071 - 0.8 = -0.8571
    logp = np.log([0.8, 0.2, np.nan, 0.2])
    behaviour = np.log([0.2, 0.4, np.nan, 0.4])
    advantage, weight = np.array([1.0, -1.0, np.nan, -1.0]), np.array([0.5, 0.5, 0.0, 1.0])
    out, gradient = gspo(logp, behaviour, advantage, weight, np.array([1, 1, 1, 2]), **CLIP)
    np.testing.assert_allclose(out, (0.857107, 2.0), rtol=1e-5)
    # Only the second target's gain moves: -0.5 s shared by the two log-ratios of its mean.
    np.testing.assert_allclose(gradient, [0.5 * np.sqrt(2) / 2] * 2 + [0, 0], rtol=1e-5)


def row(seed=0, targets=4):
    rng = np.random.default_rng(seed)
    behaviour = rng.uniform(-3, -1, targets)
    return [x.astype(np.float32) for x in (behaviour + rng.normal(size=targets) / 9, behaviour)]


def test_sequences_of_one_token_are_the_clipped_surrogate():
    logp, behaviour = row()
    advantage, weight = np.array([1.0, -1.0, 2.0, -0.5]), np.array([1.0, 2.0, 1.0, 0.5])
    got = gspo(logp, behaviour, advantage, weight, np.arange(4), **CLIP)
    want = clipped_surrogate(logp, behaviour, advantage, weight, **CLIP)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def test_both_forms_agree_where_a_sequence_has_one_advantage():
    logp, behaviour = row(1)
    segment, advantage, weight = np.array([3, 8, 3, 8]), np.array([1.0, -2.0, 1.0, -2.0]), np.full(4, 0.5)
    log_ratio = segment_mean_log_ratio(logp, behaviour, segment, np.ones(4, bool))
    want = gspo(logp, behaviour, advantage, weight, segment, **CLIP)
    got = gspo_token(logp, log_ratio, advantage, weight, **CLIP)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)
    assert np.abs(want[1]).min() > 0.1


def test_a_role_keeps_the_ratio_of_its_whole_sequence_and_moves_its_own_tokens():
    logp, behaviour = row(2)
    log_ratio = np.asarray(segment_mean_log_ratio(logp, behaviour, ZEROS, np.ones(4, bool)))
    action = np.array([1.0, 0.0, 0.0, 0.0])
    out, gradient = gspo_token(logp, log_ratio, np.ones(4), action, clip_low=0.9, clip_high=9.0)
    np.testing.assert_allclose(out, (-np.exp(log_ratio[0]), 1), rtol=1e-6)
    np.testing.assert_allclose(gradient, [-np.exp(log_ratio[0]), 0, 0, 0], rtol=1e-6)


def test_on_policy_gradient_is_reinforce():
    logp, _ = row(3)
    advantage, weight = np.full(4, -1.5), np.full(4, 0.25)
    _, want = compiled(reinforce)(logp, advantage, weight)
    _, got = gspo(logp, logp, advantage, weight, ZEROS, **CLIP)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_rollout_in_two_rows_is_one_sequence_when_the_rows_are_flattened():
    logp, behaviour = row(4, targets=6)
    advantage, weight = np.ones(6), np.full(6, 1 / 6)
    whole, _ = gspo(logp, behaviour, advantage, weight, np.zeros(6, np.int32), **CLIP)
    rows = lambda x, fill: np.concatenate([x[:2], np.full(2, fill), x[2:]]).reshape(2, 4)
    cut = [rows(x, np.nan).reshape(-1) for x in (logp, behaviour, advantage)]
    flat, _ = gspo(*cut, rows(weight, 0).reshape(-1), np.zeros(8, np.int32), **CLIP)
    np.testing.assert_allclose(flat, whole, rtol=1e-6)


def test_length_does_not_move_the_ratio():
    """A hundred tokens that are each 10 % more likely make a ratio of 1.1, not of 13780."""
    behaviour, weight = np.full(100, -2.0), np.full(100, 0.01)
    out, _ = gspo(behaviour + np.log(1.1), behaviour, np.ones(100), weight, np.zeros(100, np.int32), **CLIP)
    np.testing.assert_allclose(out[0], -1.1, rtol=1e-5)
