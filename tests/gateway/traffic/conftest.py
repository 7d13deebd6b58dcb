"""Recorded requests of a harness -> the same requests through our gateway, answered as they were answered then.

A recording holds requests only. What the model said stands in the request that goes on from it: there the turn is
found, sampled again token by token; its tool-call ids are put in place of the recorded ones wherever they come back.
"""

import asyncio
import functools
import itertools
import json
import pathlib
import re
from typing import NamedTuple

import pytest

from harnessrl_jax.errors import SamplerError
from harnessrl_jax.gateway import Gateway, Rollouts, SamplingPolicy, Store, create_app
from harnessrl_jax.gateway.dialects import PATHS
from harnessrl_jax.gateway.exchange import TURN
from harnessrl_jax.trajectories.headers import claims

FOLDER = pathlib.Path(__file__).parents[2] / "data/harness_traffic"
# What the recorded server said when it had nothing to call.
DONE = "The capital of France is Paris. TASK_DONE"
_OUR_ID = re.compile(r"call_[0-9a-f]{24}[0-9]{2}(?![0-9a-f])")


class Recorded(NamedTuple):
    """One request as a harness sent it."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict | None
    failed: bool
    """Whether the server answered with an error then."""
    in_flight: int
    """How many others were not answered yet when it came."""


def load(name):
    data = json.loads((FOLDER / f"{name}.json").read_text())
    tools = data["tools"]
    out = []
    for request in data["requests"]:
        body = request["body"]
        if body and body.get("tools"):
            body["tools"] = [tools[index] for index in body["tools"]]
        failed = request.get("failed", False)
        here = (request["method"], request["path"], request["headers"])
        out.append(Recorded(*here, body, failed, request["in_flight"]))
    return out


def path_of(request):
    return request.path.partition("?")[0]


def conversation(request):
    """Thread and messages of a request, without what the harness may vary: instructions, names of turns."""
    dialect = PATHS.get(path_of(request))
    if request.body is None or dialect is None:
        return None
    messages = dialect.parse(json.dumps(request.body)).messages
    plain = [{key: value for key, value in message.items() if key != TURN} for message in messages]
    said = claims(request.headers)
    return (said.thread if said else ""), list(itertools.dropwhile(lambda message: message["role"] == "system", plain))


def answers(requests):
    """The turn that each request was answered with, as a later request shows it; None where none does.

    A request that goes on from another begins with its messages. A turn that stands elsewhere, because the history was
    summed up, is taken for the latest answer that nothing else shows. What stood in a prompt before was not sampled for
    it: some harnesses begin with a turn that they wrote themselves.
    """
    found = [conversation(request) for request in requests]
    out = [next(_answers_to(here, found[at + 1 :]), None) for at, here in enumerate(found)]
    seen = []
    for at, here in enumerate(found):
        fresh = [message for message in here[1] if message not in seen] if here else []
        seen += fresh
        for message in fresh:
            if message["role"] == "assistant" and not any(message == known for known in out if known):
                open_still = [i for i in range(at) if found[i] and found[i][0] == here[0] and out[i] is None]
                if open_still:
                    out[open_still[-1]] = message
    return out


def _answers_to(here, later):
    size = len(here[1]) if here else 0
    for there in later:
        same = here and there and there[0] == here[0] and there[1][:size] == here[1]
        if same and len(there[1]) > size and there[1][size]["role"] == "assistant":
            yield there[1][size]


def text_of(request, message):
    """A turn as the model writes it."""
    if message is None:
        # What no request shows must not be taken for what others show.
        return DONE if request.body and request.body.get("tools") else "Something else."
    calls = [call["function"] for call in message.get("tool_calls", ())]
    blocks = [f"<tool_call>{json.dumps({'name': c['name'], 'arguments': c['arguments']})}</tool_call>" for c in calls]
    return "\n".join(filter(None, [message["content"], *blocks]))


class Reply(NamedTuple):
    status: int
    text: str


class Replayed(NamedTuple):
    """What came of a recording."""

    replies: list[Reply]
    kept: list
    counts: dict
    """Of the rollout, when it was closed."""


async def ask(app, method, path, headers, body, *, gone=False):
    """One request through the application; `gone`: the client leaves before the answer."""
    asked = False
    sent = []

    async def receive():
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}
        return {"type": "http.disconnect"} if gone else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    place, _, query = path.partition("?")
    scope = {"type": "http", "method": method, "path": place, "raw_path": place.encode(), "root_path": ""}
    scope |= {"query_string": query.encode(), "http_version": "1.1", "scheme": "http", "server": ("x", 1)}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers.items()]
    await app(scope, receive, send)
    return Reply(sent[0]["status"], b"".join(message.get("body", b"") for message in sent).decode())


def replay(name, codec, sampler, folder, *, failures="refused", together=False):
    """Sends a recording in its order.

    Args:
      name: of the recording.
      codec: the model.
      sampler: a `Scripted` one; its script is replaced.
      folder: for the store.
      failures: what became of the requests that failed then: "refused" by the sampler, or "lost", answered to a client
        that had left.
      together: whether requests overlap where they did.
    """
    requests = load(name)
    with Store(folder / f"{name}.sqlite") as store:
        rollouts = Rollouts(store, "http://gateway", lambda: "secret")
        policy = SamplingPolicy(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=512, context_tokens=1 << 20)
        ticks = itertools.count(1)
        gateway = Gateway(
            store=store, sampler=sampler, codec=codec, policy=policy, run_seed=7, clock=lambda: float(next(ticks))
        )
        app = create_app(gateway, rollouts, sampler)
        rollouts.open(
            **{"run_id": "run", "task_id": "t0", "group_id": "g0", "rollout_id": "r0", "attempt": 0},
            **{"harness": name, "trainable_agents": {"agent"}},
        )
        replies = asyncio.run(_send(app, sampler, requests, failures, together))
        counts = rollouts.close("run", "r0", 0)
        return Replayed(replies, store.calls("r0", 0), counts)


async def _send(app, sampler, requests, failures, together):
    """Request by request; with `together`, those that overlapped then overlap again."""
    await sampler.start()
    replies, ours = [], {}
    for wave in _waves(list(zip(requests, answers(requests), strict=True)), together):
        texts = iter([text_of(request, said) for request, said in wave])
        refuse = wave[0][0].failed and failures == "refused"
        sampler.script = _broken if refuse else lambda prompt, texts=texts: _spelled(sampler.codec, next(texts))
        sent = [_ask_again(app, request, ours, gone=request.failed and not refuse) for request, _ in wave]
        for (request, said), reply in zip(wave, await asyncio.gather(*sent), strict=True):
            replies.append(reply)
            recorded = [call["id"] for call in (said or {}).get("tool_calls", ())]
            if not request.failed and recorded:
                ours |= zip(recorded, dict.fromkeys(_OUR_ID.findall(reply.text)), strict=True)
    return replies


def _waves(pairs, together):
    waves = []
    for pair in pairs:
        if together and pair[0].in_flight and waves:
            waves[-1].append(pair)
        else:
            waves.append([pair])
    return waves


async def _ask_again(app, request, ours, *, gone):
    body = b"" if request.body is None else json.dumps(request.body).encode()
    for recorded, known in ours.items():
        body = body.replace(recorded.encode(), known.encode())
    headers = request.headers | {"authorization": "Bearer secret"}
    return await ask(app, request.method, "/run/r0/0" + request.path, headers, body, gone=gone)


def _broken(prompt):
    raise SamplerError("Out of order.")


def _spelled(codec, text):
    """Ids that no tokenizer would choose for this text: one token a letter, so that only stored ids can match."""
    parts = re.split("(</?tool_call>)", text)
    spell = lambda part: [i for letter in part for i in codec.encode_plain(letter)]
    return [i for at, part in enumerate(parts) for i in (codec.encode(part, "") if at % 2 else spell(part))]


@pytest.fixture(scope="session")
def replayed(codec, scripted, tmp_path_factory):
    """`replayed(name, ...)` is what came of one recording, sent through a gateway of its own."""

    @functools.cache
    def once(name, **options):
        return replay(name, codec, scripted(None), tmp_path_factory.mktemp("replay"), **options)

    return once


@pytest.fixture(scope="session")
def recorded():
    """`recorded(name)` is the requests of one recording and the turns that answered them, where they are known."""
    return functools.cache(lambda name: (load(name), answers(load(name))))


@pytest.fixture
def replay_again(codec, scripted):
    """`replay_again(name, folder)` sends a recording once more."""
    return lambda name, folder: replay(name, codec, scripted(None), folder)
