"""What holds for every loss of one row: its formula, its gradient, and that it is blind where the weight is 0."""

from functools import cache

import jax
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


ROWS = 8


def rows():
    """x, other and advantage; enough rows to meet every corner."""
    rng = np.random.default_rng(0)
    other = rng.uniform(-3, -1, (ROWS, 6))
    # |log ρ| far from the clips' corners, where no derivative exists.
    x = other + rng.choice([-0.6, -0.05, 0.05, 0.6], (ROWS, 6))
    return x, other, rng.normal(size=(ROWS, 6))


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@cache
def compiled(name):
    """(x, other, advantage, weight, segment) of rows -> (total, weight), gradients by the first three, row by row."""

    def total(*arguments):
        out = LOSSES[name][0](*arguments)
        return out.total, out

    def one_row(*arguments):
        (_, out), gradients = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(*arguments)
        return tuple(out), gradients

    return jax.jit(jax.vmap(one_row))


def run(name, x, other, advantage, weight=WEIGHT, segment=SEGMENT):
    spread = (np.broadcast_to(each, (ROWS, 6)) for each in (weight.astype(np.float64), segment))
    return jax.tree.map(np.asarray, compiled(name)(x, other, advantage, *spread))


def assert_same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), got, want)


@pytest.mark.parametrize("name", LOSSES)
def test_formula_and_its_finite_differences_row_by_row(name):
    (totals, weights), (gradients, *_) = run(name, *rows())
    for x, other, advantage, total, gradient in zip(*rows(), totals, gradients, strict=True):
        formula = lambda moved, *row: (WEIGHT * LOSSES[name][1](moved, *row)).sum()
        row = (x, other, advantage)
        differences = [formula(x + step, *row) - formula(x - step, *row) for step in 1e-6 * np.eye(6)]
        np.testing.assert_allclose(total, formula(x, *row), rtol=1e-12)
        np.testing.assert_allclose(gradient, np.array(differences) / 2e-6, atol=1e-8)
    np.testing.assert_allclose(weights, 4.5, rtol=1e-12)
    assert np.abs(gradients).max() > 0.1


@pytest.mark.parametrize("name", LOSSES)
def test_only_the_first_argument_carries_a_gradient(name):
    _, (_, other, advantage) = run(name, *rows())
    np.testing.assert_array_equal([other, advantage], 0)


@pytest.mark.parametrize("name", LOSSES)
def test_values_of_weight_0_are_never_read(name):
    spoiled = lambda spoil: [np.where(WEIGHT > 0, each, spoil) for each in rows()]
    clean = run(name, *spoiled(0.5))
    for spoil, segment in ((np.nan, -3), (np.inf, 7), (-np.inf, 2**31 - 1)):
        again = run(name, *spoiled(spoil), segment=np.where(WEIGHT > 0, SEGMENT, segment).astype(np.int32))
        jax.tree.map(np.testing.assert_array_equal, again, clean)


@pytest.mark.parametrize("name", LOSSES)
def test_sums_add_over_a_split(name):
    halves = [np.arange(6) < BORDER, np.arange(6) >= BORDER]
    parts = [run(name, *rows(), weight=np.where(half, WEIGHT, 0)) for half in halves]
    assert_same(jax.tree.map(np.add, *parts), run(name, *rows()))


@pytest.mark.parametrize("name", LOSSES)
def test_the_order_of_targets_does_not_matter(name):
    order = np.array([4, 0, 2, 5, 3, 1])
    out, gradients = run(name, *rows())
    moved = run(name, *(each[:, order] for each in rows()), weight=WEIGHT[order], segment=SEGMENT[order])
    assert_same(moved, (out, tuple(each[:, order] for each in gradients)))
