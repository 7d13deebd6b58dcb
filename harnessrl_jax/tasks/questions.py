"""Facts -> multi-hop questions with their gold chains, split by country into train and held-out.

A question is train (held-out) if every country of its chain is train (held-out); mixed ones are discarded. A country's
side depends on its name alone. So no held-out question, and no gold passage of one, is the gold of a training question.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import zip_longest
from typing import Literal, NamedTuple

from harnessrl_jax.tasks.facts import BORDER, RELATIONS, Fact, FactTable, load_facts, slug
from harnessrl_jax.tasks.grammar import SLOT, Plan
from harnessrl_jax.trajectories.records import Task

Split = Literal["train", "heldout"]
HELDOUT_PERCENT = 25
TRAIN_PER_TEMPLATE = 400
HELDOUT_PER_TEMPLATE = 40


class Draft(NamedTuple):
    """A question before it has an id: its plan and the gold fact of every step."""

    plan: Plan
    chain: tuple[Fact, ...]

    @property
    def question(self) -> str:
        """The question: the steps nested into each other, innermost first."""
        if self.plan.parallel:
            return f"What are the {self.plan.steps[0]} and the {self.plan.steps[1]}?"
        text = self.plan.steps[0]
        for step in self.plan.steps[1:]:
            text = step.replace(SLOT, f"the {text}")
        return f"What is the {text}?"


class OracleStep(NamedTuple):
    """One step of perfect play: what to ask, where the answer stands, and the report to expect."""

    sub_question: str
    passage_id: str
    report: str


def asks_value(fact: Fact, entity: str | None = None) -> str:
    """The sub-question for a fact's value; `entity` replaces the country's name."""
    name = fact.country if entity is None else entity
    if fact.field == BORDER:
        return f"country with the longest border with {name}"
    return f"{RELATIONS[fact.field].label} of {name}"


def asks_country(fact: Fact) -> str:
    """The sub-question for the country of a fact whose value names it."""
    return f"country whose {RELATIONS[fact.field].label} is {fact.value}"


def _fact(table: FactTable) -> Iterator[Draft]:
    for fact in table:
        yield Draft(Plan((asks_value(fact),), parallel=False), (fact,))


def _inverse(table: FactTable) -> Iterator[Draft]:
    for fact in table:
        if table.invertible(fact):
            yield Draft(Plan((asks_country(fact),), parallel=False), (fact,))


def _after(table: FactTable, draft: Draft, country: str, *, border: bool) -> Iterator[Draft]:
    """`draft`, whose result is `country`, followed by a question about that country."""
    asked = {fact.field for fact in draft.chain if fact.country == country}
    for field in RELATIONS:
        fact = table.get(country, field)
        if fact is not None and field not in asked and (field == BORDER) is border:
            steps = (*draft.plan.steps, asks_value(fact, SLOT))
            yield Draft(Plan(steps, parallel=False), (*draft.chain, fact))


def _inverse_fact(table: FactTable) -> Iterator[Draft]:
    for draft in _inverse(table):
        yield from _after(table, draft, draft.chain[-1].country, border=False)


def _border_fact(table: FactTable) -> Iterator[Draft]:
    for draft in _fact(table):
        if draft.chain[0].field == BORDER:
            yield from _after(table, draft, draft.chain[0].value, border=False)


def _inverse_border(table: FactTable) -> Iterator[Draft]:
    for draft in _inverse(table):
        yield from _after(table, draft, draft.chain[-1].country, border=True)


def _inverse_border_fact(table: FactTable) -> Iterator[Draft]:
    for draft in _inverse_border(table):
        yield from _after(table, draft, draft.chain[-1].value, border=False)


def _both(table: FactTable) -> Iterator[Draft]:
    facts = [fact for fact in table if fact.field != BORDER]
    for round_ in range(4):
        order = sorted(facts, key=lambda fact: stable_hash(f"both {round_} {fact.id}"))
        for one, two in zip(order[::2], order[1::2]):
            if one.country != two.country:
                yield Draft(Plan((asks_value(one), asks_value(two)), parallel=True), (one, two))


TEMPLATES: Mapping[str, Callable[[FactTable], Iterator[Draft]]] = {
    "fact": _fact,
    "inverse": _inverse,
    "inverse_fact": _inverse_fact,
    "border_fact": _border_fact,
    "inverse_border": _inverse_border,
    "both": _both,
    "inverse_border_fact": _inverse_border_fact,
}
"""Every template, by rising number of hops: 1, 1, 2, 2, 2, 2 (two independent facts), 3."""


def stable_hash(text: str) -> int:
    """A 64-bit hash that is the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def split_of(country: str) -> Split:
    """The side a country is on."""
    return "heldout" if stable_hash(f"fold {slug(country)}") % 100 < HELDOUT_PERCENT else "train"


def chain_countries(chain: Iterable[Fact]) -> set[str]:
    """Every country a chain names: the subjects, and the neighbours that are values."""
    return {name for fact in chain for name in (fact.country, *([fact.value] if fact.field == BORDER else []))}


def make_tasks(
    table: FactTable, *, split: Split, per_template: int, world: str, keep: Callable[[set[str]], bool] = lambda _: True
) -> tuple[Task, ...]:
    """Questions over one world, in an order in which every prefix holds all templates about equally often.

    Args:
      table: the facts of the world.
      split: recorded in the tasks.
      per_template: at most this many of each template, chosen by the hash of the question.
      world: first part of the task ids, which are safe in URLs and file names if it is.
      keep: says for the countries of a chain whether the question may be used.
    """
    columns = []
    for template, drafts in TEMPLATES.items():
        usable = {draft.question: draft for draft in drafts(table) if keep(chain_countries(draft.chain))}
        chosen = [usable[question] for question in sorted(usable, key=stable_hash)[:per_template]]
        columns.append([_task(draft, template, split, world) for draft in chosen])
    return tuple(task for row in zip_longest(*columns) for task in row if task is not None)


def _task(draft: Draft, template: str, split: Split, world: str) -> Task:
    results = [step.report for step in _oracle(draft.plan, draft.chain)]
    return Task(
        task_id=f"{world}.{template}.{stable_hash(draft.question):016x}",
        question=draft.question,
        answers=(draft.plan.answer(results),),
        hops=len(draft.chain),
        chain=tuple(fact.id for fact in draft.chain),
        template=template,
        split=split,
    )


def _oracle(plan: Plan, chain: tuple[Fact, ...]) -> tuple[OracleStep, ...]:
    steps: list[OracleStep] = []
    for place, fact in enumerate(chain):
        sub_question = plan.sub_question(place, [step.report for step in steps])
        report = fact.country if plan.steps[place] == asks_country(fact) else fact.value
        steps.append(OracleStep(sub_question, fact.id, report))
    return tuple(steps)


def train_tasks(per_template: int = TRAIN_PER_TEMPLATE) -> tuple[Task, ...]:
    """The training questions over the World Factbook."""
    return factbook_tasks("train", per_template)


def heldout_tasks(per_template: int = HELDOUT_PER_TEMPLATE) -> tuple[Task, ...]:
    """The held-out questions over the World Factbook."""
    return factbook_tasks("heldout", per_template)


@cache
def factbook_tasks(split: Split, per_template: int) -> tuple[Task, ...]:
    """Questions over the World Factbook whose countries are all on one side of the split."""
    table = load_facts()
    keep = lambda countries: all(split_of(country) == split for country in countries)
    return make_tasks(table, split=split, per_template=per_template, world="factbook", keep=keep)


def split_facts(table: FactTable, split: Split) -> FactTable:
    """The facts a split's search tool may show.

    Training sees only facts about, and naming, countries of its side; the held-out haystack is the whole encyclopedia.
    """
    if split == "heldout":
        return table
    return FactTable(f for f in table if all(split_of(name) == "train" for name in chain_countries([f])))
