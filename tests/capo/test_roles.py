"""Which gradient each token belongs to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harnessrl_jax.capo as capo
from harnessrl_jax.trajectories import Role

A, G, O = Role.ACTION, Role.ARGS, Role.OTHER
# Call 1 lies in both rows; call 5 could not be parsed, its tokens are all OTHER; the last of row 0 is padding; call 9
# has an ACTION token, but not in the loss.
ROLE = jnp.array([[A, O, O, Role.NONE], [G, O, O, A]], jnp.int8)
CALL = jnp.array([[1, 1, 5, -1], [1, 5, 9, 9]])
COUNTED = jnp.array([[True, True, True, False], [True, True, True, False]])

gradient_roles = jax.jit(capo.gradient_roles, static_argnames="other_role")


@pytest.mark.parametrize(
    ("other_role", "wanted"),
    [
        ("drop", [[0, -1, 1, -1], [1, 1, 1, -1]]),
        ("args", [[0, 1, 1, -1], [1, 1, 1, -1]]),
        ("ungated", [[0, 2, 2, -1], [1, 2, 2, -1]]),
    ],
)
def test_roles_by_hand(other_role, wanted):
    np.testing.assert_array_equal(gradient_roles(ROLE, CALL, COUNTED, other_role=other_role), wanted)


def test_rows_and_call_numbers_do_not_matter():
    got = gradient_roles(ROLE[::-1], CALL[::-1] * 1000 - 7, COUNTED[::-1], other_role="drop")
    np.testing.assert_array_equal(got, gradient_roles(ROLE, CALL, COUNTED, other_role="drop")[::-1])
