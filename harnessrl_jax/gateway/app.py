"""HTTP requests -> the gateway -> HTTP replies, as JSON or server-sent events. Errors have the shape of the dialect."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from harnessrl_jax.gateway import exchange, failures
from harnessrl_jax.gateway.capture import Envelope
from harnessrl_jax.gateway.delivery import Delta, Item, Stream, Whole
from harnessrl_jax.gateway.dialects import COUNT_PATH, MESSAGES, PATHS, dialect_at
from harnessrl_jax.gateway.exchange import Dialect, Head
from harnessrl_jax.gateway.failures import counted
from harnessrl_jax.gateway.metrics import ServiceCollector
from harnessrl_jax.gateway.reading import body_of, envelope_of, key_of
from harnessrl_jax.gateway.refusal import Refusal
from harnessrl_jax.gateway.registry import OpenRollout, Rollouts
from harnessrl_jax.gateway.service import Answer, Gateway, closed
from harnessrl_jax.gateway.traffic import Traffic
from harnessrl_jax.sampler.protocol import Sampler

MODEL = "policy"
MAX_BODY_BYTES = 16 << 20


def create_app(
    gateway: Gateway,
    rollouts: Rollouts,
    sampler: Sampler,
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
    traffic: Traffic | None = None,
) -> Starlette:
    """Wires the routes. The sampler is started with the application and closed with it.

    Args:
      gateway: answers requests.
      rollouts: who may ask.
      sampler: the gateway's sampler.
      max_body_bytes: longer requests are refused with 413.
      traffic: counts the requests, and lets the owner of the application drain it.

    Returns:
      An ASGI application; what stands below a rollout also stands below its agents, `.../{attempt}/{agent}/...`:
        `POST /{run}/{rollout}/{attempt}/v1/chat/completions`   OpenAI chat completions
        `POST /{run}/{rollout}/{attempt}/v1/responses`          OpenAI Responses
        `POST /{run}/{rollout}/{attempt}/v1/messages`           Anthropic Messages
        `POST /{run}/{rollout}/{attempt}/v1/messages/count_tokens`
        `GET /{run}/{rollout}/{attempt}/v1/models`
        `HEAD /` and `HEAD /{run}/{rollout}/{attempt}`          what some harnesses try first
        `GET /health`    whether the process lives
        `GET /ready`     whether it takes requests; 503 with the reason if not
        `GET /metrics`   what it counts, for Prometheus
    """
    traffic = Traffic() if traffic is None else traffic
    registry = CollectorRegistry()
    registry.register(traffic)
    registry.register(ServiceCollector(rollouts, gateway))
    endpoints = _Endpoints(gateway, rollouts, max_body_bytes, traffic, registry)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await sampler.start()
        try:
            yield
        finally:
            await sampler.close()

    routes = [Route("/health", endpoints.health), Route("/", endpoints.probe, methods=["HEAD"])]
    routes += [Route("/ready", endpoints.ready), Route("/metrics", endpoints.metrics)]
    for prefix in ("/{run}/{rollout}/{attempt}", "/{run}/{rollout}/{attempt}/{agent}"):
        routes += [Route(prefix + path, endpoints.reply, methods=["POST"]) for path in PATHS]
        routes.append(Route(prefix + COUNT_PATH, endpoints.count_tokens, methods=["POST"]))
        routes.append(Route(f"{prefix}/v1/models", endpoints.models))
        routes += [Route(prefix + end, endpoints.probe, methods=["HEAD"]) for end in ("", "/")]
    handlers = {Refusal: failures.refused, HTTPException: failures.no_route, Exception: failures.broken}
    counting = Middleware(traffic.counted)
    return Starlette(routes=routes, middleware=[counting], lifespan=lifespan, exception_handlers=handlers)


class _Endpoints(NamedTuple):
    """What the routes do. Holds no state of its own."""

    gateway: Gateway
    rollouts: Rollouts
    max_body_bytes: int
    traffic: Traffic
    registry: CollectorRegistry

    async def reply(self, request: Request) -> Response:
        started_s = self.gateway.clock()
        rollout = self._admit(request)
        dialect = dialect_at(request.url.path)
        with counted(rollout):
            envelope, wanted = await self._read(request, rollout, dialect, started_s)
            if wanted.stream:
                return await self._stream(rollout, dialect, envelope, wanted)
            answer = await self.gateway.answer(rollout, envelope, wanted)
        return Whole(dialect.whole(answer.reply), lambda delivered: self.gateway.settle(rollout, answer, delivered))

    async def count_tokens(self, request: Request) -> Response:
        rollout = self._admit(request)
        with counted(rollout):
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

    async def ready(self, request: Request) -> Response:
        reason = "draining" if self.traffic.draining else "store_failed" if self.gateway.writes.failed else None
        return JSONResponse({"status": reason or "ready"}, 503 if reason else 200)

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    async def probe(self, request: Request) -> Response:
        return Response()

    def _admit(self, request: Request) -> OpenRollout:
        names = request.path_params
        return self.rollouts.find(names["run"], names["rollout"], names["attempt"], key_of(request.headers))

    async def _read(
        self, request: Request, rollout: OpenRollout, dialect: Dialect, started_s: float
    ) -> tuple[Envelope, exchange.Request]:
        if rollout.closed:
            rollout.count("late")
            raise closed(rollout)
        body = await body_of(request, self.max_body_bytes)
        wanted = dialect.parse(body)
        return envelope_of(request, body, started_s), wanted

    async def _stream(
        self, rollout: OpenRollout, dialect: Dialect, envelope: Envelope, wanted: exchange.Request
    ) -> Response:
        """Begins to answer once there is something to send, so that a refusal before that keeps its status."""
        items: asyncio.Queue[Item] = asyncio.Queue()

        def show(*shown: Any) -> None:
            items.put_nowait(Delta(*shown))

        async def work() -> None:
            try:
                items.put_nowait(await self.gateway.answer(rollout, envelope, wanted, show))
            except Exception as error:
                items.put_nowait(failures.refusal_of(error))

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
            rollout.count(f"refused/{first.code}")
        else:
            raise first
        settle = lambda answer, delivered: self.gateway.settle(rollout, answer, delivered)
        return Stream(dialect.events(head), first, items, task, settle)
