"""Partitions: by hand, ties, the floor of the contrast, planted units, hysteresis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.capo import RandomScore, contrast_scores, entropy_scores, partition
from harnessrl_jax.capo.partition import units_per_role

RAW = {"score": "raw", "top_fraction": 0.25, "hysteresis": 1.0}
CONTRAST = RAW | {"score": "contrast"}
PARTITION = jax.jit(partition, static_argnames=("score", "top_fraction", "hysteresis"))


def members(mask):
    return [[np.flatnonzero(layer).tolist() for layer in role] for role in np.asarray(mask)]


def cut(mean, previous=None, **choices):
    mean = np.asarray(mean, np.float32)
    nothing, all_units = np.zeros(mean.shape, bool), np.ones(mean.shape, bool)
    return PARTITION(mean, nothing if previous is None else previous, all_units, **choices)


def test_raw_takes_the_most_active_of_each_layer():
    mean = [[[1, 5, 2, 0, 0, 0, 0, 4], [0, 0, 9, 0, 0, 0, 8, 0]], [[7, 0, 0, 0, 0, 0, 6, 0], [3, 2, 1, 0, 0, 0, 0, 0]]]
    assert members(cut(mean, **RAW)) == [[[1, 7], [2, 6]], [[0, 6], [0, 1]]]


@pytest.mark.parametrize("choices", [RAW, CONTRAST])
def test_ties_go_to_the_lower_index(choices):
    assert members(cut(np.ones((2, 1, 8)), **choices)) == [[[0, 1]], [[0, 1]]]
    assert members(cut(np.zeros((2, 1, 8)), **choices)) == [[[0, 1]], [[0, 1]]]


def test_contrast_worked_by_hand():
    # mean 2.5 and deviation sqrt(1.25) in both roles, so q_action ∝ s_action - s_args = [-3, -1, 1, 3].
    quality, passes = contrast_scores(jnp.array([[[1.0, 2, 3, 4]], [[4.0, 3, 2, 1]]]))
    np.testing.assert_allclose(quality[0, 0], np.array([-3, -1, 1, 3]) / np.sqrt(1.25), rtol=1e-6)
    np.testing.assert_array_equal(quality[1], -quality[0])
    np.testing.assert_array_equal(passes[:, 0], [[False, False, True, True], [True, True, False, False]])


def test_the_floor_comes_before_the_contrast():
    # Unit 0 has the best contrast for args only because it is silent for action; it hardly fires for args either.
    action = [0.0, 5, 5, 5, 5, 5, 5, 5]
    args = [4.9, 9, 5, 5, 5, 9, 5, 5]
    quality, passes = contrast_scores(jnp.array([[action], [args]]))
    assert int(jnp.argmax(quality[1, 0])) == 0
    assert not passes[1, 0, 0]
    assert members(cut([[action], [args]], **CONTRAST))[1] == [[1, 5]]


def test_contrast_finds_planted_units_where_raw_cannot():
    rng = np.random.default_rng(0)
    base = np.abs(rng.normal(0, 0.1, 200))
    action, args = base.copy(), base.copy()
    action[:50] += 5
    args[:50] += 5
    action[50:60] += 1
    args[60:70] += 1
    mean = [[action], [args]]
    found = members(cut(mean, score="contrast", top_fraction=0.05, hysteresis=1.0))
    assert found == [[list(range(50, 60))], [list(range(60, 70))]]
    raw = members(cut(mean, score="raw", top_fraction=0.05, hysteresis=1.0))
    assert raw[0] == raw[1]  # the common block: routing would do nothing


@pytest.mark.parametrize("choices", [RAW, CONTRAST])
def test_everything_at_fraction_1(choices):
    mean = np.random.default_rng(0).random((2, 1, 8))
    assert cut(mean, **choices | {"top_fraction": 1.0}).all()


def test_permuting_units_permutes_the_partition():
    rng = np.random.default_rng(1)
    mean, order = rng.random((2, 1, 8)), rng.permutation(8)
    np.testing.assert_array_equal(cut(mean[..., order], **CONTRAST), cut(mean, **CONTRAST)[..., order])


def test_hysteresis_keeps_a_member_that_fell_a_little():
    mean = np.broadcast_to(np.arange(40.0, 0, -1), (2, 1, 40))  # ranks are 0..39; K = 10, kept below rank 11
    previous = np.zeros((2, 1, 40), bool)
    previous[..., [2, 10, 11]] = True
    got = members(cut(mean, previous, **RAW | {"hysteresis": 1.1}))
    assert got[0] == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 10]]
    assert members(cut(mean, previous, **RAW))[0] == [list(range(10))]


@pytest.mark.parametrize(
    ("units", "fraction", "wanted"), [(30, 0.1, 3), (10, 0.25, 3), (8, 0.01, 1), (7, 1.0, 7), (100, 0.07, 7)]
)
def test_k_rounds_up_but_not_over_rounding_errors(units, fraction, wanted):
    assert units_per_role(units, fraction) == wanted


ENTROPY = RAW | {"score": "entropy", "top_fraction": 0.1}


def test_entropy_worked_by_hand():
    quality, passes = entropy_scores(jnp.array([[[3.0, 1, 0, 2]], [[1.0, 1, 2, 0]]]))
    sure = np.log(2) + 0.75 * np.log(0.75) + 0.25 * np.log(0.25)
    np.testing.assert_allclose(quality[0, 0], [sure, 0, -np.log(2), np.log(2)], atol=1e-6)
    np.testing.assert_allclose(quality[1, 0], [-sure, 0, np.log(2), -np.log(2)], atol=1e-6)
    np.testing.assert_array_equal(passes[:, 0], [[True, False, False, False], [False] * 4])


def test_entropy_gives_a_certain_unit_to_its_role_only():
    # 40 units; of the four that are active enough (above the 95th percentile of all 80 numbers) two belong to a role
    # each, one mostly, one to both. The rest of K = 4 is filled from the units of the role by certainty.
    action, args = np.full(40, 0.01), np.full(40, 0.01)
    action[[3, 7, 11]], args[[7, 11, 20]] = [9, 5, 6], [2, 5.5, 9]
    found = members(cut([[action], [args]], **ENTROPY))
    assert {3, 11} <= set(found[0][0])
    assert 20 in found[1][0]
    assert 20 not in found[0][0]
    assert not {3, 11} & set(found[1][0])


def test_units_of_which_too_little_was_seen_are_never_chosen():
    mean = np.broadcast_to(np.arange(8.0, 0, -1), (2, 1, 8))
    eligible = np.ones((2, 1, 8), bool)
    eligible[0, 0, [0, 2]] = False
    previous = np.zeros((2, 1, 8), bool)
    previous[0, 0, 0] = True
    found = PARTITION(mean, previous, eligible, **RAW | {"hysteresis": 2.0})
    assert members(found) == [[[1, 3]], [[0, 1]]]
    only = np.zeros((2, 1, 8), bool)
    only[:, :, 5] = True
    assert members(PARTITION(mean, previous, only, **RAW)) == [[[5]], [[5]]]


def test_random_partitions_have_the_same_size_and_no_preference():
    shape = (2, 50, 40)
    nothing, everything = np.zeros(shape, bool), np.ones(shape, bool)
    how = {"score": RandomScore(0), "top_fraction": 0.25, "hysteresis": 1.0}
    found = np.asarray(partition(np.zeros(shape), nothing, everything, **how))
    np.testing.assert_array_equal(found.sum(axis=-1), 10)
    assert found.sum(axis=(0, 1)).min() > 10  # of 100 draws, a unit is chosen about 25 times
    assert (found[0] != found[1]).any()


def test_a_random_score_reads_its_seed_and_not_the_statistics():
    rng = np.random.default_rng(0)
    nothing, everything = np.zeros((2, 5, 40), bool), np.ones((2, 5, 40), bool)

    def drawn(seed, previous):
        mean = rng.random((2, 5, 40))
        return np.asarray(
            partition(mean, previous, everything, score=RandomScore(seed), top_fraction=0.25, hysteresis=1.1)
        )

    first = drawn(3, nothing)
    np.testing.assert_array_equal(first.sum(axis=-1), 10)
    np.testing.assert_array_equal(drawn(3, first), first)
    assert (drawn(4, nothing) != first).any(axis=(1, 2)).all()
    assert (first[0] != first[1]).any()
