"""Why a request is not answered: the reason in words, with the status and code that go on the wire."""

from typing import Any

from harnessrl_jax.errors import GatewayError

CONTEXT_OVERFLOW = "context_length_exceeded"
_RETRY_AFTER_S = 5


class Refusal(GatewayError):
    """A request that is refused on purpose.

    Args:
      message: what was given, what was wanted, what to do.
      status: HTTP status.
      code: stable machine-readable reason; also the name under which the refusal is counted.
      param: the field at fault.
      retry: whether sending the same request again can help. Clients are told, so that they do not try in vain.
      retry_after_s: how long they should wait before that.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str,
        param: str | None = None,
        retry: bool = False,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry = retry
        self.retry_after_s = retry_after_s


class ContextOverflow(Refusal):
    """A prompt that leaves no room for a reply. Each dialect has words and a code of its own for it.

    Args:
      prompt_tokens: what the messages and tools take.
      context_tokens: what the model can hold.
    """

    def __init__(self, prompt_tokens: int, context_tokens: int) -> None:
        super().__init__(
            f"This model's maximum context length is {context_tokens} tokens; the messages and tools take "
            f"{prompt_tokens}, which leaves no room for a reply. Shorten the conversation.",
            status=400,
            code=CONTEXT_OVERFLOW,
            param="messages",
        )
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


def bad_request(message: str, *, code: str = "invalid_request", param: str | None = None) -> Refusal:
    """A request that no repetition makes right."""
    return Refusal(message, status=400, code=code, param=param)


def stopping() -> Refusal:
    """What a client hears of a service that ends; another one may take its place."""
    text = "The gateway is stopping: calls under way are finished where they can be, new ones are not begun. Try again."
    return Refusal(text, status=503, code="shutting_down", retry=True, retry_after_s=_RETRY_AFTER_S)


def openai_error(refusal: Refusal) -> tuple[dict[str, Any], dict[str, str]]:
    """Body and headers of a refusal in OpenAI's shape."""
    kind = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error", 429: "rate_limit_error"}
    name = "server_error" if refusal.status >= 500 else kind.get(refusal.status, "invalid_request_error")
    body = {"error": {"message": str(refusal), "type": name, "param": refusal.param, "code": refusal.code}}
    return body, {"x-should-retry": "true" if refusal.retry else "false"}


def anthropic_error(refusal: Refusal) -> tuple[dict[str, Any], dict[str, str]]:
    """Body and headers of a refusal in Anthropic's shape; our own code stands next to its type."""
    kind = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
    name = "overloaded_error" if refusal.status == 503 else "api_error" if refusal.status >= 500 else None
    message = str(refusal)
    if isinstance(refusal, ContextOverflow):
        # Clients find an overflow, which they can answer by compaction, by these words.
        message = f"prompt is too long: {refusal.prompt_tokens} tokens > {refusal.context_tokens} maximum. {message}"
    error = {
        "type": name or kind.get(refusal.status, "invalid_request_error"),
        "message": message,
        "code": refusal.code,
    }
    return {"type": "error", "error": error}, {"x-should-retry": "true" if refusal.retry else "false"}
