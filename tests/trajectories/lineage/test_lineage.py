import itertools

import numpy as np
import pytest

from harnessrl_jax.errors import LineageError
from harnessrl_jax.trajectories import build_lineage


def shown(calls):
    """call_id -> (parent, link, state), checked to be the same for several arrival orders."""
    lineage = build_lineage(calls)
    for order in itertools.islice(itertools.permutations(calls), 0, 24, 5):
        assert build_lineage(order) == lineage
    return {link.call.call_id: (link.parent_call_id, link.link, link.state) for link in lineage.calls}


def evidence(calls, call_id):
    return next(link.words for link in build_lineage(calls).calls if link.call.call_id == call_id)


def test_a_chat_is_a_chain(make_call):
    calls = [
        make_call("a", [1], [2], seq=0),
        make_call("b", [1, 2, 3], [4], seq=1),
        make_call("c", [1, 2, 3, 4], [5], seq=2),  # nothing was added between b and c
    ]
    assert shown(calls) == {
        "a": (None, "opens", "live"),
        "b": ("a", "extends", "live"),
        "c": ("b", "extends", "live"),
    }
    assert build_lineage(calls).counts() == {
        "agent/name": 3,
        "agents": 1,
        "link/extends": 2,
        "link/opens": 1,
        "sessions": 1,
        "state/live": 3,
    }


def test_parallel_calls_share_a_parent(make_call):
    calls = [
        make_call("a", [1], [2], seq=0),
        make_call("b", [1, 2, 3], [4], seq=1),
        make_call("c", [1, 2, 5], [6], seq=2),
    ]
    assert [parent for parent, _, _ in shown(calls).values()] == [None, "a", "a"]


def test_calls_of_interleaved_sub_agents_stay_apart(make_call):
    sub = {"agent": "sub", "session_id": "s1"}
    calls = [
        make_call("p1", [1], [2], seq=0),
        make_call("s1", [1, 2], [3], seq=1, parent_call_id="p1", **sub),
        make_call("s2", [1, 2, 3, 4], [5], seq=2, **sub),
        make_call("p2", [1, 2, 3], [6], seq=3),
    ]
    # By tokens alone s1 would extend p1 and p2 could follow s1: the agent decides first.
    assert shown(calls) == {
        "p1": (None, "opens", "live"),
        "s1": (None, "opens", "live"),
        "s2": ("s1", "extends", "live"),
        "p2": ("p1", "extends", "live"),
    }
    opened = {link.call.call_id: link.opened_by for link in build_lineage(calls).calls}
    assert opened == {"p1": None, "s1": "p1", "s2": None, "p2": None}


@pytest.mark.parametrize("same_digest", [True, False])
def test_a_declared_retry_replaces_the_first_try(make_call, same_digest):
    calls = [
        make_call("a", [1], [2], seq=0, request_digest="x"),
        make_call("b", [1], [3], seq=1, request_digest="x" if same_digest else "y", retry=True),
        make_call("c", [1, 3], [4], seq=2),
    ]
    assert shown(calls)["a"] == (None, "opens", "superseded")
    assert shown(calls)["b"] == (None, "opens", "live")
    assert evidence(calls, "a") == "replaced by b (the client declared a retry)"


def test_of_a_retried_pair_the_answer_that_was_used_stays(make_call):
    calls = [
        make_call("a", [1], [2], seq=0, request_digest="x"),
        make_call("b", [1], [3], seq=1, request_digest="x", retry=True),
        make_call("c", [1, 2], [4], seq=2),
    ]
    assert {name: state for name, (_, _, state) in shown(calls).items()} == {
        "a": "live",
        "b": "superseded",
        "c": "live",
    }
    assert evidence(calls, "b").startswith("retry of a, whose answer was used")


def test_no_retry_replaces_an_answer_that_was_used(make_call):
    calls = [make_call(name, [1], [i], seq=i, request_digest="x", retry=i > 0) for i, name in enumerate("abc")]
    calls.append(make_call("d", [1, 0, 5], [4], seq=3))
    assert [state for _, _, state in shown(calls).values()] == ["live", "superseded", "superseded", "live"]


def test_each_retry_replaces_the_one_before(make_call):
    calls = [make_call(name, [1], [2], seq=i, request_digest="x", retry=i > 0) for i, name in enumerate("abc")]
    assert [state for _, _, state in shown(calls).values()] == ["superseded", "superseded", "live"]


@pytest.mark.parametrize(
    ("lost", "words"),
    [({"delivered": False}, "was never delivered"), ({"finish": "aborted"}, "ended with finish=aborted")],
)
def test_the_same_bytes_after_a_failure_are_a_retry(make_call, lost, words):
    calls = [
        make_call("a", [1], [2], seq=0, request_digest="x", **lost),
        make_call("b", [1], [3], seq=1, request_digest="x"),
    ]
    assert [state for _, _, state in shown(calls).values()] == ["superseded", "live"]
    assert evidence(calls, "a") == f"replaced by b (the same request bytes came again after a call that {words})"


def test_other_bytes_after_a_failure_are_no_retry(make_call):
    calls = [make_call("a", [1], [2], seq=0, delivered=False), make_call("b", [1], [3], seq=1)]
    assert [state for _, _, state in shown(calls).values()] == ["undelivered", "live"]
    assert evidence(calls, "a") == "was never delivered"


def test_voting_is_not_retrying(make_call):
    calls = [make_call(name, [1], [2], seq=i, request_digest="x") for i, name in enumerate("abcde")]
    assert set(shown(calls).values()) == {(None, "opens", "live")}


def test_a_retry_among_voters_replaces_the_lost_one(make_call):
    calls = [
        make_call("a", [1], [2], seq=0, request_digest="x", delivered=False),
        make_call("b", [1], [3], seq=1, request_digest="y"),
        make_call("c", [1], [4], seq=2, request_digest="x", retry=True),
    ]
    assert [state for _, _, state in shown(calls).values()] == ["superseded", "live", "live"]


def test_choices_of_one_request_are_siblings_and_retried_one_by_one(make_call):
    calls = [
        make_call(f"{seq}{choice}", [1], [2], seq=seq, choice=choice, request_digest="x", retry=seq > 0)
        for seq in range(2)
        for choice in range(2)
    ]
    assert [state for _, _, state in shown(calls).values()] == ["superseded", "superseded", "live", "live"]


def test_a_lone_retry_flag_is_no_reason_to_drop(make_call):
    assert shown([make_call("a", [1], [2], retry=True)]) == {"a": (None, "opens", "live")}


def test_an_answer_that_a_later_prompt_contains_did_arrive(make_call):
    calls = [make_call("a", [1], [2], seq=0, delivered=False), make_call("b", [1, 2, 3], [4], seq=1)]
    assert [state for _, _, state in shown(calls).values()] == ["live", "live"]
    assert evidence(calls, "a") == "marked undelivered, but a later prompt contains its answer"


@pytest.mark.parametrize("finish", ["aborted", "error"])
def test_broken_sampling_is_not_live_even_if_its_text_is_used(make_call, finish):
    calls = [make_call("a", [1], [2], seq=0, finish=finish), make_call("b", [1, 2, 3], [4], seq=1)]
    assert [state for _, _, state in shown(calls).values()] == ["undelivered", "live"]


def test_a_changed_history_is_a_rewrite_and_says_where(make_call):
    calls = [
        make_call("a", [1, 7], [2, 3], seq=0),
        make_call("b", [1, 7, 2, 9, 5], [4], seq=1),  # 3 came back as 9
        make_call("c", [1, 7, 2, 9, 5, 4, 6], [4], seq=2),
    ]
    assert shown(calls) == {
        "a": (None, "opens", "live"),
        "b": (None, "rewrites", "live"),
        "c": ("b", "extends", "live"),
    }
    assert evidence(calls, "b") == "history differs from a at token 3 of 5"


def test_siblings_that_sampled_the_same_prefer_their_own_session_then_the_latest_before(make_call):
    calls = [
        make_call("a", [1], [2], seq=0, session_id="x"),
        make_call("b", [1], [2], seq=1, session_id="x"),
        make_call("c", [1], [2], seq=2, session_id="y"),
        make_call("d", [1, 2, 3], [4], seq=3, session_id="x"),
        make_call("e", [1], [2], seq=4, session_id="x"),
    ]
    assert shown(calls)["d"][0] == "b"


def test_an_empty_output_is_no_parent(make_call):
    calls = [make_call("a", [1], [], seq=0), make_call("b", [1], [], seq=1), make_call("c", [1], [2], seq=2)]
    assert [parent for parent, _, _ in shown(calls).values()] == [None, None, None]


def test_an_opener_nobody_knows_is_noted(make_call):
    assert evidence([make_call("a", [1], [2], parent_call_id="gone")], "a") == (
        "names the unknown call gone as its opener"
    )


def test_no_call_is_opened_by_a_later_one(make_call):
    calls = [make_call("a", [1], [2], parent_call_id="b"), make_call("b", [3], [4], seq=1, agent="sub")]
    assert build_lineage(calls).calls[0].opened_by is None
    assert evidence(calls, "a") == "names the later call b as its opener"


def test_a_rewrite_is_compared_with_the_nearest_history(make_call):
    calls = [
        make_call("a", [1, 7, 7, 7], [2], seq=0),
        make_call("b", [5], [6], seq=1, session_id="other"),
        make_call("c", [9], [6], seq=2),
        make_call("d", [1, 7, 7, 8], [4], seq=3),
        make_call("e", [1, 7, 7, 8], [4], seq=4),
    ]
    assert [link for _, link, _ in shown(calls).values()] == ["opens", "opens", "rewrites", "rewrites", "rewrites"]
    lineage = build_lineage(calls)
    assert lineage.calls[4].sibling_of == "d"
    assert lineage.counts()["fork/unknown"] == 2  # asked twice, d and e leave their history once
    assert evidence(calls, "d") == "history differs from a at token 3 of 4"
    assert evidence(calls, "c") == "history differs from a at token 0 of 1"


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"attempt": 1}, r"call 'b' has .* 'r', 1\), the others .* 'r', 0\).*each attempt of each rollout"),
        ({"rollout_id": "q"}, r"Build one lineage for each attempt of each rollout"),
        ({"call_id": "a"}, r"call_id 'a' occurs twice"),
        ({"trainable": False}, r"agent 'central' is trainable in some calls and not in others \(call 'b'\)"),
    ],
)
def test_calls_that_contradict_each_other_are_refused(make_call, second, message):
    other = make_call(**({"call_id": "b", "prompt_ids": [1], "output_ids": [2], "seq": 1} | second))
    with pytest.raises(LineageError, match=message):
        build_lineage([make_call("a", [1], [2]), other])


def test_no_calls_are_refused():
    with pytest.raises(LineageError, match="got no calls"):
        build_lineage([])


def test_two_hundred_long_calls_are_quick_enough_to_link(make_call):
    rng = np.random.default_rng(0)
    context, calls = rng.integers(1, 9, 50), []
    for seq in range(200):
        output = rng.integers(1, 9, 20)
        calls.append(make_call(f"{seq}", context, output, seq=seq))
        context = np.concatenate([context, output, rng.integers(1, 9, 20)])
    links = build_lineage(calls).calls
    assert [link.parent_call_id for link in links] == [None, *(f"{seq}" for seq in range(199))]
