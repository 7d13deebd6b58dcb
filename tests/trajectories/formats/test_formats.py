"""Each format on texts whose spans are marked: ⟦the action⟧ and ⟪the arguments⟫."""

import functools
import json
import re

import pytest

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories import parse_tool_calls
from harnessrl_jax.trajectories.formats import (
    BARE_JSON,
    GLM4,
    HERMES,
    LLAMA3,
    MISTRAL,
    NO_CALLS,
    QWEN3_CODER,
    REACT,
    BareJson,
    Between,
    Delimited,
    FunctionTags,
    JsonCall,
    JsonTags,
    SpecialTags,
    Tag,
)

OPENHANDS = FunctionTags()
INVOKE = FunctionTags(
    function=Between('<invoke name="', '">', "</invoke>"),
    parameter=Between('<parameter name="', '">', "</parameter>"),
    wrap=("<calls>", "</calls>"),
)
ACTION_ARGS = BareJson(
    call=JsonCall(name_key="action", arguments_key="args", other_keys=("thought",), any_arguments=True), served=False
)
LLAMA_TAGS = Delimited(open="<function=", between=">", close=("</function>",), served=True)
SEARCH = SpecialTags(tags=(Tag("search", "<search>", "</search>"), Tag("answer", "<answer>", "</answer>")))
CONTROL = SpecialTags(tags=(Tag("plan", "<|plan|>", None), Tag("finish", "<|finish|>", None)), served=True)
SCHEMAS = {
    "f": {
        "properties": {
            "n": {"type": "integer"},
            "s": {"type": "string"},
            "o": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            "b": {"type": ["boolean", "null"]},
        }
    }
}


def plain(marked):
    return re.sub("[⟦⟧⟪⟫]", "", marked)


def marked(text, blocks):
    """The text with the spans of the blocks marked, empty ones left out."""
    inserts = []
    for block in blocks:
        for (start, end), (left, right) in ((block.name_span, "⟦⟧"), (block.arguments_span, "⟪⟫")):
            inserts += [(start, 1, left), (end, 0, right)] if start < end else []
    for at, _, mark in sorted(inserts, reverse=True):
        text = text[:at] + mark + text[at:]
    return text


def calls(parsed):
    return [(call.name, call.arguments) for call in parsed.calls]


HERMES_CASES = [
    ('A <tool_call>\n{"name": "⟦f⟧", "arguments": ⟪{"q": [1, {"a": "}"}]}⟫}\n</tool_call> B', "ok", "A  B", 1),
    ('<tool_call>{"arguments": ⟪{}⟫, "name": "⟦f⟧"}</tool_call>', "ok", "", 1),
    ('<tool_call>{"name": "⟦f\\n⟧", "arguments": ⟪{"q": "\\"</tool_call>"}⟫}</tool_call>', "ok", "", 1),
    # A tag in the arguments of a broken call is text; what opens after the fault is a call.
    (
        '<tool_call>{"name": "f", "arguments": {"q": "<tool_call>{}</tool_call>",}}</tool_call>',
        "malformed",
        '<tool_call>{"name": "f", "arguments": {"q": "<tool_call>{}</tool_call>",}}</tool_call>',
        0,
    ),
    ('<tool_call>{oops<tool_call>{"name": "⟦f⟧", "arguments": ⟪{}⟫}</tool_call>', "malformed", "<tool_call>{oops", 1),
    ('<tool_call>{"name": "⟦f⟧", "arguments": ⟪{}⟫} and </tool_call>', "malformed", None, 0),
    ('<tool_call>{"name": "f", "argu', "malformed", None, 0),
]
BARE_CASES = [
    (' {"name": "⟦f⟧", "arguments": ⟪{"q": 1}⟫} done', "ok", "done", 1),
    ('{"name": "⟦f⟧", "arguments": ⟪{}⟫}\n{"name": "⟦g⟧", "arguments": ⟪{}⟫}', "ok", "", 2),
    ('[{"name": "⟦f⟧", "arguments": ⟪{}⟫} , {"name": "⟦g⟧", "arguments": ⟪{}⟫}] ok', "ok", "ok", 2),
    ('So:\n```json\n{"name": "⟦f⟧", "arguments": ⟪{}⟫}\n```\nDone.', "ok", "So:\n\nDone.", 1),
    ('```\n[{"name": "⟦f⟧", "arguments": ⟪{}⟫}]\n``` ```json\n{"name": "g", "arguments": {}}\n```', "ok", None, 1),
    ('<think>hm</think>\n{"name": "⟦f⟧", "arguments": ⟪{}⟫}', "ok", "<think>hm", 1),
    # Quoted JSON, and JSON that is an answer.
    ('You wrote {"name": "f", "arguments": {}}', "none", None, 0),
    ('{"answer": 4}', "none", None, 0),
    ("[1, 2]", "none", None, 0),
    ('```json\n{"answer": 4}\n```', "none", None, 0),
    ('{"name": "Paris", "population": 2}', "malformed", None, 0),
    ('{"name": "⟦f⟧", "arguments": ⟪{}⟫}{"name": "f"', "malformed", '{"name": "f"', 1),
    ('[{"name": "⟦f⟧", "arguments": ⟪{}⟫}, {"name": 3}]', "malformed", '{"name": 3}]', 1),
    ('```json\n{"name": "⟦f⟧", "arguments": ⟪{}⟫} or so\n```', "malformed", "or so\n```", 1),
]
ACTION_ARGS_CASES = [
    ('{"thought": "why", "action": "⟦search⟧", "args": "⟪capital of Kenya⟫"}', "ok", None, 0),
    ('{"action": "⟦search⟧", "args": ⟪["a", 1]⟫}', "ok", None, 0),
    ('{"action": "⟦stop⟧", "args": ""}', "ok", None, 0),
    ('{"action": "search"}', "malformed", None, 0),
    ('{"action": "search", "args": 1, "more": 2}', "malformed", None, 0),
]
LLAMA_CASES = [
    ('{"name": "⟦f⟧", "parameters": ⟪{"q": 1}⟫}', "ok", "", 1),
    ('{"type": "function", "name": "⟦f⟧", "parameters": ⟪{}⟫}; {"name": "⟦g⟧", "parameters": ⟪{}⟫}', "ok", "", 2),
    ('<|python_tag|>{"name": "⟦f⟧", "parameters": ⟪{}⟫}', "ok", "", 1),
    ('Hm. <|python_tag|>⟦search⟧.call(⟪query="a, b)", n=[1, 2]⟫)', "ok", "Hm.", 1),
    ("<|python_tag|>⟦now⟧.call()", "ok", "", 1),
    ("⟦<|python_tag|>⟧⟪import os\nprint(1)⟫\n", "ok", "", 1),
    ("⟦<|python_tag|>⟧⟪search.call(query='single')⟫", "ok", "", 1),
    ('⟦<|python_tag|>⟧⟪a.call(b="c") + 1⟫', "ok", "", 1),
    ("<|python_tag|> ", "malformed", None, 0),
    ('<|python_tag|>{"name": "f", "parameters": 3}', "malformed", None, 0),
    ('{"name": "f", "arguments": {}}', "malformed", None, 0),
    ('{"answer": 4}', "none", None, 0),
]
MISTRAL_CASES = [
    ('[TOOL_CALLS] [{"name": "⟦f⟧", "arguments": ⟪{"q": "é"}⟫, "id": "abc"}]', "ok", "", 1),
    ('A[TOOL_CALLS][{"name": "⟦f⟧", "arguments": ⟪{}⟫}, {"name": "⟦g⟧", "arguments": ⟪{}⟫}]', "ok", "A", 2),
    ('A[TOOL_CALLS]⟦f⟧⟪{"q": 1}⟫[TOOL_CALLS]⟦g-2.x⟧[ARGS]⟪{}⟫', "ok", "A", 2),
    ('[TOOL_CALLS]⟦f⟧[CALL_ID]a1b2c3d4e[ARGS]⟪{"q": {"r": []}}⟫', "ok", "", 1),
    ("[TOOL_CALLS]f[ARGS][]", "malformed", None, 0),
    ("[TOOL_CALLS]f and more", "malformed", None, 0),
    ("[TOOL_CALLS][ARGS]{}", "malformed", None, 0),
    ("[TOOL_CALLS][]", "malformed", None, 0),
    ('[TOOL_CALLS] [{"name": "⟦f⟧", "arguments": ⟪{}⟫}', "malformed", "", 1),
    ("[TOOL_CALLS] f", "malformed", None, 0),
]
CODER_CASES = [
    (
        "A\n<tool_call>\n<function=⟦f⟧>\n⟪<parameter=s>\nline\n\nline</parameter >\n</parameter>\n"
        "<parameter=n>\n2\n</parameter>⟫\n</function>\n</tool_call>",
        "ok",
        "A",
        1,
    ),
    ("<tool_call><function=⟦f⟧></function></tool_call>", "ok", "", 1),
    ("<tool_call><function=⟦f⟧></function> <function=⟦g⟧></function></tool_call>", "ok", "", 2),
    ("<tool_call><function=⟦f⟧></function></tool_call>" * 2, "ok", "", 2),
    ("<tool_call><function=f><parameter=s>1</parameter><parameter=s>2</parameter></function></tool_call>", "malformed"),
    ("<tool_call><function=f><parameter=s>no end</function></tool_call>", "malformed"),
    ("<tool_call><function=f><parameter=s>a</tool_call></parameter></function></tool_call>", "malformed"),
    ("<tool_call><function=f><parameter=s>a</tool_call></function></tool_call>", "malformed"),
    ("<tool_call><function=f>text</function></tool_call>", "malformed"),
    ("<tool_call><function=></function></tool_call>", "malformed"),
    ("<tool_call><function=a\nb></function></tool_call>", "malformed"),
    ("<tool_call></tool_call>", "malformed"),
    ("<function=f></function></tool_call>", "malformed"),
    ("<function=f></function>", "none"),
    ("<tool_call><function=⟦f⟧></function>", "malformed", "", 1),
    ("<tool_call><function=f><param", "malformed"),
    (
        "<tool_call><function=⟦f⟧>⟪<parameter=s>a</parameter>⟫</function></tool_call>\n<tool_call><function=g><parameter=s>b",
        "malformed",
        "<tool_call><function=g><parameter=s>b",
        1,
    ),
]
TAG_CASES = [
    ("Think. ⟦<search>⟧ ⟪capital of Kenya⟫ </search> then ⟦<answer>⟧⟪Nairobi⟫</answer>", "ok", None, 0),
    ("<search>a<answer>⟪b⟫</answer>".replace("<answer>⟪b⟫", "⟦<answer>⟧⟪b⟫"), "malformed", None, 0),
    ("a</search>", "malformed", None, 0),
]
CASES = [
    *((HERMES, *case) for case in HERMES_CASES),
    *((BARE_JSON, *case) for case in BARE_CASES),
    *((ACTION_ARGS, *case) for case in ACTION_ARGS_CASES),
    *((LLAMA3, *case) for case in LLAMA_CASES),
    *((MISTRAL, *case) for case in MISTRAL_CASES),
    *((QWEN3_CODER, *case) for case in CODER_CASES),
    *((SEARCH, *case) for case in TAG_CASES),
    (OPENHANDS, "<function=f>text<function=⟦g⟧></function>", "malformed", None, 1),
    (OPENHANDS, "<function=f><parameter=s>no end <function=g></function>", "malformed", None, 0),
    (OPENHANDS, "A <function=⟦f⟧>\n⟪<parameter=s>x</parameter>⟫</function> B", "ok", "A  B", 1),
    (OPENHANDS, "<function=⟦f⟧>⟪<parameter=s></tool_call></parameter>⟫</function>", "ok", "", 1),
    (INVOKE, '<calls><invoke name="⟦f⟧">⟪<parameter name="s">x</parameter>⟫</invoke></calls>', "ok", "", 1),
    (
        GLM4,
        "<tool_call>⟦f⟧\n⟪<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>2</arg_value>⟫\n</tool_call>",
        "ok",
        "",
        1,
    ),
    (REACT, 'Thought: I look.\nAction: ⟦search⟧\nAction Input: ⟪{"q": 1}⟫', "ok", None, 0),
    (REACT, "Action: ⟦a⟧\nAction Input: ⟪x y⟫\nObservation: z\nAction: ⟦b⟧\nAction Input: ⟪w⟫\n", "ok", None, 0),
    (REACT, "Action: ⟦a⟧\nAction Input: ⟪x⟫\nAction: ⟦b⟧\nAction Input: ⟪y⟫", "ok", None, 0),
    (REACT, "Action: ⟦a⟧\nAction Input:\nThought: hm\nFinal Answer: 4", "ok", None, 0),
    (REACT, "The Action: a\nAction Input: b", "none", None, 0),
    (REACT, "Action: a\nThought: no\nAction: ⟦b⟧\nAction Input: ⟪w⟫", "malformed", None, 0),
    (REACT, "Action: a", "malformed", None, 0),
    (REACT, "Thought: done\nFinal Answer: 4", "none", None, 0),
    (LLAMA_TAGS, 'A<function=⟦f⟧>⟪{"q": 1}⟫ </function>', "ok", "A", 1),
    (LLAMA_TAGS, 'A<function=⟦f⟧>⟪{"q": 1}⟫', "malformed", None, 0),
    (LLAMA_TAGS, 'A<function=⟦f⟧>⟪{"q": 1}⟫ or <function=⟦g⟧>⟪{}⟫</function>', "malformed", None, 1),
    (LLAMA_TAGS, "<function=f>[1]</function>", "malformed", None, 0),
    # What a string quotes is no call, though the arguments around it are broken.
    (LLAMA_TAGS, '<function=f>{"q": "<function=g>{}</function>",}</function>', "malformed", None, 0),
    (CONTROL, "⟦<|plan|>⟧ ⟪first, then⟫\n⟦<|finish|>⟧", "ok", "", 2),
    (NO_CALLS, '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "none", None, 0),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{type(case[0]).__name__}-{plain(case[1])[:40]}")
def test_what_is_found(case):
    known, given, status, content, number = (*case, None, 0)[:5]
    text = plain(given)
    out = parse_tool_calls(text, known)
    assert marked(text, out.blocks) == given
    assert (out.status, len(out.calls)) == (status, number)
    if content is not None:
        assert out.content == content
    if not out.calls:
        assert out.content == text.strip()
    for call in out.calls:
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{type(case[0]).__name__}-{plain(case[1])[:40]}")
def test_the_length_limit_wins(case):
    text = plain(case[1])
    out = parse_tool_calls(text, case[0], finish="length")
    tried = case[2] != "none"
    assert (out.status, out.calls, out.content) == ("truncated" if tried else "none", (), text.strip())


@pytest.mark.parametrize(
    ("known", "text"),
    [
        (LLAMA3, "<|python_tag|>print(1)"),
        (LLAMA3, '<|python_tag|>search.call(query="a")'),
        (REACT, "Action: a\nAction Input: b"),
        (CONTROL, "<|plan|> a"),
        (Delimited(open="<f=", between=">", end_closes=True), "<f=a>{}"),
    ],
)
def test_only_the_end_of_a_whole_output_closes_a_block(known, text):
    assert [block.closed for block in parse_tool_calls(text, known).blocks] == [True]
    assert not any(block.closed for block in parse_tool_calls(text, known, finish="length").blocks)


XML = "<tool_call><function={}>{}</function></tool_call>"
parameter = "<parameter={}>{}</parameter>".format


@pytest.mark.parametrize(
    ("tool", "key", "written", "value"),
    [
        ("f", "n", "2", 2),
        ("f", "n", "\n2\n", 2),
        ("f", "n", "two", "two"),
        ("f", "n", "__import__('os').abort()", "__import__('os').abort()"),
        ("f", "s", "2", "2"),
        ("f", "s", '"q" é\n<b>', '"q" é\n<b>'),
        ("f", "s", "\n\n a \n\n", "\n a \n"),
        ("f", "o", '{"a": [1.0]}', {"a": [1.0]}),
        ("f", "o", "None", None),
        ("f", "b", "True", True),
        ("f", "b", "false", False),
        ("f", "unknown", "2", "2"),
        ("other", "n", "2", "2"),
    ],
)
def test_values_in_tags_follow_the_schema(tool, key, written, value):
    text = XML.format(tool, parameter(key, written))
    (call,) = parse_tool_calls(text, QWEN3_CODER, schemas=SCHEMAS).calls
    assert json.loads(call.arguments) == {key: value}


def test_numbers_in_tags_stay_as_they_were_sampled():
    text = XML.format("f", parameter("n", "1.0") + parameter("o", '{"b": 1, "a":false}'))
    (call,) = parse_tool_calls(text, QWEN3_CODER, schemas=SCHEMAS).calls
    assert call.arguments == '{"n": 1.0, "o": {"b": 1, "a":false}}'


@pytest.mark.parametrize(
    "schemas", [{"f": {"properties": 3}}, {"f": {"properties": {"n": 4}}}, {"f": {"properties": {"n": {"type": 5}}}}]
)
def test_a_schema_that_is_none_decides_nothing(schemas):
    (call,) = parse_tool_calls(XML.format("f", parameter("n", "2")), QWEN3_CODER, schemas=schemas).calls
    assert call.arguments == '{"n": "2"}'


def test_arguments_without_json_are_handed_over_as_json():
    call = lambda text, known: calls(parse_tool_calls(text, known))
    assert call("<|python_tag|>print('é')", LLAMA3) == [("code_interpreter", '{"code": "print(\'é\')"}')]
    assert call('<|python_tag|>f.call(a="x", b=1.0)', LLAMA3) == [("f", '{"a": "x", "b": 1.0}')]
    assert call("<|plan|> a", CONTROL) == [("plan", '{"input": "a"}')]
    assert call("<a>f|x</a>", Delimited(open="<a>", between="|", close=("</a>",), text_key="q", served=True)) == [
        ("f", '{"q": "x"}')
    ]


def test_text_that_a_harness_reads_stays_whole():
    text = "Action: search\nAction Input: x"
    out = parse_tool_calls(text, REACT)
    assert (out.content, out.calls, out.blocks[0].arguments) == (text, (), "x")


def test_only_control_tokens_open_a_block_where_the_tokenizer_has_them():
    texts = {
        HERMES: '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        QWEN3_CODER: "<tool_call><function=f></function></tool_call>",
        MISTRAL: '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
        LLAMA3: "<|python_tag|>print(1)",
        SEARCH: "<search>a</search>",
    }
    for known, text in texts.items():
        read = functools.partial(parse_tool_calls, text, known)
        quoted = dict.fromkeys(known.marks, frozenset())
        real = {mark: {at for at in range(len(text)) if text.startswith(mark, at)} for mark in known.marks}
        assert read().status == read(control=real).status == "ok"
        assert (read(control=quoted).status, read(control=quoted).blocks) == ("none", ())


def test_a_quoted_mark_hides_no_real_one():
    text = '<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    out = parse_tool_calls(text, HERMES, control={"<tool_call>": {11}})
    assert (out.status, len(out.calls), out.content) == ("ok", 1, "<tool_call>")


def test_a_quoted_mark_hides_none_that_begins_inside_it():
    known = SpecialTags(tags=(Tag("go", "[[", None),))
    assert [block.name_span for block in parse_tool_calls("[[[x", known, control={"[[": {1}}).blocks] == [(1, 3)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JsonCall(arguments_key="name"), r"JsonCall: keys must be non-empty and differ, got 'name', 'name'"),
        (lambda: Delimited(open="a", between="b"), r"nothing ends the arguments\. Give `close` or `until`"),
        (lambda: Delimited(open="", between="b", end_closes=True), r"a mark needs at least one character, got open ''"),
        (lambda: SpecialTags(tags=()), r"opening tags must be there"),
        (
            lambda: SpecialTags(tags=(Tag("a", "<a>", None), Tag("b", "<a>", None))),
            r"opening tags must be there, differ",
        ),
        (lambda: FunctionTags(wrap=("", "x")), r"every mark must hold at least one character"),
    ],
)
def test_a_spec_that_cannot_work_is_refused(make, message):
    with pytest.raises(RecordError, match=message):
        make()


def test_other_keys_may_stand_in_tagged_json():
    known = JsonTags(open="<c>", close="</c>", call=JsonCall(other_keys=("id",)))
    assert calls(parse_tool_calls('<c>{"id": [1], "name": "f", "arguments": {}}</c>', known)) == [("f", "{}")]
