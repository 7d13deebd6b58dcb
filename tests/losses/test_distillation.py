"""Self-distilled advantages, entropy and distances to a teacher: by hand, by enumeration, at their limits."""

import jax
import numpy as np
import pytest

from harnessrl_jax import losses
from harnessrl_jax.losses import distillation_advantage, reinforce

STUDENT = np.array([[0.5, -1.0, 0.2, 0.0], [1.0, 0.3, -0.4, 0.9]], np.float32)
TEACHER = np.array([[0.1, 0.4, -0.6, 1.0], [0.0, 0.0, 2.0, -1.0]], np.float32)
WEIGHT = np.array([1.0, 0.5], np.float32)
CLIP = {"clip_low": 0.2, "clip_high": 0.4}

self_distilled = jax.jit(losses.self_distilled_advantage, static_argnames=("clip_low", "clip_high"))


def total_and_gradients(loss):
    """(student, teacher, weight) -> (total, (gradient by the student, by the teacher)), compiled."""
    return jax.jit(jax.value_and_grad(lambda *arguments: loss(*arguments).total, argnums=(0, 1)))


DISTANCES = {
    "reverse": total_and_gradients(losses.reverse_kl),
    "forward": total_and_gradients(losses.forward_kl),
}
entropy = jax.jit(jax.value_and_grad(lambda x, mask: (losses.entropy(x, mask)).sum()))


def softmax(x):
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


def finite_differences(function, x):
    steps = 1e-6 * np.eye(x.size).reshape(x.size, *x.shape)
    return np.array([function(x + step) - function(x - step) for step in steps]).reshape(x.shape) / 2e-6


def test_self_distilled_advantage_worked_by_hand():
    #   A               2     2     -2     -2     nan
    #   P_T / P_S       1.2   3      1.2   1/3     -
    #   to sign(A)      1.2   3     1/1.2   3      -
    #   clipped         1.2   1.4    .8333  1.4    -
    #   λ = 1/2         2.2   2.4   -1.8333 -2.4   0
    advantage = np.array([2.0, 2.0, -2.0, -2.0, np.nan])
    teacher = np.log([1.2, 3.0, 1.2, 1 / 3, np.nan]) - 1
    logp, mask = np.array([-1.0, -1.0, -1.0, -1.0, np.inf]), np.array([True] * 4 + [False])
    out = self_distilled(advantage, logp, teacher, mask, mix=0.5, **CLIP)
    np.testing.assert_allclose(out, [2.2, 2.4, -1.83333, -2.4, 0], rtol=1e-5)


def test_the_verifier_keeps_the_sign_and_no_mix_keeps_the_advantage():
    advantage, logp, teacher = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    distilled = lambda mix, teacher: self_distilled(advantage, logp, teacher, np.ones(50, bool), mix=mix, **CLIP)
    mixed = distilled(1.0, teacher)
    np.testing.assert_array_equal(np.sign(mixed), np.sign(advantage))
    assert (np.abs(mixed) <= 1.4 * np.abs(advantage) + 1e-6).all()
    np.testing.assert_array_equal(distilled(0.0, teacher), advantage)
    np.testing.assert_array_equal(distilled(0.5, logp), advantage)


def test_advantages_carry_no_gradient():
    one, mask = np.ones(2, np.float32), np.ones(2, bool)

    def total(x, y, z):
        return (self_distilled(x, y, z, mask, mix=0.5, **CLIP) + distillation_advantage(y, z, mask)).sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(total, argnums=(0, 1, 2)))(one, one, one), 0)


def test_sampled_distillation_has_the_gradient_of_the_reverse_kl():
    """Over all tokens that the student may sample, weighted by its probabilities."""
    teacher, probability = np.log(softmax(TEACHER[0])), softmax(STUDENT[0])

    @jax.jit
    @jax.grad
    def sampled(logits):
        logp = jax.nn.log_softmax(logits)
        return reinforce(logp, distillation_advantage(logp, teacher, np.ones(4, bool)), probability).total

    want = DISTANCES["reverse"](STUDENT, TEACHER, np.array([1, 0], np.float32))[1][0][0]
    np.testing.assert_allclose(sampled(STUDENT[0]), want, atol=1e-6)
    assert np.abs(want).max() > 0.1


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_are_their_formulas_with_finite_differences(name):
    def formula(student):
        p, q = softmax(student), softmax(TEACHER.astype(np.float64))
        p, q = (p, q) if name == "reverse" else (q, p)
        return WEIGHT @ (p * np.log(p / q)).sum(axis=-1)

    student = STUDENT.astype(np.float64)
    with jax.enable_x64(True):
        total, (gradient, teacher) = DISTANCES[name](student, TEACHER.astype(np.float64), WEIGHT.astype(np.float64))
    np.testing.assert_allclose(total, formula(student), rtol=1e-12)
    np.testing.assert_allclose(gradient, finite_differences(formula, student), atol=1e-8)
    np.testing.assert_array_equal(teacher, 0)


@pytest.mark.parametrize("name", DISTANCES)
def test_a_distance_to_the_same_distribution_is_0(name):
    np.testing.assert_allclose(DISTANCES[name](STUDENT, STUDENT + 3, WEIGHT)[0], 0, atol=1e-6)


def test_distances_worked_by_hand():
    # p = (1/2, 1/2), q = (1/4, 3/4): KL(p||q) = ½ log 4/3
    half, quarter = (np.log([each, each], dtype=np.float32) for each in ([0.5, 0.5], [0.25, 0.75]))
    out = [jax.jit(losses.reverse_kl)(half, quarter, 2 * WEIGHT), jax.jit(losses.forward_kl)(quarter, half, 2 * WEIGHT)]
    np.testing.assert_allclose(out, [(1.5 * np.log(4 / 3), 3)] * 2, rtol=1e-5)


@pytest.mark.parametrize("name", DISTANCES)
def test_rows_of_weight_0_are_never_read_and_impossible_tokens_add_nothing(name):
    def run(spoil):
        student, teacher = STUDENT.copy(), TEACHER.copy()
        student[0, 1] = teacher[0, 1] = -np.inf
        student[1] = teacher[1] = spoil
        return DISTANCES[name](student, teacher, np.array([1, 0], np.float32))

    clean, possible = run(0.0), [0, 2, 3]
    p, q = softmax(STUDENT[0, possible]), softmax(TEACHER[0, possible])
    p, q = (p, q) if name == "reverse" else (q, p)
    np.testing.assert_allclose(clean[0], (p * np.log(p / q)).sum(), rtol=1e-5)
    assert np.isfinite(clean[1]).all()
    for spoil in (np.nan, np.inf, -np.inf):
        jax.tree.map(np.testing.assert_array_equal, run(spoil), clean)


def test_entropy_at_its_limits_and_blind_where_masked():
    logits = np.array([[0, 0, 0, 0], [0, -np.inf, -np.inf, -np.inf], [np.nan] * 4], np.float32)
    total, gradient = entropy(logits, np.array([True, True, False]))
    np.testing.assert_allclose(total, np.log(4), atol=1e-6)
    np.testing.assert_allclose(gradient, np.zeros((3, 4)), atol=1e-7)


def test_entropy_is_its_formula_with_finite_differences():
    formula = lambda x: -(softmax(x) * np.log(softmax(x))).sum()
    student = STUDENT.astype(np.float64)
    with jax.enable_x64(True):
        total, gradient = entropy(student, np.ones(2, bool))
    np.testing.assert_allclose(total, formula(student), rtol=1e-12)
    np.testing.assert_allclose(gradient, finite_differences(formula, student), atol=1e-8)
