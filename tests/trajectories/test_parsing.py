import functools

import pytest

from harnessrl_jax.trajectories import parse_tool_calls as parse
from harnessrl_jax.trajectories.formats import HERMES

parse_tool_calls = functools.partial(parse, format=HERMES)


CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "Nile"}}\n</tool_call>'


def test_one_call_and_its_spans():
    text = f"Look it up. {CALL} Done."
    out = parse_tool_calls(text)
    assert (out.status, out.content) == ("ok", "Look it up.  Done.")
    (call,) = out.calls
    assert (call.name, call.arguments) == ("find", '{"q": "Nile"}')
    cut = lambda span: text[slice(*span)]
    assert (cut(call.name_span), cut(call.arguments_span), cut(call.span)) == ("find", '{"q": "Nile"}', CALL)


def test_text_without_a_call():
    out = parse_tool_calls("The answer is 4.")
    assert (out.status, out.content, out.calls, out.blocks) == ("none", "The answer is 4.", (), ())


def test_several_calls_are_all_returned():
    out = parse_tool_calls(CALL * 3)
    assert (len(out.calls), out.status, out.content) == (3, "ok", "")
    assert len({call.span for call in out.calls}) == 3


def test_keys_in_any_order_and_nested_values():
    out = parse_tool_calls('<tool_call>{"arguments":{"a":[1,{"name":"no"}],"b":{}},"name":"yes"}</tool_call>')
    assert [(c.name, c.arguments) for c in out.calls] == [("yes", '{"a":[1,{"name":"no"}],"b":{}}')]


def test_tags_inside_strings_are_text():
    out = parse_tool_calls('<tool_call>{"name": "f", "arguments": {"q": "</tool_call><tool_call>"}}</tool_call>')
    assert (out.status, out.calls[0].arguments) == ("ok", '{"q": "</tool_call><tool_call>"}')


def test_escapes_are_read_in_the_name_and_kept_in_the_arguments():
    out = parse_tool_calls('<tool_call>{"name": "fi\\u00f1d", "arguments": {"q": "\\"\\u00e9"}}</tool_call>')
    assert (out.calls[0].name, out.calls[0].arguments) == ("fiñd", '{"q": "\\"\\u00e9"}')


def test_an_unclosed_block_is_malformed_and_the_one_before_it_counts():
    out = parse_tool_calls(CALL + '<tool_call>{"name": "find", "arguments": {}}')
    assert (out.status, len(out.calls), len(out.blocks)) == ("malformed", 1, 2)
    assert out.content == '<tool_call>{"name": "find", "arguments": {}}'


def test_a_block_that_opens_inside_a_broken_one_is_read():
    out = parse_tool_calls("<tool_call>{oops " + CALL)
    assert (out.status, [c.name for c in out.calls], out.content) == ("malformed", ["find"], "<tool_call>{oops")


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "{}",
        "[]",
        '{"name": "f"}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "arguments": []}',
        '{"name": "", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "f", "arguments": {}, "extra": 1}',
        '{"name": "f", "name": "g", "arguments": {}}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": }}',
        '{"name": "f", "arguments": {"a": "line\nbreak"}}',
        '{"name": "f", "arguments": {}} trailing',
        "{'name': 'f', 'arguments': {}}",
        '{"name": __import__("os").system("true"), "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}",
        '{"name": "f", "arguments": {"a": ' + "[" * 100_000 + "}}",
    ],
)
def test_what_is_no_call_is_malformed_and_stays_in_the_text(body):
    text = f"<tool_call>{body}</tool_call>"
    out = parse_tool_calls(text)
    assert (out.status, out.calls, out.content) == ("malformed", (), text)


def test_a_stray_closing_tag_is_malformed():
    assert parse_tool_calls('{"name": "f", "arguments": {}}</tool_call>').status == "malformed"


@pytest.mark.parametrize("text", [CALL, CALL + " and", CALL[:-20], CALL + CALL[:30]])
def test_the_length_limit_wins_over_every_call(text):
    out = parse_tool_calls(text, finish="length")
    assert (out.status, out.calls, out.content) == ("truncated", (), text)
    assert parse_tool_calls("no call", finish="length").status == "none"


def test_quoted_tags_are_no_call():
    text = f"You wrote {CALL}"
    assert parse_tool_calls(text, control={"<tool_call>": (), "</tool_call>": ()}).status == "none"
    opener, closer = (text.index(tag) for tag in (HERMES.open, HERMES.close))
    assert parse_tool_calls(text, control={"<tool_call>": {opener}, "</tool_call>": {closer}}).status == "ok"
    assert parse_tool_calls(text, control={"<tool_call>": {opener}, "</tool_call>": ()}).status == "malformed"
    assert parse_tool_calls(text, control={"<tool_call>": {opener}}).status == "ok"
