"""A document of the Agent Trajectory Interchange Format -> calls, and what it did not say. NumPy only, no file.

Documents that `to_atif` wrote give back equal records. In those of other programs a step with prompt ids and sampled
ids is a call; what ATIF has no field for comes from `Origin`, and everything that is assumed or passed over is counted.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, cast

from harnessrl_jax.errors import RecordError
from harnessrl_jax.trajectories.interchange.atif_export import EXTRA, Json
from harnessrl_jax.trajectories.interchange.json_lines import STATES, KeptCall, Records
from harnessrl_jax.trajectories.records import Call, LogpKind, Rollout, ToolCall

_READ = re.compile(r"ATIF-v1\.[0-8]")


class Origin(NamedTuple):
    """What a document of another program does not say.

    Attributes:
      run_id: the run that the calls are to belong to.
      task_id: the problem; also the group, so that documents with one task are compared.
      rollout_id: unique in the run.
      trainable_agents: agents to train; None trains all.
      logp_kind: how the log-probabilities were computed; None leaves them out.
      version: number of the weights that sampled.
    """

    run_id: str
    task_id: str
    rollout_id: str
    trainable_agents: Collection[str] | None
    logp_kind: LogpKind | None
    version: int


class Imported(NamedTuple):
    """The records, and how often something was assumed or passed over."""

    records: Records
    notes: Counter[str]


def from_atif(document: Mapping[str, Any], origin: Origin) -> Imported:
    """The calls of one document, sub-agents included, in the order of its steps.

    Args:
      document: as `json.loads` gives it, versions 1.0 to 1.8.
      origin: what it does not say; not read where `to_atif` wrote the document.

    Returns:
      The records and the notes. A rollout comes back only from a document of this library: ATIF has no reward.

    Raises:
      RecordError: the document breaks the format; the message says where.
    """
    version = document.get("schema_version")
    if not isinstance(version, str) or not _READ.fullmatch(version):
        raise RecordError(f"schema_version is {version!r}; ATIF-v1.0 to ATIF-v1.8 can be read.")
    reader = _Reader(origin, Counter(), [])
    reader.trajectory(dict(document), "", None)
    ours = _at(_part(document, "extra", "extra"), EXTRA)
    rollouts: tuple[Rollout, ...] = ()
    if isinstance(ours.get("rollout"), dict):
        rollouts = (Rollout.from_json(ours["rollout"]),)
    elif EXTRA not in _part(document, "extra", "extra"):
        reader.notes["documents without a reward: ATIF has no field for it"] += 1
    calls = sorted(reader.calls, key=lambda kept: (kept.call.seq, kept.call.choice))
    return Imported(Records(tuple(calls), rollouts), reader.notes)


class _Reader(NamedTuple):
    origin: Origin
    notes: Counter[str]
    calls: list[KeptCall]

    def trajectory(self, document: Json, where: str, opened_by: str | None) -> None:
        """Reads one conversation and those below it."""
        agent = _part(document, "agent", f"{where}agent")
        below = _embedded(document, where)
        opener: dict[str, str] = {}
        for number, step in enumerate(_list(document, "steps", where), start=1):
            place = f"{where}steps[{number - 1}]"
            if step.get("step_id") != number:
                raise RecordError(f"{place}.step_id is {step.get('step_id')!r}, wanted {number}: steps count from 1.")
            kept = self._step(document, agent, step, place, opened_by)
            if kept is not None:
                self.calls.append(kept)
                opener.update(dict.fromkeys(self._references(step), kept.call.call_id))
        for number, (name, sub) in enumerate(below.items()):
            self.trajectory(sub, f"{where}subagent_trajectories[{number}].", opener.get(name))

    def _step(self, document: Json, agent: Json, step: Json, place: str, opened_by: str | None) -> KeptCall | None:
        if step.get("source") != "agent":
            return None
        if step.get("is_copied_context"):
            self.notes["steps copied for context, passed over"] += 1
            return None
        metrics = _part(step, "metrics", f"{place}.metrics")
        prompt, output = metrics.get("prompt_token_ids"), metrics.get("completion_token_ids")
        if not prompt or output is None:
            self.notes["steps without token ids, passed over: text would have to be encoded again"] += 1
            return None
        if (step.get("llm_call_count") or 1) > 1:
            self.notes["steps of several model calls, passed over: their ids belong to no single prompt"] += 1
            return None
        tools = [_tool_call(tool, f"{place}.tool_calls") for tool in _list(step, "tool_calls", f"{place}.")]
        carried = {
            "prompt_ids": prompt,
            "output_ids": output,
            "logps": metrics.get("logprobs"),
            "tool_calls": [{"id": tool.id, "name": tool.name, "arguments": tool.arguments} for tool in tools],
        }
        ours = dict(_at(_part(step, "extra", f"{place}.extra"), EXTRA))
        state, notes = ours.pop("state", None), ours.pop("notes", None)
        try:
            if state in STATES and isinstance(notes, dict):
                return KeptCall(Call.from_json(ours | carried), str(state), cast(Json, notes))
            return self._foreign(document, agent, step, carried, opened_by)
        except RecordError as error:
            raise RecordError(f"{place}: {error}") from error

    def _references(self, step: Json) -> Iterator[str]:
        """Ids of the embedded trajectories that a step's results name."""
        for result in _list(_part(step, "observation", "observation"), "results", "observation."):
            for reference in _list(result, "subagent_trajectory_ref", "results."):
                if isinstance(reference.get("trajectory_id"), str):
                    yield reference["trajectory_id"]
                else:
                    self.notes["sub-agents in documents of their own, which are not read"] += 1

    def _foreign(self, document: Json, agent: Json, step: Json, carried: Json, opened_by: str | None) -> KeptCall:
        """A call of another program."""
        origin, name = self.origin, str(agent.get("name") or "agent")
        session = str(document.get("trajectory_id") or document.get("session_id") or origin.rollout_id)
        if carried["logps"] is not None and origin.logp_kind is None:
            self.notes["steps whose log-probabilities are left out: how they were computed is not said"] += 1
            carried = carried | {"logps": None}
        self.notes["calls whose finish, roles and weights are assumed: ATIF has no field for them"] += 1
        tools = carried.pop("tool_calls")
        call = Call(
            run_id=origin.run_id,
            task_id=origin.task_id,
            group_id=origin.task_id,
            rollout_id=origin.rollout_id,
            attempt=0,
            session_id=session,
            agent=name,
            trainable=origin.trainable_agents is None or name in origin.trainable_agents,
            parent_call_id=opened_by,
            call_id=f"{origin.rollout_id}:{len(self.calls)}",
            seq=len(self.calls),
            choice=0,
            harness=f"{name} {agent.get('version') or 'unknown'}",
            dialect="atif",
            logp_kind=None if carried["logps"] is None else origin.logp_kind,
            version_start=origin.version,
            version_end=origin.version,
            finish="tool_calls" if tools else "stop",
            parse_status="ok" if tools else "none",
            tool_calls=tuple(ToolCall(**tool) for tool in tools),
            spans=(),
            delivered=True,
            request_digest="",
            retry=False,
            request="",
            started_s=0.0,
            finished_s=0.0,
            **carried,
        )
        return KeptCall(call, "delivered", {})


def _embedded(document: Json, where: str) -> dict[str, Json]:
    """Embedded conversations by their id, which each must have for itself."""
    out: dict[str, Json] = {}
    for number, sub in enumerate(_list(document, "subagent_trajectories", where)):
        name = sub.get("trajectory_id")
        if not isinstance(name, str) or name in out:
            raise RecordError(
                f"{where}subagent_trajectories[{number}].trajectory_id is {name!r}; each embedded trajectory needs one "
                "of its own."
            )
        out[name] = sub
    return out


def _tool_call(tool: Json, place: str) -> ToolCall:
    """The call with the text of its arguments as sampled, where the document has it."""
    name, identity, arguments = tool.get("function_name"), tool.get("tool_call_id"), tool.get("arguments")
    if not isinstance(name, str) or not isinstance(identity, str) or not isinstance(arguments, dict):
        raise RecordError(
            f"{place}: wanted tool_call_id and function_name as text and an object as arguments, got {tool!r:.200}"
        )
    sampled = _at(_part(tool, "extra", f"{place}.extra"), EXTRA).get("arguments")
    text = sampled if isinstance(sampled, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id=identity, name=name, arguments=text)


def _part(data: Mapping[str, Any], name: str, where: str) -> Json:
    """An object inside another; empty where it is absent or null."""
    value = data.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RecordError(f"{where}: an object is wanted, got {type(value).__name__}.")
    return cast(Json, value)


def _at(data: Json, name: str) -> Json:
    return _part(data, name, name)


def _list(data: Mapping[str, Any], name: str, where: str) -> list[Json]:
    """A list of objects inside an object; empty where it is absent or null."""
    value: Any = data.get(name)
    items = cast(list[Any], value) if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, dict) for item in items) or not isinstance(value, list | None):
        raise RecordError(f"{where}{name}: a list of objects is wanted, got {value!r:.80}.")
    return cast(list[Json], items)
