"""What people see of a rollout, as plain values: the terminal and the report draw the same ones."""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harnessrl_jax.trajectories.records import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenView:
    """One sampled token: its text and its role."""

    text: str
    role: Role


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkView:
    """Where a prompt leaves the history that it takes up.

    Attributes:
      category: what changed, such as "reasoning" or "compaction".
      from_seq: the call whose prompt and output are that history.
      position: tokens that both share from the start.
      before: how the history goes on from there.
      after: how this prompt does.
    """

    category: str
    from_seq: int
    position: int
    before: str
    after: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CallView:
    """One model call.

    Attributes:
      call_id: of the record.
      seq: position among the requests of the rollout, from 0.
      link: extends, opens, rewrites, continues or handoff, as in the lineage.
      state: live, superseded, rejected, auxiliary or undelivered.
      evidence: what link and state rest on.
      fork: where the prompt leaves the history it takes up; None where it does not.
      sibling_of: `seq` of the call that had the same prompt, where this one asks again on purpose; None elsewhere.
      finish: why sampling ended.
      parse_status: what the tool-call parser said.
      version: weights that sampled it.
      advantage: credit of each of its tokens; None if they are not trained.
      mask_reason: why they are not trained; "" if they are.
      process_reward: of this call; None if it has none.
      continues: `seq` of the call whose prompt and output begin this prompt; None if there is none.
      shared_tokens: prompt tokens that come from that call.
      new_tokens: prompt tokens after those.
      new_prompt: text of the new ones.
      tokens: what was sampled.
      sessions: conversations that this call opened.
    """

    call_id: str
    seq: int
    link: str
    state: str
    evidence: str
    fork: ForkView | None
    sibling_of: int | None
    finish: str
    parse_status: str
    version: int
    advantage: float | None
    mask_reason: str
    process_reward: float | None
    continues: int | None
    shared_tokens: int
    new_tokens: int
    new_prompt: str
    tokens: tuple[TokenView, ...]
    sessions: tuple["SessionView", ...]

    @property
    def remark(self) -> str:
        """The evidence, where something other than going on happened; "" elsewhere."""
        return "" if self.state == "live" and self.link == "extends" else self.evidence


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionView:
    """One conversation of one agent, its calls in request order.

    Attributes:
      session_id: as recorded.
      agent: who has it.
      told_by: what told this agent apart from others of its name, in words; "" if its name alone.
      trainable: whether this agent's policy is trained.
      opened: how the call that opened it is known; "" if none is.
      calls: its calls.
    """

    session_id: str
    agent: str
    told_by: str
    trainable: bool
    opened: str
    calls: tuple[CallView, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutView:
    """One rollout: what was asked, what came out, and the forest of its sessions.

    Attributes:
      task_id: the problem.
      question: what the harness was asked; "" if unknown.
      answers: what would be right.
      rollout_id: with `attempt` unique in a run.
      attempt: 0 for the first try.
      status: completed, truncated, policy_failure or infra_failure.
      detail: the failure in words, or "".
      answer: what the harness answered, or None.
      reward: the verifier's, or None.
      version: weights when the rollout began.
      wall_s: how long it took.
      sessions: those that no call of the rollout is known to have opened, usually the central agent's.
    """

    task_id: str
    question: str
    answers: tuple[str, ...]
    rollout_id: str
    attempt: int
    status: str
    detail: str
    answer: str | None
    reward: float | None
    version: int
    wall_s: float
    sessions: tuple[SessionView, ...]

    def calls(self) -> Iterator[CallView]:
        """All calls; a call stands before the calls of the sessions it opened."""
        yield from _calls(self.sessions)


def printable(text: str) -> str:
    r"""Text that cannot steer a terminal, reverse a line or break a file: what a model says is not to be trusted.

    >>> printable("a\x1b[31m b\x00 c\u202e d\ud800")
    'a␛[31m b␀ c[U+202E] d�'
    """
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    code, category = ord(character), unicodedata.category(character)
    if character in "\n\t" or category not in ("Cc", "Cf", "Cs"):
        return character
    if code < 0x20:
        return chr(0x2400 + code)
    return "\ufffd" if category == "Cs" else f"[U+{code:04X}]"


def _calls(sessions: Sequence[SessionView]) -> Iterator[CallView]:
    for session in sessions:
        for call in session.calls:
            yield call
            yield from _calls(call.sessions)
