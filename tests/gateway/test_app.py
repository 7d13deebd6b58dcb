"""The official client over real HTTP: JSON, events, tools, and what the store holds afterwards."""

import asyncio
import dataclasses
import json

import numpy as np
import openai
import pytest

from harnessrl_jax.gateway import Limits

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Find facts.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
ASK = [{"role": "user", "content": "Where is Nairobi?"}]
ONE_CALL = '<tool_call>{"name": "search", "arguments": {"query": "Nairobi"}}</tool_call>'
TWO_CALLS = f'Look.\n{ONE_CALL}\n<tool_call>{{"name": "search", "arguments": {{"query": "é"}}}}</tool_call>'


def create(house, messages=ASK, *, agent="central", session=None, **options):
    with house.client(agent, session) as client:
        return client.chat.completions.create(model="m", messages=messages, **options)


def message_of(reply):
    """The assistant message as a harness sends it back."""
    message = reply.choices[0].message
    return message.model_dump(exclude_none=True, exclude={"refusal"})


def test_a_plain_reply(house):
    h = house(lambda prompt: "In Kenya.")
    reply = create(h)
    choice = reply.choices[0]
    assert (choice.message.content, choice.finish_reason, reply.model) == ("In Kenya.", "stop", "m")
    assert choice.message.tool_calls is None
    [(call, state, notes)] = h.calls()
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(call.prompt_ids), len(call.output_ids))
    assert reply.usage.total_tokens == len(call.prompt_ids) + len(call.output_ids)
    assert (call.agent, call.session_id, call.trainable, call.seq, state) == (
        "central",
        "central",
        True,
        0,
        "delivered",
    )
    assert call.delivered
    assert call.output_ids[-1] == h.codec.stop_ids[0]
    assert tuple(call.prompt_ids) == h.sampler.requests[0].prompt_ids
    assert call.logps is not None
    assert notes["max_new_tokens"] == 256
    assert json.loads(call.request) == {"messages": ASK, "model": "m"}
    assert (call.harness, call.dialect, call.finish, call.parse_status) == ("test", "openai-chat", "stop", "none")
    assert 0 < call.started_s <= call.finished_s


def test_parallel_tool_calls_and_their_echo(house):
    h = house(lambda prompt: "Kenya." if "tool_response" in prompt else TWO_CALLS)
    reply = create(h, tools=[SEARCH])
    first, second = reply.choices[0].message.tool_calls
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.choices[0].message.content == "Look."
    assert (first.function.name, first.function.arguments) == ("search", '{"query": "Nairobi"}')
    assert json.loads(second.function.arguments) == {"query": "é"}
    assert first.id != second.id
    results = [{"role": "tool", "tool_call_id": call.id, "content": "A city."} for call in (first, second)]
    # A harness may write the arguments anew, and leave out what is null.
    echo = message_of(reply)
    echo["tool_calls"][0]["function"]["arguments"] = '{"query":"Nairobi"}'
    create(h, [*ASK, echo, *results], tools=[SEARCH])
    one, two = (kept.call for kept in h.calls())
    prefix = [*one.prompt_ids, *one.output_ids]
    assert list(two.prompt_ids[: len(prefix)]) == prefix
    assert [call.id for call in one.tool_calls] == [first.id, second.id]
    assert (one.finish, one.parse_status) == ("tool_calls", "ok")
    assert "search" in h.codec.decode(one.output_ids[one.spans[0].start : one.spans[0].end])
    assert h.calls()[1].notes["spliced"] == [one.call_id]


@pytest.mark.parametrize("content", ["", None, "missing", []])
def test_a_tool_turn_without_content_is_found_however_it_is_written(house, content):
    h = house(lambda prompt: ONE_CALL)
    echo = message_of(create(h, tools=[SEARCH]))
    assert "content" not in echo
    if content != "missing":
        echo["content"] = content
    result = {"role": "tool", "tool_call_id": echo["tool_calls"][0]["id"], "content": [{"type": "text", "text": "A"}]}
    create(h, [*ASK, echo, result], tools=[SEARCH])
    assert h.calls()[1].notes["rewrites"] == []
    assert len(h.calls()[1].notes["spliced"]) == 1


def collect(chunks):
    """What a client makes of a stream: content, tool calls, finish reason, usage."""
    content, calls, finish, usage = "", {}, None, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
                call["id"] += part.id or ""
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
    return content, list(calls.values()), finish, usage


def test_a_stream_says_what_the_json_reply_says(house):
    h = house(lambda prompt: TWO_CALLS)
    whole = create(h, tools=[SEARCH])
    with h.client() as client:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.chat.completions.create(model="m", messages=ASK, tools=[SEARCH], **options))
    content, calls, finish, usage = collect(chunks)
    message = whole.choices[0].message
    assert (content, finish, usage) == (message.content, "tool_calls", whole.usage)
    assert [(c["name"], c["arguments"]) for c in calls] == [
        (c.function.name, c.function.arguments) for c in message.tool_calls
    ]
    assert [kept.state for kept in h.calls()] == ["delivered", "delivered"]
    assert [c["id"] for c in calls] == [c.id for c in h.calls()[1].call.tool_calls]
    assert chunks[0].choices[0].delta.role == "assistant"


def test_the_asynchronous_client_streams_and_uses_helpers(house):
    h = house(lambda prompt: TWO_CALLS)

    async def run():
        to = h.endpoint
        async with openai.AsyncOpenAI(base_url=f"{to.base_url}/central/v1", api_key=to.api_key) as client:
            stream = await client.chat.completions.create(model="m", messages=ASK, tools=[SEARCH], stream=True)
            chunks = [chunk async for chunk in stream]
            async with client.chat.completions.stream(model="m", messages=ASK, tools=[SEARCH]) as events:
                async for _ in events:
                    pass
                final = await events.get_final_completion()
            models = [model.id async for model in client.models.list()]
        return collect(chunks), final, models

    (content, calls, finish, usage), final, models = asyncio.run(run())
    assert (content, len(calls), finish, usage) == ("Look.", 2, "tool_calls", None)
    assert [call.function.arguments for call in final.choices[0].message.tool_calls] == [c["arguments"] for c in calls]
    assert models == ["policy"]


def test_several_choices_are_several_calls(house):
    h = house(lambda prompt: "Yes.")
    reply = create(h, n=3)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    calls = [kept.call for kept in h.calls()]
    assert [(call.seq, call.choice) for call in calls] == [(0, 0), (0, 1), (0, 2)]
    assert len({call.call_id for call in calls}) == 3
    assert len({request.seed for request in h.sampler.requests}) == 3
    assert reply.usage.completion_tokens == sum(len(call.output_ids) for call in calls)
    with h.client() as client:
        chunks = list(client.chat.completions.create(model="m", messages=ASK, n=2, stream=True))
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}


def test_length_wins_over_a_tool_call(house):
    h = house(lambda prompt: TWO_CALLS, max_new_tokens=10)
    reply = create(h, tools=[SEARCH])
    assert (reply.choices[0].finish_reason, reply.choices[0].message.tool_calls) == ("length", None)
    [(call, _, _)] = h.calls()
    assert reply.choices[0].message.content == h.codec.decode(call.output_ids).strip()
    assert (call.finish, call.parse_status, call.tool_calls) == ("length", "truncated", ())
    # The closing tag of the first call lies inside the limit: it is still no call to execute.
    h.sampler.script = lambda prompt: h.sampler.sample(ONE_CALL + " and", len(h.codec.encode(ONE_CALL, "")) + 1)
    assert create(h, tools=[SEARCH]).choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>{"name": "search", "arguments": {"query": </tool_call>',
        '<tool_call>{"name": "search"}</tool_call>',
        "<tool_call>search('Nairobi')",
        "<tool_call>__import__('os').abort()</tool_call>",
    ],
)
def test_a_malformed_tool_call_is_text_and_can_be_sent_back(house, broken):
    h = house(lambda prompt: broken)
    reply = create(h, tools=[SEARCH])
    message = reply.choices[0].message
    assert (message.content, message.tool_calls, reply.choices[0].finish_reason) == (broken, None, "stop")
    create(h, [*ASK, message_of(reply), *ASK], tools=[SEARCH])
    one, two = h.calls()
    assert (one.call.parse_status, one.call.delivered, one.call.trainable) == ("malformed", True, True)
    assert two.notes["spliced"] == [one.call.call_id]


def test_a_tool_call_quoted_as_text_is_no_call(house, codec):
    h = house(lambda prompt: codec.encode_plain(ONE_CALL))
    reply = create(h, tools=[SEARCH])
    assert (reply.choices[0].message.tool_calls, reply.choices[0].message.content) == (None, ONE_CALL)


def test_half_a_character_at_the_end_is_shown_and_kept(house, codec):
    half = codec.encode_plain("😀")[:-1]
    assert len(half) >= 1
    h = house(lambda prompt: half)
    reply = create(h)
    assert reply.choices[0].message.content == "\ufffd"
    assert tuple(h.calls()[0].call.output_ids[:-1]) == half
    create(h, [*ASK, message_of(reply), *ASK])
    assert len(h.calls()[1].notes["spliced"]) == 1


def test_an_empty_reply(house):
    h = house(lambda prompt: "")
    reply = create(h)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("", "stop")
    assert reply.usage.completion_tokens == 1
    with h.client() as client:
        chunks = list(client.chat.completions.create(model="m", messages=ASK, stream=True))
    assert collect(chunks)[0] == ""
    assert chunks[0].choices[0].delta.role == "assistant"


def test_the_trainer_decides_how_to_sample_and_the_request_is_noted(house):
    h = house(lambda prompt: "Yes.")
    create(h, temperature=0.0, top_p=0.5, seed=3, max_tokens=20, extra_body={"store": False})
    request = h.sampler.requests[0]
    assert (request.temperature, request.top_p, request.top_k, request.max_new_tokens) == (1.0, 1.0, 0, 20)
    notes = h.calls()[0].notes
    assert notes["asked"] == {"temperature": 0.0, "top_p": 0.5, "seed": 3, "store": False}
    assert (notes["max_tokens_asked"], notes["max_new_tokens"]) == (20, 20)


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ({}, 256),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 9}, 9),
        ({"max_tokens": 32_000}, 256),
        ({"max_tokens": 8, "max_completion_tokens": 5}, 5),
    ],
)
def test_the_smallest_limit_wins(house, asked, given):
    h = house(lambda prompt: "x")
    create(h, **asked)
    assert h.sampler.requests[0].max_new_tokens == given


def test_the_context_limits_the_reply_and_refuses_what_leaves_no_room(house, codec):
    size = len(codec.prompt(ASK))
    h = house(lambda prompt: "a b c d e f g h", context_tokens=size + 3)
    assert create(h).choices[0].finish_reason == "length"
    assert h.sampler.requests[0].max_new_tokens == 3
    with pytest.raises(openai.BadRequestError) as refused:
        create(h, [*ASK, {"role": "user", "content": "and more"}])
    assert refused.value.code == "context_length_exceeded"
    assert "maximum context length" in refused.value.message
    assert len(h.calls()) == 1
    assert h.rollouts.counts()["refused/context_length_exceeded"] == 1


def test_the_last_token_of_the_context_can_be_sampled(house, codec):
    # No merge of this vocabulary holds a Q: one more letter is one more token.
    ask = lambda letters: [{"role": "user", "content": "Q" * letters}]
    size = len(codec.prompt(ask(5)))
    h = house(lambda prompt: "a b", context_tokens=size + 1)
    assert h.post({"messages": ask(5)}).json()["usage"]["completion_tokens"] == 1
    assert len(codec.prompt(ask(6))) == size + 1
    full = h.post({"messages": ask(6)})
    assert full.json()["error"]["code"] == "context_length_exceeded"


def test_sessions_and_agents_are_kept_apart(house):
    h = house(lambda prompt: ONE_CALL)
    opener = create(h, tools=[SEARCH]).choices[0].message.tool_calls[0].id
    create(h, agent="researcher", session="r-1")
    with h.client("researcher", "r-2") as client:
        client.chat.completions.create(model="m", messages=ASK, extra_headers={"x-parent-tool-call-id": opener})
    calls = [kept.call for kept in h.calls()]
    assert [(c.agent, c.session_id, c.trainable) for c in calls] == [
        ("central", "central", True),
        ("researcher", "r-1", False),
        ("researcher", "r-2", False),
    ]
    assert [call.parent_call_id for call in calls] == [None, None, calls[0].call_id]


def test_equal_prompts_are_siblings_with_seeds_of_their_own(house):
    h = house(lambda prompt: "Yes.")
    for _ in range(3):
        create(h)
    assert len({request.seed for request in h.sampler.requests}) == 3
    assert [kept.call.retry for kept in h.calls()] == [False] * 3


def test_a_retry_is_declared_by_the_client(house):
    h = house(lambda prompt: "Yes.")
    for retries in ("0", "2", "x"):
        h.post({"messages": ASK}, **{"x-stainless-retry-count": retries})
    assert [kept.call.retry for kept in h.calls()] == [False, True, False]
    assert len({kept.call.request_digest for kept in h.calls()}) == 1


def test_the_same_run_gives_the_same_names_and_seeds(house, tmp_path, codec):
    seen = []
    for rollout_id in ("r0", "r0", "r1"):
        (tmp_path / "calls.sqlite").unlink(missing_ok=True)
        h = house(lambda prompt: ONE_CALL)
        endpoint = h.endpoint if rollout_id == "r0" else h.open(rollout_id)
        with h.client(endpoint=endpoint) as client:
            reply = client.chat.completions.create(model="m", messages=ASK, tools=[SEARCH])
        seen.append((reply.choices[0].message.tool_calls[0].id, h.sampler.requests[0].seed))
        h.close()
    assert seen[0] == seen[1]
    assert seen[0][0] != seen[2][0]
    assert seen[0][1] != seen[2][1]


def test_a_version_is_kept_with_each_call(house):
    h = house(lambda prompt: "Yes.")
    create(h)
    h.sampler.load_weights(None, 3)
    create(h)
    assert [kept.call.version_end for kept in h.calls()] == [0, 3]


def test_sixty_four_conversations_at_once(house):
    h = house(lambda prompt: ONE_CALL if "tool_response" not in prompt else "Done.", limits=Limits(max_calls=200))

    async def converse(client, number):
        ask = [{"role": "user", "content": f"Question {number % 8}?"}]
        headers = {"x-session-id": f"s{number}"}
        create = lambda messages: client.chat.completions.create(
            model="m", messages=messages, tools=[SEARCH], extra_headers=headers
        )
        echo = message_of(await create(ask))
        result = {"role": "tool", "tool_call_id": echo["tool_calls"][0]["id"], "content": "A"}
        return (await create([*ask, echo, result])).choices[0].message.content

    async def run():
        to = h.endpoint
        async with openai.AsyncOpenAI(base_url=f"{to.base_url}/central/v1", api_key=to.api_key) as client:
            return await asyncio.gather(*(converse(client, number) for number in range(64)))

    assert asyncio.run(run()) == ["Done."] * 64
    calls = h.calls()
    assert len(calls) == 128
    assert {kept.state for kept in calls} == {"delivered"}
    assert sorted(kept.call.seq for kept in calls) == list(range(128))
    assert sum(len(kept.notes["spliced"]) for kept in calls) == 64
    assert h.rollouts.close("run", "r0", 0)["delivered"] == 128


def test_without_a_choice_of_tools_a_call_is_text(house):
    h = house(lambda prompt: ONE_CALL)
    reply = create(h, tools=[SEARCH], tool_choice="none")
    assert (reply.choices[0].message.content, reply.choices[0].message.tool_calls) == (ONE_CALL, None)
    assert (reply.choices[0].finish_reason, h.calls()[0].notes["asked"]) == ("stop", {"tool_choice": "none"})
    assert "<tools>" not in h.codec.decode(h.calls()[0].call.prompt_ids)
    create(h, [*ASK, message_of(reply), *ASK], tools=[SEARCH], tool_choice="none")
    assert h.calls()[1].notes["spliced"] == [h.calls()[0].call.call_id]


@pytest.mark.parametrize("said", ["Look.", "Look.</code>", "Look. </code>", "Look.\n</code>"])
def test_a_stop_text_ends_the_turn_and_may_come_back(house, said):
    h = house(lambda prompt: "Look. </code> and more")
    reply = create(h, stop=["Observation:", "</code>"])
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("Look.", "stop")
    [kept] = h.calls()
    assert h.codec.decode(kept.call.output_ids) == "Look. </code>"
    assert reply.usage.completion_tokens == len(kept.call.output_ids) == len(kept.call.logps)
    create(h, [*ASK, {"role": "assistant", "content": said}, *ASK])
    prompt = h.codec.decode(h.calls()[1].call.prompt_ids)
    assert h.calls()[1].notes["spliced"] == [kept.call.call_id]
    assert "<|im_start|>assistant\nLook. </code><|im_end|>\n<|im_start|>user" in prompt


@pytest.mark.parametrize("kept", [True, False])
def test_reasoning_stands_beside_the_content(thinking_house, kept):
    h = thinking_house(lambda prompt: "<think>\nKenya.\n</think>\n\nIn Kenya.")
    message = message_of(create(h))
    assert (message["content"], message["reasoning_content"]) == ("In Kenya.", "Kenya.")
    with h.client() as client:
        chunks = list(client.chat.completions.create(model="m", messages=ASK, stream=True))
    told = [getattr(chunk.choices[0].delta, "reasoning_content", None) for chunk in chunks]
    assert "".join(filter(None, told)) == "Kenya."
    if not kept:
        del message["reasoning_content"]
    create(h, [*ASK, message, *ASK])
    assert h.calls()[2].notes["rewrites"] == ([] if kept else ["reasoning"])


def test_what_the_harness_says_about_itself_is_kept(house):
    h = house(lambda prompt: "Yes.")
    names = {"x-claude-code-session-id": "s1", "x-claude-code-agent-id": "a7", "x-app": "cli", "x-secret": "no"}
    h.post({"messages": ASK}, **names)
    h.post({"messages": ASK}, **{"session-id": "root", "thread-id": "t2"})
    h.post({"messages": ASK}, **{"x-claude-code-session-id": "s1", "x-session-id": "mine"})
    calls = [kept.call for kept in h.calls()]
    assert [call.session_id for call in calls] == ["a7", "t2", "mine"]
    assert calls[0].headers == {name: value for name, value in names.items() if name != "x-secret"}
    # Seeds know nothing of names that a harness draws by chance.
    assert len({request.seed for request in h.sampler.requests}) == 3
    again = house(lambda prompt: "Yes.", store="again.sqlite")
    again.post({"messages": ASK}, **{"x-claude-code-session-id": "other"})
    assert again.sampler.requests[0].seed == h.sampler.requests[0].seed


def test_a_key_may_come_as_anthropics_clients_send_it(house):
    h = house(lambda prompt: "Yes.")
    assert h.post({"messages": ASK}, **{"authorization": "", "x-api-key": h.endpoint.api_key}).status_code == 200
    assert h.post({"messages": ASK}, **{"authorization": "", "x-api-key": "wrong"}).status_code == 401


def test_a_compressed_body_is_refused(house):
    h = house(lambda prompt: "Yes.")
    response = h.post(b"x", **{"content-encoding": "zstd"})
    assert (response.status_code, response.json()["error"]["code"]) == (415, "compressed_body")


def test_the_experts_that_a_sampler_reports_are_recorded(house):
    """Those of the tokens that were read: of the prompt, and of the output but the last."""
    h = house(lambda prompt: "")
    plain = h.sampler.complete

    async def complete(request):
        sample = await plain(request)
        read = len(request.prompt_ids) + len(sample.output_ids) - 1
        return dataclasses.replace(sample, experts=np.arange(read)[:, None, None] % 7)

    h.sampler.complete = complete
    assert h.post({"messages": [{"role": "user", "content": "Hi"}]}).status_code == 200
    (kept,) = h.calls()
    tokens = len(kept.call.prompt_ids) + len(kept.call.output_ids) - 1
    assert kept.call.experts.ravel().tolist() == [place % 7 for place in range(tokens)]
