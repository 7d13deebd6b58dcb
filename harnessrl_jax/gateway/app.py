"""HTTP requests -> the gateway -> HTTP replies, as JSON or server-sent events. Every error has OpenAI's shape."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from harnessrl_jax.errors import StoreError, TextError
from harnessrl_jax.gateway.capture import Envelope
from harnessrl_jax.gateway.chat import parse_request, reply_events, reply_json
from harnessrl_jax.gateway.identity import session_of
from harnessrl_jax.gateway.refusal import Refusal, bad_request, openai_error
from harnessrl_jax.gateway.registry import OpenRollout, Rollouts
from harnessrl_jax.gateway.service import Gateway, closed
from harnessrl_jax.sampler.protocol import Sampler

LOGGER = logging.getLogger(__name__)
DEFAULT_AGENT = "agent"
MODEL = "policy"
MAX_BODY_BYTES = 16 << 20


def create_app(
    gateway: Gateway, rollouts: Rollouts, sampler: Sampler, *, max_body_bytes: int = MAX_BODY_BYTES
) -> Starlette:
    """Wires the routes. The sampler is started with the application and closed with it.

    Args:
      gateway: answers chat requests.
      rollouts: who may ask.
      sampler: the gateway's sampler.
      max_body_bytes: longer requests are refused with 413.

    Returns:
      An ASGI application:
        `POST /{run}/{rollout}/{attempt}[/{agent}]/v1/chat/completions`
        `GET /{run}/{rollout}/{attempt}[/{agent}]/v1/models`
        `GET /health`
    """
    endpoints = _Endpoints(gateway, rollouts, max_body_bytes)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await sampler.start()
        try:
            yield
        finally:
            await sampler.close()

    routes = [Route("/health", endpoints.health)]
    for prefix in ("/{run}/{rollout}/{attempt}", "/{run}/{rollout}/{attempt}/{agent}"):
        routes.append(Route(f"{prefix}/v1/chat/completions", endpoints.chat, methods=["POST"]))
        routes.append(Route(f"{prefix}/v1/models", endpoints.models))
    handlers = {Refusal: _refused, HTTPException: _no_route, StoreError: _not_stored, Exception: _broken}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


class _Endpoints(NamedTuple):
    """What the routes do. Holds no state of its own."""

    gateway: Gateway
    rollouts: Rollouts
    max_body_bytes: int

    async def chat(self, request: Request) -> Response:
        started_s = self.gateway.clock()
        rollout = self._admit(request)
        try:
            if rollout.closed:
                rollout.counts["late"] += 1
                raise closed(rollout)
            body = await _body(request, self.max_body_bytes)
            wanted = parse_request(body)
            answer = await self.gateway.answer(rollout, _envelope(request, body, started_s), wanted)
        except asyncio.CancelledError as error:
            # The server cancels what is left when it stops; the client gets an answer all the same.
            raise Refusal("The gateway is stopping.", status=503, code="shutting_down", retry=True) from error
        except TextError as error:
            rollout.counts["refused/template"] += 1
            raise bad_request(str(error), code="template", param="messages") from error
        except Refusal as refusal:
            rollout.counts[f"refused/{refusal.code}"] += 1
            raise
        settle = lambda delivered: self.gateway.settle(rollout, answer, delivered)
        if not wanted.stream:
            return _Delivery(reply_json(answer.reply), "application/json", settle)
        events = reply_events(answer.reply, include_usage=wanted.include_usage)
        return _Delivery(b"".join(events), "text/event-stream; charset=utf-8", settle)

    async def models(self, request: Request) -> Response:
        self._admit(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "harnessrl_jax"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    def _admit(self, request: Request) -> OpenRollout:
        names = request.path_params
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        key = secret.strip() if scheme.lower() == "bearer" else None
        return self.rollouts.find(names["run"], names["rollout"], names["attempt"], key)


class _Delivery(Response):
    """A reply whose calls are on disk; afterwards it is known whether the client was there to take it."""

    def __init__(self, body: bytes, media_type: str, settle: Callable[[bool], None]) -> None:
        super().__init__(body, media_type=media_type)
        self._settle = settle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        delivered = False
        try:
            gone = await Request(scope, receive).is_disconnected()
            await super().__call__(scope, receive, send)
            delivered = not gone
        finally:
            self._settle(delivered)


def _envelope(request: Request, body: str, started_s: float) -> Envelope:
    agent = request.path_params.get("agent", DEFAULT_AGENT)
    headers = request.headers
    retries = headers.get("x-stainless-retry-count", "0")
    return Envelope(
        agent=agent,
        session_id=session_of(headers.get("x-session-id"), agent),
        opened_by=headers.get("x-parent-tool-call-id"),
        retry=retries.isascii() and retries.isdigit() and int(retries[:9]) > 0,
        body=body,
        started_s=started_s,
    )


async def _body(request: Request, limit: int) -> str:
    """The body as text, never reading much more than `limit` bytes."""
    data = bytearray()
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > limit:
                raise Refusal(
                    f"The request is longer than {limit} bytes. Shorten the conversation.",
                    status=413,
                    code="request_too_large",
                )
    except ClientDisconnect as error:
        raise bad_request("The client left before its request was complete.", code="incomplete_request") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(f"The body is not UTF-8 ({error.reason} at byte {error.start}).") from error


def _respond(refusal: Refusal) -> Response:
    body, headers = openai_error(refusal)
    return JSONResponse(body, refusal.status, headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return _respond(error)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    wanted = "POST {base_url}/v1/chat/completions or GET {base_url}/v1/models"
    return _respond(
        Refusal(f"{where}: {error.detail}. This gateway serves {wanted}.", status=error.status_code, code="no_route")
    )


async def _not_stored(request: Request, error: Exception) -> Response:
    LOGGER.error("%s", error)
    return _respond(Refusal(str(error), status=503, code="store_failed"))


async def _broken(request: Request, error: Exception) -> Response:
    text = f"The gateway failed on this request ({type(error).__name__}); the log has the traceback."
    return _respond(Refusal(text, status=500, code="internal_error"))
