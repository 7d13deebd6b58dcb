import pytest
from hypothesis import given
from hypothesis import strategies as st

from harnessrl_jax.tasks.verifier import best_exact_match, best_f1, exact_match, normalise, token_f1


def test_normalisation_drops_case_articles_and_punctuation():
    assert normalise("The Isle, of  A Man's!") == "isle of mans"
    assert normalise("Theodor and an ant") == "theodor and ant"


@pytest.mark.parametrize(
    ("prediction", "answer", "f1"),
    [
        # shared words / precision / recall by hand
        ("Lima", "lima.", 1.0),
        ("Lima city", "Lima", 2 / 3),  # 1 shared, 1/2 and 1
        ("new Israeli shekels", "Israeli new pounds", 2 / 3),  # 2 shared, 2/3 and 2/3
        ("Lima and euros", "Lima and francs", 2 / 3),
        ("a a b", "b b", 2 / 3),  # articles go; one b is shared: 1 and 1/2
        ("b b b", "b b", 4 / 5),  # two b are shared: 2/3 and 1
        ("Quito", "Lima", 0.0),
        ("", "Lima", 0.0),
        ("the", "a", 1.0),  # both empty after normalisation
        ("yes", "yes it is", 0.0),  # closed answers match whole or not at all
        ("No.", "no", 1.0),
        ("no answer", "noanswer", 0.0),
    ],
)
def test_f1_by_hand(prediction, answer, f1):
    assert token_f1(prediction, answer) == pytest.approx(f1, abs=1e-12)


words = st.lists(st.sampled_from(["lima", "Quito", "the", "of", "peru"]), max_size=5).map(" ".join)


@given(words, words)
def test_f1_is_symmetric_bounded_and_one_exactly_for_the_same_words(one, two):
    f1 = token_f1(one, two)
    assert f1 == token_f1(two, one)
    assert 0.0 <= f1 <= 1.0
    assert (f1 == 1.0) == (sorted(normalise(one).split()) == sorted(normalise(two).split()))


def test_the_best_answer_counts_and_nothing_scores_nothing():
    assert best_f1("Lima city", ("Quito", "Lima", "Lima City")) == 1.0
    assert best_f1(None, ("Lima",)) == best_exact_match(None, ("Lima",)) == 0.0
    assert best_exact_match("the lima", ("Quito", "Lima")) == 1.0
    assert exact_match("Lima city", "Lima") == 0.0
