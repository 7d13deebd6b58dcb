"""JetStream's orchestrator and gRPC server around our engine; live weights and early ends beside their methods.

Two things are done to run the unchanged package:
- `jax.tree_map`, which JAX has removed and JetStream calls, is set again.
- One slot is held by a request that never ends. JetStream asserts that a slot is in use before every step, but its
  detokenizing thread may free the last one just before; the failed assertion kills the process.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax

from harnessrl_jax.errors import HarnessRLError, SamplerError
from harnessrl_jax.models import DecoderConfig
from harnessrl_jax.sampler.jetstream.engine import BEYOND, HOLD, JetStreamEngine
from harnessrl_jax.sampler.jetstream.wire import END, LOAD, SERVICE, json_answer, json_bytes
from harnessrl_jax.weights import load_model


class _Nobody:
    """The return channel of the request that holds a slot."""

    def add_result(self, result: object) -> None:
        """Forgets it."""

    def close(self) -> None:
        """Nothing to close."""


@contextlib.contextmanager
def _same_logging() -> Iterator[None]:
    """Undoes what importing JetStream's orchestrator does to the root logger: DEBUG, to standard output."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


def result_type() -> Callable[..., Any]:
    """JetStream's ResultTokens."""
    from jetstream.engine import engine_api

    return engine_api.ResultTokens


def serve(adapter: JetStreamEngine, port: int, load: Callable[[str, int], None]) -> Any:
    """Starts JetStream's orchestrator and gRPC server, for clients on this machine; returns its JetStreamServer.

    Args:
      adapter: the engine.
      port: where to listen.
      load: takes the weights of a folder, and their version.

    Raises:
      SamplerError: the installed JetStream asks for more than the adapter has.
    """
    import grpc

    jax.__dict__["tree_map"] = jax.tree.map
    with _same_logging():
        from jetstream.core import orchestrator, server_lib
        from jetstream.engine import engine_api

    missing = engine_api.Engine.__abstractmethods__ - set(dir(JetStreamEngine))
    if missing:
        raise SamplerError(
            f"JetStream's Engine has {', '.join(sorted(missing))}, which this adapter does not know. "
            "It is written for google-jetstream 0.2.2: install that version."
        )
    engine_api.Engine.register(JetStreamEngine)
    engines: list[Any] = [adapter]
    params = [adapter.load_params()]
    driver = orchestrator.Driver(engines, engines, params, params, interleaved_mode=True, jax_padding=False)
    channel: Any = _Nobody()
    driver.place_request_on_prefill_queue(
        orchestrator.ActiveRequest(
            max_tokens=BEYOND,
            return_channel=channel,
            prefill_content=[HOLD],
            is_client_side_tokenization=True,
        )
    )
    threads = max(64, adapter.max_concurrent_decodes)
    server: Any = server_lib.JetStreamServer(driver, threads, port, grpc.local_server_credentials())
    # JetStream has no place for further methods; the server under it, which has not started, takes any.
    server._grpc_server.add_generic_rpc_handlers((_control(adapter, load),))
    server.start()
    return server


def _control(adapter: JetStreamEngine, load: Callable[[str, int], None]) -> Any:
    """The methods `LOAD` and `END`."""
    import grpc

    async def take(message: Any, context: Any) -> dict[str, Any]:
        try:
            await asyncio.to_thread(load, message["folder"], message["version"])
        except (HarnessRLError, OSError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{type(error).__name__}: {error}")
        return {}

    async def end(message: Any, context: Any) -> dict[str, Any]:
        adapter.end(message["number"])
        return {}

    method = lambda handler: grpc.unary_unary_rpc_method_handler(handler, json_answer, json_bytes)
    return grpc.method_handlers_generic_handler(SERVICE, {LOAD: method(take), END: method(end)})


def loader(adapter: JetStreamEngine, config: DecoderConfig) -> Callable[[str, int], None]:
    """Takes the weights of a folder. What it returns raises HarnessRLError for those of another model."""

    def load(folder: str, version: int) -> None:
        found, params = load_model(folder)
        if found != config:
            raise SamplerError(f"{folder}: its config.json is not that of the model that is served.")
        adapter.load(jax.block_until_ready(jax.device_put(params)), version)

    return load
