"""The official OpenAI client speaking Responses over real HTTP, and bodies as Codex sends them."""

import json

import openai
import pytest

from harnessrl_jax.gateway.responses import parse_request

SEARCH = {
    "type": "function",
    "name": "search",
    "description": "Find facts.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    "strict": False,
}
ASK = [{"role": "user", "content": "Where is Nairobi?"}]
ONE_CALL = '<tool_call>{"name": "search", "arguments": {"query": "Nairobi"}}</tool_call>'
TWO_CALLS = f'Look.\n{ONE_CALL}\n<tool_call>{{"name": "search", "arguments": {{"query": "é"}}}}</tool_call>'


def ask_tools(prompt):
    return "Done." if "tool_response" in prompt else TWO_CALLS


def results(response):
    calls = [item for item in response.output if item.type == "function_call"]
    return [{"type": "function_call_output", "call_id": call.call_id, "output": "A"} for call in calls]


def echo(response):
    return [item.model_dump(exclude_none=True) for item in response.output]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_round_trip(house, stream):
    h = house(ask_tools)
    with h.client() as client:

        def create(items):
            options = {"model": "m", "input": items, "tools": [SEARCH], "instructions": "Be brief.", "store": False}
            if not stream:
                return client.responses.create(**options)
            with client.responses.stream(**options) as events:
                return events.get_final_response()

        first = create(ASK)
        assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
        assert (first.output_text, first.status) == ("Look.", "completed")
        assert [json.loads(item.arguments) for item in first.output[1:]] == [{"query": "Nairobi"}, {"query": "é"}]
        second = create([*ASK, *echo(first), *results(first)])
    assert second.output_text == "Done."
    one, two = h.calls()
    assert (one.call.dialect, one.state, two.state) == ("openai-responses", "delivered", "delivered")
    assert first.usage.input_tokens == len(one.call.prompt_ids)
    assert first.usage.output_tokens == len(one.call.output_ids)
    prefix = [*one.call.prompt_ids, *one.call.output_ids]
    assert list(two.call.prompt_ids[: len(prefix)]) == prefix
    assert (two.notes["spliced"], two.notes["rewrites"]) == ([one.call.call_id], [])
    assert "Be brief." in h.codec.decode(one.call.prompt_ids)


def test_the_events_add_up_to_the_response(house):
    h = house(lambda prompt: TWO_CALLS)
    with h.client() as client:
        events = list(client.responses.create(model="m", input="Where?", tools=[SEARCH], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    final = events[-1].response
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in final.output]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Look."
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert arguments == [item.arguments for item in final.output[1:]]
    assert [event.output_index for event in events if event.type == "response.output_item.added"] == [0, 1, 2]


@pytest.mark.parametrize("kept", ["text", "encrypted", "nothing"])
def test_reasoning_comes_back_as_text_or_as_the_name_of_its_turn(thinking_house, kept):
    h = thinking_house(lambda prompt: "<think>\nKenya, I think.\n</think>\n\nIn Kenya.")
    with h.client() as client:
        first = client.responses.create(model="m", input=ASK, include=["reasoning.encrypted_content"])
        with client.responses.stream(model="m", input=ASK) as events:
            streamed = events.get_final_response()
        for response in (first, streamed):
            reasoning, message = response.output
            assert (reasoning.content[0].text, message.content[0].text) == ("Kenya, I think.", "In Kenya.")
            assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
        items = echo(first)
        if kept == "encrypted":
            del items[0]["content"], items[0]["id"]
        if kept == "nothing":
            items = [{"role": "assistant", "content": "In Kenya."}]
        client.responses.create(model="m", input=[*ASK, *items, {"role": "user", "content": "Sure?"}])
    one, _, last = h.calls()
    lost = kept == "nothing"
    assert last.notes["spliced"] == ([] if lost else [one.call.call_id])
    assert last.notes["rewrites"] == (["reasoning"] if lost else [])


@pytest.mark.parametrize("kept", [True, False])
def test_a_tool_call_alone_does_not_bring_its_reasoning_back(thinking_house, kept):
    said = f"<think>\nSearch first.\n</think>\n\n{ONE_CALL}"
    h = thinking_house(lambda prompt: "Done." if "<|im_start|>tool" in prompt else said)
    with h.client() as client:
        first = client.responses.create(model="m", input=ASK, tools=[SEARCH])
        assert [item.type for item in first.output] == ["reasoning", "function_call"]
        items = echo(first)[0 if kept else 1 :]
        client.responses.create(model="m", input=[*ASK, *items, *results(first)], tools=[SEARCH])
    one, two = h.calls()
    assert two.notes["rewrites"] == ([] if kept else ["reasoning"])
    prefix = [*one.call.prompt_ids, *one.call.output_ids]
    # The template writes empty reasoning where a turn has none; sampled ids replace the whole turn.
    assert (list(two.call.prompt_ids[: len(prefix)]) == prefix) is kept


def test_a_conversation_goes_on_from_a_reply_that_is_only_named(house):
    h = house(ask_tools)
    with h.client() as client:
        options = {"model": "m", "tools": [SEARCH]}
        first = client.responses.create(input="Where is Nairobi?", instructions="Be brief.", **options)
        second = client.responses.create(
            input=results(first), instructions="Be brief.", previous_response_id=first.id, **options
        )
        assert second.output_text == "Done."
        third = client.responses.create(
            input="And?", instructions="Be long.", previous_response_id=second.id, store=False, **options
        )
        for unknown in (third.id, "resp_other"):
            with pytest.raises(openai.BadRequestError, match="no reply of this attempt") as refused:
                client.responses.create(input="x", previous_response_id=unknown, **options)
            assert refused.value.code == "previous_response_not_found"
    one, two, three = (kept.call for kept in h.calls())
    prefix = [*one.prompt_ids, *one.output_ids]
    assert list(two.prompt_ids[: len(prefix)]) == prefix
    text = h.codec.decode(three.prompt_ids)
    assert "Be long." in text
    assert "Be brief." not in text
    assert text.index("Nairobi") < text.index("Done.") < text.index("And?")
    assert h.calls()[2].notes["spliced"] == [one.call_id, two.call_id]


def test_length_makes_the_response_incomplete(house):
    h = house(lambda prompt: TWO_CALLS)
    with h.client() as client:
        cut = client.responses.create(model="m", input="x", tools=[SEARCH], max_output_tokens=9)
        events = list(client.responses.create(model="m", input="x", tools=[SEARCH], max_output_tokens=9, stream=True))
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.type for item in cut.output] == ["message"]
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == cut.output_text


def test_an_overflow_has_its_own_code_in_both_forms(house, codec):
    h = house(lambda prompt: "Yes.", context_tokens=len(codec.prompt(ASK)))
    with h.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="m", input=ASK)
        assert refused.value.code == "context_length_exceeded"
        events = list(client.responses.create(model="m", input=ASK, stream=True))
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1].response.error.code == "context_length_exceeded"
    assert h.rollouts.counts()["refused/context_length_exceeded"] == 2
    assert h.calls() == []


SPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}}, SEARCH],
}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit.", "format": {"type": "grammar"}}


def test_tools_in_namespaces_and_of_text_are_called_by_their_own_names(house):
    calls = [("spawn", {}), ("agents.search", {"query": "x"}), ("search", {}), ("apply_patch", {"input": "*** Begin"})]
    said = "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>" for name, arguments in calls
    )
    h = house(lambda prompt: "Done." if "tool_response" in prompt else said)
    tools = [SEARCH, SPACE, PATCH, {"type": "web_search"}]
    with h.client() as client:
        first = client.responses.create(model="m", input=ASK, tools=tools)
        with client.responses.stream(model="m", input=ASK, tools=tools) as events:
            streamed = events.get_final_response()
        found = [(item.type, item.name, getattr(item, "namespace", None)) for item in first.output]
        assert found == [
            ("function_call", "spawn", "agents"),
            ("function_call", "search", "agents"),
            ("function_call", "search", None),
            ("custom_tool_call", "apply_patch", None),
        ]
        assert first.output[3].input == streamed.output[3].input == "*** Begin"
        outputs = [{"type": f"{item.type}_output", "call_id": item.call_id, "output": "A"} for item in first.output]
        client.responses.create(model="m", input=[*ASK, *echo(first), *outputs], tools=tools)
    one, _, last = h.calls()
    assert last.notes["spliced"] == [one.call.call_id]
    assert one.notes["ignored"]["tool:web_search"] == 1


def body(**fields):
    return json.dumps({"input": "Hi"} | fields)


def test_items_of_one_turn_are_one_message_and_other_turns_are_others():
    one, two = "a" * 24, "b" * 24
    items = [
        {"type": "reasoning", "summary": [], "encrypted_content": one},
        {"type": "message", "role": "assistant", "id": f"msg_{one}", "content": [{"type": "output_text", "text": "x"}]},
        {"type": "function_call", "call_id": f"call_{one}00", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": f"call_{two}00", "name": "f", "arguments": "{bad"},
        {"type": "function_call_output", "call_id": f"call_{two}00", "output": [{"type": "input_text", "text": "r"}]},
        {"role": "developer", "content": "rule"},
        {"role": "assistant", "content": "y"},
        {"role": "assistant", "content": "z"},
    ]
    request = parse_request(body(input=items))
    call = lambda key, arguments: {
        "id": f"call_{key}00",
        "type": "function",
        "function": {"name": "f", "arguments": arguments},
    }
    assert request.messages == [
        {"role": "assistant", "content": "x", "turn": one, "reasoning_content": "", "tool_calls": [call(one, {})]},
        {"role": "assistant", "content": "", "turn": two, "tool_calls": [call(two, "{bad")]},
        {"role": "tool", "tool_call_id": f"call_{two}00", "content": "r"},
        {"role": "system", "content": "rule"},
        {"role": "assistant", "content": "y"},
        {"role": "assistant", "content": "z"},
    ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": []}, "input must hold at least one item"),
        ({"input": 3}, "input must be text or a list of items, got int"),
        ({"input": ["x"]}, r"input\[0\] must be an object, got str"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\] is of type 'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image'; this model reads text"),
        ({"input": [{"role": "tool", "content": "x"}]}, r"input\[0\].role is 'tool'"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}, "arguments must be a text"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].name must be a text"),
        ({"conversation": "c"}, "conversation is not served here"),
        ({"background": True}, "background is not served here"),
        ({"max_output_tokens": "9"}, "max_output_tokens must be an integer"),
    ],
)
def test_a_bad_body_is_refused_with_the_field(shared_house, fields, words):
    response = shared_house.post({"input": "Hi"} | fields, path="/v1/responses")
    assert response.status_code == 400
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(response.json()["error"]["message"])
