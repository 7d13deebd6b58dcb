"""HTTP requests -> the gateway -> HTTP replies, as JSON or server-sent events. Errors have the shape of the dialect."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from harnessrl_jax.errors import StoreError, TextError
from harnessrl_jax.gateway import exchange
from harnessrl_jax.gateway.capture import Envelope
from harnessrl_jax.gateway.delivery import Delta, Item, Stream, Whole
from harnessrl_jax.gateway.dialects import COUNT_PATH, MESSAGES, PATHS, dialect_at
from harnessrl_jax.gateway.exchange import Dialect, Head
from harnessrl_jax.gateway.reading import body_of, envelope_of, key_of
from harnessrl_jax.gateway.refusal import Refusal, bad_request
from harnessrl_jax.gateway.registry import OpenRollout, Rollouts
from harnessrl_jax.gateway.service import Answer, Gateway, closed
from harnessrl_jax.sampler.protocol import Sampler

LOGGER = logging.getLogger(__name__)
MODEL = "policy"
MAX_BODY_BYTES = 16 << 20


def create_app(
    gateway: Gateway, rollouts: Rollouts, sampler: Sampler, *, max_body_bytes: int = MAX_BODY_BYTES
) -> Starlette:
    """Wires the routes. The sampler is started with the application and closed with it.

    Args:
      gateway: answers requests.
      rollouts: who may ask.
      sampler: the gateway's sampler.
      max_body_bytes: longer requests are refused with 413.

    Returns:
      An ASGI application; what stands below a rollout also stands below its agents, `.../{attempt}/{agent}/...`:
        `POST /{run}/{rollout}/{attempt}/v1/chat/completions`   OpenAI chat completions
        `POST /{run}/{rollout}/{attempt}/v1/responses`          OpenAI Responses
        `POST /{run}/{rollout}/{attempt}/v1/messages`           Anthropic Messages
        `POST /{run}/{rollout}/{attempt}/v1/messages/count_tokens`
        `GET /{run}/{rollout}/{attempt}/v1/models`
        `HEAD /` and `HEAD /{run}/{rollout}/{attempt}`          what some harnesses try first
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

    routes = [Route("/health", endpoints.health), Route("/", endpoints.probe, methods=["HEAD"])]
    for prefix in ("/{run}/{rollout}/{attempt}", "/{run}/{rollout}/{attempt}/{agent}"):
        routes += [Route(prefix + path, endpoints.reply, methods=["POST"]) for path in PATHS]
        routes.append(Route(prefix + COUNT_PATH, endpoints.count_tokens, methods=["POST"]))
        routes.append(Route(f"{prefix}/v1/models", endpoints.models))
        routes += [Route(prefix + end, endpoints.probe, methods=["HEAD"]) for end in ("", "/")]
    handlers = {Refusal: _refused, HTTPException: _no_route, Exception: _broken}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


class _Endpoints(NamedTuple):
    """What the routes do. Holds no state of its own."""

    gateway: Gateway
    rollouts: Rollouts
    max_body_bytes: int

    async def reply(self, request: Request) -> Response:
        started_s = self.gateway.clock()
        rollout = self._admit(request)
        dialect = dialect_at(request.url.path)
        with _counted(rollout):
            envelope, wanted = await self._read(request, rollout, dialect, started_s)
            if wanted.stream:
                return await self._stream(rollout, dialect, envelope, wanted)
            answer = await self.gateway.answer(rollout, envelope, wanted)
        return Whole(dialect.whole(answer.reply), lambda delivered: self.gateway.settle(rollout, answer, delivered))

    async def count_tokens(self, request: Request) -> Response:
        rollout = self._admit(request)
        with _counted(rollout):
            envelope, wanted = await self._read(request, rollout, MESSAGES, self.gateway.clock())
            return JSONResponse({"input_tokens": self.gateway.count(rollout, envelope, wanted)})

    async def models(self, request: Request) -> Response:
        self._admit(request)
        context = self.gateway.policy.context_tokens
        model: dict[str, Any] = {"id": MODEL, "object": "model", "created": 0, "owned_by": "harnessrl_jax"}
        listed = {"object": "list", "data": [model | {"max_model_len": context}]}
        if "anthropic-version" in request.headers:
            model = {"type": "model", "id": MODEL, "display_name": MODEL, "created_at": "1970-01-01T00:00:00Z"}
            model |= {"max_input_tokens": context, "lifecycle": "active"}
            listed = {"data": [model], "has_more": False, "first_id": MODEL, "last_id": MODEL}
        return JSONResponse(listed)

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def probe(self, request: Request) -> Response:
        return Response()

    def _admit(self, request: Request) -> OpenRollout:
        names = request.path_params
        return self.rollouts.find(names["run"], names["rollout"], names["attempt"], key_of(request.headers))

    async def _read(
        self, request: Request, rollout: OpenRollout, dialect: Dialect, started_s: float
    ) -> tuple[Envelope, exchange.Request]:
        if rollout.closed:
            rollout.counts["late"] += 1
            raise closed(rollout)
        body = await body_of(request, self.max_body_bytes)
        wanted = dialect.parse(body)
        return envelope_of(request, body, started_s), wanted

    async def _stream(
        self, rollout: OpenRollout, dialect: Dialect, envelope: Envelope, wanted: exchange.Request
    ) -> Response:
        """Begins to answer once there is something to send, so that a refusal before that keeps its status."""
        items: asyncio.Queue[Item] = asyncio.Queue()

        def show(head: Head, choice: int, kind: exchange.Kind, text: str) -> None:
            items.put_nowait(Delta(head, choice, kind, text))

        async def work() -> None:
            try:
                items.put_nowait(await self.gateway.answer(rollout, envelope, wanted, show))
            except Exception as error:
                items.put_nowait(_refusal_of(error))

        task = asyncio.create_task(work())
        try:
            first = await items.get()
        except asyncio.CancelledError:
            task.cancel()
            raise
        head = Head(request=wanted, call_id="refused", created=int(envelope.started_s), prompt_tokens=0)
        if isinstance(first, Answer):
            head = first.reply.head
        elif isinstance(first, Delta):
            head = first.head
        elif dialect.refuses_in_stream(first):
            rollout.counts[f"refused/{first.code}"] += 1
        else:
            raise first
        settle = lambda answer, delivered: self.gateway.settle(rollout, answer, delivered)
        return Stream(dialect.events(head), first, items, task, settle)


@contextlib.contextmanager
def _counted(rollout: OpenRollout) -> Iterator[None]:
    """Turns what ends a request into a refusal, and counts it."""
    try:
        yield
    except asyncio.CancelledError as error:
        # The server cancels what is left when it stops; the client gets an answer all the same.
        raise Refusal("The gateway is stopping.", status=503, code="shutting_down", retry=True) from error
    except Exception as error:
        refusal = _refusal_of(error)
        if refusal.code not in ("rollout_closed", "internal_error", "store_failed"):
            rollout.counts[f"refused/{refusal.code}"] += 1
        raise refusal from error


def _refusal_of(error: Exception) -> Refusal:
    """What an error says to the client; what is no refusal on purpose also goes to the log."""
    match error:
        case Refusal():
            return error
        case TextError():
            return bad_request(str(error), code="template", param="messages")
        case StoreError():
            LOGGER.error("%s", error)
            return Refusal(str(error), status=503, code="store_failed")
        case _:
            LOGGER.error("A request failed.", exc_info=error)
            text = f"The gateway failed on this request ({type(error).__name__}); the log has the traceback."
            return Refusal(text, status=500, code="internal_error")


def _respond(request: Request, refusal: Refusal) -> Response:
    body, headers = dialect_at(request.url.path).error(refusal)
    return JSONResponse(body, refusal.status, headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return _respond(request, error)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    wanted = f"POST {{base_url}}{', '.join((*PATHS, COUNT_PATH))} and GET {{base_url}}/v1/models"
    refusal = Refusal(f"{where}: {error.detail}. Served are {wanted}.", status=error.status_code, code="no_route")
    return _respond(request, refusal)


async def _broken(request: Request, error: Exception) -> Response:
    return _respond(request, _refusal_of(error))
