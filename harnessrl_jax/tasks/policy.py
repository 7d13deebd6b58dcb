"""A conversation so far -> the tool calls of the next turn: a scripted player with known strategy mistakes.

The player reads nothing but the conversation, so it plays any question in the language of the templates, in any world.
Its mistakes are choices of strategy, never of names: a model that imitates it learns to copy names faithfully and to
choose badly, and choosing is what reinforcement learning can then improve.
"""

import random
from dataclasses import dataclass, fields
from typing import NamedTuple

from harnessrl_jax.errors import TaskError
from harnessrl_jax.tasks.facts import RELATIONS, Fact, read_passage
from harnessrl_jax.tasks.grammar import Lookup, Plan, parse_lookup, parse_question
from harnessrl_jax.tasks.prompts import PROMPTS

UNKNOWN = "unknown"
MOST_SEARCHES = 2


class Action(NamedTuple):
    """One tool call with its one text argument."""

    tool: str
    text: str


class Turn(NamedTuple):
    """One assistant turn: its tool calls, and what each gave back."""

    actions: tuple[Action, ...]
    results: tuple[str, ...]


class Conversation(NamedTuple):
    """What an agent has seen: its role, the request it was given, and its turns."""

    agent: str
    request: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistakes:
    """Probability of each strategy mistake at each place where it can be made.

    With the default, the most likely first move, to hand on the whole question, is a poor one for every question of two
    or more hops, so that even greedy decoding of an imitator has something to learn.

    Attributes:
      guess: central's first move answers with the last name in the question.
      ask_whole: central's first move asks the researcher the whole question instead of the next fact.
      trust_whole: after that, central answers with whatever came back.
      answer_early: central answers with the last value it knows though facts are missing.
      repeat: central asks its last sub-question again.
      wrong_value: central knows everything and answers with another value it was told.
      search_self: central searches for the next fact itself. Not harmful: it then reads the result correctly.
      vague_relation: the researcher searches only the relation ("capital").
      vague_entity: the researcher searches only the entity ("Peru").
      give_up: the researcher, not finding the fact in the results, reports what stands in the first line.
      wrong_line: the researcher reports the value of another line.
      report_given: the researcher reports what it was given instead of what was asked for.
    """

    guess: float = 0.25
    ask_whole: float = 0.5
    trust_whole: float = 0.85
    answer_early: float = 0.4
    repeat: float = 0.05
    wrong_value: float = 0.15
    search_self: float = 0.1
    vague_relation: float = 0.08
    vague_entity: float = 0.08
    give_up: float = 0.5
    wrong_line: float = 0.05
    report_given: float = 0.05

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0.0 <= value <= 1.0:
                raise TaskError(f"Mistakes.{field.name} is {value}; it is a probability, so give a number in [0, 1].")
        for one, two in (("guess", "ask_whole"), ("vague_relation", "vague_entity"), ("wrong_line", "report_given")):
            total = getattr(self, one) + getattr(self, two)
            if total > 1.0:
                raise TaskError(
                    f"Mistakes.{one} + Mistakes.{two} is {total}; they exclude each other: at most 1 together."
                )


PERFECT = Mistakes(**{field.name: 0.0 for field in fields(Mistakes)})
"""A player that never errs."""


def next_actions(conversation: Conversation, mistakes: Mistakes, rng: random.Random) -> tuple[Action, ...]:
    """The tool calls of the next turn.

    Args:
      conversation: what the agent has seen.
      mistakes: how often it errs.
      rng: the only source of chance.

    Raises:
      TaskError: an agent this player does not play.
    """
    if conversation.agent == "central":
        return _central(conversation, mistakes, rng)
    if conversation.agent == "researcher":
        return (_researcher(conversation, mistakes, rng),)
    raise TaskError(f"the scripted player plays central and researcher, but was given {conversation.agent!r}.")


def _central(conversation: Conversation, mistakes: Mistakes, rng: random.Random) -> tuple[Action, ...]:
    plan = parse_question(conversation.request)
    told = known(conversation)
    last = told[-1][1] if told else UNKNOWN
    if plan is None:
        plan = Plan((conversation.request,), parallel=False)
    results = progress(plan, told)
    chance = lambda probability: rng.random() < probability
    if len(results) == len(plan.steps):
        others = [value for value in results if value != plan.answer(results)]
        wrong = chance(mistakes.wrong_value) and bool(others)
        return (Action("answer", others[0] if wrong else plan.answer(results)),)
    if len(conversation.turns) >= PROMPTS["agents"]["central"]["max_calls"] - 1:
        return (Action("answer", last),)
    if not conversation.turns:
        draw = rng.random()
        if draw < mistakes.guess:
            return (Action("answer", name_in(plan)),)
        if draw < mistakes.guess + mistakes.ask_whole:
            return (Action("ask_researcher", conversation.request),)
    elif told and told[-1][0] == conversation.request:
        if chance(mistakes.trust_whole):
            return (Action("answer", last),)
    elif told and chance(mistakes.answer_early):
        return (Action("answer", last),)
    elif told and chance(mistakes.repeat):
        return (Action("ask_researcher", told[-1][0]),)
    missing = [plan.sub_question(len(results), results)] if not plan.parallel else missing_steps(plan, told)
    tool = "search" if chance(mistakes.search_self) else "ask_researcher"
    return tuple(Action(tool, sub_question) for sub_question in missing)


def name_in(plan: Plan) -> str:
    """The name that a plan starts from; for two independent facts, that of the second."""
    lookup = parse_lookup(plan.steps[-1] if plan.parallel else plan.steps[0])
    return UNKNOWN if lookup is None else lookup.entity


def known(conversation: Conversation) -> list[tuple[str, str]]:
    """What central was told: (sub-question, result), in order; its own searches are read."""
    told = []
    for turn in conversation.turns:
        for action, result in zip(turn.actions, turn.results):
            if action.tool == "ask_researcher" and result not in PROMPTS["replies"].values():
                told.append((action.text, result))
            elif action.tool == "search" and (lookup := parse_lookup(action.text)) is not None:
                value = find(lookup, result)
                if value is not None:
                    told.append((action.text, value))
    return told


def progress(plan: Plan, told: list[tuple[str, str]]) -> list[str]:
    """The results of the first steps of `plan`, as far as they are known; the last word on each counts."""
    answers = dict(told)
    results: list[str] = []
    for place in range(len(plan.steps)):
        sub_question = plan.sub_question(place, results)
        if sub_question not in answers:
            break
        results.append(answers[sub_question])
    return results


def missing_steps(plan: Plan, told: list[tuple[str, str]]) -> list[str]:
    """The sub-questions of a parallel plan that have no result yet."""
    answers = dict(told)
    return [step for step in plan.steps if step not in answers]


def _researcher(conversation: Conversation, mistakes: Mistakes, rng: random.Random) -> Action:
    plan = parse_question(conversation.request)
    asked = plan.steps[0] if plan is not None and len(plan.steps) == 1 else conversation.request
    lookup = parse_lookup(asked)
    searches = [(turn.actions[0].text, turn.results[0]) for turn in conversation.turns if turn.actions]
    if not searches:
        return Action("search", asked if lookup is None else _query(asked, lookup, mistakes, rng))
    found = find(lookup, searches[-1][1]) if lookup is not None else None
    if lookup is not None and found is not None:
        return Action("report", _report(lookup, found, searches[-1][1], mistakes, rng))
    if lookup is not None and len(searches) < MOST_SEARCHES and rng.random() >= mistakes.give_up:
        again = asked if searches[-1][0] != asked else f"{lookup.entity} {RELATIONS[lookup.field].label}"
        return Action("search", again)
    return Action("report", _first_line(lookup, searches[-1][1]))


def _query(asked: str, lookup: Lookup, mistakes: Mistakes, rng: random.Random) -> str:
    draw = rng.random()
    if draw < mistakes.vague_relation:
        return RELATIONS[lookup.field].label
    return lookup.entity if draw < mistakes.vague_relation + mistakes.vague_entity else asked


def _report(lookup: Lookup, found: str, result: str, mistakes: Mistakes, rng: random.Random) -> str:
    draw = rng.random()
    if draw < mistakes.wrong_line:
        others = [fact for fact in read_lines(result) if lookup.result(fact) is None]
        return side(lookup, others[0]) if others else lookup.entity
    return lookup.entity if draw < mistakes.wrong_line + mistakes.report_given else found


def _first_line(lookup: Lookup | None, result: str) -> str:
    facts = read_lines(result)
    if not facts:
        return UNKNOWN
    return side(lookup, facts[0]) if lookup is not None else facts[0].value


def read_lines(result: str) -> list[Fact]:
    """The facts that the lines of a search result state."""
    return [fact for line in result.split("\n") if (fact := read_passage(line)) is not None]


def find(lookup: Lookup, result: str) -> str | None:
    """What a search result says about a sub-question, or None."""
    return next((value for fact in read_lines(result) if (value := lookup.result(fact)) is not None), None)


def side(lookup: Lookup, fact: Fact) -> str:
    """The part of a fact that a report on `lookup` would name."""
    return fact.value if lookup.wanted == "value" else fact.country
