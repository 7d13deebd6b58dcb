from collections import Counter

import pytest
from tokenizers import Tokenizer

from harnessrl_jax.errors import TaskError
from harnessrl_jax.tasks.build_tokenizer import FOLDER
from harnessrl_jax.tasks.facts import load_facts, read_passage, slug
from harnessrl_jax.tasks.grammar import parse_question
from harnessrl_jax.tasks.invented import invented_facts, invented_tasks
from harnessrl_jax.tasks.policy import PERFECT
from harnessrl_jax.tasks.questions import TEMPLATES, split_of
from harnessrl_jax.tasks.search import SearchIndex
from harnessrl_jax.tasks.simulate import expected_score
from harnessrl_jax.tasks.worlds import training_world

WORLD = invented_facts(0, 300)


def test_the_same_seed_gives_the_same_world():
    assert list(invented_facts(0, 300)) == list(WORLD)
    assert not set(invented_facts(1, 300).countries) & set(WORLD.countries[:5])


def test_no_real_country_is_used_and_every_line_can_be_read_back():
    assert len(WORLD.countries) == 300
    assert not {slug(name) for name in WORLD.countries} & {slug(name) for name in load_facts().countries}
    assert all(read_passage(fact.text) == fact for fact in WORLD)


def test_every_template_can_be_asked_and_answered():
    tasks = invented_tasks(0, WORLD, 15)
    assert Counter(task.template for task in tasks) == dict.fromkeys(TEMPLATES, 15)
    assert all(parse_question(task.question) is not None for task in tasks)
    assert {task.split for task in tasks} == {"train"}
    assert expected_score(tasks, SearchIndex(WORLD), PERFECT).f1 > 0.9


def test_nearly_every_token_of_a_heldout_name_turns_up():
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokens = lambda facts: Counter(
        token for fact in facts for name in (fact.country, fact.value) for token in tokenizer.encode(name).ids
    )
    needed = set(tokens(fact for fact in load_facts() if split_of(fact.country) == "heldout"))
    seen = tokens(invented_facts(0, 1000))
    assert sum(seen[token] > 0 for token in needed) / len(needed) > 0.97


def test_a_mixed_world_asks_about_both_sides():
    world = training_world(invented_countries=30, invented_per_template=3)
    sources = Counter(task.task_id.split(".")[0] for task in world.tasks)
    assert sources["invented-0"] == 21
    assert sources["factbook"] > 2000
    assert all(passage in {fact.id for fact in world.facts} for task in world.tasks[:50] for passage in task.chain)


def test_a_world_of_one_is_refused():
    with pytest.raises(TaskError, match=r"countries is 1; a world needs at least 2"):
        invented_facts(0, 1)
