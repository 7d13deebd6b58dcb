"""Faults that other gateways had with turns that come back and with the calls in them: the smallest input of each."""

import itertools
import json

import pytest

from harnessrl_jax.gateway.normalise import NORMALISERS
from harnessrl_jax.trajectories import Role, build_lineage
from harnessrl_jax.trajectories.parsing import parse_tool_calls

ASK = [{"role": "user", "content": "Hi"}]
MORE = {"role": "user", "content": "And?"}
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"query": "Peru"}}}}\n</tool_call>'


def asked(house, messages, **fields):
    """The message that answers, as a harness sends it back."""
    reply = house.post({"messages": messages} | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]


def lineage_of(house):
    return build_lineage([kept.call for kept in house.calls()], house.codec.decode)


def chained(calls):
    """Whether each prompt begins with the prompt before it and what was sampled then."""
    for before, after in itertools.pairwise(calls):
        whole = [*before.prompt_ids.tolist(), *before.output_ids.tolist()]
        if after.prompt_ids.tolist()[: len(whole)] != whole:
            return False
    return True


def test_ids_that_encoding_again_would_change_make_no_fork(house, codec):
    text = "Nairobi is the capital."
    spelled = [i for letter in text for i in codec.encode_plain(letter)]
    assert tuple(spelled) != codec.encode_plain(text)
    h = house(lambda prompt: spelled)
    first = asked(h, ASK)
    # A turn that the harness changed is rendered from text: that has other ids, and it is counted.
    asked(h, [*ASK, first | {"content": "Nairobi is its capital."}, MORE])
    assert h.rollouts.counts()["rewrite/unknown"] == 1
    asked(h, [*ASK, first, MORE])
    assert h.rollouts.counts()["rewrite/unknown"] == 1
    lineage = lineage_of(h)
    one, changed, two = lineage.calls
    assert (two.link, two.parent_call_id, two.fork) == ("extends", one.call.call_id, None)
    assert chained([one.call, two.call])
    assert (changed.link, changed.fork.from_call_id) == ("rewrites", one.call.call_id)
    assert lineage.counts()["fork/edited"] == 1


@pytest.mark.parametrize("kept", [True, False])
def test_a_template_that_drops_earlier_thoughts_makes_one_chain(thinking_house, kept):
    """Its own render of the second question has no reasoning of the first: every question would begin a branch."""
    h = thinking_house(lambda prompt: "<think>\nKenya.\n</think>\n\nIn Kenya.")
    messages = list(ASK)
    for _ in range(3):
        echo = asked(h, messages)
        assert echo["reasoning_content"] == "Kenya."
        messages += [echo if kept else {"role": "assistant", "content": echo["content"]}, MORE]
    calls = [kept.call for kept in h.calls()]
    canonical = h.codec.prompt(messages[:-2])
    counts = lineage_of(h).counts()
    assert counts["sessions"] == 1
    if kept:
        assert canonical != calls[-1].prompt_ids.tolist()
        assert chained(calls)
        assert (counts["link/extends"], counts.get("link/rewrites", 0)) == (2, 0)
    else:
        # The harness itself left the reasoning out: a fork, which says why.
        assert canonical == calls[-1].prompt_ids.tolist()
        assert counts["fork/reasoning"] == counts["link/rewrites"] == 2
        assert h.rollouts.counts()["rewrite/reasoning"] == 3


@pytest.mark.parametrize("content", ["", None, "missing", []])
def test_an_empty_turn_is_found_however_it_is_written(house, content):
    h = house(lambda prompt: "")
    echo = asked(h, ASK)
    echo.pop("content")
    if content != "missing":
        echo["content"] = content
    asked(h, [*ASK, echo, MORE])
    first, second = h.calls()
    assert second.notes["spliced"] == [first.call.call_id]
    assert chained([first.call, second.call])


def test_a_billing_line_that_changes_breaks_no_chain_and_stays_in_the_record(house):
    h = house(lambda prompt: "Yes.")
    line = "x-anthropic-billing-header: cc_version=2.1; cch={};"
    turns = list(ASK)
    for mark in ("a1", "b2"):
        system = [{"type": "text", "text": line.format(mark)}, {"type": "text", "text": "Be brief."}]
        body = {"system": system, "messages": turns, "max_tokens": 50}
        reply = h.post(body, path="/v1/messages").json()
        turns = [*turns, {"role": "assistant", "content": reply["content"]}, MORE]
    one, two = h.calls()
    assert chained([one.call, two.call])
    assert "billing" not in h.codec.decode(two.call.prompt_ids.tolist())
    assert [json.loads(kept.call.request)["system"][0]["text"] for kept in (one, two)] == [
        line.format("a1"),
        line.format("b2"),
    ]
    assert two.notes["normalised"] == [NORMALISERS[0].name]


def test_a_turn_that_comes_back_without_its_calls_is_a_fork_and_counted(house):
    h = house(lambda prompt: "Look.\n" + CALL.format("search"))
    echo = asked(h, ASK, tools=[TOOL])
    assert echo.pop("tool_calls")
    asked(h, [*ASK, echo, MORE], tools=[TOOL])
    assert h.calls()[1].notes["rewrites"] == ["unknown"]
    assert h.rollouts.counts()["rewrite/unknown"] == 1
    first, second = lineage_of(h).calls
    assert (second.link, second.parent_call_id, second.fork.from_call_id) == ("rewrites", None, first.call.call_id)
    assert (second.fork.category, first.state, second.state) == ("edited", "live", "live")


def test_a_call_of_an_unknown_tool_is_read_alike_for_the_harness_and_for_training(house):
    """Whether there is such a tool is for the harness to say: read one way here and another there, it is learnt."""
    h = house(lambda prompt: CALL.format("no_such_tool"))
    (made,) = asked(h, ASK, tools=[TOOL])["tool_calls"]
    [kept] = h.calls()
    call, text = kept.call, h.codec.decode(kept.call.output_ids[:-1].tolist())
    (read,) = parse_tool_calls(text, h.codec.tool_format).calls
    assert made["function"] == {"name": read.name, "arguments": read.arguments}
    assert [(one.id, one.name, one.arguments) for one in call.tool_calls] == [(made["id"], read.name, read.arguments)]
    assert [span.role for span in call.spans] == [Role.ACTION, Role.ARGS]
    assert (call.parse_status, call.trainable, h.rollouts.counts()["parse/ok"]) == ("ok", True, 1)


def test_of_two_calls_of_which_one_is_not_closed_the_first_is_returned(house):
    second = '<tool_call>\n{"name": "search", "arguments": {"query": "Kenya"}}'
    h = house(lambda prompt: CALL.format("search") + second)
    message = asked(h, ASK, tools=[TOOL])
    (made,) = message["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"query": "Peru"}
    assert message["content"] == second
    [kept] = h.calls()
    spelled = [h.codec.decode(kept.call.output_ids[span.start : span.end].tolist()) for span in kept.call.spans]
    # Both are labelled: what was meant as a call is trained as one.
    assert [span.role for span in kept.call.spans] == [Role.ACTION, Role.ARGS] * 2
    assert ["Peru" in spelled[1], "Kenya" in spelled[3]] == [True, True]
    assert (kept.call.parse_status, h.rollouts.counts()["parse/malformed"]) == ("malformed", 1)
    result = {"role": "tool", "tool_call_id": made["id"], "content": "Lima."}
    asked(h, [*ASK, message, result], tools=[TOOL])
    assert chained([kept.call for kept in h.calls()])


@pytest.mark.parametrize("capped", [False, True])
def test_of_three_calls_in_one_turn_none_is_dropped(house, capped):
    """Also where the harness asks for one at a time: what was sampled is given, and the wish stands in the record."""
    h = house(lambda prompt: "".join(CALL.format(name) for name in ("a", "b", "c")))
    wish = {"parallel_tool_calls": False} if capped else {}
    made = asked(h, ASK, tools=[TOOL], **wish)["tool_calls"]
    assert [one["function"]["name"] for one in made] == ["a", "b", "c"]
    [kept] = h.calls()
    assert [one.id for one in kept.call.tool_calls] == [one["id"] for one in made]
    assert kept.notes["asked"] == wish
    claude = {"messages": ASK, "max_tokens": 200, "tools": [{"name": "search", "input_schema": {"type": "object"}}]}
    blocks = h.post(claude, path="/v1/messages").json()["content"]
    assert [block["name"] for block in blocks] == ["a", "b", "c"]
    codex = {"input": "Hi", "tools": [TOOL["function"] | {"type": "function"}]}
    items = h.post(codex, path="/v1/responses").json()["output"]
    assert [item["name"] for item in items if item["type"] == "function_call"] == ["a", "b", "c"]


def test_arguments_that_are_no_json_can_be_sent_back(house):
    """A harness that repairs nothing echoes what it was given, or what it made up."""
    h = house(lambda prompt: "Yes.")
    call = {"id": "call_x", "type": "function", "function": {"name": "search", "arguments": '{"a":'}}
    echo = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_x", "content": "No JSON."}
    asked(h, [*ASK, echo, result], tools=[TOOL])
    [kept] = h.calls()
    assert kept.notes["rewrites"] == ["unknown"]
    assert "No JSON." in h.codec.decode(kept.call.prompt_ids.tolist())
