"""Rewards that know the cost of a rollout: by hand and at their limits."""

from functools import partial

import jax
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
    np.array([True, False, True]),
    np.array([10, 10, 60]),
    np.array([0.5, 1.0, 0.0]),
    np.array([3, 25, 0]),
    np.array([2, 0, 1]),
)

reward = jax.jit(partial(cost_aware_reward, **PAPER))
weight_at = jax.jit(partial(exploration_weight, updates=150))


def test_worked_by_hand():
    # 10 + 40/50 + 0.5 · 0.5 - 0.3 - 0.2;   0 + 0.5 - 1 (the limit);   10 + 0 (too long to be efficient) - 0.1
    out = reward(*ROLLOUTS, exploration=0.5)
    np.testing.assert_allclose(out, [10.55, -0.5, 9.9], rtol=1e-6)


def test_each_rollout_is_paid_for_itself():
    out = reward(*ROLLOUTS, exploration=1.0)
    alone = jax.jit(jax.vmap(lambda *one: reward(*one, exploration=1.0)))(*(each[:, None] for each in ROLLOUTS))
    np.testing.assert_allclose(alone[:, 0], out, rtol=1e-6)


def test_without_exploration_diversity_is_not_read():
    spoiled = (*ROLLOUTS[:2], np.full(3, np.nan), *ROLLOUTS[3:])
    out = reward(*spoiled, exploration=weight_at(150, peak=1.0))
    np.testing.assert_allclose(out, [10.3, -1.0, 9.9], rtol=1e-5)


def test_a_shorter_success_is_worth_more_and_a_shorter_failure_is_not():
    of = lambda solved: reward(np.full(3, solved), np.array([5, 20, 50]), *(np.zeros(3),) * 3, exploration=1.0)
    np.testing.assert_allclose(of(True), [10.9, 10.6, 10.0], rtol=1e-6)
    np.testing.assert_array_equal(of(False), 0)


def test_exploration_falls_along_half_a_cosine():
    np.testing.assert_allclose(
        [weight_at(update, peak=2.0) for update in (0, 50, 75, 150, 999)], [2, 1.5, 1, 0, 0], atol=1e-6
    )


def test_overlong_worked_by_hand():
    lengths = np.array([0, 16384, 18432, 20480, 99999])
    out = jax.jit(partial(overlong_penalty, max_tokens=20480, grace_tokens=4096))(lengths)
    np.testing.assert_allclose(out, [0, 0, -0.5, -1, -1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: cost_aware_reward(*ROLLOUTS, exploration=0.0, **{**PAPER, "max_calls": 0}),
            r"max_calls must be at least 1, got 0",
        ),
        (lambda: exploration_weight(np.array(0), peak=1.0, updates=0), r"updates must be at least 1, got 0"),
        (
            lambda: overlong_penalty(np.array([1]), max_tokens=4, grace_tokens=5),
            r"wanted 1 <= grace_tokens <= 4, got 5",
        ),
    ],
)
def test_settings_without_meaning_are_refused(call, message):
    with pytest.raises(LossError, match=message):
        call()
