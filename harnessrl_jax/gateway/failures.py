"""What goes wrong with a request -> a refusal, counted in its rollout -> a response in the shape of its dialect."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from harnessrl_jax.errors import StoreError, TextError
from harnessrl_jax.gateway.dialects import COUNT_PATH, PATHS, dialect_at
from harnessrl_jax.gateway.refusal import Refusal, bad_request, stopping
from harnessrl_jax.gateway.registry import OpenRollout

LOGGER = logging.getLogger(__name__)


@contextlib.contextmanager
def counted(rollout: OpenRollout) -> Iterator[None]:
    """Turns what ends a request into a refusal, and counts it."""
    try:
        yield
    except asyncio.CancelledError as error:
        # The server cancels what is left when it stops; the client gets an answer all the same.
        raise stopping() from error
    except Exception as error:
        refusal = refusal_of(error)
        if refusal.code not in ("rollout_closed", "internal_error", "store_failed"):
            rollout.count(f"refused/{refusal.code}")
        raise refusal from error


def refusal_of(error: Exception) -> Refusal:
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


def respond(path: str, refusal: Refusal) -> Response:
    """The response to a request of this path."""
    body, headers = dialect_at(path).error(refusal)
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(refusal.retry_after_s)
    return JSONResponse(body, refusal.status, headers)


async def refused(request: Request, error: Exception) -> Response:
    """Handles a Refusal."""
    assert isinstance(error, Refusal)
    return respond(request.url.path, error)


async def no_route(request: Request, error: Exception) -> Response:
    """Handles a path or method that is not served."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    wanted = f"POST {{base_url}}{', '.join((*PATHS, COUNT_PATH))} and GET {{base_url}}/v1/models"
    refusal = Refusal(f"{where}: {error.detail}. Served are {wanted}.", status=error.status_code, code="no_route")
    return respond(request.url.path, refusal)


async def broken(request: Request, error: Exception) -> Response:
    """Handles any other error."""
    return respond(request.url.path, refusal_of(error))
