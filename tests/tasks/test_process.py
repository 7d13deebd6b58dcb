import json

import numpy as np
import pytest

from harnessrl_jax.tasks.facts import Fact
from harnessrl_jax.tasks.process import oracle_steps, process_rewards
from harnessrl_jax.tasks.search import SearchIndex
from harnessrl_jax.trajectories.records import Call, Task, ToolCall

FACTS = (
    Fact("Peru", "capital", "Lima"),
    Fact("Peru", "longest_border", "Brazil"),
    Fact("Brazil", "currency", "reals"),
    Fact("Chad", "currency", "francs"),
)
SEARCH = SearchIndex(FACTS)
WHOLE = "What is the currency of the country with the longest border with the country whose capital is Lima?"
STEPS = ("country whose capital is Lima", "country with the longest border with Peru", "currency of Brazil")


def task(question=WHOLE, chain=("peru/capital", "peru/longest_border", "brazil/currency")):
    return Task(
        task_id="t", question=question, answers=("x",), hops=len(chain), chain=chain, template="", split="train"
    )


def call(seq, *uses):
    tools = tuple(ToolCall(id=f"{seq}.{place}", name=name, arguments=text) for place, (name, text) in enumerate(uses))
    return Call(
        run_id="run", task_id="t", group_id="g", rollout_id="r", attempt=0, session_id="s", agent="central",
        trainable=True, parent_call_id=None, call_id=f"c{seq}", seq=seq, choice=0, harness="h", dialect="openai-chat",
        prompt_ids=np.array([1], np.int32), output_ids=np.array([2], np.int32), logps=None, logp_kind=None,
        version_start=0, version_end=0, finish="tool_calls", parse_status="ok", tool_calls=tools, spans=(),
        delivered=True, request_digest="d", retry=False, request="", started_s=0.0, finished_s=0.0,
    )  # fmt: skip


def ask(text):
    return ("ask_researcher", json.dumps({"question": text}))


def find(text):
    return ("search", json.dumps({"query": text}))


def test_the_oracle_reads_the_steps_from_the_search_results():
    assert tuple(step.sub_question for step in oracle_steps(task(), SEARCH)) == STEPS
    assert [step.report for step in oracle_steps(task(), SEARCH)] == ["Peru", "Brazil", "reals"]


def test_the_oracle_stops_where_the_gold_passage_is_not_found():
    assert len(oracle_steps(task(chain=("peru/capital", "peru/anthem")), SEARCH)) == 1
    assert oracle_steps(task("Who?"), SEARCH) == ()


def test_perfect_play_earns_one_for_every_request_and_every_find():
    calls = [call(seq, use) for seq, use in enumerate(use for step in STEPS for use in (ask(step), find(step)))]
    assert process_rewards(task(), calls, SEARCH) == {f"c{seq}": 1.0 for seq in range(6)}


def test_nothing_is_earned_twice_or_for_the_whole_question():
    calls = [
        call(0, ask(WHOLE)),
        call(1, ask(STEPS[0])),
        call(2, ask(STEPS[0])),
        call(3, find("Lima")),
        call(4, find("Lima")),
    ]
    assert process_rewards(task(), calls, SEARCH) == {"c0": 0.0, "c1": 1.0, "c2": 0.0, "c3": 1.0, "c4": 0.0}


def test_the_order_of_arrival_decides_not_the_order_given():
    calls = [call(1, ask(STEPS[0])), call(0, ask(STEPS[0]))]
    assert process_rewards(task(), calls, SEARCH) == {"c0": 1.0, "c1": 0.0}


def test_two_facts_in_one_call_earn_two():
    both = task("What are the capital of Peru and the currency of Chad?", ("peru/capital", "chad/currency"))
    calls = [call(0, ask("Capital of  Peru"), ask("currency of Chad"))]
    assert process_rewards(both, calls, SEARCH) == {"c0": 2.0}


@pytest.mark.parametrize("arguments", ["{", "[]", "{}", '{"query": 3}', '{"query": "Lima", "k": "3"}'])
def test_unusable_arguments_earn_nothing(arguments):
    assert process_rewards(task(), [call(0, ("search", arguments))], SEARCH) == {"c0": 0.0}


def test_answers_and_other_questions_earn_nothing():
    calls = [call(0, ("answer", '{"text": "reals"}')), call(1, ask("currency of Chad")), call(2, find("Chad"))]
    assert process_rewards(task(), calls, SEARCH) == {"c0": 0.0, "c1": 0.0, "c2": 0.0}
