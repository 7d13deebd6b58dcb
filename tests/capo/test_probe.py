"""The probe: worked by hand, additive over any split, blind to everything it must not see."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from harnessrl_jax.capo import ACTION, ARGS, absolute, probe_row, probe_targets, relu

ROLE = jnp.array([ACTION, ARGS, ARGS, -1, ACTION])
PROBED = jnp.array([True, True, True, False, True])
UNITS = (
    jnp.array([[1.0, -2], [3, 4], [5, -6], [np.nan, 7], [0.5, 1]]),
    jnp.array([[0.0, 1], [0, 2], [0, 3], [9, np.inf], [0, 4]]),
)

PROBE_TARGETS = jax.jit(probe_targets)


@partial(jax.jit, static_argnames="phi")
def probe(units, role, probed, phi=relu):
    return probe_row(units, role, probed, phi=phi)


def test_worked_by_hand():
    found = probe(UNITS, ROLE, PROBED)
    np.testing.assert_array_equal(found.total, [[[1.5, 1], [0, 5]], [[8, 4], [0, 5]]])
    np.testing.assert_array_equal(found.tokens, [2, 2])
    assert found.dropped == 0
    np.testing.assert_array_equal(probe(UNITS, ROLE, PROBED, phi=absolute).total[:, 0], [[1.5, 3], [8, 10]])


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
