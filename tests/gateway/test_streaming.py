"""Events go out while tokens are sampled; the terminal one waits for the disk; what breaks on the way is said."""

import asyncio
import contextlib
import json
import threading

import httpx
import pytest

from harnessrl_jax.errors import SamplerError
from harnessrl_jax.gateway import Store
from harnessrl_jax.gateway.chat import parse_request
from harnessrl_jax.gateway.chat_reply import ChatEvents
from harnessrl_jax.gateway.delivery import Delta, Stream
from harnessrl_jax.gateway.exchange import Choice, Head, Reply, TokenLogp
from harnessrl_jax.gateway.live import Live
from harnessrl_jax.gateway.sampling import listener
from harnessrl_jax.gateway.service import Answer

ASK = [{"role": "user", "content": "Hi"}]
SAID = "One two three four."
PATHS = {
    "/v1/chat/completions": ({"messages": ASK}, "[DONE]", "content"),
    "/v1/responses": ({"input": ASK}, "response.completed", "response.output_text.delta"),
    "/v1/messages": ({"messages": ASK, "max_tokens": 100}, "message_stop", "text_delta"),
}


async def lines_of(house, path, body):
    """Each line of a stream as it arrives."""
    headers = {"authorization": f"Bearer {house.endpoint.api_key}"}
    url = f"{house.endpoint.base_url}/central{path}"
    async with (
        httpx.AsyncClient(trust_env=False) as client,
        client.stream("POST", url, json=body | {"stream": True}, headers=headers) as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            yield line


def states(house):
    with Store(house.store.path, read_only=True) as reader:
        return [kept.state for kept in reader.calls("r0", 0)]


@pytest.mark.parametrize("path", PATHS)
def test_text_arrives_while_it_is_sampled_and_the_end_waits_for_the_disk(house, path):
    body, terminal, kind = PATHS[path]
    h = house(lambda prompt: SAID)
    go = asyncio.Event()

    async def pace():
        paced.append(None)
        while len(paced) > 3 and not go.is_set():
            await asyncio.sleep(0.01)

    heard, paced = [], []
    h.sampler.pace = pace

    async def run():
        async for line in lines_of(h, path, body):
            if kind in line and not heard:
                heard.append(line)
                # Nothing is stored: the rest of the turn is not sampled yet.
                assert states(h) == []
                go.set()
            if terminal in line:
                # The note that it was delivered may be on disk as well by now.
                assert states(h) in (["sampled"], ["delivered"])

    asyncio.run(run())
    assert heard
    [kept] = h.calls()
    assert (kept.state, h.codec.decode(kept.call.output_ids[:-1])) == ("delivered", SAID)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "said", [SAID, "", "a <tool_call>{", 'Go.<tool_call>{"name": "f", "arguments": {}}</tool_call> on']
)
def test_a_live_stream_says_what_one_at_the_end_says(house, path, said):
    body, _, _ = PATHS[path]
    h = house(lambda prompt: said)

    async def run():
        live = [json.loads(line[6:]) async for line in lines_of(h, path, body) if line.startswith("data: {")]
        h.sampler.quiet = True
        late = [json.loads(line[6:]) async for line in lines_of(h, path, body) if line.startswith("data: {")]
        return live, late

    def text_of(events):
        """All text of one kind together, in the order of the kinds."""
        out = {}
        for event in events:
            delta = event.get("delta")
            for choice in event.get("choices", ()):
                if choice["delta"].get("content"):
                    out["content"] = out.get("content", "") + choice["delta"]["content"]
            if isinstance(delta, str):
                out[event["type"]] = out.get(event["type"], "") + delta
            elif isinstance(delta, dict) and "type" in delta:
                key = delta.pop("type")
                out[key] = out.get(key, "") + "".join(delta.values())
        return out

    live, late = asyncio.run(run())
    assert text_of(live) == text_of(late)
    assert len(live) >= len(late)


@pytest.mark.parametrize("path", PATHS)
def test_a_sampler_that_fails_on_the_way_ends_the_stream_with_an_error(house, path):
    body, terminal, _ = PATHS[path]
    h = house(lambda prompt: SAID)

    async def pace():
        if len(h.sampler.requests) and h.codec.stop_ids:
            await asyncio.sleep(0.05)
            raise SamplerError("Slot lost.")

    h.sampler.pace = pace

    async def run():
        return [line async for line in lines_of(h, path, body)]

    lines = asyncio.run(run())
    text = "\n".join(lines)
    assert "Slot lost." in text
    assert "sampler_failed" in text
    assert terminal not in text
    h.store.flush()
    assert h.store.counts() == {"calls/failed": 1}
    h.rollouts.close("run", "r0", 0, timeout_s=5)


@pytest.mark.parametrize("path", PATHS)
def test_a_sampler_that_fails_at_once_is_a_status(house, path):
    body, _, _ = PATHS[path]

    def fail(prompt):
        raise SamplerError("Slot lost.")

    h = house(fail)
    response = h.post(body | {"stream": True}, path=path)
    assert response.status_code == 503
    assert response.headers["x-should-retry"] == "true"
    assert "Slot lost." in response.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_leaves_in_the_middle_loses_nothing(house, path):
    body, _, kind = PATHS[path]
    h = house(lambda prompt: SAID)

    async def pace():
        await asyncio.sleep(0.02)

    h.sampler.pace = pace

    async def run():
        async for line in lines_of(h, path, body):
            if kind in line:
                return

    asyncio.run(run())
    # Closing waits for replies on their way.
    for _ in range(200):
        if h.calls():
            break
        asyncio.run(asyncio.sleep(0.02))
    assert h.rollouts.close("run", "r0", 0, timeout_s=5)["undelivered"] == 1
    [kept] = h.calls()
    assert (kept.state, h.codec.decode(kept.call.output_ids[:-1])) == ("undelivered", SAID)


def test_choices_stream_side_by_side(house):
    h = house(lambda prompt: SAID)

    async def run():
        body = {"messages": ASK, "n": 2}
        return [line async for line in lines_of(h, "/v1/chat/completions", body) if line.startswith("data: {")]

    texts = {0: "", 1: ""}
    for line in asyncio.run(run()):
        for choice in json.loads(line[6:])["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == {0: SAID, 1: SAID}


def waiting(send):
    """What a stream settles whose text and end were there before it began to send."""
    head = Head(request=parse_request(json.dumps({"messages": ASK})), call_id="c", created=0, prompt_tokens=1)
    tokens = tuple(TokenLogp(text.encode(), -float(at), False) for at, text in enumerate("rabc"))
    choice = Choice(content="abc", tool_calls=(), finish="stop", reasoning="r", logprobs=tokens)
    answer = Answer(Reply(head=head, choices=[choice], completion_tokens=4, reasoning_tokens=1), ())
    kinds = ("reasoning", "content", "content")
    deltas = [Delta(head, 0, kind, text, (token,)) for kind, text, token in zip(kinds, "rab", tokens, strict=False)]
    settled = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def run():
        items = asyncio.Queue()
        for item in (*deltas[1:], answer):
            items.put_nowait(item)
        work = asyncio.create_task(asyncio.sleep(0))
        settle = lambda given, delivered: settled.append((given, delivered))
        await Stream(ChatEvents(head), deltas[0], items, work, settle)({"type": "http"}, receive, send)

    with contextlib.suppress(OSError):
        asyncio.run(run())
    assert [given for given, _ in settled] == [answer]
    return settled[0][1]


def test_text_that_waits_goes_out_in_one_piece():
    sent = []

    async def send(message):
        sent.append(message)

    assert waiting(send)
    _start, text, end = sent
    choices = [json.loads(line[6:])["choices"][0] for line in text["body"].decode().split("\n\n")[:-1]]
    told = [choice["logprobs"] and [token["token"] for token in choice["logprobs"]["content"]] for choice in choices]
    assert told == [None, ["r"], ["a", "b"]]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "r"},
        {"content": "ab"},
    ]
    assert (text["more_body"], b'"content":"c"' in end["body"], b"[DONE]" in end["body"]) == (True, True, True)


def test_an_answer_behind_text_that_cannot_be_sent_is_settled_once():
    async def send(message):
        if message["type"] == "http.response.body":
            raise OSError("gone")

    assert not waiting(send)


class Counted(asyncio.SelectorEventLoop):
    """An event loop that counts how often another thread wakes it."""

    woken = 0

    def call_soon_threadsafe(self, *given, **options):
        self.woken += 1
        return super().call_soon_threadsafe(*given, **options)


def test_a_loop_that_is_behind_is_woken_once_for_all_tokens(codec):
    live = Live(codec.decode, lambda ids: False, opened=False, marks=(), stop_ids=codec.stop_ids)
    said = codec.encode(SAID, "")
    head = Head(request=parse_request(json.dumps({"messages": ASK})), call_id="c", created=0, prompt_tokens=1)
    shown = []

    async def run():
        loop = asyncio.get_running_loop()
        hear = listener(live, head, 0, lambda *what: shown.append(what[2:4])).tokens
        for times, part in enumerate((said[:3], said[3:-1]), start=1):
            sampler = threading.Thread(target=lambda part=part: [hear([one]) for one in part])
            sampler.start()
            sampler.join()
            await asyncio.sleep(0)
            assert (loop.woken, len(shown)) == (times, times)
        hear(said[-1:])  # on the loop itself: in its next turn, and nobody is woken
        assert (loop.woken, len(shown)) == (2, 2)
        await asyncio.sleep(0)
        assert (loop.woken, len(shown)) == (2, 3)

    with asyncio.Runner(loop_factory=Counted) as runner:
        runner.run(run())
    assert "".join(text for _, text in shown) == SAID
