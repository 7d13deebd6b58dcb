"""Why a request is not answered: the reason in words, with the status and code that go on the wire."""

from typing import Any

from harnessrl_jax.errors import GatewayError


class Refusal(GatewayError):
    """A request that is refused on purpose.

    Args:
      message: what was given, what was wanted, what to do.
      status: HTTP status.
      code: stable machine-readable reason; also the name under which the refusal is counted.
      param: the field at fault.
      retry: whether sending the same request again can help. Clients are told, so that they do not try in vain.
    """

    def __init__(self, message: str, *, status: int, code: str, param: str | None = None, retry: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry = retry


def bad_request(message: str, *, code: str = "invalid_request", param: str | None = None) -> Refusal:
    """A request that no repetition makes right."""
    return Refusal(message, status=400, code=code, param=param)


def openai_error(refusal: Refusal) -> tuple[dict[str, Any], dict[str, str]]:
    """Body and headers of a refusal in OpenAI's shape."""
    kind = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error", 429: "rate_limit_error"}
    name = "server_error" if refusal.status >= 500 else kind.get(refusal.status, "invalid_request_error")
    body = {"error": {"message": str(refusal), "type": name, "param": refusal.param, "code": refusal.code}}
    return body, {"x-should-retry": "true" if refusal.retry else "false"}
