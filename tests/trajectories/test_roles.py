import hypothesis
import hypothesis.strategies as st
import numpy as np

from harnessrl_jax.trajectories import Role, Span, assign_roles, call_roles
from harnessrl_jax.trajectories.formats import HERMES, FunctionTags
from harnessrl_jax.trajectories.roles import token_characters

A, G, O = Role.ACTION, Role.ARGS, Role.OTHER
TAIL = ["}", "</tool_call>", "<|im_end|>"]


def vocabulary(pieces):
    """ids 0, 1, ... and a byte-level decoder for them, as byte-level BPE decodes."""
    coded = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]
    return list(range(len(coded))), lambda ids: b"".join(coded[i] for i in ids).decode("utf-8", "replace")


def test_each_kind_of_token():
    ids, decode = vocabulary(
        [
            "I see.",
            "<tool_call>",
            '{"',
            "name",
            '": "',
            "fi",
            "nd",
            '", "',
            "arguments",
            '": ',
            '{"q"',
            ': "x"',
            "}",
            *TAIL,
        ]
    )
    out = assign_roles(ids, decode, HERMES)
    assert out.role.tolist() == [O, O, O, O, O, A, A, O, O, O, G, G, G, O, O, O]
    assert out.spans == (Span(role=A, start=5, end=7), Span(role=G, start=10, end=13))
    assert out.role.dtype == np.int8


def test_a_token_that_straddles_name_and_arguments_is_action():
    ids, decode = vocabulary(["<tool_call>", '{"name": "f', 'ind", "arguments": {"q', '": 1', "}}", "</tool_call>"])
    assert assign_roles(ids, decode, HERMES).role.tolist() == [O, A, A, G, G, O]


def test_two_calls_each_have_their_spans():
    block = ["<tool_call>", '{"name": "', "f", '", "arguments": ', "{}", "}", "</tool_call>"]
    ids, decode = vocabulary(block + block)
    assert assign_roles(ids, decode, HERMES).role.tolist() == [O, O, A, O, G, O, O] * 2


def test_what_cannot_be_read_is_other_and_the_readable_call_before_it_is_kept():
    block = ["<tool_call>", '{"name": "', "f", '", "arguments": ', "{}", "}", "</tool_call>"]
    ids, decode = vocabulary([*block, "<tool_call>", '{"name": ', "g"])
    out = assign_roles(ids, decode, HERMES)
    assert out.role.tolist() == [O, O, A, O, G, O, O, O, O, O]
    assert out.parsed.status == "malformed"
    assert assign_roles(ids, decode, HERMES, finish="length").parsed.status == "truncated"


def test_characters_split_over_tokens():
    emoji = "😀".encode()
    ids, decode = vocabulary(
        [
            "<tool_call>",
            '{"name": "f',
            b"\xc3",
            b'\xb1", "arguments": {"q": "',
            emoji[:1],
            emoji[1:3],
            emoji[3:] + b'x"}',
            *TAIL[:2],
        ]
    )
    out = assign_roles(ids, decode, HERMES)
    assert out.parsed.calls[0].name == "fñ"
    assert out.role.tolist() == [O, A, A, A, G, G, G, O, O]


def test_no_arguments_are_no_token():
    ids, decode = vocabulary(["<function=", "f", "></function>", "<function=g>", "</function>"])
    assert assign_roles(ids, decode, FunctionTags()).role.tolist() == [O, A, O, A, O]


def test_a_token_that_ends_a_name_and_begins_other_arguments_is_action():
    ids, decode = vocabulary(
        [
            '<tool_call>{"arguments": {}, "name": "',
            'f"}</tool_call><tool_call>{"arguments": {',
            '}, "name": "g"}</tool_call>',
        ]
    )
    assert assign_roles(ids, decode, HERMES).role.tolist() == [G, A, A]
    assert assign_roles(ids[:2], decode, HERMES).role.tolist() == [G, A]


def test_quoted_tags_are_no_call():
    ids, decode = vocabulary(["<tool", "_call>", '{"name": "f", "arguments": {}}', "</tool_call>", "<tool_call>"])
    assert assign_roles(ids[:4], decode, HERMES).parsed.status == "ok"
    assert assign_roles(ids[:4], decode, HERMES, control={"<tool_call>": 4, "</tool_call>": 3}).role.tolist() == [O] * 4
    assert assign_roles([4, 2, 3], decode, HERMES, control={"<tool_call>": 4, "</tool_call>": 3}).parsed.status == "ok"


def test_nothing_sampled():
    out = assign_roles([], lambda ids: "", HERMES)
    assert (out.role.tolist(), out.spans, out.parsed.status) == ([], (), "none")


def test_the_roles_of_a_record_are_its_spans(make_call):
    call = make_call("c", [1], [2, 3, 4, 5], spans=(Span(role=A, start=1, end=2), Span(role=G, start=2, end=4)))
    assert call_roles(call).tolist() == [O, A, G, G]


@hypothesis.given(st.text(max_size=12), st.lists(st.integers(1, 4), max_size=60))
def test_token_characters_of_any_cut_of_any_text(text, sizes):
    data = text.encode()
    edges = np.minimum(np.concatenate([[0], np.cumsum(sizes)]), len(data)).astype(int).tolist()
    pieces = [data[start:end] for start, end in zip(edges, [*edges[1:], len(data)], strict=True)]
    ids, decode = vocabulary(pieces)
    found, low, high = token_characters(ids, decode)
    assert found == text
    start = np.cumsum([0, *(len(letter.encode()) for letter in text)])
    for place, piece in enumerate(pieces):
        begin, end = edges[place], edges[place] + len(piece)
        letters = [i for i in range(len(text)) if start[i] < end and start[i + 1] > begin]
        covered = range(int(low[place]), int(high[place]))
        assert set(letters) <= set(covered)
        # A neighbour may be claimed only next to a literal replacement character, which looks like an open one.
        assert set(covered) == set(letters) or "\ufffd" in text


def test_bytes_that_never_become_a_character():
    ids, decode = vocabulary(["ab", b"\xff", b"\xff", "c", b"\xe2\x82"])
    text, low, high = token_characters(ids, decode)
    assert text == decode(ids) == "ab\ufffd\ufffdc\ufffd"
    assert (low[0], high[0], high[-1]) == (0, 2, len(text))


def test_a_decoder_that_trims_the_start_of_a_text():
    words = ["one", "two", "three"]
    decode = lambda ids: " ".join(words[i] for i in ids)
    text, low, high = token_characters([0, 1, 2], decode)
    assert text == "one two three"
    assert list(zip(low.tolist(), high.tolist(), strict=True)) == [(0, 3), (3, 7), (7, 13)]
