import dataclasses
import json

import pytest

from harnessrl_jax.monitor import view
from harnessrl_jax.trajectories.lineage import build_lineage
from harnessrl_jax.trajectories.records import Role, ToolCall


def by_seq(seen):
    return {call.seq: call for call in seen.calls()}


def test_sub_agents_stand_below_the_call_that_opened_them(seen):
    (central,) = seen.sessions
    assert [call.seq for call in central.calls] == [0, 4]
    researcher, critic = central.calls[0].sessions
    assert (researcher.agent, [call.seq for call in researcher.calls]) == ("researcher", [1, 2])
    assert (critic.agent, critic.trainable, [call.seq for call in critic.calls]) == ("critic", False, [3])
    assert researcher.opened == "its request quotes the arguments of this call"
    assert [call.seq for call in seen.calls()] == [0, 1, 2, 3, 4]


def test_what_the_harness_names_comes_before_what_a_request_quotes(rollout, calls, decode, new_call):
    calls.append(new_call(5, "more", "look:it.", agent="helper", session_id="h", parent_call_id="c4"))
    seen = view(rollout, build_lineage(calls), decode)
    (helper,) = by_seq(seen)[4].sessions
    assert (helper.agent, helper.opened) == ("helper", "named by the harness")


def test_a_whole_message_is_better_evidence_than_a_part_of_one(rollout, new_call, decode, body):
    calls = [
        new_call(0, "Q", "ask:capital of Chad today."),
        new_call(1, "x", "look:capital of Chad.", agent="a", session_id="a", request=body("capital of Chad today")),
        new_call(2, "y", "look:it.", agent="b", session_id="b", request=body("capital of Chad today")),
    ]
    seen = view(rollout, build_lineage(calls), decode)
    assert [session.agent for session in by_seq(seen)[0].sessions] == ["a", "b"]


@pytest.mark.parametrize("opener", ["unknown", "c9"])
def test_a_session_without_an_earlier_opener_is_a_root(rollout, new_call, decode, opener):
    calls = [
        new_call(0, "Q", "ask:this or that.", request="[" * 100_000),
        new_call(1, "x", "a:b.", agent="lone", session_id="x", parent_call_id=opener, request="not JSON"),
        new_call(9, "Q and", "say:no.", call_id="c9"),
    ]
    seen = view(rollout, build_lineage(calls), decode)
    assert [session.agent for session in seen.sessions] == ["central", "lone"]
    assert len(list(seen.calls())) == 3


def test_only_the_new_part_of_a_prompt_is_shown(seen):
    first, last = by_seq(seen)[0], by_seq(seen)[4]
    assert (first.continues, first.shared_tokens, first.new_tokens, first.new_prompt) == (None, 0, 2, "Q?")
    assert (last.continues, last.shared_tokens, last.new_tokens, last.new_prompt) == (0, 22, 5, "=Emi>")


def test_each_call_says_how_it_is_trained_or_why_not(seen):
    calls = by_seq(seen)
    assert {seq: call.advantage for seq, call in calls.items()} == {0: 0.5, 1: None, 2: -0.25, 3: None, 4: 1.0}
    assert {seq: call.mask_reason for seq, call in calls.items() if call.mask_reason} == {
        1: "superseded",
        3: "frozen agent",
    }
    assert calls[1].remark.startswith("replaced by c2")
    assert calls[4].remark == ""
    assert (calls[0].process_reward, calls[4].process_reward) == (0.5, None)


def test_a_live_call_without_an_advantage_has_the_given_reason(rollout, calls, decode):
    lineage = build_lineage(calls)
    seen = by_seq(view(rollout, lineage, decode, advantages={"c4": 1.0}, reasons={"c0": "too_long"}, untrained="later"))
    assert (seen[0].mask_reason, seen[2].mask_reason, seen[4].mask_reason) == ("too_long", "later", "")
    assert by_seq(view(rollout, lineage, decode))[4].mask_reason == "evaluation, not trained"


def test_tokens_have_their_text_and_role(seen):
    tokens = by_seq(seen)[0].tokens
    assert "".join(token.text for token in tokens) == "ask:highest of Chad."
    labels = [Role.ACTION] * 3 + [Role.OTHER] + [Role.ARGS] * 15 + [Role.OTHER]
    assert [token.role for token in tokens] == labels


def test_a_character_of_several_tokens_is_shown_once(rollout, new_call):
    # Bytes as tokens: é is two of them.
    decode = lambda ids: bytes(ids).decode("utf-8", "replace")
    output = list("é!".encode())
    one = new_call(0, "Q", "x.", output_ids=output, spans=(), tool_calls=())
    (call,) = view(rollout, build_lineage([one]), decode).calls()
    assert [token.text for token in call.tokens] == ["é", "", "!"]


def test_a_rollout_without_calls_has_an_empty_forest(rollout, decode, task):
    failed = dataclasses.replace(rollout, status="infra_failure", reward=None, answer=None, process_rewards={})
    seen = view(failed, None, decode, task=task)
    assert seen.sessions == ()
    assert (seen.question, seen.answers, seen.status) == ("Which is the highest?", ("Emi Koussi",), "infra_failure")


def test_deep_and_broken_arguments_do_no_harm(rollout, new_call, decode, body):
    deep = ToolCall(id="t", name="ask", arguments="[" * 900 + json.dumps("a question") + "]" * 900)
    broken = ToolCall(id="u", name="ask", arguments='{"text": "a quest')
    calls = [
        new_call(0, "Q", "ask:x.", tool_calls=(broken, deep)),
        new_call(1, "x", "a:b.", agent="sub", session_id="s", request=body("a question")),
    ]
    (session,) = view(rollout, build_lineage(calls), decode).sessions
    assert [opened.agent for opened in session.calls[0].sessions] == ["sub"]


@pytest.fixture
def forked(rollout, calls, decode, new_call):
    """A sixth call takes up the history of the second central one, changed; a seventh asks the same again."""
    prompt = "Q?ask:lowest of Chad.=Emi>"
    calls += [new_call(5, prompt, "say:no."), new_call(6, prompt, "say:so.", choice=1)]
    return by_seq(view(rollout, build_lineage(calls, decode), decode))


def test_a_fork_says_what_changed_from_which_call_on(forked):
    fork = forked[5].fork
    assert (forked[5].link, fork.from_seq, fork.position) == ("rewrites", 4, len("Q?ask:"))
    assert (fork.before[:7], fork.after[:6]) == ("highest", "lowest")
    assert forked[4].fork is None


def test_a_call_that_asks_again_names_the_first(forked):
    assert (forked[6].sibling_of, forked[5].sibling_of) == (5, None)


def test_a_fork_without_text_is_decoded(rollout, calls, decode, new_call):
    calls.append(new_call(5, "Q?ask:lowest of Chad.=Emi>", "say:no."))
    fork = by_seq(view(rollout, build_lineage(calls), decode))[5].fork
    assert (fork.before[:7], fork.after[:6]) == ("highest", "lowest")


def test_an_agent_without_a_name_of_its_own_says_how_it_is_known(rollout, decode, new_call):
    headers = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "sub"}
    calls = [new_call(0, "Q", "ask:x."), new_call(1, "other", "a:b.", headers=headers)]
    _, second = view(rollout, build_lineage(calls), decode).sessions
    assert (second.agent, second.told_by) == ("central/sub", "a header")
