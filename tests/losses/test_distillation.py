"""Self-distilled advantages and distances to a teacher: by hand, by enumeration, at their limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from harnessrl_jax.losses import (
    distillation_advantage,
    entropy,
    forward_kl,
    reinforce,
    reverse_kl,
    self_distilled_advantage,
)

STUDENT = jnp.array([[0.5, -1.0, 0.2, 0.0], [1.0, 0.3, -0.4, 0.9]])
TEACHER = jnp.array([[0.1, 0.4, -0.6, 1.0], [0.0, 0.0, 2.0, -1.0]])
CLIP = {"clip_low": 0.2, "clip_high": 0.4}


def test_self_distilled_advantage_worked_by_hand():
    #   A               2     2     -2     -2     nan
    #   P_T / P_S       1.2   3      1.2   1/3     -
    #   to sign(A)      1.2   3     1/1.2   3      -
    #   clipped         1.2   1.4    .8333  1.4    -
    #   λ = 1/2         2.2   2.4   -1.8333 -2.4   0
    advantage = jnp.array([2.0, 2.0, -2.0, -2.0, jnp.nan])
    teacher = jnp.log(jnp.array([1.2, 3.0, 1.2, 1 / 3, jnp.nan])) - 1
    logp, mask = jnp.array([-1.0, -1.0, -1.0, -1.0, jnp.inf]), jnp.array([True] * 4 + [False])
    out = self_distilled_advantage(advantage, logp, teacher, mask, mix=0.5, **CLIP)
    np.testing.assert_allclose(out, [2.2, 2.4, -1.83333, -2.4, 0], rtol=1e-5)


def test_the_verifier_keeps_the_sign_and_no_mix_keeps_the_advantage():
    rng = np.random.default_rng(0)
    advantage, logp, teacher = (jnp.asarray(rng.normal(size=50), jnp.float32) for _ in range(3))
    mask = jnp.ones(50, bool)
    mixed = self_distilled_advantage(advantage, logp, teacher, mask, mix=1.0, **CLIP)
    np.testing.assert_array_equal(np.sign(mixed), np.sign(advantage))
    assert (np.abs(mixed) <= 1.4 * np.abs(advantage) + 1e-6).all()
    np.testing.assert_array_equal(self_distilled_advantage(advantage, logp, teacher, mask, mix=0.0, **CLIP), advantage)
    np.testing.assert_array_equal(self_distilled_advantage(advantage, logp, logp, mask, mix=0.5, **CLIP), advantage)


def test_a_schedule_may_be_traced_and_nothing_carries_a_gradient():
    scheduled = jax.jit(lambda x, mix: self_distilled_advantage(x, x - 1, x, jnp.ones(2, bool), mix=mix, **CLIP).sum())
    np.testing.assert_allclose(scheduled(jnp.array([1.0, 1.0]), jnp.array(0.5)), 2.4, rtol=1e-6)
    np.testing.assert_array_equal(jax.grad(scheduled)(jnp.array([1.0, 1.0]), jnp.array(0.5)), 0)


def test_sampled_distillation_has_the_gradient_of_the_reverse_kl():
    """Over all tokens that the student may sample, weighted by its probabilities."""
    probability = jax.nn.softmax(STUDENT[0])
    teacher, mask = jax.nn.log_softmax(TEACHER[0]), jnp.ones(4, bool)

    def sampled(logits):
        logp = jax.nn.log_softmax(logits)
        return reinforce(logp, distillation_advantage(logp, teacher, mask), probability).total

    exact = lambda logits: reverse_kl(logits[None], TEACHER[:1], jnp.ones(1)).total
    want = jax.grad(exact)(STUDENT[0])
    np.testing.assert_allclose(jax.grad(sampled)(STUDENT[0]), want, atol=1e-6)
    assert np.abs(want).max() > 0.1


@pytest.mark.parametrize("swap", [False, True])
def test_distances_worked_by_hand(swap):
    # p = (1/2, 1/2), q = (1/4, 3/4): KL(p||q) = ½ log 2 + ½ log ⅔
    half, quarter = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.25, 0.75]]))
    loss = forward_kl if swap else reverse_kl
    out = loss(quarter, half, jnp.array([3.0])) if swap else loss(half, quarter, jnp.array([3.0]))
    np.testing.assert_allclose(out, (1.5 * np.log(4 / 3), 3), rtol=1e-5)


@pytest.mark.parametrize("loss", [reverse_kl, forward_kl])
def test_distances_to_themselves_and_finite_differences(loss):
    weight = jnp.array([1.0, 0.5])
    np.testing.assert_allclose(loss(STUDENT, STUDENT + 3.0, weight).total, 0, atol=1e-6)
    with jax.enable_x64(True):
        student, teacher = (jnp.asarray(np.asarray(x), jnp.float64) for x in (STUDENT, TEACHER))
        of = lambda x: loss(jnp.asarray(x), teacher, jnp.array([1.0, 0.5])).total
        check_grads(of, (student,), order=1, modes=["rev"], atol=1e-7, rtol=1e-7)
        np.testing.assert_array_equal(jax.grad(lambda x: loss(student, x, jnp.ones(2)).total)(teacher), 0)


@pytest.mark.parametrize("loss", [reverse_kl, forward_kl])
def test_rows_of_weight_0_are_never_read_and_impossible_tokens_add_nothing(loss):
    weight, never = jnp.array([1.0, 0.0]), STUDENT.at[0, 1].set(-jnp.inf)
    run = lambda spoil: jax.value_and_grad(
        lambda x: loss(x, TEACHER.at[0, 1].set(-jnp.inf).at[1].set(spoil), weight).total
    )(never.at[1].set(spoil))
    clean = run(0.0)
    possible = np.array([0, 2, 3])
    only = loss(STUDENT[:1, possible], TEACHER[:1, possible], weight[:1]).total
    np.testing.assert_allclose(clean[0], only, rtol=1e-6)
    assert np.isfinite(clean[1]).all()
    for spoil in (jnp.nan, jnp.inf, -jnp.inf):
        jax.tree.map(np.testing.assert_array_equal, run(spoil), clean)


def test_entropy_at_its_limits_and_blind_where_masked():
    logits = jnp.stack([jnp.zeros(4), jnp.array([0.0, -jnp.inf, -jnp.inf, -jnp.inf]), jnp.full(4, jnp.nan)])
    mask = jnp.array([True, True, False])
    total = lambda x: entropy(x, mask).sum()
    np.testing.assert_allclose(entropy(logits, mask), [np.log(4), 0, 0], atol=1e-6)
    np.testing.assert_allclose(jax.grad(total)(logits), np.zeros((3, 4)), atol=1e-7)


def test_entropy_matches_finite_differences():
    with jax.enable_x64(True):
        logits = jnp.asarray(np.asarray(STUDENT), jnp.float64)
        of = lambda x: entropy(jnp.asarray(x), jnp.ones(2, bool)).sum()
        check_grads(of, (logits,), order=1, modes=["rev"], atol=1e-7, rtol=1e-7)
