"""The official Anthropic client over real HTTP, and bodies as Claude Code sends them."""

import asyncio
import json

import anthropic
import pytest

from harnessrl_jax.gateway.messages import parse_request
from harnessrl_jax.gateway.normalise import normalise

SEARCH = {
    "name": "search",
    "description": "Find facts.",
    "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}},
}
ASK = [{"role": "user", "content": "Where is Nairobi?"}]
ONE_CALL = '<tool_call>{"name": "search", "arguments": {"query": "Nairobi"}}</tool_call>'
TWO_CALLS = f'Look.\n{ONE_CALL}\n<tool_call>{{"name": "search", "arguments": {{"query": "é"}}}}</tool_call>'
OPTIONS = {"model": "m", "max_tokens": 200}


def ask_tools(prompt):
    return "Done." if "tool_response" in prompt else TWO_CALLS


def results(message):
    return [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "A"}]}
        for block in message.content
        if block.type == "tool_use"
    ]


def echo(message):
    """The turn as a harness sends it back, with marks for a cache."""
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    blocks[-1]["cache_control"] = {"type": "ephemeral"}
    return {"role": "assistant", "content": blocks}


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_round_trip(house, stream):
    h = house(ask_tools)
    with h.anthropic() as client:

        def create(messages):
            options = {**OPTIONS, "messages": messages, "tools": [SEARCH], "system": "Be brief."}
            if not stream:
                return client.messages.create(**options)
            with client.messages.stream(**options) as events:
                return events.get_final_message()

        first = create(ASK)
        assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
        assert (first.content[0].text, first.stop_reason, first.stop_sequence) == ("Look.", "tool_use", None)
        assert [block.input for block in first.content[1:]] == [{"query": "Nairobi"}, {"query": "é"}]
        second = create([*ASK, echo(first), {"role": "user", "content": results(first)}])
    assert (second.content[0].text, second.stop_reason) == ("Done.", "end_turn")
    one, two = h.calls()
    assert (one.call.dialect, one.state, two.state) == ("anthropic-messages", "delivered", "delivered")
    assert first.usage.input_tokens == len(one.call.prompt_ids)
    assert first.usage.output_tokens == len(one.call.output_ids)
    prefix = [*one.call.prompt_ids, *one.call.output_ids]
    assert list(two.call.prompt_ids[: len(prefix)]) == prefix
    assert (two.notes["spliced"], two.notes["rewrites"]) == ([one.call.call_id], [])
    assert two.notes["ignored"] == {"cache_control": 1}
    assert [call.id for call in one.call.tool_calls] == [block.id for block in first.content[1:]]


def test_thinking_comes_back_as_it_was_sampled(thinking_house):
    h = thinking_house(lambda prompt: "<think>\nKenya, I think.\n</think>\n\nIn Kenya.")
    with h.anthropic() as client:
        whole = client.messages.create(**OPTIONS, messages=ASK)
        with client.messages.stream(**OPTIONS, messages=ASK) as events:
            streamed = events.get_final_message()
        for message in (whole, streamed):
            thinking, text = message.content
            assert (thinking.thinking, text.text) == ("Kenya, I think.", "In Kenya.")
        more = {"role": "user", "content": "Sure?"}
        client.messages.create(**OPTIONS, messages=[*ASK, echo(streamed), more])
        without = {"role": "assistant", "content": "In Kenya."}
        client.messages.create(**OPTIONS, messages=[*ASK, without, more])
        omitted = echo(streamed)
        omitted["content"][0]["thinking"] = ""
        client.messages.create(**OPTIONS, messages=[*ASK, omitted, more])
    calls = h.calls()
    assert (calls[4].notes["spliced"], calls[4].notes["rewrites"]) == ([calls[1].call.call_id], [])
    assert (calls[2].notes["spliced"], calls[2].notes["rewrites"]) == ([calls[1].call.call_id], [])
    assert (calls[3].notes["spliced"], calls[3].notes["rewrites"]) == ([], ["reasoning"])
    assert "Kenya, I think." not in h.codec.decode(calls[3].call.prompt_ids)


def test_the_reasons_to_stop(house):
    h = house(lambda prompt: "a b c STOP d e f g")
    with h.anthropic() as client:
        full = client.messages.create(**OPTIONS, messages=ASK)
        cut = client.messages.create(model="m", max_tokens=2, messages=ASK)
        stopped = client.messages.create(**OPTIONS, messages=ASK, stop_sequences=["x", "STOP"])
    assert (full.stop_reason, cut.stop_reason) == ("end_turn", "max_tokens")
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
    assert stopped.content[0].text == "a b c"


def test_the_asynchronous_client_and_the_counts(house):
    h = house(lambda prompt: "Yes.")

    async def run():
        to = h.endpoint
        async with anthropic.AsyncAnthropic(base_url=f"{to.base_url}/central", api_key=to.api_key) as client:
            counted = await client.messages.count_tokens(model="m", messages=ASK, system="Brief.", tools=[SEARCH])
            reply = await client.messages.create(**OPTIONS, messages=ASK, system="Brief.", tools=[SEARCH])
            events = await client.messages.create(**OPTIONS, messages=ASK, stream=True)
            kinds = [event.type async for event in events]
            models = [model.id async for model in client.models.list()]
        return counted.input_tokens, reply.usage.input_tokens, kinds, models

    counted, used, kinds, models = asyncio.run(run())
    assert counted == used
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert models == ["policy"]
    assert len(h.calls()) == 2


def test_the_beta_path_and_the_probe(house):
    h = house(lambda prompt: "Yes.")
    with h.anthropic() as client:
        reply = client.beta.messages.create(**OPTIONS, messages=ASK, betas=["x-2025-01-01"])
    assert reply.content[0].text == "Yes."
    import httpx

    with httpx.Client(trust_env=False) as client:
        for url in (h.server.url, h.endpoint.base_url, f"{h.endpoint.base_url}/central/"):
            assert client.head(url).status_code == 200


def test_errors_have_the_shape_of_the_dialect(house, codec):
    size = len(codec.prompt(ASK))
    h = house(lambda prompt: "Yes.", context_tokens=size + 3)
    with h.anthropic(max_retries=0) as client:
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > ") as refused:
            client.messages.create(**OPTIONS, messages=ASK * 2)
        assert refused.value.body["error"]["code"] == "context_length_exceeded"
        assert refused.value.body["type"] == "error"
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
        with pytest.raises(anthropic.BadRequestError, match="this model reads text only"):
            client.messages.create(**OPTIONS, messages=[{"role": "user", "content": [image]}])
        client.messages.create(**OPTIONS, messages=ASK)
    with (
        h.anthropic(endpoint=h.endpoint._replace(api_key="wrong")) as client,
        pytest.raises(anthropic.AuthenticationError),
    ):
        client.messages.create(**OPTIONS, messages=ASK)
    assert h.rollouts.counts()["refused/context_length_exceeded"] == 1


def body(**fields):
    return json.dumps({"messages": ASK, "max_tokens": 9} | fields)


BILLING = "x-anthropic-billing-header: cc_version=2.1.197.d46; cc_entrypoint=sdk-cli; cch=%s;"


def test_the_billing_line_does_not_move_the_prompt():
    blocks = lambda mark: [{"type": "text", "text": BILLING % mark}, {"type": "text", "text": "You are."}]
    one, two = (parse_request(body(system=blocks(mark))) for mark in ("a1", "b2"))
    assert one.messages == two.messages == [{"role": "system", "content": "You are."}, *ASK]
    assert one.normalised == ("claude-code-billing-line",)
    assert parse_request(body(system=BILLING % "c")).messages == ASK
    assert normalise("Say x-anthropic-billing-header: no")[1] == ()


def test_results_and_texts_keep_their_order_and_reminders_their_place():
    content = [
        {"type": "tool_result", "tool_use_id": "b", "content": "B", "is_error": True},
        {"type": "tool_result", "tool_use_id": "a"},
        {"type": "text", "text": "one"},
        {"type": "text", "text": "two"},
    ]
    messages = [{"role": "user", "content": content}, {"role": "system", "content": "Remember."}]
    request = parse_request(body(messages=messages))
    assert request.messages == [
        {"role": "tool", "tool_call_id": "b", "content": "B"},
        {"role": "tool", "tool_call_id": "a", "content": ""},
        {"role": "user", "content": "one\ntwo"},
        {"role": "system", "content": "Remember."},
    ]
    assert request.ignored == {"is_error": 1}


def test_tools_that_the_service_would_run_are_left_out_and_counted():
    tools = [SEARCH | {"defer_loading": True}, {"type": "web_search_20250305", "name": "web_search"}]
    request = parse_request(body(tools=tools))
    assert [tool["function"]["name"] for tool in request.tools] == ["search"]
    assert request.tools[0]["function"]["parameters"] == SEARCH["input_schema"]
    assert request.ignored == {"tool:web_search_20250305": 1, "defer_loading": 1}
    assert parse_request(body(tools=tools, tool_choice={"type": "none"})).tools == []


def test_what_is_asked_and_not_followed_is_noted():
    fields = {"thinking": {"type": "adaptive"}, "temperature": 1, "metadata": {"user_id": "u"}, "top_k": 3}
    assert parse_request(body(**fields)).asked == {
        "thinking": "...",
        "temperature": 1,
        "metadata": "...",
        "top_k": 3,
    }


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages must hold at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role is 'robot'"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content must be text or a list of blocks"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, r"content\[0\] must be an object, got str"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'; this model reads text only"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id must be a text"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "x", "input": 3}]}]},
            "input must",
        ),
        ({"system": [{"type": "image"}]}, r"system\[0\] is of type 'image'"),
        ({"tools": [{"description": "x"}]}, r"tools\[0\].name must be a text"),
        ({"stop_sequences": [""]}, "stop_sequences must be a text or a list of texts"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1"),
    ],
)
def test_a_bad_body_is_refused_with_the_field(shared_house, fields, words):
    response = shared_house.post({"messages": ASK} | fields, path="/v1/messages")
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(error["message"])
