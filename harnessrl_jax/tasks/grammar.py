"""A question in the language of the templates -> a plan: which facts to ask for, in which order, and the answer.

Every sub-question is a verbatim piece of the question, with the result of an earlier step in the place of the piece
that asks for it. The grammar needs no facts, so it reads questions about any world.
"""

import re
from typing import Literal, NamedTuple

from harnessrl_jax.tasks.facts import BORDER, FIELD_OF_LABEL, RELATIONS, Fact

_LABEL = "|".join(relation.label for field, relation in RELATIONS.items() if field != BORDER)
_OF = re.compile(rf"(?P<label>{_LABEL}) of (?P<entity>.+)")
_WHOSE = re.compile(rf"country whose (?P<label>{_LABEL}) is (?P<entity>.+)")
_WITH = re.compile(r"country with the longest border with (?P<entity>.+)")
_HEAD = rf"(?:{_LABEL}) of|country with the longest border with"
_NESTED = re.compile(rf"(?P<head>{_HEAD}) the (?P<inner>country (?:whose|with) .+)")
_BOTH = re.compile(rf"What are the (?P<first>.+) and the (?P<second>(?:{_LABEL}) of .+)\?")
SLOT = "{}"


class Plan(NamedTuple):
    """The facts a question needs.

    Attributes:
      steps: sub-questions in order; `{}` stands for the result of the step before.
      parallel: True if the steps are independent and the answer joins their results with ` and `; otherwise the answer
        is the result of the last step.
    """

    steps: tuple[str, ...]
    parallel: bool

    def sub_question(self, step: int, results: tuple[str, ...] | list[str]) -> str:
        """The sub-question of one step, given the results of the steps before it."""
        return self.steps[step].replace(SLOT, results[step - 1]) if SLOT in self.steps[step] else self.steps[step]

    def answer(self, results: tuple[str, ...] | list[str]) -> str:
        """The answer, given the results of all steps."""
        return " and ".join(results) if self.parallel else results[-1]


class Lookup(NamedTuple):
    """What one sub-question asks: the `value` of a field of a country, or the `country` that has a value."""

    wanted: Literal["value", "country"]
    field: str
    entity: str

    def result(self, fact: Fact) -> str | None:
        """What `fact` says about it, or None if it is another fact."""
        if fact.field != self.field:
            return None
        given, found = (fact.country, fact.value) if self.wanted == "value" else (fact.value, fact.country)
        return found if given == self.entity else None


def parse_question(question: str) -> Plan | None:
    """The plan of a question, or None if it is not in the language of the templates.

    >>> parse_question("What is the currency of the country whose capital is Lima?").steps
    ('country whose capital is Lima', 'currency of {}')
    """
    both = _BOTH.fullmatch(question)
    if both is not None:
        return Plan((both["first"], both["second"]), parallel=True)
    one = re.fullmatch(r"What is the (?P<inner>.+)\?", question)
    steps = _steps(one["inner"]) if one is not None else None
    return Plan(steps, parallel=False) if steps is not None else None


def _steps(fragment: str) -> tuple[str, ...] | None:
    nested = _NESTED.fullmatch(fragment)
    if nested is not None:
        inner = _steps(nested["inner"])
        return (*inner, f"{nested['head']} {SLOT}") if inner is not None else None
    return (fragment,) if parse_lookup(fragment) is not None else None


def parse_lookup(sub_question: str) -> Lookup | None:
    """What a sub-question with one fact asks, or None if it asks for more than one fact or is not understood.

    >>> parse_lookup("country whose highest point is Fako")
    Lookup(wanted='country', field='highest_point', entity='Fako')
    """
    if _NESTED.fullmatch(sub_question):
        return None
    if (match := _WHOSE.fullmatch(sub_question)) is not None:
        return Lookup("country", FIELD_OF_LABEL[match["label"]], match["entity"])
    if (match := _WITH.fullmatch(sub_question)) is not None:
        return Lookup("value", BORDER, match["entity"])
    if (match := _OF.fullmatch(sub_question)) is not None:
        return Lookup("value", FIELD_OF_LABEL[match["label"]], match["entity"])
    return None
