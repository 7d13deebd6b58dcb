"""Calls of one attempt -> one document of the Agent Trajectory Interchange Format, and what it cannot say. NumPy only.

One conversation is one trajectory: that of the first call is the root, the others are embedded below the one whose call
opened them. One call is one step with its prompt ids, sampled ids and log-probabilities. Whatever ATIF has no field for
stands in the step's `extra` under this library's name, so that `from_atif` gives back equal records.

References:
  Harbor, RFC 0001 "Agent Trajectory Interchange Format", v1.7 (trajectory_id, embedded sub-agents, `extra` of tool
  calls); v1.8 adds audio only.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeAlias, cast

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories.interchange.json_lines import KeptCall
from harnessrl_jax.trajectories.records import Call, Rollout, ToolCall

SCHEMA_VERSION = "ATIF-v1.7"
EXTRA = "harnessrl_jax"
# Fields of a call that ATIF has its own names for.
CARRIED = ("prompt_ids", "output_ids", "logps", "tool_calls")

Json: TypeAlias = dict[str, Any]
Message: TypeAlias = Mapping[str, Any]
"""One message of a request: `role` (system, user, assistant or tool), `content` as text, `tool_call_id`."""


class Exported(NamedTuple):
    """A document, and how often ATIF could not say what the records say."""

    document: Json
    notes: Counter[str]


def to_atif(
    calls: Sequence[KeptCall],
    rollout: Rollout | None,
    *,
    speak: Callable[[Call], str],
    listen: Callable[[Call], Sequence[Message] | None],
) -> Exported:
    """The trajectory of one attempt.

    Args:
      calls: of one attempt, at least one, in any order.
      rollout: its outcome, if there is one.
      speak: what a call says to people, its tool calls left out.
      listen: the messages of a call's request; None if they cannot be read.

    Returns:
      The document and the notes.

    Raises:
      RecordError: no call; ATIF has no trajectory without a step.
    """
    if not calls:
        raise RecordError("to_atif: got no calls; ATIF has no trajectory without a step. Leave such rollouts out.")
    ordered = sorted(calls, key=lambda kept: (kept.call.seq, kept.call.choice))
    sessions: dict[tuple[str, str], list[KeptCall]] = {}
    for kept in ordered:
        sessions.setdefault((kept.call.agent, kept.call.session_id), []).append(kept)
    notes: Counter[str] = Counter()
    writer = _Writer(speak, listen, notes)
    documents = {key: writer.document(items) for key, items in sessions.items()}
    _embed(sessions, documents, notes)
    root = next(iter(documents.values()))
    root["extra"] = {EXTRA: {"rollout": None if rollout is None else rollout.to_json()}}
    return Exported(root, notes)


class _Writer(NamedTuple):
    speak: Callable[[Call], str]
    listen: Callable[[Call], Sequence[Message] | None]
    notes: Counter[str]

    def document(self, items: Sequence[KeptCall]) -> Json:
        """The trajectory of one conversation, its sub-agents left out."""
        first = items[0].call
        name, _, version = first.harness.partition(" ")
        steps: list[Json] = []
        heard: list[Message] = []
        for kept in items:
            heard = self._listen(steps, kept.call, heard)
            steps.append(self._step(kept))
        for number, step in enumerate(steps, start=1):
            step["step_id"] = number
        return {
            "schema_version": SCHEMA_VERSION,
            "session_id": f"{first.run_id}/{first.rollout_id}/{first.attempt}",
            "trajectory_id": f"{first.rollout_id}/{first.attempt}/{first.agent}/{first.session_id}",
            "agent": {"name": name or "unknown", "version": version or "unknown", "extra": {"role": first.agent}},
            "steps": steps,
            "final_metrics": {
                "total_prompt_tokens": sum(len(kept.call.prompt_ids) for kept in items),
                "total_completion_tokens": sum(len(kept.call.output_ids) for kept in items),
                "total_steps": len(steps),
            },
        }

    def _listen(self, steps: list[Json], call: Call, heard: list[Message]) -> list[Message]:
        """Adds what the call read and no call of its conversation had read before; all that it read."""
        listened = self.listen(call)
        if listened is None:
            self.notes["requests that could not be read: their messages are missing"] += 1
            return heard
        messages = list(listened)
        known = 0
        while known < min(len(heard), len(messages)) and heard[known] == messages[known]:
            known += 1
        new = messages[known:]
        if heard and known == len(heard) and new and new[0].get("role") == "assistant":
            new = new[1:]  # the last step, echoed
        for message in new:
            _hear(steps, message, copied=message in heard or message.get("role") == "assistant")
        return messages

    def _step(self, kept: KeptCall) -> Json:
        call, record = kept.call, kept.call.to_json()
        about = {name: value for name, value in record.items() if name not in CARRIED}
        metrics = {
            "prompt_tokens": len(call.prompt_ids),
            "completion_tokens": len(call.output_ids),
            "prompt_token_ids": record["prompt_ids"],
            "completion_token_ids": record["output_ids"],
        }
        if record["logps"] is not None:
            metrics["logprobs"] = record["logps"]
        step: Json = {
            "step_id": 0,
            "source": "agent",
            "timestamp": datetime.fromtimestamp(call.started_s, UTC).isoformat().replace("+00:00", "Z"),
            "message": self.speak(call),
            "metrics": metrics,
            "llm_call_count": 1,
            "extra": {EXTRA: about | {"state": kept.state, "notes": dict(kept.notes)}},
        }
        if call.tool_calls:
            step["tool_calls"] = [self._tool_call(tool) for tool in call.tool_calls]
        self.notes[
            "calls whose weights, sampling, roles and request stand in `extra`, which other tools pass over"
        ] += 1
        if kept.state != "delivered":
            self.notes[f"{kept.state} calls, which are steps like the others"] += 1
        if call.choice:
            self.notes["further choices of a request, which are steps of their own"] += 1
        return step

    def _tool_call(self, tool: ToolCall) -> Json:
        arguments = _arguments(tool.arguments)
        if arguments is None:
            self.notes["tool calls whose arguments are no JSON object; their text stands in `extra`"] += 1
        return {
            "tool_call_id": tool.id,
            "function_name": tool.name,
            "arguments": arguments or {},
            "extra": {EXTRA: {"arguments": tool.arguments}},
        }


def _hear(steps: list[Json], message: Message, *, copied: bool) -> None:
    """Adds one message of a request: tool results to the step that asked for them, others as steps."""
    role, content = message.get("role"), str(message.get("content") or "")
    asked = next((step for step in reversed(steps) if step["source"] == "agent" and "metrics" in step), None)
    if role == "tool" and asked is not None and not copied:
        known = [tool["tool_call_id"] for tool in asked.get("tool_calls", ())]
        result: Json = {"content": content}
        if message.get("tool_call_id") in known:
            result["source_call_id"] = message["tool_call_id"]
        asked.setdefault("observation", {"results": []})["results"].append(result)
        return
    source = {"system": "system", "assistant": "agent"}.get(str(role), "user")
    step: Json = {"step_id": 0, "source": source, "message": content}
    steps.append(step | ({"is_copied_context": True} if copied else {}))


def _embed(
    sessions: Mapping[tuple[str, str], Sequence[KeptCall]],
    documents: Mapping[tuple[str, str], Json],
    notes: Counter[str],
) -> None:
    """Puts each conversation but the first below the one whose call opened it; below the first if that is unknown."""
    owner = {kept.call.call_id: (key, kept.call) for key, items in sessions.items() for kept in items}
    root = next(iter(documents))
    for key, items in list(sessions.items())[1:]:
        call_id = items[0].call.parent_call_id
        opener, asked = owner.get(call_id, (root, None)) if call_id is not None else (root, None)
        document = documents[key]
        if asked is None or asked.seq >= items[0].call.seq:
            notes["conversations without a known opener, which stand below the first"] += 1
            opener = root
        else:
            step = next(step for step in documents[opener]["steps"] if _call_id(step) == call_id)
            reference = {"trajectory_id": document["trajectory_id"], "session_id": document["session_id"]}
            step.setdefault("observation", {"results": []})["results"].append({"subagent_trajectory_ref": [reference]})
        documents[opener].setdefault("subagent_trajectories", []).append(document)


def _call_id(step: Json) -> str | None:
    return step.get("extra", {}).get(EXTRA, {}).get("call_id")


def _arguments(text: str) -> Json | None:
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return cast(Json, value) if isinstance(value, dict) else None
