"""Parents and shared tokens from one sort, against the definition applied to every pair."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from harnessrl_jax.trajectories.prefixes import common_prefix, history, link_prefixes, shared_tokens

IDS = st.integers(0, 1)
CALL = st.tuples(
    st.lists(IDS, min_size=1, max_size=4), st.lists(IDS, max_size=2), st.integers(0, 5), st.sampled_from("xy")
)


@pytest.fixture(scope="session")
def calls_of(make_call):
    def make(drawn):
        ordered = sorted(drawn, key=lambda item: item[2])
        return [make_call(f"{i}", p, o, seq=seq, session_id=s) for i, (p, o, seq, s) in enumerate(ordered)]

    return make


def parent_by_definition(calls, child):
    call = calls[child]
    ends = [
        (len(history(other)), other.session_id == call.session_id, i)
        for i, other in enumerate(calls)
        if other.seq < call.seq
        and len(other.output_ids)
        and np.array_equal(call.prompt_ids[: len(history(other))], history(other))
    ]
    return max(ends)[2] if ends else None


@settings(max_examples=60, deadline=None)
@given(st.lists(CALL, min_size=1, max_size=9))
def test_parents_are_the_longest_earlier_prefixes(calls_of, drawn):
    calls = calls_of(drawn)
    assert list(link_prefixes(calls).parent) == [parent_by_definition(calls, i) for i in range(len(calls))]


@settings(max_examples=50, deadline=None)
@given(st.lists(CALL, min_size=1, max_size=9), st.data())
def test_shared_tokens_are_the_common_prefixes(calls_of, drawn, data):
    calls = calls_of(drawn)
    child = data.draw(st.integers(0, len(calls) - 1))
    want = [common_prefix(calls[child].prompt_ids, history(other)) for other in calls]
    assert shared_tokens(link_prefixes(calls), calls, child).tolist() == want


def test_an_answer_that_came_later_is_not_continued(make_call):
    calls = [
        make_call("a", [1], [2], seq=0),
        make_call("b", [1, 2, 3, 4, 5], [6], seq=1),
        make_call("c", [1, 2, 3], [4], seq=2),
    ]
    assert link_prefixes(calls).parent == (None, 0, 0)


def test_ids_are_compared_whole_and_not_by_their_bytes(make_call):
    calls = [make_call("a", [1], [256], seq=0), make_call("b", [1, 256 + 2**16, 3], [4], seq=1)]
    assert link_prefixes(calls).parent == (None, None)
    assert shared_tokens(link_prefixes(calls), calls, 1).tolist() == [1, 3]


def test_many_calls_over_a_long_shared_prompt(make_call):
    context = np.arange(300)
    calls = [make_call("root", context, [7], seq=0)]
    calls += [make_call(f"{i}", [*context, 7, 8, i], [9], seq=i) for i in range(1, 400)]
    assert set(link_prefixes(calls).parent[1:]) == {0}
