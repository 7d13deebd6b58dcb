"""A rollout's calls -> a process reward for each call that made progress along the gold chain.

Every gold passage can be earned twice in a rollout, each time once: by the first call that *asks* for it (an
`ask_researcher` with the sub-question of perfect play, compared after normalisation) and by the first call whose
`search` *finds* it among the results. A call earns 1.0 for each passage it asks for or finds first, else 0.0. Order
does not matter: a later sub-question can only be written once the earlier result is known, and two independent facts
may be asked for in one call. The outcome is not looked at.
"""

import json
from collections.abc import Sequence

from harnessrl_jax.tasks.facts import read_passage
from harnessrl_jax.tasks.grammar import parse_lookup, parse_question
from harnessrl_jax.tasks.questions import OracleStep
from harnessrl_jax.tasks.search import Search
from harnessrl_jax.tasks.verifier import normalise
from harnessrl_jax.trajectories.records import Call, Task


def oracle_steps(task: Task, search: Search) -> tuple[OracleStep, ...]:
    """The steps of perfect play, read from the question and the search results.

    Args:
      task: a question in the language of the templates; any other has no steps.
      search: the search tool of the rollout.

    Returns:
      One step a hop; fewer if a gold passage is not among the results of its sub-question.
    """
    plan = parse_question(task.question)
    steps: list[OracleStep] = []
    for place, passage_id in enumerate(task.chain if plan is not None else ()):
        sub_question = plan.sub_question(place, [step.report for step in steps]) if plan is not None else ""
        lookup = parse_lookup(sub_question)
        text = next((passage.text for passage in search(sub_question) if passage.id == passage_id), "")
        fact = read_passage(text)
        report = lookup.result(fact) if lookup is not None and fact is not None else None
        if report is None:
            break
        steps.append(OracleStep(sub_question, passage_id, report))
    return tuple(steps)


def process_rewards(task: Task, calls: Sequence[Call], search: Search) -> dict[str, float]:
    """The process reward of every call of one rollout; pure but for `search`.

    Args:
      task: the rollout's task.
      calls: its calls, in any order; they are taken by `seq`.
      search: the search tool, with as many results as the harness shows.

    Returns:
      call_id -> reward, 0.0 or a whole number up to the number of hops.
    """
    to_ask = {normalise(step.sub_question) for step in oracle_steps(task, search)}
    to_find = set(task.chain)
    rewards = {}
    for call in sorted(calls, key=lambda call: (call.seq, call.choice)):
        reward = 0.0
        for tool, text in tool_texts(call):
            if tool == "ask_researcher" and normalise(text) in to_ask:
                to_ask.remove(normalise(text))
                reward += 1.0
            elif tool == "search":
                found = to_find & {passage.id for passage in search(text)}
                to_find -= found
                reward += len(found)
        rewards[call.call_id] = reward
    return rewards


def tool_texts(call: Call) -> list[tuple[str, str]]:
    """The (tool name, text argument) of every tool call with exactly one text argument."""
    texts = []
    for tool in call.tool_calls:
        try:
            arguments = json.loads(tool.arguments)
        except json.JSONDecodeError:
            continue
        if (
            isinstance(arguments, dict)
            and len(arguments) == 1
            and isinstance(text := next(iter(arguments.values())), str)
        ):
            texts.append((tool.name, text))
    return texts
