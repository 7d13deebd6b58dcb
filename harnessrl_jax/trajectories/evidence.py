"""What the place of a call in its rollout rests on: plain values that a lineage carries and that people can read.

Evidence  one reason for a link, a state, an opener or an agent: what it is about, its kind, the other call, words
Agent     who made a call, and whether a name, a header, its instructions or only its tokens told it apart
Fork      where a prompt leaves the history that it takes up: category, position, the differing ids, their text
"""

from typing import Literal, NamedTuple

Link = Literal["opens", "extends", "rewrites", "continues", "handoff"]
State = Literal["live", "superseded", "rejected", "auxiliary", "undelivered"]

AgentSource = Literal["name", "header", "fingerprint", "prefix"]

ForkCategory = Literal[
    "compaction",  # a summary stands for what was said before
    "handoff",  # other instructions and tools over the same messages
    "instructions",  # the system text changed
    "tools",  # the tool list changed
    "arguments",  # a sampled call came back with the same arguments, written another way
    "reasoning",  # the reasoning of a sampled turn was left out
    "whitespace",  # only white space differs
    "retokenised",  # the same text as other ids
    "template",  # the same messages, rendered another way
    "dropped",  # messages were taken out
    "edited",  # a message was changed
    "unknown",  # neither the requests nor a decoder say
]

EvidenceKind = Literal[
    # link
    "token_prefix",  # prompt and output of the other call begin this prompt
    "same_session",  # the record puts both into one conversation
    "same_messages",  # this request begins with the messages of the other one
    "quoted_answer",  # this prompt contains what the other call sampled
    "harness_header",  # the harness says so in a header
    # sibling
    "same_request",  # another choice of one request (n > 1)
    "same_prompt",  # the same prompt, asked again without proof of a retry
    # state
    "retry_header",  # the client declared a retry
    "same_body_after_failure",  # the same bytes after a call that failed or never arrived
    "answer_used",  # a later prompt contains the answer
    "not_delivered",
    "sampling_failed",
    "other_summary_used",  # another summary of the same history was used, this one nowhere
    "background_header",
    "title_request",
    "one_token_probe",
    # opener
    "named_opener",  # the record names the call that opened this conversation
    "unknown_opener",  # it names a call that the attempt does not have
    "quoted_arguments",  # the request quotes arguments of a tool call of the other call
]

About = Literal["link", "sibling", "state", "opener"]


class Evidence(NamedTuple):
    """One reason for the place of a call.

    Attributes:
      about: which field it explains.
      kind: what the reason is.
      call_id: the other call that it speaks of, or None.
      words: the reason as a sentence part.
    """

    about: About
    kind: EvidenceKind
    call_id: str | None
    words: str


class Agent(NamedTuple):
    """Who made a call.

    Attributes:
      name: as recorded: what the harness was given in its base URL.
      thread: which of the agents under this name; "" is the main one, a sub-agent has its own.
      source: what told this agent apart: "name" alone; a "header" of the harness; its "fingerprint" (instructions and
        tools); only the "prefix" lineage of its tokens.
    """

    name: str
    thread: str
    source: AgentSource

    def __str__(self) -> str:
        return f"{self.name}/{self.thread}" if self.thread else self.name


class Fork(NamedTuple):
    """Where a prompt leaves the history that it takes up.

    Attributes:
      from_call_id: the call whose prompt and output are that history.
      category: what changed.
      position: number of tokens that both share from the start.
      before: the first ids of the history from there on, at most 16.
      after: the first ids of this prompt from there on, at most 16.
      before_text: `before` decoded; None without a decoder.
      after_text: `after` decoded; None without a decoder.
    """

    from_call_id: str
    category: ForkCategory
    position: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    before_text: str | None
    after_text: str | None
