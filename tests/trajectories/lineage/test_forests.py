"""Random forests of calls: nothing depends on the order of arrival, and every place is what it says."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from harnessrl_jax.trajectories import build_lineage
from harnessrl_jax.trajectories.prefixes import common_prefix, history

MOVES = ["extend"] * 3 + [
    "sibling",
    "retry",
    "lost",
    "rewrite",
    "cut",
    "restart",
    "sub-agent",
    "other agent",
    "compact",
]


@st.composite
def forests(draw, wire_of, toy):
    """Calls of one rollout; each extends, repeats, edits, cuts or sums up an earlier one, or opens a conversation."""
    random = draw(st.randoms(use_true_random=True))
    wire = wire_of()
    histories: list[tuple[list, dict]] = []  # messages after the answer, and fields
    for seq in range(random.randint(1, 9)):
        move = random.choice(MOVES)
        messages, fields = random.choice(histories) if histories else ([], {})
        tell = lambda: f"{random.choice(['Look it up', 'Well', 'I do not know about that'])} {random.randint(0, 3)}"
        fields = dict(fields)
        if move == "sub-agent":
            messages, fields = [], {"headers": {"x-claude-code-session-id": "s", "x-claude-code-agent-id": f"a{seq}"}}
        elif move == "other agent":
            messages, fields = [], {"agent": "critic"}
        elif move == "restart" or not messages:
            messages = []
        elif move in ("sibling", "retry", "lost"):
            messages = messages[:-1]
            fields |= {"retry": move == "retry"}
        elif move == "rewrite":
            place = random.randrange(len(messages))
            messages = [*messages[:place], {**messages[place], "content": tell()}, *messages[place + 1 :]]
        elif move == "cut":
            messages = messages[2 * random.randint(0, len(messages) // 2) :]
        elif move == "compact":
            messages = [toy.user(f"So far: {messages[-1]['content']}. Go on.")]
        if len(messages) % 2 == 0:
            messages = [*messages, toy.user(tell())]
        answer = tell()
        fields |= {"delivered": move != "lost", "finish": random.choice(["stop"] * 5 + ["length", "aborted"])}
        system = random.choice(["Answer."] * 4 + ["Decide."])
        wire.ask(f"c{seq}", toy.chat(system).body(*messages), answer, **fields)
        keep = {name: fields[name] for name in ("headers", "agent") if name in fields}
        histories.append(([*messages, toy.said(answer)], keep))
    return wire.calls


@pytest.fixture(scope="session")
def forest(wire_of, toy):
    return forests(wire_of, toy)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_order_of_arrival_never_matters(forest, toy, data):
    calls = data.draw(forest)
    shuffled = data.draw(st.permutations(calls))
    assert build_lineage(shuffled, toy.decode) == build_lineage(calls, toy.decode)
    bare = [linked._replace(fork=None, evidence=()) for linked in build_lineage(calls).calls]
    assert bare == [linked._replace(fork=None, evidence=()) for linked in build_lineage(calls, toy.decode).calls]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_place_is_what_it_says(forest, data):
    calls = data.draw(forest)
    lineage = build_lineage(calls)
    places = {linked.call.call_id: linked for linked in lineage.calls}
    assert sorted(places) == sorted(call.call_id for call in calls)
    for name, place in places.items():
        if place.parent_call_id is not None:
            parent = places[place.parent_call_id]
            before = history(parent.call)
            np.testing.assert_array_equal(place.call.prompt_ids[: len(before)], before)
            assert parent.call.seq < place.call.seq
            assert parent.agent == place.agent
        assert (place.fork is not None) == (place.link in ("rewrites", "continues", "handoff"))
        if place.fork is not None:
            source = places[place.fork.from_call_id]
            assert place.fork.position == common_prefix(history(source.call), place.call.prompt_ids)
            assert place.fork.before[:1] != place.fork.after[:1] or place.fork.before == ()
        opening = places[place.session]
        assert opening.session == place.session
        assert opening.call.seq <= place.call.seq
        assert opening.agent == place.agent
        assert place.sibling_of is None or places[place.sibling_of].sibling_of is None
        assert place.opened_by is None or places[place.opened_by].call.seq < place.call.seq
        assert place.state == "live" or any(item.about == "state" for item in place.evidence), name
    states = [count for key, count in lineage.counts().items() if key.startswith("state/")]
    assert sum(states) == len(calls)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_only_what_is_proven_is_left_out(forest, data):
    """These calls are all of the task: none declares background work, a title or a probe."""
    calls = data.draw(forest)
    retried = {call.request_digest for call in calls if call.retry}
    for place in build_lineage(calls).calls:
        call = place.call
        broken = not call.delivered or call.finish == "aborted"
        if place.state == "superseded":
            assert (
                broken
                or call.request_digest in retried
                or any(np.array_equal(call.prompt_ids, other.prompt_ids) for other in calls if other.retry)
            )
        elif place.state == "undelivered":
            assert broken
        elif place.state == "rejected":
            assert place.evidence[-1].kind == "other_summary_used"
        else:
            assert place.state == "live"
