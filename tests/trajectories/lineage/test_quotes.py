import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from harnessrl_jax.trajectories.quotes import LEAST_IDS, MOST_IDS, quotations

LONG = list(range(10, 30))


def found(*calls, fresh=None):
    return quotations(calls, fresh or [0] * len(calls))


def test_an_answer_is_found_by_its_end(make_call):
    answer = make_call("a", [1], [*LONG, 2])
    passed_on = [7, *LONG[-2 - MOST_IDS : -1], 99]  # the last id merged with what follows
    assert found(answer, make_call("b", passed_on, [3], seq=1)) == {1: (0,)}
    changed = [7, *LONG[:-4], 98, *LONG[-3:], 99]
    assert found(answer, make_call("b", changed, [3], seq=1)) == {}


@pytest.mark.parametrize(("length", "want"), [(LEAST_IDS + 2, {1: (0,)}), (LEAST_IDS + 1, {})])
def test_a_short_answer_shows_nothing(make_call, length, want):
    answer = LONG[:length]
    assert found(make_call("a", [1], [*answer, 2]), make_call("b", [7, *answer, 8], [3], seq=1)) == want


def test_a_cut_answer_has_no_end_of_turn(make_call):
    cut = make_call("a", [1], LONG[:6], finish="length")
    assert found(cut, make_call("b", [7, *LONG[1:5], 8], [3], seq=1)) == {1: (0,)}


def test_only_earlier_answers_and_new_ids_count(make_call):
    answer = make_call("a", [1], [*LONG, 2], seq=1)
    assert found(make_call("b", [7, *LONG, 8], [3], seq=0), answer) == {}
    assert found(answer, make_call("b", [7, *LONG, 8], [3], seq=1)) == {}
    reader = make_call("b", [1, *LONG, 2, 5], [3], seq=2)
    assert found(answer, reader, fresh=[0, 22]) == {}
    assert found(answer, reader) == {1: (0,)}


def test_words_of_its_own_prompt_are_no_quotation(make_call):
    echo = make_call("a", [1, *LONG, 2], [*LONG, 2])
    assert found(echo, make_call("b", [7, *LONG, 8], [3], seq=1)) == {}


def test_every_call_that_answered_so_is_named(make_call):
    calls = [make_call(name, [1], [*LONG, 2], seq=i) for i, name in enumerate("ab")]
    assert found(*calls, make_call("c", [*LONG, *LONG], [3], seq=2)) == {2: (0, 1)}


IDS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(IDS, IDS), min_size=1, max_size=5))
def test_the_hash_finds_what_a_search_finds(make_call, drawn):
    calls = [make_call(f"{i}", prompt, output, seq=i) for i, (prompt, output) in enumerate(drawn)]
    want = {}
    for i, reader in enumerate(calls):
        quoted = [j for j in range(i) if _quotes(reader, calls[j])]
        if quoted:
            want[i] = tuple(quoted)
    assert found(*calls) == want


def _quotes(reader, other):
    tail = other.output_ids[1:-2][-MOST_IDS:]
    stands_in = lambda ids: any(np.array_equal(ids[i : i + len(tail)], tail) for i in range(len(ids) - len(tail) + 1))
    return len(tail) >= LEAST_IDS and stands_in(reader.prompt_ids) and not stands_in(other.prompt_ids)
