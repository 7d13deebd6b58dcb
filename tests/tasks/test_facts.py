import importlib

import pytest

from harnessrl_jax import tasks
from harnessrl_jax.errors import TaskError
from harnessrl_jax.tasks import build_factbook
from harnessrl_jax.tasks.facts import RELATIONS, Fact, FactTable, load_facts, read_passage, slug

PERU = {
    "Government": {
        "Country name": {"conventional short form": {"text": "Per&uacute;"}},
        "Capital": {"name": {"text": "Lima (Lima is the seat)"}},
        "Executive branch": {"chief of state": {"text": "King CHARLES III (since 8 September 2022); represented by X"}},
        "National anthem(s)": {"title": {"text": "“Himno Nacional” (National Anthem)"}},
    },
    "Economy": {"Exchange rates": {"Currency": {"text": "nuevo sol (PEN) per US dollar -"}}},
    "Geography": {
        "Elevation": {"highest point": {"text": "Nevado <em>Huascaran</em> 6,746 m"}},
        "Land boundaries": {"border countries": {"text": "Bolivia 1,212 km; Gibraltar 9,000 m; Brazil 2,659 km"}},
    },
    "People and Society": {
        "Nationality": {"noun": {"text": "Peruvian(s)"}},
        "Languages": {"Languages": {"text": "Spanish (official) 82.9%, Quechua (official) 13.6%"}},
    },
    "Communications": {"Internet country code": {"text": ".pe"}},
}


def test_a_profile_becomes_short_clean_values():
    brazil = {
        section: {**body, "Country name": {"conventional short form": {"text": "Brazil"}}}
        if "Capital" in body
        else body
        for section, body in PERU.items()
    }
    record = build_factbook.clean_profiles([PERU, brazil])[1]
    assert record == {
        "country": "Peru",
        "capital": "Lima",
        "currency": "nuevo sol",
        "highest_point": "Nevado Huascaran",
        "leader": "Charles III",
        "anthem": "Himno Nacional",
        "demonym": "Peruvian",
        "language": "Spanish",
        "internet_code": "pe",
        "longest_border": "Brazil",
    }


def test_a_border_with_a_country_that_has_no_record_is_left_out():
    assert "longest_border" not in build_factbook.clean_profiles([PERU])[0]


@pytest.mark.parametrize("value", ["a: b", "one, two", "", "none", "5 km", "x" * 27, "a b c d e", "Trailing'"])
def test_values_that_a_line_could_not_hold_are_unusable(value):
    assert not build_factbook.usable(value)


@pytest.mark.parametrize(
    ("text", "leader"),
    [
        ("President Jos&eacute; RAMOS-HORTA (since 20 May 2022)", "Jose Ramos-Horta"),
        ("President XI Jinping (since 14 March 2013)", "Xi Jinping"),
        ("King FREDERIK X of Denmark (since 2024)", "Frederik X"),
        ("President (vacant)", ""),
        ("President A B C D (since 2020)", ""),
    ],
)
def test_leaders_lose_title_date_and_capitals(text, leader):
    assert build_factbook.leader(text) == leader


def test_every_fact_can_be_read_back():
    facts = load_facts()
    assert len(facts) == 1738
    assert len(facts.countries) == 232
    assert all(read_passage(fact.text) == fact for fact in facts)
    assert facts["peru/capital"].text == "Peru, capital: Lima"
    assert all(
        facts.get(fact.value, "capital") or fact.value in facts.countries
        for fact in facts
        if fact.field == "longest_border"
    )


@pytest.mark.parametrize("field", RELATIONS)
def test_every_field_has_over_a_hundred_values(field):
    assert sum(fact.field == field for fact in load_facts()) > 130


@pytest.mark.parametrize("text", ["Peru", "Peru, size: big", "capital: Lima", ", capital: Lima", "Peru, capital: "])
def test_other_lines_are_no_passages(text):
    assert read_passage(text) is None


def test_shared_values_and_languages_do_not_name_their_country():
    rows = [("A", "capital", "X"), ("B", "capital", "x"), ("A", "leader", "X"), ("A", "language", "Y")]
    facts = FactTable(Fact(*row) for row in rows)
    assert [facts.invertible(fact) for fact in facts] == [False, False, True, False]


def test_slugs():
    assert slug("Cote d'Ivoire") == "cote-d-ivoire"


def test_bad_tables_and_files_are_refused(tmp_path):
    with pytest.raises(TaskError, match=r"fact 'a-b/capital' is given twice \('X' and 'Y'\).*Rename one country"):
        FactTable([Fact("A b", "capital", "X"), Fact("A B", "capital", "Y")])
    with pytest.raises(TaskError, match=r"field 'size' has no wording; known fields: capital"):
        FactTable([Fact("A", "size", "X")])
    with pytest.raises(TaskError, match=r"no fact has the id 'a/b'"):
        FactTable([])["a/b"]
    with pytest.raises(
        TaskError, match=r"no such file; regenerate it with python -m harnessrl_jax.tasks.build_factbook"
    ):
        load_facts(tmp_path / "none.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"country": "A"}\n{"capital": "X"}\n')
    with pytest.raises(TaskError, match=r"bad.jsonl, line 2: got .*wanted .*country"):
        load_facts(tmp_path / "bad.jsonl")


def test_public_names():
    assert all(getattr(tasks, name) is not None for name in tasks.__all__)
    assert tasks.__all__ == sorted(tasks.__all__)
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'; its names are .*FactTable"):
        importlib.import_module("harnessrl_jax.tasks").nothing  # noqa: B018  the access is the test
