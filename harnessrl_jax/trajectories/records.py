"""What was captured at the model boundary -> checked, frozen records and their JSON. NumPy only.

A record is one plain value: build it with keywords, and it is checked once, at construction. `to_json` gives a
dict of JSON values that carries the schema number; `from_json` accepts exactly such a dict.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any, Literal, Self, get_args

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories import checks

Finish = Literal["stop", "length", "tool_calls", "aborted", "error"]
ParseStatus = Literal["none", "ok", "malformed", "truncated"]
RolloutStatus = Literal["completed", "truncated", "policy_failure", "infra_failure"]
Split = Literal["train", "heldout"]


class Role(IntEnum):
    """What a token is to the loss; NONE is everything the policy did not sample."""

    NONE = 0
    ACTION = 1
    ARGS = 2
    OTHER = 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LogpKind:
    """How the sampler's log-probabilities were computed.

    Attributes:
      mode: "raw" = log-softmax of the model's logits; "processed" = after temperature, top-p, top-k and min-p.
      temperature: softmax temperature the token was drawn with, above 0.
      top_p: nucleus mass, in (0, 1].
      top_k: number of candidates kept; 0 = all.
      min_p: candidates of at least this share of the highest probability are kept, in [0, 1); 0 = all.
    """

    mode: Literal["raw", "processed"]
    temperature: float
    top_p: float
    top_k: int
    min_p: float = 0.0

    def __post_init__(self) -> None:
        where = "LogpKind"
        checks.one_of(where, "mode", self.mode, ("raw", "processed"))
        checks.need(
            math.isfinite(self.temperature) and self.temperature > 0, where, "temperature", self.temperature, "> 0"
        )
        checks.need(0 < self.top_p <= 1, where, "top_p", self.top_p, "in (0, 1]")
        checks.whole(where, "top_k", self.top_k)
        checks.need(0 <= self.min_p < 1, where, "min_p", self.min_p, "in [0, 1)")

    @property
    def of_the_model(self) -> bool:
        """Whether they are the model's own: temperature 1, every token kept."""
        cut = (self.temperature, self.top_p, self.top_k, self.min_p) != (1.0, 1.0, 0, 0.0)
        return self.mode == "raw" or not cut

    def drawn_at(self, temperature: float) -> bool:
        """Whether they are what a token drawn from log softmax(logits / temperature), no token cut, is trained with.

        False also for raw log-probabilities of tokens that were drawn at another temperature than 1.
        """
        whole = (self.temperature, self.top_p, self.top_k, self.min_p) == (temperature, 1.0, 0, 0.0)
        return whole and (self.mode == "processed" or temperature == 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One tool call as the harness received it; `arguments` is the raw JSON text that was sampled."""

    id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Tokens `output_ids[start:end]` have this role."""

    role: Role
    start: int
    end: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "role", Role(self.role))
        checks.need(0 <= self.start < self.end, "Span", "start, end", (self.start, self.end), "0 <= start < end")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """One model call: what the engine consumed and what it sampled (an Interface Call Record).

    Attributes:
      run_id: the training run.
      task_id: the problem that is solved.
      group_id: the rollouts of one task in one step share it.
      rollout_id: the run of the harness; with `attempt` it is unique.
      attempt: 0 for the first try of the rollout.
      session_id: the conversation; each sub-agent has its own.
      agent: role name inside the rollout, such as "central".
      trainable: whether this agent's policy is trained.
      parent_call_id: the call that the harness says opened this session; a hint, or None.
      call_id: unique in the run.
      seq: position of the request among the rollout's requests, from 0.
      choice: which of the n completions of the request.
      harness: name (and version) of the program that called.
      dialect: wire format, such as "openai-chat".
      prompt_ids: token ids the engine consumed, at least one.
      output_ids: token ids as sampled, the end-of-turn token included; may be empty.
      logps: natural-log probability of each output id as the sampler reported it; None if absent, never zeros.
      logp_kind: how `logps` were computed; None exactly if `logps` is None.
      version_start: number of the weights when sampling began.
      version_end: number of the weights when it ended.
      finish: why sampling ended.
      parse_status: what the tool-call parser said.
      tool_calls: calls that were handed to the harness.
      spans: tokens of `output_ids` that are ACTION or ARGS, ascending; all others are OTHER.
      delivered: whether the harness took the whole reply.
      request_digest: digest of the request body's bytes.
      retry: whether the client declared the request a retry.
      request: the raw request body.
      headers: what the harness says about itself, names in lower case; see `headers.attribution`. Never a secret.
      started_s: arrival time of the request, seconds.
      finished_s: time the reply was stored, seconds.
      experts: the experts that each token the model read went to in every layer, for training to replay: of
        `prompt_ids`, then of `output_ids` but the last; None if the model has none or the sampler does not say.
    """

    run_id: str
    task_id: str
    group_id: str
    rollout_id: str
    attempt: int
    session_id: str
    agent: str
    trainable: bool
    parent_call_id: str | None
    call_id: str
    seq: int
    choice: int
    harness: str
    dialect: str
    prompt_ids: Int32[np.ndarray, " p"]
    output_ids: Int32[np.ndarray, " o"]
    logps: Float32[np.ndarray, " o"] | None
    logp_kind: LogpKind | None
    version_start: int
    version_end: int
    finish: Finish
    parse_status: ParseStatus
    tool_calls: tuple[ToolCall, ...]
    spans: tuple[Span, ...]
    delivered: bool
    request_digest: str
    retry: bool
    request: str
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    started_s: float
    finished_s: float
    experts: UInt8[np.ndarray, "token layer active"] | None = None

    def __post_init__(self) -> None:
        where = f"Call {self.call_id!r} of rollout {self.rollout_id!r}"
        for name in ("run_id", "task_id", "group_id", "rollout_id", "session_id", "agent", "call_id"):
            checks.text(where, name, getattr(self, name))
        for name in ("attempt", "seq", "choice", "version_start"):
            checks.whole(where, name, getattr(self, name))
        checks.whole(where, "version_end", self.version_end, at_least=self.version_start)
        checks.one_of(where, "finish", self.finish, get_args(Finish))
        checks.one_of(where, "parse_status", self.parse_status, get_args(ParseStatus))
        object.__setattr__(self, "prompt_ids", checks.ids(where, "prompt_ids", self.prompt_ids))
        object.__setattr__(self, "output_ids", checks.ids(where, "output_ids", self.output_ids))
        checks.need(
            len(self.prompt_ids) > 0, where, "prompt_ids", "no token", "at least one, which predicts the first output"
        )
        if (self.logps is None) != (self.logp_kind is None):
            raise RecordError(
                f"{where}: logps and logp_kind go together, got {'no ' if self.logps is None else ''}logps and "
                f"{'no ' if self.logp_kind is None else ''}logp_kind. Give both, or None for both."
            )
        if self.logps is not None:
            object.__setattr__(self, "logps", checks.logps(where, self.logps, len(self.output_ids)))
        if self.experts is not None:
            tokens = len(self.prompt_ids) + max(len(self.output_ids) - 1, 0)
            object.__setattr__(self, "experts", checks.experts(where, self.experts, tokens))
        object.__setattr__(self, "headers", checks.headers(where, self.headers))
        object.__setattr__(self, "tool_calls", tuple(self.tool_calls))
        object.__setattr__(self, "spans", _checked_spans(where, self.spans, len(self.output_ids)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Call) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((self.rollout_id, self.attempt, self.call_id))

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values that `from_json` turns back into an equal record."""
        out = checks.plain(self)
        for name in ("prompt_ids", "output_ids"):
            out[name] = getattr(self, name).tolist()
        out["logps"] = None if self.logps is None else self.logps.tolist()
        out["experts"] = None if self.experts is None else checks.packed(self.experts)
        out["logp_kind"] = None if self.logp_kind is None else dataclasses.asdict(self.logp_kind)
        out["tool_calls"] = [dataclasses.asdict(call) for call in self.tool_calls]
        out["spans"] = [[span.role.name, span.start, span.end] for span in self.spans]
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The record that `to_json` wrote.

        Args:
          data: the dict, as `json.loads` gives it back.

        Returns:
          An equal record.

        Raises:
          RecordError: an unknown, missing or unusable field, or another schema number.
        """
        return checks.parse(
            cls,
            data,
            logp_kind=lambda v: None if v is None else LogpKind(**v),
            tool_calls=lambda v: tuple(ToolCall(**call) for call in v),
            spans=lambda v: tuple(Span(role=Role[role], start=start, end=end) for role, start, end in v),
            experts=lambda v: None if v is None else checks.unpacked(v),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One run of a harness on a task, and what the verifier thought of it.

    Attributes:
      run_id: the training run.
      task_id: the problem.
      group_id: the rollouts of one task in one step share it.
      rollout_id: with `attempt` unique in the run.
      attempt: 0 for the first try.
      harness: name of the program.
      status: "completed"; "truncated" at a limit; "policy_failure" if the model made the harness fail (its reward
        counts); "infra_failure" if the machine failed (neither in the loss nor in the baseline).
      reward: the verifier's outcome reward; None if there is none.
      process_rewards: reward of single calls, by call_id; empty if the task has none.
      answer: what the harness answered; None if nothing.
      detail: the failure in words, or "".
      version: number of the weights when the rollout began.
      started_s: seconds.
      finished_s: seconds.
    """

    run_id: str
    task_id: str
    group_id: str
    rollout_id: str
    attempt: int
    harness: str
    status: RolloutStatus
    reward: float | None
    process_rewards: Mapping[str, float]
    answer: str | None
    detail: str
    version: int
    started_s: float
    finished_s: float

    def __post_init__(self) -> None:
        where = f"Rollout {self.rollout_id!r}"
        for name in ("run_id", "task_id", "group_id", "rollout_id"):
            checks.text(where, name, getattr(self, name))
        checks.whole(where, "attempt", self.attempt)
        checks.whole(where, "version", self.version)
        checks.one_of(where, "status", self.status, get_args(RolloutStatus))
        if self.reward is not None:
            object.__setattr__(self, "reward", checks.number(where, "reward", self.reward))
        rewards = {
            call: checks.number(where, f"process_rewards[{call!r}]", r) for call, r in self.process_rewards.items()
        }
        object.__setattr__(self, "process_rewards", rewards)

    def __hash__(self) -> int:
        return hash((self.run_id, self.rollout_id, self.attempt))

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values that `from_json` turns back into an equal record."""
        return checks.plain(self) | {"process_rewards": dict(self.process_rewards)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The record that `to_json` wrote; `RecordError` if it is not one."""
        return checks.parse(cls, data)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One problem: a question, the answers that count, and the evidence chain that leads there.

    Attributes:
      task_id: unique in its source.
      question: what the harness is asked.
      answers: accepted answers, at least one.
      hops: number of facts that must be combined, from 1.
      chain: ids of the gold passages, in order; empty if the source has none.
      template: name of the question's pattern, or "".
      split: which half of the data it belongs to.
    """

    task_id: str
    question: str
    answers: tuple[str, ...]
    hops: int
    chain: tuple[str, ...]
    template: str
    split: Split

    def __post_init__(self) -> None:
        where = f"Task {self.task_id!r}"
        checks.text(where, "task_id", self.task_id)
        checks.text(where, "question", self.question)
        object.__setattr__(self, "answers", tuple(self.answers))
        object.__setattr__(self, "chain", tuple(self.chain))
        checks.need(len(self.answers) > 0, where, "answers", "none", "at least one")
        checks.whole(where, "hops", self.hops, at_least=1)
        checks.one_of(where, "split", self.split, get_args(Split))

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values that `from_json` turns back into an equal record."""
        return checks.plain(self) | {"answers": list(self.answers), "chain": list(self.chain)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The record that `to_json` wrote; `RecordError` if it is not one."""
        return checks.parse(cls, data, answers=tuple, chain=tuple)


def _checked_spans(where: str, spans: Iterable[Span], length: int) -> tuple[Span, ...]:
    end = 0
    out = tuple(spans)
    for span in out:
        checks.need(
            span.role in (Role.ACTION, Role.ARGS, Role.OTHER), where, "spans", span, "of role ACTION, ARGS or OTHER"
        )
        checks.need(
            end <= span.start and span.end <= length, where, "spans", span, f"ascending, disjoint, inside 0..{length}"
        )
        end = span.end
    return out
