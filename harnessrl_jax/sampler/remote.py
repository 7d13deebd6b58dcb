"""A sampler on the other side of HTTP: requests counted, weights handed over as a folder, errors in our words. No JAX.

An engine that serves over HTTP does not say which weights sampled a token. So a swap waits for the requests under way
and holds back new ones: every token of a request has one version, and none is dropped.
"""

import asyncio
import contextlib
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import httpx
import numpy as np

from harnessrl_jax.errors import SamplerError
from harnessrl_jax.sampler.protocol import Sample, SampleRequest

Json = dict[str, Any]
POLL_S = 0.01  # how often a held-back request looks whether the swap is over
# Servers close connections that were idle for some seconds (uvicorn: 5). A request that meets that is lost, and cannot
# be sent again, because it may have been read.
IDLE_S = 1.0


class Wire(Protocol):
    """How one engine spells requests, replies and swaps."""

    path: str
    """Where requests go."""
    swapping: str
    """How a server must be started to load weights."""

    def body(self, request: SampleRequest) -> Json:
        """The request. Raises SamplerError for a wish that the engine does not have."""
        ...

    def sample(self, reply: Any, request: SampleRequest, version: int) -> Sample:
        """The reply. Raises KeyError, IndexError, TypeError or ValueError where it is not of the documented form."""
        ...

    def swap(self, folder: str, version: int) -> list[tuple[str, Json]]:
        """Paths and bodies of the requests that load the weights of a folder, in order."""
        ...

    def abort(self, request: SampleRequest) -> tuple[str, Json] | None:
        """How to end a request early; None where closing its connection does."""
        ...


class RemoteSampler:
    """The Sampler that asks an HTTP server.

    Args:
      url: of the server, as in `http://localhost:8000`.
      wire: how it is spoken to.
      folder: where weights are written, one folder a version, which is removed when the next one is served; the server
        must see it under the same path.
      save: writes parameters as a model folder, as `weights.save_model`.
      version: of the weights that the server starts with.
      api_key: sent as a bearer token, or None.
      timeout_s: for one request, queueing included.
      weights_timeout_s: for the requests under way to end, and then for each request that loads weights.
    """

    def __init__(
        self,
        url: str,
        wire: Wire,
        *,
        folder: Path,
        save: Callable[[Path, Any], None],
        version: int = 0,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        weights_timeout_s: float = 600.0,
    ) -> None:
        self._url, self._wire, self._folder, self._save = url.rstrip("/"), wire, folder, save
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._timeout_s, self._weights_timeout_s = timeout_s, weights_timeout_s
        self._version = version
        self._written: Path | None = None  # what the server has loaded
        self._changed = threading.Condition()  # guards the three below
        self._under_way = 0
        self._swapping = False
        self._closed = False
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()

    async def start(self) -> None:
        """Checks that the server answers. Raises SamplerError."""
        try:
            reply = await self._client().get("/health")
        except httpx.HTTPError as error:
            raise self._unreachable("start", error) from error
        _check(reply, f"{self._url}: start")

    async def complete(self, request: SampleRequest) -> Sample:
        """Samples until a stop id, a stop text or the length limit. Cancelling the call ends it on the server too.

        Raises:
          SamplerError: the engine lacks what is asked for, cannot be reached, or does not answer as documented.
        """
        where = f"Request {request.request_id!r}: {self._url}"
        body = self._wire.body(request)
        async with self._admitted(request) as version:
            try:
                reply = await self._client().post(self._wire.path, json=body)
            except httpx.HTTPError as error:
                raise self._unreachable(f"request {request.request_id!r}", error) from error
            except asyncio.CancelledError:
                await asyncio.shield(self._abort(request))
                raise
        _check(reply, where)
        try:
            return _checked(self._wire.sample(reply.json(), request, version))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise SamplerError(
                f"{where} answered in an unknown form ({type(error).__name__}: {error}): {reply.text[:200]!r}. Use a "
                "version of the server that documents token ids and log-probabilities."
            ) from error

    def load_weights(self, params: Any, version: int) -> None:
        """Writes the weights, waits for the requests under way, and has the server load them.

        May be called from any thread that does not run the event loop of the requests, which would wait for itself.

        Raises:
          SamplerError: the requests do not end in time, or the server refuses the weights.
        """
        folder = self._folder / f"version-{version:06d}"
        self._save(folder, params)
        with self._changed:
            self._changed.wait_for(lambda: not self._swapping)
            self._swapping = True
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: self._under_way == 0, self._weights_timeout_s):
                    raise SamplerError(
                        f"Weights of version {version}: {self._under_way} requests did not end within "
                        f"{self._weights_timeout_s:g} s. Load weights from another thread than the one that awaits "
                        "them."
                    )
            self._swap(folder, version)
            self._version = version
            if self._written not in (None, folder):
                shutil.rmtree(self._written)
            self._written = folder
        finally:
            with self._changed:
                self._swapping = False
                self._changed.notify_all()

    async def close(self) -> None:
        """Refuses further requests and closes this event loop's connections. Idempotent."""
        self._closed = True
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    def _swap(self, folder: Path, version: int) -> None:
        patience = self._weights_timeout_s
        with httpx.Client(base_url=self._url, headers=self._headers, timeout=patience, trust_env=False) as http:
            for path, body in self._wire.swap(str(folder.resolve()), version):
                try:
                    reply = http.post(path, json=body)
                except httpx.HTTPError as error:
                    raise self._unreachable(f"weights of version {version}", error) from error
                where = f"{self._url}{path}: weights of version {version}"
                if reply.status_code == httpx.codes.NOT_FOUND:
                    raise SamplerError(f"{where}: the server has no such address. {self._wire.swapping}")
                _check(reply, where)

    @contextlib.asynccontextmanager
    async def _admitted(self, request: SampleRequest) -> AsyncIterator[int]:
        """Counts a request in and out, and gives the version of the weights that serve it."""
        deadline = time.monotonic() + self._timeout_s + self._weights_timeout_s
        while not self._enter(request):
            if time.monotonic() > deadline:
                raise SamplerError(
                    f"Request {request.request_id!r}: {self._url} did not take up new weights in time. Look at the "
                    "server's log."
                )
            await asyncio.sleep(POLL_S)
        try:
            yield self._version
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def _enter(self, request: SampleRequest) -> bool:
        with self._changed:
            if self._closed:
                raise SamplerError(f"Request {request.request_id!r}: the sampler was closed; make a new one.")
            if not self._swapping:
                self._under_way += 1
            return not self._swapping

    async def _abort(self, request: SampleRequest) -> None:
        """Ends a request on the server; whoever cancelled does not wait for an error of that."""
        if (how := self._wire.abort(request)) is not None:
            with contextlib.suppress(httpx.HTTPError):
                await self._client().post(how[0], json=how[1])

    def _client(self) -> httpx.AsyncClient:
        """This event loop's connections."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            limits = httpx.Limits(max_connections=None, keepalive_expiry=IDLE_S)
            self._clients[loop] = httpx.AsyncClient(
                base_url=self._url, headers=self._headers, timeout=self._timeout_s, limits=limits, trust_env=False
            )
        return self._clients[loop]

    def _unreachable(self, what: str, error: httpx.HTTPError) -> SamplerError:
        return SamplerError(
            f"{self._url}: {what}: {type(error).__name__}: {error}. Is the server running, and is this its address?"
        )


def check_count(ids: Sequence[int], said: int) -> None:
    """Raises ValueError unless these are as many ids as the server says that it sampled; it may have lost some."""
    if len(ids) != said:
        raise ValueError(f"{len(ids)} tokens, but the server counts {said}")


def _check(reply: httpx.Response, where: str) -> None:
    """Raises SamplerError unless the server was content; some say in the body that they were not."""
    said: Any = None
    with contextlib.suppress(ValueError):
        said = reply.json()
    refused = isinstance(said, dict) and (said.get("success") is False or said.get("object") == "error")
    if reply.is_error or refused:
        raise SamplerError(f"{where}: the server refuses with status {reply.status_code}: {reply.text[:400]}")


def _checked(sample: Sample) -> Sample:
    """The sample, if its arrays have one finite entry for each token. Raises ValueError."""
    size = len(sample.output_ids)
    for name in ("logps", "raw_logps"):
        values = getattr(sample, name)
        if values is not None and (values.shape != (size,) or not np.isfinite(values).all()):
            raise ValueError(f"{size} tokens, but {name} are not as many finite numbers")
    if not size:
        raise ValueError("no tokens")
    return sample
