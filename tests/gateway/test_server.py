"""The server: loopback unless wanted otherwise, a port at once, and an application that cannot start says why."""

import contextlib

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from harnessrl_jax.errors import GatewayError
from harnessrl_jax.gateway import Server


async def hello(request):
    return PlainTextResponse("hello")


def app(started, *, fail=False):
    @contextlib.asynccontextmanager
    async def lifespan(app):
        if fail:
            raise RuntimeError("no weights")
        started.append("up")
        yield
        started.append("down")

    return Starlette(routes=[Route("/", hello)], lifespan=lifespan)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_it_serves_and_stops(host):
    states = []
    with Server(host) as server:
        assert server.url.startswith(f"http://{host}:")
        server.start(app(states))
        assert httpx.get(server.url, trust_env=False).text == "hello"
        assert states == ["up"]
    assert states == ["up", "down"]
    server.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url, trust_env=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_a_public_address_must_be_wanted(host):
    with pytest.raises(GatewayError, match=r"reachable from other machines.*TLS-terminating proxy"):
        Server(host)


def test_a_public_address_can_be_wanted():
    with Server("0.0.0.0", public=True) as server:
        server.start(app([]))
        port = server.url.rpartition(":")[2]
        assert httpx.get(f"http://127.0.0.1:{port}/").text == "hello"


def test_a_taken_port_is_named():
    with Server() as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(GatewayError, match=rf"Cannot listen on 127\.0\.0\.1:{port}: .*in use.*Choose another port"):
            Server(port=port)


def test_an_application_that_cannot_start_is_an_error(capfd):
    with Server() as server, pytest.raises(GatewayError, match=r"The gateway at http://127\.0\.0\.1:\d+ did not start"):
        server.start(app([], fail=True))
    assert "no weights" in capfd.readouterr().err
