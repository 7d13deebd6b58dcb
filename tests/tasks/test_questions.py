from collections import Counter

import pytest

from harnessrl_jax.tasks.facts import load_facts
from harnessrl_jax.tasks.grammar import parse_lookup, parse_question
from harnessrl_jax.tasks.questions import (
    TEMPLATES,
    factbook_tasks,
    heldout_tasks,
    split_facts,
    split_of,
    train_tasks,
)
from harnessrl_jax.tasks.worlds import heldout_world, training_world

FACTS = load_facts()
HOPS = {
    "fact": 1,
    "inverse": 1,
    "inverse_fact": 2,
    "border_fact": 2,
    "inverse_border": 2,
    "both": 2,
    "inverse_border_fact": 3,
}


@pytest.fixture(scope="module")
def everything():
    return {split: factbook_tasks(split, 10**9) for split in ("train", "heldout")}


def test_no_heldout_question_or_gold_passage_is_a_gold_of_training(everything):
    train, heldout = everything["train"], everything["heldout"]
    assert len(train) > 10_000
    assert len(heldout) > 3_000
    assert not {task.question for task in train} & {task.question for task in heldout}
    assert not {passage for task in train for passage in task.chain} & {p for task in heldout for p in task.chain}


def test_every_country_of_a_chain_is_on_the_side_of_its_task(everything):
    for split, tasks in everything.items():
        chained = [FACTS[passage] for task in tasks for passage in task.chain]
        named = {fact.country for fact in chained} | {f.value for f in chained if f.field == "longest_border"}
        assert {split_of(name) for name in named} == {split}


def test_training_cannot_see_a_heldout_passage_in_a_search_result(everything):
    golds = {passage for task in everything["heldout"] for passage in task.chain}
    for world in (training_world(), training_world(invented_countries=20, invented_per_template=2)):
        assert not golds & {fact.id for fact in world.facts}
    shown = split_facts(FACTS, "train")
    named = {fact.country for fact in shown} | {fact.value for fact in shown if fact.field == "longest_border"}
    assert {split_of(name) for name in named} == {"train"}
    assert heldout_world().facts.countries == FACTS.countries


def test_a_quarter_of_the_countries_is_held_out():
    held = sum(split_of(country) == "heldout" for country in FACTS.countries)
    assert 0.2 < held / len(FACTS.countries) < 0.3


def test_chains_lead_to_the_answer(everything):
    for task in everything["heldout"]:
        plan = parse_question(task.question)
        results = []
        for place, passage in enumerate(task.chain):
            results.append(parse_lookup(plan.sub_question(place, results)).result(FACTS[passage]))
        assert task.answers == (plan.answer(results),)
        assert task.hops == len(task.chain) == HOPS[task.template]


def test_sub_questions_are_pieces_of_the_question():
    task = next(task for task in train_tasks(5) if task.template == "inverse_border_fact")
    first, *later = parse_question(task.question).steps
    assert first in task.question
    assert all(step.replace("{}", "the country") in task.question for step in later)


def test_every_prefix_is_balanced_and_the_lists_are_stable():
    tasks = heldout_tasks()
    assert Counter(task.template for task in tasks) == dict.fromkeys(TEMPLATES, 40)
    assert Counter(task.template for task in tasks[:70]) == dict.fromkeys(TEMPLATES, 10)
    assert tasks[0].task_id == heldout_tasks(3)[0].task_id
    train = train_tasks()
    assert len({task.task_id for task in train}) == len(train) == 2800
    assert {task.split for task in train} == {"train"}


def test_the_lists_have_not_changed():
    # Other questions here mean another split or order, and change what the shipped model was trained and measured on.
    assert heldout_tasks()[6].question == PINNED[0]
    assert train_tasks()[6].question == PINNED[1]


PINNED = (
    "What is the demonym of the country with the longest border with the country whose currency is South Sudanese "
    "pounds?",
    "What is the leader of the country with the longest border with the country whose currency is Liberian dollars?",
)
