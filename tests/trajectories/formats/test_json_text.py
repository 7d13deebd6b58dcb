import json
import re

import hypothesis
import hypothesis.strategies as st
import pytest

from harnessrl_jax.trajectories.formats.json_text import MAX_DEPTH, MAX_DIGITS, is_json, members, value_end
from harnessrl_jax.trajectories.formats.said import Malformed

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def refuse(word):
    raise ValueError(word)


def standard(text):
    """Whether the standard library reads it, less what RFC 8259 does not know."""
    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


@hypothesis.given(VALUES, st.sampled_from([None, 1]), st.booleans(), st.text(max_size=3))
def test_a_value_ends_where_it_was_written_to_end(value, indent, ascii_only, after):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    hypothesis.assume(not after[:1] or after[0] not in "0123456789.eE+-")
    assert value_end(f"..{text} {after}", 2) == 2 + len(text)


@hypothesis.given(VALUES, st.data())
def test_what_is_cut_fails_in_its_last_token(value, data):
    text = json.dumps([value])
    cut = text[: data.draw(st.integers(0, len(text) - 1))]
    at = fault_in(cut)
    assert at is not None
    # A word, an escape or a number that is not over.
    assert re.fullmatch(r"|[a-z]+|-|\.|[eE][-+]?|\\(u[0-9a-f]*)?", cut[at:])


def fault_in(text):
    try:
        value_end(text, 0)
    except Malformed as fault:
        return fault.at
    return None


# Pieces of JSON in any order: near misses of every kind.
@hypothesis.given(
    st.lists(
        st.sampled_from([*'{}[]:,"\\ \n01-.eE+', "true", "nul", "null", '"a"', '"\\u00e9"', '"\\ud800"', "\x00", "é"]),
        max_size=12,
    ).map("".join)
)
def test_agrees_with_the_standard_library_on_what_json_is(text):
    assert is_json(text) == standard(text)


def test_members_and_their_places():
    text = 'x{"a": [1, {"b": 2}], "b\\u00e9": "c"} y'
    found, end = members(text, 1)
    assert {key: text[slice(*span)] for key, span in found.items()} == {"a": '[1, {"b": 2}]', "bé": '"c"'}
    assert text[end:] == " y"
    assert members("{ }", 0) == ({}, 3)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": 1,}', "{,}", '{"a"}', "{1: 2}", "[]", '{"a": 1]'])
def test_no_members(text):
    with pytest.raises(Malformed):
        members(text, 0)


def test_depth_and_digits_have_limits():
    assert is_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert not is_json("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))
    assert is_json("9" * MAX_DIGITS)
    assert not is_json("9" * (MAX_DIGITS + 1))
