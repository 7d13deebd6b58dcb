"""A submitted answer and the accepted ones -> exact match and token F1, with the usual normalisation.

References: SQuAD, https://arxiv.org/abs/1606.05250; HotpotQA, https://arxiv.org/abs/1809.09600 (evaluation scripts).
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

CLOSED = frozenset({"yes", "no", "noanswer"})
"""Answers without partial credit, as in HotpotQA."""
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces.

    >>> normalise("The  Cote d'Ivoire, a country.")
    'cote divoire country'
    """
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """1.0 if both are the same after normalisation, else 0.0."""
    return float(normalise(prediction) == normalise(answer))


def token_f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall of the prediction's words, counted with multiplicity, in [0, 1].

    Two empty texts match; an empty and a non-empty one do not. `yes`, `no` and `noanswer` match whole or not at all.
    """
    one, two = normalise(prediction), normalise(answer)
    if one != two and (one in CLOSED or two in CLOSED):
        return 0.0
    words_one, words_two = one.split(), two.split()
    if not words_one or not words_two:
        return float(words_one == words_two)
    shared = (Counter(words_one) & Counter(words_two)).total()
    return 2 * shared / (len(words_one) + len(words_two))


def best_f1(prediction: str | None, answers: Sequence[str]) -> float:
    """The outcome reward: the best token F1 against an accepted answer; 0.0 if nothing was submitted."""
    return 0.0 if prediction is None else max(token_f1(prediction, answer) for answer in answers)


def best_exact_match(prediction: str | None, answers: Sequence[str]) -> float:
    """1.0 if the prediction is one of the accepted answers, else 0.0."""
    return 0.0 if prediction is None else max(exact_match(prediction, answer) for answer in answers)
