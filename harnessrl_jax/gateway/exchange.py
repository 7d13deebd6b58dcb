"""The one form in which every dialect's request and reply pass through the gateway."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from harnessrl_jax.gateway.refusal import Refusal
from harnessrl_jax.trajectories.records import ToolCall

Json = dict[str, Any]
Kind = Literal["reasoning", "content"]

TURN = "turn"
"""Key of an assistant message that names the turn it echoes; it is removed before rendering."""


class Origin(NamedTuple):
    """How a tool is called on the wire, where that is not by its rendered name as a function."""

    name: str
    namespace: str | None = None
    custom: bool = False
    """Whether the tool takes text instead of a JSON object."""


class TokenLogp(NamedTuple):
    """One sampled token: its bytes, and its log-probability under the model itself, in nats."""

    data: bytes
    logp: float
    message: bool
    """Whether it belongs to the text of the message, not to reasoning, to a call or to the end of the turn. While the
    turn is sampled that is not known, and False."""


class Constraint(NamedTuple):
    """The form that a reply must have.

    Attributes:
      schema: JSON schema of the content, or None.
      must_call: names of tools of which one must be called; empty leaves it to the model.
      parallel: whether there may be several calls.
    """

    schema: Json | None = None
    must_call: tuple[str, ...] = ()
    parallel: bool = True

    @property
    def asked(self) -> bool:
        """Whether it constrains anything."""
        return self.schema is not None or bool(self.must_call)


FREE = Constraint()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request in the form that templates expect.

    Attributes:
      dialect: the wire format, as records name it.
      body: the request as sent, for replies that repeat parts of it.
      messages: role and content of each message, content always text; arguments of tool calls parsed where they are
        JSON; `reasoning_content` and `TURN` on assistant messages that carry them.
      tools: tool definitions in the form of chat completions.
      model: the name the client asked for; it is echoed and decides nothing.
      n: number of choices.
      max_tokens: the client's limit on sampled tokens, or None.
      stop: texts that end the reply.
      constraint: the form that the reply must have.
      banned: token ids that must not be sampled.
      logprobs: whether the reply tells the log-probabilities of its tokens.
      stream: whether the reply goes out as events.
      calls: whether the reply may hold tool calls.
      asked: fields that the gateway does not follow, with small values kept: sampling is the trainer's decision.
      ignored: what inside messages and tools was not used, counted by name.
      normalised: names of the moving parts that were taken out, so that prompts extend each other.
      origins: by rendered name, the tools that the wire calls in another way.
      previous: the earlier reply whose conversation goes on before `messages[lead:]`, or None.
      lead: how many of the messages stand before that conversation.
      resumable: whether a later request may name this one's reply as `previous`.
    """

    dialect: str
    body: Json
    messages: list[Json]
    tools: list[Json]
    model: str
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    constraint: Constraint = FREE
    banned: tuple[int, ...] = ()
    logprobs: bool = False
    stream: bool = False
    calls: bool = True
    asked: Json = field(default_factory=dict[str, Any])
    ignored: Mapping[str, int] = field(default_factory=dict[str, int])
    normalised: tuple[str, ...] = ()
    origins: Mapping[str, Origin] = field(default_factory=dict[str, Origin])
    previous: str | None = None
    lead: int = 0
    resumable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One sampled turn as the harness sees it."""

    content: str | None
    tool_calls: tuple[ToolCall, ...]
    finish: Literal["stop", "length", "tool_calls"]
    reasoning: str = ""
    stopped_by: str | None = None
    """The text of `Request.stop` that ended it."""
    logprobs: tuple[TokenLogp, ...] = ()
    """Of every sampled token, where the request asks for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a reply can say before anything is sampled."""

    request: Request
    call_id: str
    """Of the first choice."""
    created: int
    """Seconds since the epoch."""
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """All choices of a request, and true token counts: all choices share the prompt."""

    head: Head
    choices: Sequence[Choice]
    completion_tokens: int
    reasoning_tokens: int
    """How many of them are reasoning."""


class Events(Protocol):
    """A reply as server-sent events. Whatever `text` has sent, `end` sends the rest."""

    def text(self, choice: int, kind: Kind, delta: str, logps: Sequence[TokenLogp] = ()) -> bytes:
        """Further text of a choice, in order, and tokens of which nothing was told yet, as far as they are known."""
        ...

    def end(self, reply: Reply) -> bytes:
        """Everything that was not sent yet, the terminal event last."""
        ...

    def fail(self, refusal: Refusal) -> bytes:
        """Ends the stream with an error."""
        ...


class Dialect(NamedTuple):
    """One wire format.

    Attributes:
      name: as records name it.
      parse: request body -> request; raises Refusal, whose message names the field.
      whole: the reply as one JSON document.
      events: the reply as events.
      error: body and headers of a refusal.
      refuses_in_stream: whether a refusal is an event of a stream that opened well, for clients that look only there.
    """

    name: str
    parse: Callable[[str], Request]
    whole: Callable[[Reply], bytes]
    events: Callable[[Head], Events]
    error: Callable[[Refusal], tuple[Json, dict[str, str]]]
    refuses_in_stream: Callable[[Refusal], bool] = lambda refusal: False
