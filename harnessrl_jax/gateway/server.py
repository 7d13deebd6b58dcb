"""An ASGI application -> a running HTTP server in a thread of this process, on loopback."""

import contextlib
import ipaddress
import socket
import threading
from types import TracebackType
from typing import Self

import uvicorn
from starlette.types import ASGIApp

from harnessrl_jax.errors import GatewayError

# Longer than any client keeps an idle connection, so that the server is never the one to close it under a request.
_KEEP_ALIVE_S = 600
_BACKLOG = 2048


class Server:
    """Takes a port at once, so that its address is known, and serves when started.

    Args:
      host: an address of this machine. Keys travel unencrypted: anything but loopback must be wanted explicitly.
      port: 0 takes any free one.
      public: allow a host that other machines reach; put a TLS-terminating proxy in front.

    Raises:
      GatewayError: the address is not loopback, or cannot be taken.

    Attributes:
      url: address of the server, without a path.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, public: bool = False) -> None:
        if not public and not _is_loopback(host):
            raise GatewayError(
                f"Host {host!r} is reachable from other machines, and keys travel unencrypted. Use 127.0.0.1, or allow "
                "it explicitly and put a TLS-terminating proxy in front."
            )
        try:
            self._socket = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_BACKLOG
            )
        except OSError as error:
            raise GatewayError(
                f"Cannot listen on {host}:{port}: {error.strerror}. Choose another port, or 0."
            ) from error
        taken = self._socket.getsockname()[1]
        self.url = f"http://[{host}]:{taken}" if ":" in host else f"http://{host}:{taken}"
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._ready = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, app: ASGIApp, *, timeout_s: float = 600.0, grace_s: int = 5) -> None:
        """Serves `app` from a thread; returns when it answers.

        Args:
          app: the application.
          timeout_s: how long its start may take; a sampler that starts with it may have to compile.
          grace_s: how long `stop` waits for requests under way before it cancels them.

        Raises:
          GatewayError: the application did not start; the cause is attached.
        """
        config = uvicorn.Config(
            app,
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=grace_s,
        )
        self._server = _Announcing(config, self._ready)
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._thread.start()
        answered = self._ready.wait(timeout_s)
        if not answered or not self._server.started:
            cause = self._failure
            self.stop()
            reason = f"it took more than {timeout_s} s" if not answered else "see the log above"
            raise GatewayError(f"The gateway at {self.url} did not start: {cause or reason}.") from cause

    def stop(self) -> None:
        """Waits a little for what is under way, cancels the rest and gives the port back. Idempotent."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join()
        with contextlib.suppress(OSError):
            self._socket.close()

    def _run(self) -> None:
        assert self._server is not None
        try:
            self._server.run(sockets=[self._socket])
        except (Exception, SystemExit) as error:
            # Kept for the thread that waits in `start`.
            self._failure = error
        finally:
            self._ready.set()


class _Announcing(uvicorn.Server):
    """Sets an event as soon as it serves, or knows that it will not."""

    def __init__(self, config: uvicorn.Config, ready: threading.Event) -> None:
        super().__init__(config)
        self._announce = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce.set()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
