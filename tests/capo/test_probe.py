"""The probe: worked by hand, additive over any split, blind to everything it must not see."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from harnessrl_jax.capo import (
    ABSOLUTE,
    ACTION,
    ARGS,
    FIRE,
    POSITIVE_SHARE,
    RELU,
    UP_RELU,
    ExpertUnits,
    head_norm,
    probe_row,
    probe_targets,
)

ROLE = jnp.array([ACTION, ARGS, ARGS, -1, ACTION])
PROBED = jnp.array([True, True, True, False, True])
UNITS = (
    jnp.array([[1.0, -2], [3, 4], [5, -6], [np.nan, 7], [0.5, 1]]),
    jnp.array([[0.0, 1], [0, 2], [0, 3], [9, np.inf], [0, 4]]),
)

PROBE_TARGETS = jax.jit(probe_targets)


@partial(jax.jit, static_argnames="statistic")
def probe(units, role, probed, statistic=RELU):
    return probe_row(units, role, probed, statistic=statistic)


def test_worked_by_hand():
    found = probe(UNITS, ROLE, PROBED)
    np.testing.assert_array_equal(found.total, [[[1.5, 1], [0, 5]], [[8, 4], [0, 5]]])
    np.testing.assert_array_equal(found.tokens, np.full((2, 2, 2), 2))
    assert found.dropped == 0
    np.testing.assert_array_equal(probe(UNITS, ROLE, PROBED, ABSOLUTE).total[:, 0], [[1.5, 3], [8, 10]])


def test_it_is_additive_over_any_split_and_float32():
    rng = np.random.default_rng(0)
    units = tuple(jnp.asarray(rng.normal(size=(9, 4)), jnp.bfloat16) for _ in range(2))
    role, probed = jnp.asarray(rng.integers(0, 2, 9)), jnp.asarray(rng.random(9) < 0.7)
    whole = probe(units, role, probed)
    assert whole.total.dtype == np.float32
    for cut in (0, 1, 4, 9):
        parts = [probe(units, role, probed & part) for part in (np.arange(9) < cut, np.arange(9) >= cut)]
        for got, want in zip(map(jnp.add, *parts), whole, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_target_that_is_not_finite_is_left_out_and_counted():
    probed = PROBED.at[3].set(True)
    found = probe(UNITS, ROLE.at[3].set(ACTION), probed)
    clean = probe(UNITS, ROLE, PROBED)
    assert found.dropped == 1
    np.testing.assert_array_equal(found.total, clean.total)
    np.testing.assert_array_equal(found.tokens, clean.tokens)


def test_only_successful_rollouts_with_both_roles_are_probed():
    # Rollout 7 succeeds with both roles, in two rows; 8 fails; 9 has no ARGS; 10 has no ACTION.
    role = jnp.array([[ACTION, 5, ACTION, ARGS], [ARGS, ACTION, ARGS, -1]])
    rollout = jnp.array([[7, 7, 8, 8], [7, 9, 10, -1]])
    success = jnp.array([[True, True, False, False], [True, True, True, False]])
    probed, rollouts = PROBE_TARGETS(role, rollout, success)
    np.testing.assert_array_equal(probed, [[True, False, False, False], [True, False, False, False]])
    assert rollouts == 1


def test_no_rollout_is_no_rollout():
    nothing = jnp.full((2, 4), -1)
    probed, rollouts = PROBE_TARGETS(nothing, nothing, nothing > 0)
    assert not probed.any()
    assert rollouts == 0


def test_every_statistic_worked_by_hand():
    both = jnp.array([True, True])
    one = lambda activation, statistic: probe((jnp.asarray(activation),), jnp.array([ACTION, ACTION]), both, statistic)
    np.testing.assert_array_equal(one([[-1.0, 2], [3, 4]], UP_RELU).total[0], [[3, 6]])
    np.testing.assert_array_equal(one([[-1.0, 2], [0, 4]], FIRE).total[0], [[0, 2]])
    heads = one([[3.0, 4, 0, 0, 1, 0, 0, 0], [0.0, 0, 0, 0, 0, 2, 2, 1]], head_norm(2))
    np.testing.assert_array_equal(heads.total[0], [[5, 1 + 3]])
    assert (UP_RELU.reads, FIRE.reads, head_norm(2).reads, POSITIVE_SHARE.reads) == ("up", "gate", "heads", "residual")


def test_layers_as_units_lie_side_by_side():
    layers = (jnp.array([[1.0, -1, 2, 3], [1, 1, 1, 1]]), jnp.array([[-1.0, -1, -1, 0], [np.nan, 1, 1, 1]]))
    found = probe(layers, jnp.array([ACTION, ARGS]), jnp.array([True, True]), POSITIVE_SHARE)
    np.testing.assert_array_equal(found.total, [[[0.75, 0]], [[0, 0]]])  # the second target is not finite
    np.testing.assert_array_equal(found.tokens, [[[1, 1]], [[0, 0]]])


def test_an_expert_counts_only_the_targets_it_saw():
    activation = jnp.array([[[1.0, 2], [np.nan, np.nan]], [[3, 4], [5, 6]], [[np.inf, 1], [1, 1]]])
    routed = jnp.array([[True, False], [True, True], [True, True]])
    found = probe((ExpertUnits(activation, routed),), jnp.array([ACTION] * 3), jnp.array([True] * 3))
    np.testing.assert_array_equal(found.total[0, 0], [4, 6, 5, 6])
    np.testing.assert_array_equal(found.tokens[0, 0], [2, 2, 1, 1])
    np.testing.assert_array_equal(found.mean()[0, 0], [2, 3, 5, 6])
    assert found.dropped == 1
