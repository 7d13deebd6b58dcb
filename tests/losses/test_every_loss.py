"""What holds for every loss of one row: its formula, its gradient, and that it is blind where the weight is 0."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax import losses

CLIP = {"clip_low": 0.2, "clip_high": 0.3}
SEGMENT = np.array([7, 7, 7, -3, -3, 7], np.int32)
WEIGHT = np.array([1.0, 0.5, 0.0, 2.0, 1.0, 0.0], np.float32)
BORDER = 3  # the row may be split here: no segment with weight lies on both sides


def gain(ratio, advantage, low=0.2, high=0.3):
    return np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


def sequence_ratio(log_ratio):
    """Geometric mean over the counted targets of a segment, for WEIGHT and SEGMENT."""
    counted = WEIGHT > 0
    return np.exp([log_ratio[counted & (each == SEGMENT)].mean() for each in SEGMENT])


# Each loss of (x, other, advantage, weight, segment), and what each of its targets adds per unit of weight, in NumPy.
# `start` is x again, wherever the loss stops the gradient.
LOSSES = {
    "clipped": (
        lambda x, other, advantage, weight, segment: losses.clipped_surrogate(x, other, advantage, weight, **CLIP),
        lambda x, start, other, advantage: -gain(np.exp(x - other), advantage),
    ),
    "dual_clipped": (
        lambda x, other, advantage, weight, segment: losses.dual_clipped_surrogate(
            x, other, advantage, weight, dual_clip=1.5, **CLIP
        ),
        lambda x, start, other, advantage: (
            -np.where(
                advantage < 0,
                np.maximum(gain(np.exp(x - other), advantage), 1.5 * advantage),
                gain(np.exp(x - other), advantage),
            )
        ),
    ),
    "gspo": (
        lambda x, other, advantage, weight, segment: losses.gspo(x, other, advantage, weight, segment, **CLIP),
        lambda x, start, other, advantage: -gain(sequence_ratio(x - other), advantage),
    ),
    "gspo_token": (
        lambda x, other, advantage, weight, segment: losses.gspo_token(
            x, losses.segment_mean_log_ratio(x, other, segment, weight > 0), advantage, weight, **CLIP
        ),
        lambda x, start, other, advantage: -gain(sequence_ratio(start - other) * np.exp(x - start), advantage),
    ),
    "cispo": (
        lambda x, other, advantage, weight, segment: losses.cispo(x, other, advantage, weight, **CLIP),
        lambda x, start, other, advantage: -np.clip(np.exp(start - other), 0.8, 1.3) * advantage * x,
    ),
    "reinforce": (
        lambda x, other, advantage, weight, segment: losses.reinforce(x, advantage, weight),
        lambda x, start, other, advantage: -advantage * x,
    ),
    "regression": (
        lambda x, other, advantage, weight, segment: losses.advantage_weighted_regression(
            x, advantage, weight, temperature=0.5, limit=3.0
        ),
        lambda x, start, other, advantage: -np.minimum(np.exp(advantage / 0.5), 3) * x,
    ),
    "cross_entropy": (
        lambda x, other, advantage, weight, segment: losses.cross_entropy(x, weight),
        lambda x, start, other, advantage: -x,
    ),
    "entropy": (
        lambda x, other, advantage, weight, segment: losses.entropy_loss(x, weight),
        lambda x, start, other, advantage: -x,
    ),
    "kl_k1": (
        lambda x, other, advantage, weight, segment: losses.kl_k1(x, other, weight),
        lambda x, start, other, advantage: x - other,
    ),
    "kl_k2": (
        lambda x, other, advantage, weight, segment: losses.kl_k2(x, other, weight),
        lambda x, start, other, advantage: (x - other) ** 2 / 2,
    ),
    "kl_k3": (
        lambda x, other, advantage, weight, segment: losses.kl_k3(x, other, weight),
        lambda x, start, other, advantage: np.exp(other - x) - 1 - (other - x),
    ),
    "value": (
        lambda x, other, advantage, weight, segment: losses.value_loss(x, advantage, weight),
        lambda x, start, other, advantage: (x - advantage) ** 2 / 2,
    ),
    "clipped_value": (
        lambda x, other, advantage, weight, segment: losses.clipped_value_loss(x, other, advantage, weight, clip=0.3),
        lambda x, start, other, advantage: np.maximum(
            (x - advantage) ** 2 / 2, (other + np.clip(x - other, -0.3, 0.3) - advantage) ** 2 / 2
        ),
    ),
}


def row(seed):
    rng = np.random.default_rng(seed)
    other = rng.uniform(-3, -1, 6)
    # |log ρ| far from the clips' corners, where no derivative exists.
    x = other + rng.choice([-0.6, -0.05, 0.05, 0.6], 6)
    return x, other, rng.normal(size=6)


@cache
def compiled(name):
    """(x, other, advantage, weight, segment) -> ((total, weight), gradients by the first three)."""

    def total(*arguments):
        out = LOSSES[name][0](*arguments)
        return out.total, out

    def run(*arguments):
        (_, out), gradients = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(*arguments)
        return tuple(out), gradients

    return jax.jit(run)


def run(name, x, other, advantage, weight=WEIGHT, segment=SEGMENT):
    floats = (jnp.asarray(each, jnp.float32) for each in (x, other, advantage, weight))
    return jax.tree.map(np.asarray, compiled(name)(*floats, jnp.asarray(segment)))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_formula_and_its_finite_differences(name, seed):
    x, other, advantage = row(seed)
    formula = lambda moved: (WEIGHT * LOSSES[name][1](moved, x, other, advantage)).sum()
    steps = 1e-6 * np.eye(6)
    differences = np.array([formula(x + step) - formula(x - step) for step in steps]) / 2e-6
    with jax.enable_x64(True):
        arguments = [jnp.asarray(each, jnp.float64) for each in (x, other, advantage, WEIGHT)]
        (total, weight), gradients = compiled(name)(*arguments, jnp.asarray(SEGMENT))
    np.testing.assert_allclose(total, formula(x), rtol=1e-12)
    np.testing.assert_allclose(weight, 4.5, rtol=1e-12)
    np.testing.assert_allclose(gradients[0], differences, atol=1e-8)
    assert np.abs(gradients[0]).max() > 0.01


@pytest.mark.parametrize("name", LOSSES)
def test_only_the_first_argument_carries_a_gradient(name):
    _, (_, other, advantage) = run(name, *row(0))
    np.testing.assert_array_equal([other, advantage], 0)


@pytest.mark.parametrize("name", LOSSES)
def test_values_of_weight_0_are_never_read(name):
    spoiled = lambda spoil: [np.where(WEIGHT > 0, each, spoil) for each in row(1)]
    clean = run(name, *spoiled(0.5))
    assert np.abs(clean[1][0]).sum() > 0
    for spoil, segment in ((np.nan, -3), (np.inf, 7), (-np.inf, 2**31 - 1)):
        again = run(name, *spoiled(spoil), segment=np.where(WEIGHT > 0, SEGMENT, segment).astype(np.int32))
        jax.tree.map(np.testing.assert_array_equal, again, clean)


@pytest.mark.parametrize("name", LOSSES)
def test_sums_add_over_a_split(name):
    whole = run(name, *row(2))
    halves = [np.arange(6) < BORDER, np.arange(6) >= BORDER]
    parts = [run(name, *row(2), weight=np.where(half, WEIGHT, 0)) for half in halves]
    jax.tree.map(lambda want, *got: np.testing.assert_allclose(sum(got), want, rtol=1e-5, atol=1e-6), whole, *parts)


@pytest.mark.parametrize("name", LOSSES)
def test_the_order_of_targets_does_not_matter(name):
    order = np.array([4, 0, 2, 5, 3, 1])
    out, (gradient, *_) = run(name, *row(2))
    moved, (again, *_) = run(name, *(each[order] for each in row(2)), weight=WEIGHT[order], segment=SEGMENT[order])
    np.testing.assert_allclose(moved, out, rtol=1e-5)
    np.testing.assert_allclose(again, gradient[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_rows_are_computed_apart_under_vmap(name):
    rows = [(*(np.float32(each) for each in row(seed)), WEIGHT, SEGMENT) for seed in range(3)]
    together = jax.vmap(compiled(name))(*(jnp.stack(each) for each in zip(*rows, strict=True)))
    alone = jax.tree.map(lambda *each: np.stack(each), *(run(name, *each) for each in rows))
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6), together, alone)
