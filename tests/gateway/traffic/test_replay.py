"""Everything that real harnesses sent, through the whole gateway: all of it is served, and every turn is found again.

`tests/data/harness_traffic` holds the requests of 36 set-ups as they reached a server on loopback, in three dialects.
Long texts are replaced by a hash and a length, so that equal texts are still equal; headers are those that attribute a
call; the tool definitions of a file are listed once. `expected.json` says what each must give, and what reading the
requests shows.
"""

import json
import pathlib
from collections import Counter

import numpy as np
import pytest

from harnessrl_jax.gateway.dialects import PATHS
from harnessrl_jax.trajectories import build_lineage, pack_groups, target_context
from harnessrl_jax.trajectories.credit import supervised_calls
from harnessrl_jax.trajectories.records import Rollout

FOLDER = pathlib.Path(__file__).parents[2] / "data/harness_traffic"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
NAMES = sorted(EXPECTED)
RETRIES = sorted(name for name in NAMES if name.endswith("-retry"))


def test_every_recording_has_its_line():
    assert {path.stem for path in FOLDER.glob("*.json")} == {*NAMES, "expected"}


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_served_and_every_turn_is_found(replayed, recorded, name):
    requests, answers = recorded(name)
    out = replayed(name)
    assert [reply.status for reply in out.replies] == [503 if request.failed else 200 for request in requests]
    assert {kept.state for kept in out.kept} == {"delivered"}
    asked = [
        (request, PATHS[request.path.partition("?")[0]].parse(json.dumps(request.body)))
        for request in requests
        if request.body and not request.failed and "count_tokens" not in request.path
    ]
    known = [message for message in answers if message is not None]
    for (_, wanted), kept in zip(asked, out.kept, strict=True):
        echoed = [message for message in wanted.messages if message["role"] == "assistant"]
        # What the harness itself put into the model's mouth was never sampled; all else comes back token by token.
        foreign = [message for message in echoed if not any(_same(message, turn) for turn in known)]
        assert kept.notes["rewrites"] == ["unknown"] * len(foreign)
        assert len(kept.notes["spliced"]) == len(echoed) - len(foreign)


def _same(message, turn):
    calls = [[call["id"] for call in one.get("tool_calls", ())] for one in (message, turn)]
    return calls[0] == calls[1] and (bool(calls[0]) or message["content"] == turn["content"])


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_that_goes_on_extends_what_was_sampled(replayed, recorded, name):
    """Unless instructions or tools changed, which the lineage has to name."""
    lineage = lineage_of(replayed(name))
    by_id = {linked.call.call_id: linked.call for linked in lineage.calls}
    for kept, linked in zip(replayed(name).kept, lineage.calls, strict=True):
        if not kept.notes["spliced"] or linked.link != "extends":
            assert linked.parent_call_id is None
            continue
        assert linked.parent_call_id == kept.notes["spliced"][-1]
        before = by_id[linked.parent_call_id]
        whole = [*before.prompt_ids, *before.output_ids]
        assert list(linked.call.prompt_ids[: len(whole)]) == whole


def lineage_of(out, decode=None):
    return build_lineage([kept.call for kept in out.kept], decode)


def summary(lineage, targets):
    """The figures of `expected.json`."""
    counts = lineage.counts()
    forks = Counter(linked.fork.category for linked in lineage.calls if linked.fork is not None)
    live = [linked for linked in lineage.calls if linked.state == "live"]
    return {
        "calls": len(lineage.calls),
        "agents": counts["agents"],
        "sessions": counts["sessions"],
        "roots": sum(linked.parent_call_id is None for linked in live),
        "siblings": counts.get("siblings", 0),
        "forks": dict(sorted(forks.items())),
        "superseded": counts.get("state/superseded", 0),
        "auxiliary": counts.get("state/auxiliary", 0),
        "targets": targets,
    }


def packed(lineage):
    first = lineage.calls[0].call
    names = {name: getattr(first, name) for name in ("run_id", "task_id", "group_id", "rollout_id", "attempt")}
    rollout = Rollout(
        **names,
        **{"harness": "x", "status": "completed", "reward": 1.0, "process_rewards": {}, "answer": None, "detail": ""},
        **{"version": 0, "started_s": 0.0, "finished_s": 1.0},
    )
    credited = supervised_calls([rollout], [lineage])
    longest = max(len(linked.call.prompt_ids) + len(linked.call.output_ids) for linked in lineage.calls)
    sampled = sum(len(linked.call.output_ids) for linked in lineage.calls)
    return pack_groups(credited, loss_mean="rollout", row_slots=longest, row_targets=sampled, max_rows=24)


def back(step):
    """Prompt and output of each packed call, from the rows alone."""
    found = {}
    rows, places = np.nonzero(step.batch.weight)
    for row, place in zip(rows.tolist(), places.tolist(), strict=True):
        number = int(step.batch.call[row, place])
        context = target_context(step.batch, row, place)
        found.setdefault(number, []).append((len(context), context, int(step.batch.target[row, place])))
    out = []
    for number in sorted(found):
        tokens = sorted(found[number], key=lambda token: token[0])
        out.append((tuple(tokens[0][1].tolist()), tuple(token for _, _, token in tokens)))
    return out


@pytest.mark.parametrize("name", NAMES)
def test_trajectories_are_what_reading_the_traffic_says(replayed, codec, name):
    lineage = lineage_of(replayed(name), codec.decode)
    step = packed(lineage)
    assert step.report.dropped.keys() <= {"auxiliary"}
    expected = {key: value for key, value in EXPECTED[name].items() if key not in ("read", "lost")}
    assert summary(lineage, step.report.targets_used) == expected
    live = [linked.call for linked in lineage.calls if linked.state == "live"]
    wanted = [(tuple(call.prompt_ids.tolist()), tuple(call.output_ids.tolist())) for call in live]
    assert Counter(back(step)) == Counter(wanted)
    assert float(step.batch.weight.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_the_records_does_not_matter(replayed, name):
    calls = [kept.call for kept in replayed(name).kept]
    places = lambda given: {linked.call.call_id: linked[1:] for linked in build_lineage(given).calls}
    assert places(calls) == places(calls[::-1])


@pytest.mark.parametrize("name", RETRIES)
def test_an_answer_that_never_arrived_is_superseded_by_its_retry(replayed, codec, name):
    out = replayed(name, failures="lost")
    assert [kept.state for kept in out.kept] == ["undelivered", "undelivered", "delivered", "delivered"]
    lineage = lineage_of(out, codec.decode)
    expected = {key: value for key, value in EXPECTED[name].items() if key not in ("read", "lost")}
    step = packed(lineage)
    assert summary(lineage, step.report.targets_used) == expected | EXPECTED[name]["lost"]


@pytest.mark.parametrize("name", ["claude-code-subagents", "opencode-subagents"])
def test_sub_agents_that_run_at_the_same_time_are_kept_apart(replayed, recorded, codec, name):
    assert any(request.in_flight for request in recorded(name)[0])
    out = replayed(name, together=True)
    lineage = lineage_of(out, codec.decode)
    expected = {key: value for key, value in EXPECTED[name].items() if key != "read"}
    assert summary(lineage, packed(lineage).report.targets_used) == expected
    assert [kept.notes["rewrites"] for kept in out.kept] == [[]] * len(out.kept)


@pytest.mark.parametrize("name", ["claude-code-subagents", "codex-subagents", "opencode-subagents", "qwen-subagents"])
def test_a_sub_agent_is_opened_by_the_call_that_asked_for_it(replayed, codec, name):
    """With headers or without, and also where another call waits for the sub-agent."""
    live = [linked for linked in lineage_of(replayed(name), codec.decode).calls if linked.state == "live"]
    opened = {linked.opened_by for linked in live if linked.link == "opens"}
    assert opened == {None, live[0].call.call_id}


def test_the_same_recording_gives_the_same_records(replayed, replay_again, tmp_path):
    """Names, seeds and ids depend on nothing but the requests and the run."""
    plain = lambda out: [kept.call.to_json() for kept in out.kept]
    assert plain(replay_again("opencode-subagents", tmp_path)) == plain(replayed("opencode-subagents"))
