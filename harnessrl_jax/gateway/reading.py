"""An HTTP request -> its key, its body, and what it says outside its body."""

from collections.abc import Mapping

from starlette.requests import ClientDisconnect, Request

from harnessrl_jax.gateway.capture import Envelope
from harnessrl_jax.gateway.identity import session_of
from harnessrl_jax.gateway.refusal import Refusal, bad_request
from harnessrl_jax.trajectories.headers import attribution

DEFAULT_AGENT = "agent"


def key_of(headers: Mapping[str, str]) -> str | None:
    """The key as a bearer token, or as Anthropic's clients send it; None if there is none."""
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return secret.strip()
    return headers.get("x-api-key")


def envelope_of(request: Request, body: str, started_s: float) -> Envelope:
    """What a request says in its path and headers.

    Raises:
      Refusal: the name of the session cannot be used.
    """
    agent = request.path_params.get("agent", DEFAULT_AGENT)
    headers = request.headers
    retries = headers.get("x-stainless-retry-count", "0")
    return Envelope(
        agent=agent,
        session_id=session_of(headers, agent),
        seed_name=headers.get("x-session-id", agent),
        opened_by=headers.get("x-parent-tool-call-id"),
        retry=retries.isascii() and retries.isdigit() and int(retries[:9]) > 0,
        headers=attribution(headers),
        body=body,
        started_s=started_s,
    )


async def body_of(request: Request, limit: int) -> str:
    """The body as text, never reading much more than `limit` bytes.

    Raises:
      Refusal: it is too long, cut, compressed, or no UTF-8.
    """
    coding = request.headers.get("content-encoding", "identity")
    if coding != "identity":
        raise Refusal(
            f"The body is compressed ({coding}). Send it as it is.", status=415, code="compressed_body", param=None
        )
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
