"""A fake neighbour: an OpenAI-compatible server whose replies a test scripts."""

import asyncio
import dataclasses
import json
import threading

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

# A command of its own, with its own installs: see third_party.py.
collect_ignore_glob = ["programs/*", "third_party.py", "recipes.py", "tool_caller.py"]


@dataclasses.dataclass(frozen=True)
class Seen:
    """One request as the server saw it."""

    rollout: str
    agent: str
    session: str
    headers: dict
    body: dict
    raw: bytes

    @property
    def turn(self):
        return sum(message["role"] == "assistant" for message in self.body["messages"])

    @property
    def last(self):
        return self.body["messages"][-1]["content"]


class FakeModel:
    """Answers each request with what the rollout's script returns: (tool, argument) pairs, a text, or an HTTP error.

    A script is a function of a `Seen`, plain or async. An argument that is a text becomes the tool's one parameter; a
    `bytes` argument is sent as it is.
    """

    def __init__(self):
        self.scripts, self.requests = {}, []
        app = Starlette(routes=[Route("/run/{rollout}/0/{agent}/v1/chat/completions", self.chat, methods=["POST"])])
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off", ws="none")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)

    def start(self):
        self.thread.start()
        while not self.server.started:
            pass
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def stop(self):
        self.server.should_exit = self.server.force_exit = True  # a script may wait for ever
        self.thread.join()

    def of(self, rollout):
        return [seen for seen in self.requests if seen.rollout == rollout]

    async def chat(self, request):
        raw = await request.body()
        path = request.path_params
        session = request.headers["x-session-id"]
        seen = Seen(path["rollout"], path["agent"], session, dict(request.headers), json.loads(raw), raw)
        self.requests.append(seen)
        said = self.scripts[seen.rollout](seen)
        if asyncio.iscoroutine(said):
            said = await said
        if isinstance(said, JSONResponse):
            return said
        message = {"role": "assistant", "content": said if isinstance(said, str) else None}
        if not isinstance(said, str):
            message["tool_calls"] = [self.tool_call(*pair) for pair in said]
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return JSONResponse({"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})

    def tool_call(self, name, argument):
        parameter = {"search": "query", "ask_researcher": "question"}.get(name, "text")
        text = argument.decode() if isinstance(argument, bytes) else json.dumps({parameter: argument})
        return {
            "id": f"call-{len(self.requests)}-{name}",
            "type": "function",
            "function": {"name": name, "arguments": text},
        }


@pytest.fixture(scope="module")
def model():
    fake = FakeModel()
    fake.start()
    yield fake
    fake.stop()
