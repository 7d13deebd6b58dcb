"""Rewards that know the cost of a rollout: by hand and at their limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.errors import LossError
from harnessrl_jax.losses import cost_aware_reward, exploration_weight, overlong_penalty

PAPER = {
    "success_reward": 10.0,
    "efficiency": 1.0,
    "max_calls": 50,
    "spam_penalty": 0.1,
    "spam_limit": 10,
    "invalid_penalty": 0.1,
}
ROLLOUTS = (
    jnp.array([True, False, True]),
    jnp.array([10, 10, 60]),
    jnp.array([0.5, 1.0, 0.0]),
    jnp.array([3, 25, 0]),
    jnp.array([2, 0, 1]),
)


def test_worked_by_hand():
    # 10 + 40/50 + 0.5 · 0.5 - 0.3 - 0.2;   0 + 0.5 - 1 (the limit);   10 + 0 (too long to be efficient) - 0.1
    out = cost_aware_reward(*ROLLOUTS, exploration=0.5, **PAPER)
    np.testing.assert_allclose(out, [10.55, -0.5, 9.9], rtol=1e-6)


def test_each_rollout_is_paid_for_itself():
    out = cost_aware_reward(*ROLLOUTS, exploration=1.0, **PAPER)
    alone = jax.vmap(lambda *one: cost_aware_reward(*one, exploration=1.0, **PAPER))(
        *(each[:, None] for each in ROLLOUTS)
    )
    np.testing.assert_allclose(alone[:, 0], out, rtol=1e-6)


def test_without_exploration_diversity_is_not_read():
    spoiled = (*ROLLOUTS[:2], jnp.full(3, jnp.nan), *ROLLOUTS[3:])
    out = cost_aware_reward(*spoiled, exploration=exploration_weight(jnp.array(150), peak=1.0, updates=150), **PAPER)
    np.testing.assert_allclose(out, [10.3, -1.0, 9.9], rtol=1e-5)


def test_a_shorter_success_is_worth_more_and_a_shorter_failure_is_not():
    reward = lambda solved: cost_aware_reward(
        jnp.full(3, solved), jnp.array([5, 20, 50]), *(jnp.zeros(3),) * 3, exploration=1.0, **PAPER
    )
    np.testing.assert_allclose(reward(True), [10.9, 10.6, 10.0], rtol=1e-6)
    np.testing.assert_array_equal(reward(False), 0)


def test_exploration_falls_along_half_a_cosine():
    at = lambda update: exploration_weight(jnp.array(update), peak=2.0, updates=150)
    np.testing.assert_allclose([at(0), at(50), at(75), at(150), at(999)], [2, 1.5, 1, 0, 0], atol=1e-6)


def test_overlong_worked_by_hand():
    lengths = jnp.array([0, 16384, 18432, 20480, 99999])
    out = overlong_penalty(lengths, max_tokens=20480, grace_tokens=4096)
    np.testing.assert_allclose(out, [0, 0, -0.5, -1, -1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: cost_aware_reward(*ROLLOUTS, exploration=0.0, **{**PAPER, "max_calls": 0}),
            r"max_calls must be at least 1, got 0",
        ),
        (lambda: exploration_weight(jnp.array(0), peak=1.0, updates=0), r"updates must be at least 1, got 0"),
        (
            lambda: overlong_penalty(jnp.array([1]), max_tokens=4, grace_tokens=5),
            r"wanted 1 <= grace_tokens <= 4, got 5",
        ),
    ],
)
def test_settings_without_meaning_are_refused(call, message):
    with pytest.raises(LossError, match=message):
        call()
