"""Requests of a whole service: how many, how long, with which status; and a drain that ends them without loss."""

import threading
import time
from collections.abc import Callable, Iterator

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from harnessrl_jax.gateway.dialects import COUNT_PATH, PATHS
from harnessrl_jax.gateway.failures import respond
from harnessrl_jax.gateway.refusal import stopping

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_ENDS = (*PATHS, COUNT_PATH)


class Traffic(Collector):
    """Counts the requests that ask for tokens, and can refuse new ones while those under way finish.

    Args:
      clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._gate = threading.Condition()
        self._under_way = 0
        self._draining = False
        self._requests = Counter(
            "harnessrl_requests", "Requests that were answered or refused.", ["path", "status"], registry=None
        )
        self._seconds = Histogram(
            "harnessrl_request_seconds",
            "From the arrival of a request to the last byte of its reply.",
            ["path"],
            buckets=_SECONDS,
            registry=None,
        )

    def collect(self) -> Iterator[Metric]:
        """Its metrics, for a registry of Prometheus."""
        yield from self._requests.collect()
        yield from self._seconds.collect()
        yield GaugeMetricFamily("harnessrl_requests_under_way", "Not answered yet.", value=self._under_way)
        yield GaugeMetricFamily("harnessrl_draining", "1 while new requests are refused.", value=self._draining)

    @property
    def under_way(self) -> int:
        """Requests that have come and are not answered yet."""
        return self._under_way

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    def drain(self, timeout_s: float) -> int:
        """Refuses new requests with 503 and waits for those under way; from any thread but the event loop's.

        Args:
          timeout_s: how long to wait.

        Returns:
          How many are under way still; 0 if every reply went out.
        """
        with self._gate:
            self._draining = True
            self._gate.wait_for(lambda: self._under_way == 0, timeout_s)
            return self._under_way

    def counted(self, app: ASGIApp) -> ASGIApp:
        """The application with its traffic counted."""

        async def counting(scope: Scope, receive: Receive, send: Send) -> None:
            end = _end(scope)
            if end is None:
                await app(scope, receive, send)
            else:
                await self._count(end, app, scope, receive, send)

        return counting

    async def _count(self, end: str, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._enter():
            app = respond(scope["path"], stopping())
        started, status = self._clock(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, watched)
        finally:
            self._leave()
            self._requests.labels(end, status).inc()
            self._seconds.labels(end).observe(self._clock() - started)

    def _enter(self) -> bool:
        """Whether the request may go on; it counts as under way in any case."""
        with self._gate:
            self._under_way += 1
            return not self._draining

    def _leave(self) -> None:
        with self._gate:
            self._under_way -= 1
            self._gate.notify_all()


def _end(scope: Scope) -> str | None:
    """The end of the path by which a request that asks for tokens is counted; None for any other."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    return next((end for end in _ENDS if scope["path"].endswith(end)), None)
