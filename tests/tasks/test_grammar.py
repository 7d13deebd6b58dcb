import pytest

from harnessrl_jax.tasks.facts import Fact
from harnessrl_jax.tasks.grammar import Lookup, Plan, parse_lookup, parse_question

PLANS = {
    "What is the capital of The Gambia?": (("capital of The Gambia",), False),
    "What is the country whose highest point is Fako?": (("country whose highest point is Fako",), False),
    "What is the currency of the country whose capital is Lima?": (
        ("country whose capital is Lima", "currency of {}"),
        False,
    ),
    "What is the leader of the country with the longest border with Peru?": (
        ("country with the longest border with Peru", "leader of {}"),
        False,
    ),
    "What is the country with the longest border with the country whose anthem is A of the B?": (
        ("country whose anthem is A of the B", "country with the longest border with {}"),
        False,
    ),
    "What is the demonym of the country with the longest border with the country whose internet code is pe?": (
        ("country whose internet code is pe", "country with the longest border with {}", "demonym of {}"),
        False,
    ),
    "What are the capital of Bosnia and Herzegovina and the internet code of Chad?": (
        ("capital of Bosnia and Herzegovina", "internet code of Chad"),
        True,
    ),
}


@pytest.mark.parametrize(("question", "plan"), PLANS.items())
def test_questions_give_their_plan(question, plan):
    assert parse_question(question) == Plan(*plan)


@pytest.mark.parametrize(
    "question", ["", "Who?", "What is the size of Peru?", "What is the capital of?", "capital of Peru"]
)
def test_other_questions_have_no_plan(question):
    assert parse_question(question) is None


def test_a_plan_fills_in_what_it_learns():
    plan = parse_question(
        "What is the demonym of the country with the longest border with the country whose capital is X?"
    )
    assert plan.sub_question(0, []) == "country whose capital is X"
    assert plan.sub_question(1, ["Peru"]) == "country with the longest border with Peru"
    assert plan.sub_question(2, ["Peru", "Chad"]) == "demonym of Chad"
    assert plan.answer(["Peru", "Chad", "Chadian"]) == "Chadian"
    assert Plan(("a", "b"), parallel=True).answer(["A", "B"]) == "A and B"


def test_lookups():
    assert parse_lookup("internet code of Peru") == Lookup("value", "internet_code", "Peru")
    assert parse_lookup("country whose leader is Leo XIV") == Lookup("country", "leader", "Leo XIV")
    assert parse_lookup("country with the longest border with Peru") == Lookup("value", "longest_border", "Peru")
    assert parse_lookup("capital of the country whose leader is Leo XIV") is None
    assert parse_lookup("Peru") is None


def test_a_lookup_reads_only_its_own_fact():
    fact = Fact("Peru", "capital", "Lima")
    assert Lookup("value", "capital", "Peru").result(fact) == "Lima"
    assert Lookup("country", "capital", "Lima").result(fact) == "Peru"
    assert Lookup("value", "capital", "Lima").result(fact) is None
    assert Lookup("value", "leader", "Peru").result(fact) is None
