"""Models that write calls in another way: what the harness gets, and what the record says, from the same tokens."""

import json

import pytest

from harnessrl_jax.gateway import TextCodec
from harnessrl_jax.trajectories import Role
from harnessrl_jax.trajectories.formats import QWEN3_CODER, REACT

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
        },
    },
}
ASK = [{"role": "user", "content": "Where is Nairobi?"}]
HERMES_LINE = '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
CODER_LINES = """<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() %}
<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}
</function>"""
CALL = (
    "<tool_call>\n<function=search>\n<parameter=query>\n5,199 metres\n</parameter>\n"
    "<parameter=limit>\n3\n</parameter>\n</function>\n</tool_call>"
)


@pytest.fixture(scope="module")
def coder(train, tmp_path_factory):
    folder = train(tmp_path_factory.mktemp("coder"))
    template = folder / "chat_template.jinja"
    source = template.read_text()
    assert HERMES_LINE in source
    template.write_text(source.replace(HERMES_LINE, CODER_LINES))
    return folder


@pytest.fixture(params=["coder", "react"])
def codec(request, coder, model_folder):
    return TextCodec(coder) if request.param == "coder" else TextCodec(model_folder, tool_format=REACT)


def spelled(codec, call, role):
    return [codec.decode(call.output_ids[span.start : span.end].tolist()) for span in call.spans if span.role == role]


@pytest.mark.parametrize("codec", ["coder"], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
def test_calls_written_as_tags_are_served_as_json(house, codec, stream):
    assert codec.tool_format is QWEN3_CODER
    h = house(lambda prompt: "Look.\n" + CALL if "5,199" not in prompt else "High.")
    with h.client() as client:
        if stream:
            with client.chat.completions.stream(model="m", messages=ASK, tools=[TOOL]) as events:
                reply = events.get_final_completion()
        else:
            reply = client.chat.completions.create(model="m", messages=ASK, tools=[TOOL])
        (choice,) = reply.choices
        (made,) = choice.message.tool_calls
        assert (choice.message.content, choice.finish_reason, made.function.name) == ("Look.", "tool_calls", "search")
        assert json.loads(made.function.arguments) == {"query": "5,199 metres", "limit": 3}
        # The harness echoes the call; the sampled ids stand in the next prompt.
        echo = choice.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
        answer = {"role": "tool", "tool_call_id": made.id, "content": "Mount Kenya"}
        client.chat.completions.create(model="m", messages=[*ASK, echo, answer], tools=[TOOL])
    [(first, _, _), (second, _, _)] = h.calls()
    assert first.parse_status == "ok"
    assert spelled(codec, first, Role.ACTION) == ["search"]
    assert json.loads(first.tool_calls[0].arguments) == {"query": "5,199 metres", "limit": 3}
    (said,) = spelled(codec, first, Role.ARGS)
    assert said.startswith("<parameter=query>")
    both = [*first.prompt_ids, *first.output_ids]
    assert second.prompt_ids[: len(both)].tolist() == both


@pytest.mark.parametrize("codec", ["react"], indirect=True)
def test_calls_that_the_harness_reads_stay_in_the_text(house, codec):
    text = "Thought: look\nAction: search\nAction Input: Nairobi"
    h = house(lambda prompt: text)
    with h.client() as client:
        reply = client.chat.completions.create(model="m", messages=ASK)
    choice = reply.choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    [(call, _, _)] = h.calls()
    assert (call.parse_status, call.tool_calls) == ("ok", ())
    assert [word.strip() for word in spelled(codec, call, Role.ACTION)] == ["search"]
    assert [word.strip() for word in spelled(codec, call, Role.ARGS)] == ["Nairobi"]
