import contextlib
import gc
import sqlite3
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harnessrl_jax.errors import TaskError
from harnessrl_jax.tasks.facts import Fact, Passage, load_facts, slug
from harnessrl_jax.tasks.process import oracle_steps
from harnessrl_jax.tasks.questions import factbook_tasks, split_facts
from harnessrl_jax.tasks.search import SearchIndex, build_index, match_expression, search

FACTS = (
    Fact("Peru", "capital", "Lima"),
    Fact("Peru", "currency", "nuevo sol"),
    Fact("Chad", "capital", "N'Djamena"),
    Fact("Lima Land", "currency", "francs"),
)


def test_the_best_passage_comes_first(tmp_path):
    path = tmp_path / "deep" / "facts.sqlite"
    build_index(FACTS, path)
    assert search(path, "country whose capital is Lima")[0] == Passage("peru/capital", "Peru, capital: Lima")
    assert [passage.id for passage in search(path, "capital of Chad", k=1)] == ["chad/capital"]
    assert search(path, "nothing like it") == []
    assert search(path, "?!") == []


def test_building_replaces_the_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "facts.sqlite"
    build_index(FACTS, path)
    build_index(FACTS[:1], path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["facts.sqlite"]
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT id, text FROM passages").fetchall() == [
            ("peru/capital", "Peru, capital: Lima")
        ]


def test_equal_scores_keep_the_order_of_the_facts():
    facts = [Fact(f"Land {letter}", "capital", "Same") for letter in "ABCDE"]
    assert [passage.id for passage in SearchIndex(facts)("Same")] == [
        "land-a/capital",
        "land-b/capital",
        "land-c/capital",
    ]


def test_common_words_count_only_if_there_are_no_others():
    assert match_expression("What is the capital of Peru?") == '"capital" OR "peru"'
    assert match_expression("The of") == '"the" OR "of"'
    assert match_expression("Lima lima LIMA") == '"lima"'


@given(st.text())
def test_no_query_is_an_error(query):
    found = SearchIndex(FACTS)(query)
    assert {passage.id for passage in found} <= {f"{slug(fact.country)}/{fact.field}" for fact in FACTS}


@pytest.mark.parametrize("query", ['"', "capital AND", "NEAR(", "text:Lima", "Lim*", "-Lima", "id : peru", "a\x00b"])
def test_syntax_in_a_query_is_text(query):
    assert all(isinstance(passage, Passage) for passage in SearchIndex(FACTS)(query))


def test_a_missing_index_is_an_error(tmp_path):
    with pytest.raises(TaskError, match=r"search index .*none.sqlite' does not exist; write it with tasks.build_index"):
        search(tmp_path / "none.sqlite", "x")


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_gold_passages_are_among_the_results(split):
    index = SearchIndex(split_facts(load_facts(), split))
    tasks = factbook_tasks(split, 60)
    found = sum(len(oracle_steps(task, index)) for task in tasks)
    assert found / sum(task.hops for task in tasks) > 0.97


def test_an_index_that_nobody_holds_closes_its_file():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        connection = SearchIndex(FACTS)._connection
        gc.collect()
    assert caught == []
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")
