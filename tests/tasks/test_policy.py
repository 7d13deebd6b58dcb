import functools
import random
from collections import Counter
from dataclasses import replace

import pytest

from harnessrl_jax.errors import TaskError
from harnessrl_jax.tasks.facts import load_facts
from harnessrl_jax.tasks.policy import PERFECT, Action, Conversation, Mistakes, Turn, next_actions
from harnessrl_jax.tasks.prompts import PROMPTS
from harnessrl_jax.tasks.questions import heldout_tasks
from harnessrl_jax.tasks.search import SearchIndex
from harnessrl_jax.tasks.simulate import expected_score, play, scripted

QUESTION = "What is the currency of the country whose capital is Lima?"
LINES = "Chad, capital: Lima Town\nPeru, capital: Lima\nPeru, currency: sol"


@pytest.fixture(scope="module")
def search():
    return functools.cache(SearchIndex(load_facts()))


def moves(conversation, mistakes, count=1):
    return [next_actions(conversation, mistakes, random.Random(seed)) for seed in range(count)]


def central(*turns, request=QUESTION):
    return Conversation(
        "central", request, tuple(Turn((Action(tool, text),), (result,)) for tool, text, result in turns)
    )


def researcher(*turns, request="country whose capital is Lima"):
    return Conversation("researcher", request, tuple(Turn((Action("search", text),), (got,)) for text, got in turns))


ONE = ("ask_researcher", "country whose capital is Lima", "Peru")
TWO = ("ask_researcher", "currency of Peru", "sol")


def test_perfect_central_play():
    assert moves(central(), PERFECT) == [(Action("ask_researcher", ONE[1]),)]
    assert moves(central(ONE), PERFECT) == [(Action("ask_researcher", TWO[1]),)]
    assert moves(central(ONE, TWO), PERFECT) == [(Action("answer", "sol"),)]


def test_reports_are_believed_and_the_last_one_counts():
    wrong = ("ask_researcher", ONE[1], "Chad")
    assert moves(central(wrong), PERFECT) == [(Action("ask_researcher", "currency of Chad"),)]
    assert moves(central(wrong, ONE), PERFECT) == [(Action("ask_researcher", "currency of Peru"),)]


def test_two_independent_facts_are_asked_for_in_one_turn():
    start = central(request="What are the capital of Peru and the currency of Chad?")
    asked = (Action("ask_researcher", "capital of Peru"), Action("ask_researcher", "currency of Chad"))
    assert moves(start, PERFECT) == [asked]
    later = start._replace(turns=(Turn(asked, ("Lima", PROMPTS["replies"]["no_report"])),))
    assert moves(later, PERFECT) == [asked[1:]]
    last = start._replace(turns=(Turn(asked, ("Lima", "francs")),))
    assert moves(last, PERFECT) == [(Action("answer", "Lima and francs"),)]


def test_central_reads_its_own_search():
    assert moves(central(("search", ONE[1], LINES)), PERFECT) == [(Action("ask_researcher", "currency of Peru"),)]
    assert moves(central(("search", ONE[1], "Chad, capital: Rome")), PERFECT) == [(Action("ask_researcher", ONE[1]),)]


def test_a_foreign_question_is_handed_on_and_its_report_is_the_answer():
    assert moves(central(request="Who?"), PERFECT) == [(Action("ask_researcher", "Who?"),)]
    assert moves(central(("ask_researcher", "Who?", "Me"), request="Who?"), PERFECT) == [(Action("answer", "Me"),)]


def test_the_last_call_is_spent_on_an_answer():
    stuck = central(*[("ask_researcher", ONE[1], PROMPTS["replies"]["no_report"])] * 5)
    assert moves(stuck, PERFECT) == [(Action("answer", "unknown"),)]


EVERY_MISTAKE = [
    ("guess", central(), Action("answer", "Lima")),
    ("ask_whole", central(), Action("ask_researcher", QUESTION)),
    ("search_self", central(), Action("search", ONE[1])),
    ("trust_whole", central(("ask_researcher", QUESTION, "Lima Town")), Action("answer", "Lima Town")),
    ("answer_early", central(ONE), Action("answer", "Peru")),
    ("repeat", central(ONE), Action("ask_researcher", ONE[1])),
    ("wrong_value", central(ONE, TWO), Action("answer", "Peru")),
    ("vague_relation", researcher(), Action("search", "capital")),
    ("vague_entity", researcher(), Action("search", "Lima")),
    ("give_up", researcher(("capital", "Chad, capital: Rome\nx")), Action("report", "Chad")),
    ("wrong_line", researcher(("country whose capital is Lima", LINES)), Action("report", "Chad")),
    ("report_given", researcher(("country whose capital is Lima", LINES)), Action("report", "Lima")),
]


@pytest.mark.parametrize(("mistake", "conversation", "action"), EVERY_MISTAKE)
def test_each_mistake_is_made_as_often_as_it_says(mistake, conversation, action):
    assert (action,) not in moves(conversation, PERFECT)
    assert moves(conversation, replace(PERFECT, **{mistake: 1.0})) == [(action,)]
    half = Counter(moves(conversation, replace(PERFECT, **{mistake: 0.5}), 400))
    assert half[(action,)] / 400 == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    ("one", "two", "conversation"),
    [
        ("guess", "ask_whole", central()),
        ("vague_relation", "vague_entity", researcher()),
        ("wrong_line", "report_given", researcher(("country whose capital is Lima", LINES))),
    ],
)
def test_mistakes_that_exclude_each_other_keep_their_own_share(one, two, conversation):
    shares = {one: 0.2, two: 0.5}
    made = Counter(moves(conversation, replace(PERFECT, **shares), 400))
    for mistake, share in shares.items():
        (action,) = moves(conversation, replace(PERFECT, **{mistake: 1.0}))
        assert made[action] / 400 == pytest.approx(share, abs=0.08)


def test_the_most_likely_first_move_is_a_poor_one():
    ((action, count),) = Counter(moves(central(), Mistakes(), 400)).most_common(1)
    assert action == (Action("ask_researcher", QUESTION),)
    assert count / 400 == pytest.approx(0.5, abs=0.08)


def test_perfect_research():
    assert moves(researcher(), PERFECT) == [(Action("search", "country whose capital is Lima"),)]
    assert moves(researcher(("q", LINES)), PERFECT) == [(Action("report", "Peru"),)]
    assert moves(researcher(request="What is the capital of Chad?"), PERFECT) == [
        (Action("search", "capital of Chad"),)
    ]
    missed = ("country whose capital is Lima", "Chad, capital: Rome")
    assert moves(researcher(missed), PERFECT) == [(Action("search", "Lima capital"),)]
    assert moves(researcher(missed, missed), PERFECT) == [(Action("report", "Chad"),)]
    nothing = PROMPTS["replies"]["nothing_found"]
    assert moves(researcher(("q", nothing), ("q", nothing)), PERFECT) == [(Action("report", "unknown"),)]


def test_the_whole_question_misleads_the_researcher():
    assert moves(researcher(request=QUESTION), PERFECT) == [(Action("search", QUESTION),)]
    assert moves(researcher((QUESTION, LINES), request=QUESTION), PERFECT) == [(Action("report", "Lima Town"),)]


def test_scores_leave_room_to_learn(search):
    tasks = heldout_tasks()
    perfect = expected_score(tasks, search, PERFECT)
    default = expected_score(tasks, search, Mistakes(), rollouts=2)
    assert perfect.f1 > 0.97
    assert min(perfect.f1_by_hops.values()) > 0.95
    assert 0.25 < default.f1 < 0.36
    # Most likely first move only: fails on everything that takes more than one fact.
    greedy = replace(PERFECT, ask_whole=1.0, trust_whole=1.0)
    assert Mistakes().ask_whole >= 0.5
    assert expected_score([task for task in tasks if task.hops > 1], search, greedy).f1 < 0.15


def test_perfect_play_keeps_the_limits_of_the_harness(search):
    for task in heldout_tasks(5):
        played = play(task.question, search, scripted(PERFECT, 0))
        assert len(played.conversations[0].turns) <= task.hops + 1
        assert all(len(conversation.turns) <= 3 for conversation in played.conversations[1:])


def test_the_harness_rules_of_the_simulation(search):
    def player(script):
        return lambda conversation: script[conversation.agent][len(conversation.turns)]

    talk = (Action("ask_researcher", "x"), Action("report", "central has no such tool"))
    script = {"central": [(), talk, (Action("search", "zzz"), Action("answer", "A"))], "researcher": [()] * 3}
    played = play("q", search, player(script))
    assert played.answer == "A"
    assert played.conversations[0].turns[1].results == ("No report.", "Bad call.")
    assert len(played.conversations) == 2
    assert play("q", search, lambda conversation: ()).answer is None


def test_bad_settings_are_refused():
    with pytest.raises(TaskError, match=r"Mistakes.repeat is 1.5; it is a probability"):
        Mistakes(repeat=1.5)
    with pytest.raises(TaskError, match=r"Mistakes.guess \+ Mistakes.ask_whole is 1.25; they exclude each other"):
        Mistakes(ask_whole=1.0)
    with pytest.raises(TaskError, match=r"plays central and researcher, but was given 'judge'"):
        next_actions(Conversation("judge", "q", ()), PERFECT, random.Random(0))
