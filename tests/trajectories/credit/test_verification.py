import itertools
import math

import numpy as np
import pytest

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories.credit import (
    groups_within,
    leave_one_out,
    verification_advantages,
    verification_weights,
)

NEVER = -1


def answers(outcomes, most):
    """For each rollout the number of the answer that passed, or NEVER after `most` answers."""
    rows = [
        (place, j, j == passed)
        for place, passed in enumerate(outcomes)
        for j in range(most if passed == NEVER else passed + 1)
    ]
    rollout, index, solved = (np.array(column) for column in zip(*rows, strict=True))
    return solved, np.zeros(len(rows), int), rollout, index


def test_worked_by_hand():
    # Answer 0: fails in 0, 1 and 3, passes in 2; answer 1: passes in 0, fails in 1 and 3.
    given = answers([1, NEVER, 0, NEVER], 2)
    weight = dict(
        zip(zip(given[2].tolist(), given[3].tolist(), strict=True), verification_weights(*given), strict=True)
    )
    assert weight == {(0, 0): 2 / 3, (0, 1): 1, (1, 0): 2 / 3, (1, 1): 1, (2, 0): 2 / 3, (3, 0): 2 / 3, (3, 1): 1}
    third = 2 / 3 * (0 - 1 / 3)
    np.testing.assert_allclose(verification_advantages(*given), [third, 1, third, -0.5, 2 / 3, third, -0.5])


def expectation(estimate, chance_of_success, size):
    """E[1/G Σ A_ij d log π_j / dθ_j] for each j over all outcomes of a group, θ_j the logit of answer j."""
    most = len(chance_of_success)
    total = np.zeros(most)
    for outcomes in itertools.product([*range(most), NEVER], repeat=size):
        given = answers(outcomes, most)
        s = np.array(chance_of_success)[given[3]]
        chance = np.where(given[0], s, 1 - s).prod()
        score = np.where(given[0], 1 - s, -s)
        np.add.at(total, given[3], chance * estimate(*given) * score / size)
    return total


def gradient(chance_of_success):
    fail = [1 - s for s in chance_of_success]
    return np.array([math.prod(fail[:j] + fail[j + 1 :]) * s * (1 - s) for j, s in enumerate(chance_of_success)])


def own_check_only(solved, group, rollout, index):
    return leave_one_out(solved.astype(float), groups_within(group, index), np.ones(len(solved), bool))


@pytest.mark.parametrize("chance", [(0.3, 0.6), (0.2, 0.5, 0.7), (0.9, 0.4)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_over_all_outcomes_the_expectation_is_the_gradient_of_verification_at_k(chance, size):
    reached = np.cumprod([1.0, *(1 - s for s in chance[:-1])])
    in_company = 1 - (1 - reached) ** (size - 1)
    np.testing.assert_allclose(expectation(verification_advantages, chance, size), gradient(chance) * in_company)
    # Answers weighed by their own check alone push the first one far too hard.
    assert expectation(own_check_only, chance, size)[0] > 1.5 * gradient(chance)[0]


def test_answers_without_a_signal_give_exactly_zero():
    assert not verification_advantages(*answers([0, 0, 0], 2)).any()
    assert not verification_advantages(*answers([NEVER] * 3, 2)).any()
    assert not verification_advantages(*answers([1], 2)).any()
    assert verification_advantages(*(array[:0] for array in answers([1], 2))).tolist() == []


def test_only_one_rollout_at_an_answer_has_nothing_to_compare_with():
    given = answers([0, NEVER], 2)
    np.testing.assert_allclose(verification_advantages(*given), [1, -1, 0])


def test_answers_that_make_no_sense_are_refused():
    zeros = np.zeros(2, int)
    with pytest.raises(
        RecordError, match=r"end at the first that passes; rollout 0 has \[0, 1\], passed \[True, False"
    ):
        verification_weights(np.array([True, False]), zeros, zeros, np.array([0, 1]))
    with pytest.raises(RecordError, match=r"must be 0, 1, \.\.\. once each.*rollout 0 has \[0, 2\]"):
        verification_advantages(np.array([False, False]), zeros, zeros, np.array([0, 2]))
    with pytest.raises(RecordError, match=r"wanted flat arrays of one length"):
        verification_weights(np.array([True]), zeros, zeros, zeros)
