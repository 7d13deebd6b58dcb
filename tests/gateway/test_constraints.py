"""What a request says about the form of its reply holds, whatever the model: here one with random weights."""

import json
import sys

import anthropic
import jax
import numpy as np
import openai
import pydantic
import pytest
from tokenizers import Tokenizer

from harnessrl_jax.gateway.capture import _behaviour
from harnessrl_jax.gateway.constraints import anthropic_choice, openai_choice, schema_of
from harnessrl_jax.gateway.exchange import Constraint
from harnessrl_jax.gateway.grammar import Grammars, _check
from harnessrl_jax.gateway.refusal import Refusal
from harnessrl_jax.models import DecoderConfig, init_params
from harnessrl_jax.sampler import Engine, LocalSampler, Sample, SampleRequest
from harnessrl_jax.sampler.vocabulary import Vocabulary
from harnessrl_jax.trajectories.formats import GLM4, HERMES, LLAMA3, BareJson
from harnessrl_jax.trajectories.records import LogpKind

CITY = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "The capital of Kenya?"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}}


def tool(name, wrap="function"):
    definition = {"name": name, "description": "Looks.", "parameters": CITY}
    return {"type": "function", wrap: definition} if wrap else {"type": "function", **definition}


SEARCH, FIND = tool("search"), tool("find")


def fits(value):
    value = json.loads(value) if isinstance(value, str) else value
    return value.keys() == {"name", "size"} and len(value["name"]) <= 6 and value["size"] in ("small", "large")


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return Tokenizer.from_file(str(model_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def sampler(codec, tokenizer):
    size = codec.vocab_size + 5  # as embeddings that are padded
    config = DecoderConfig(vocab_size=size, hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_size=16)
    engine = Engine(config=config, slots=4, length=512, chunk=64, steps=4, pages=16)
    made = LocalSampler(engine, vocabulary=Vocabulary(tokenizer, size))
    made.load_weights(jax.tree.map(lambda x: 3.0 * x, init_params(config, jax.random.key(0))), 0)
    return made


@pytest.fixture(scope="module")
def h(codec, sampler, tmp_path_factory):
    from tests.gateway.conftest import House

    made = House(tmp_path_factory.mktemp("forms") / "c.sqlite", codec, None, context_tokens=512, sampler=sampler)
    yield made
    made.close()


def create(h, **wishes):
    return h.client(timeout=120).chat.completions.create(model="m", **({"messages": ASK} | wishes))


def test_chat_follows_a_schema(h):
    reply = create(h, response_format=FORMAT, n=3)
    assert [fits(choice.message.content) for choice in reply.choices] == [True] * 3
    assert len({choice.message.content for choice in reply.choices}) > 1
    assert {choice.finish_reason for choice in reply.choices} == {"stop"}


def test_forbidden_tokens_are_not_sampled_and_log_probabilities_are_the_models(h):
    free = create(h, logprobs=True, max_tokens=40)
    spelled = {bytes(token.bytes) for token in free.choices[0].logprobs.content}
    ids = [i for i in range(h.codec.vocab_size) if h.codec.bytes_of(i) in spelled]
    reply = create(h, logprobs=True, max_tokens=40, logit_bias={str(i): -100 for i in ids})
    tokens = reply.choices[0].logprobs.content
    assert not spelled & {bytes(token.bytes) for token in tokens} - {b""}
    call = next(kept.call for kept in h.calls() if kept.call.call_id == reply.id.removeprefix("chatcmpl-"))
    # At temperature 1 the whole vocabulary's are the model's own, whatever was forbidden.
    np.testing.assert_allclose([token.logprob for token in tokens], call.logps, atol=1e-5)
    assert call.logp_kind == LogpKind(mode="processed", temperature=1.0, top_p=1.0, top_k=0)


def test_a_stream_follows_a_schema(h):
    chunks = create(h, response_format=FORMAT, stream=True)
    assert fits("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


def test_the_sdk_parses_into_a_model(h):
    class City(pydantic.BaseModel):
        capital: bool
        rank: int = pydantic.Field(ge=0, le=9)

    reply = h.client(timeout=120).chat.completions.parse(model="m", messages=ASK, response_format=City)
    assert isinstance(reply.choices[0].message.parsed, City)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"search", "find"}),
        ({"type": "function", "function": {"name": "find"}}, {"find"}),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [SEARCH]}},
            {"search"},
        ),
    ],
)
def test_chat_calls_the_tools_that_must_be_called(h, choice, names):
    reply = create(h, tools=[SEARCH, FIND], tool_choice=choice, n=4, parallel_tool_calls=False)
    for one in reply.choices:
        assert (one.finish_reason, one.message.content, len(one.message.tool_calls)) == ("tool_calls", None, 1)
        assert fits(one.message.tool_calls[0].function.arguments)
        assert one.message.tool_calls[0].function.name in names


def test_a_schema_beside_tools_leaves_the_choice(h):
    reply = create(h, tools=[SEARCH], response_format=FORMAT, n=8, parallel_tool_calls=False)
    calls = [one.message.tool_calls[0].function.arguments for one in reply.choices if one.message.tool_calls]
    contents = [one.message.content for one in reply.choices if not one.message.tool_calls]
    assert len(calls + contents) == 8
    assert all(map(fits, calls + contents))


def test_responses_follow_schema_and_choice(h):
    client = h.client(timeout=120).responses
    reply = client.create(
        model="m", input="Kenya?", text={"format": {"type": "json_schema", "name": "c", "schema": CITY}}
    )
    assert fits(reply.output_text)
    tools = [tool("search", wrap=None), tool("find", wrap=None)]
    choice = {"type": "function", "name": "find"}
    reply = client.create(model="m", input="Kenya?", tools=tools, tool_choice=choice, parallel_tool_calls=False)
    (call,) = reply.output
    assert (call.type, call.name, fits(call.arguments)) == ("function_call", "find", True)


def test_messages_follow_schema_and_choice(h):
    client = h.anthropic(timeout=120).messages
    wishes = {"model": "m", "max_tokens": 200, "messages": ASK}
    reply = client.create(**wishes, output_config={"format": {"type": "json_schema", "schema": CITY}})
    assert fits(reply.content[0].text)
    tools = [{"name": name, "description": "Looks.", "input_schema": CITY} for name in ("search", "find")]
    for choice, names in (({"type": "any"}, {"search", "find"}), ({"type": "tool", "name": "search"}, {"search"})):
        once = choice | {"disable_parallel_tool_use": True}  # a random model would go on calling
        reply = client.create(**wishes, tools=tools, tool_choice=once)
        assert reply.stop_reason == "tool_use"
        assert {block.name for block in reply.content} <= names
        assert all(block.type == "tool_use" and fits(block.input) for block in reply.content)


def test_sampling_ends_at_a_stop_text(h, codec):
    stops = list("aeiost")
    (choice,) = create(h, max_tokens=40, stop=stops).choices
    output = h.calls()[-1].call.output_ids.tolist()
    assert choice.finish_reason == "stop"
    assert not set(stops) & set(choice.message.content)
    assert not set(stops) & set(codec.decode(output[:-1]))
    assert set(stops) & set(codec.decode(output))


def test_what_cannot_be_enforced_is_refused(h):
    wrong = [
        ({"response_format": {"type": "grammar"}}, r"response_format\.type is 'grammar'; this gateway knows"),
        ({"response_format": {"type": "json_schema"}}, r"response_format\.json_schema must be an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            r"cannot be held to this schema: .*Simplify it",
        ),
        (
            {"tools": [SEARCH], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            r"names 'x', which is not",
        ),
        ({"tool_choice": "required"}, r"asks for a call, but there are no tools"),
        ({"tools": [SEARCH], "tool_choice": 7}, r"tool_choice must be none, auto, required"),
    ]
    for wishes, message in wrong:
        with pytest.raises(openai.BadRequestError, match=message):
            create(h, **wishes)
    with pytest.raises(anthropic.BadRequestError, match=r"tool_choice\.type must be auto, any, none"):
        h.anthropic().messages.create(model="m", max_tokens=5, messages=ASK, tool_choice={"type": "all"})


def test_without_the_package_the_extra_is_named(h, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    _check.cache_clear()
    with pytest.raises(openai.BadRequestError, match=r"harnessrl-jax\[schemas\]") as error:
        create(h, response_format={"type": "json_object"})
    assert error.value.code == "schemas_not_installed"
    _check.cache_clear()


def test_nothing_is_asked_by_plain_values():
    assert schema_of(None, "f") is schema_of({"type": "text"}, "f") is None
    for choice in (None, "none", "auto", {"type": "allowed_tools", "mode": "auto", "tools": []}):
        assert openai_choice(choice, ["a"]) == ()
    for choice in (None, {"type": "auto"}, {"type": "none"}):
        assert anthropic_choice(choice, ["a"]) == ()
    assert Grammars(HERMES, {}).of(Constraint(), [SEARCH], opened=False) == ""


CALL = '{"name": "search", "arguments": {"name": "x", "size": "small"}}'
TAGGED = f"<tool_call>{CALL}</tool_call>"
MUST = Constraint(must_call=("search",))
ALONE = MUST._replace(parallel=False)
SCHEMA = Constraint(schema=CITY)


@pytest.mark.parametrize(
    ("tool_format", "constraint", "tools", "opened", "good", "bad"),
    [
        (HERMES, MUST, True, False, f"<tool_call>\n{CALL}\n</tool_call>", CALL),
        (HERMES, MUST, True, False, f"{TAGGED}\n{TAGGED}", "<tool_call></tool_call>"),
        (HERMES, ALONE, True, False, TAGGED, f"{TAGGED}{TAGGED}"),
        (HERMES, MUST, True, False, TAGGED, TAGGED.replace("search", "find")),
        (HERMES, MUST, True, True, f"So, {{ }}.</think>\n\n{TAGGED}", f"</think>{CALL}"),
        (BareJson(), MUST, True, False, CALL, TAGGED),
        (LLAMA3, MUST, True, False, CALL.replace("arguments", "parameters"), CALL),
        (HERMES, SCHEMA, False, True, 'Hm.</think>{"name": "", "size": "large"}', '</think>{"name": 1}'),
        (HERMES, SCHEMA, False, False, '{\n  "name": "", "size":"large"\n}', 'Hm. {"name": "", "size": "large"}'),
        (HERMES, SCHEMA, True, False, '{"name": "", "size": "large"}', "Hm."),
        (HERMES, SCHEMA, True, False, TAGGED.replace("search", "find"), "<tool_call>Hm.</tool_call>"),
        (GLM4, Constraint(schema={"enum": ["a"]}), False, False, '"a"', '"b"'),
    ],
)
def test_turns_that_grammars_allow(codec, tokenizer, tool_format, constraint, tools, opened, good, bad):
    grammar = Grammars(tool_format, codec.control).of(constraint, [SEARCH, FIND] if tools else [], opened=opened)
    vocabulary, end = Vocabulary(tokenizer, codec.vocab_size), codec.stop_ids[0]
    request = SampleRequest(prompt_ids=(1,), max_new_tokens=1, stop_ids=(end,), grammar=grammar)

    def follow(text):
        guide = vocabulary.guide(request)
        for token in [*codec.encode(text, ""), end]:
            if not guide.words()[token // 32] >> np.uint32(token % 32) & 1:
                return False
            guide.accept(token)
        return True

    assert follow(good)
    assert not follow(bad)


def test_reasoning_may_come_first_where_the_model_can_open_it(codec):
    control = {"<think>": 3, "</think>": 4}  # two tokens of the tokenizer, renamed
    grammar = Grammars(HERMES, control).of(Constraint(schema={"enum": ["a"]}), [], opened=False)
    assert "thoughts? " in grammar
    assert "thoughts: <[3]> TEXT <[4]>" in grammar


def test_formats_without_a_grammar_are_refused():
    with pytest.raises(Refusal, match=r"Calls in this model's format \(FunctionTags\) cannot be enforced"):
        Grammars(GLM4, {}).of(MUST, [SEARCH], opened=False)


def test_constrained_calls_are_recorded_under_the_whole_vocabulary():
    kind = LogpKind(mode="processed", temperature=0.5, top_p=0.9, top_k=3, min_p=0.1)
    arrays = {"logps": np.log(np.array([0.5, 1.0], np.float32)), "survival": np.array([0.5, 0.01], np.float32)}
    sample = Sample(
        output_ids=np.zeros(2, np.int32), logp_kind=kind, versions=np.zeros(2, np.int32), finish="stop", **arrays
    )
    logps, recorded = _behaviour(sample, constrained=True)
    np.testing.assert_allclose(np.exp(logps), [0.25, 0.01], rtol=1e-5)
    assert recorded == LogpKind(mode="processed", temperature=0.5, top_p=1.0, top_k=0)
    assert _behaviour(sample, constrained=False) == (sample.logps, kind)
