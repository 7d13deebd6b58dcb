"""Paths -> the dialects that are spoken there."""

from harnessrl_jax.gateway import chat, chat_reply, messages, messages_reply, responses, responses_reply
from harnessrl_jax.gateway.exchange import Dialect
from harnessrl_jax.gateway.refusal import anthropic_error, openai_error

CHAT = Dialect(
    name=chat.DIALECT,
    parse=chat.parse_request,
    whole=chat_reply.reply_json,
    events=chat_reply.ChatEvents,
    error=openai_error,
)
RESPONSES = Dialect(
    name=responses.DIALECT,
    parse=responses.parse_request,
    whole=responses_reply.reply_json,
    events=responses_reply.ResponseEvents,
    error=openai_error,
    refuses_in_stream=responses_reply.refuses_in_stream,
)
MESSAGES = Dialect(
    name=messages.DIALECT,
    parse=messages.parse_request,
    whole=messages_reply.reply_json,
    events=messages_reply.MessageEvents,
    error=anthropic_error,
)

PATHS = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES}
COUNT_PATH = "/v1/messages/count_tokens"


def dialect_at(path: str) -> Dialect:
    """The dialect of a path, for errors: clients of other paths understand OpenAI's shape."""
    return next(
        (dialect for end, dialect in PATHS.items() if path.endswith(end)), MESSAGES if COUNT_PATH in path else CHAT
    )
