"""A seed -> an invented world: the schema of the World Factbook with made-up countries, cities, people and songs.

A model that answers questions about such worlds has learnt to copy names, not to remember them. Names mix words built
from syllables, real name words in a new order, and halves of two real words joined, so that every piece a tokenizer
knows turns up. Real *words* of both sides of the split are used; real facts are not.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from harnessrl_jax.errors import TaskError
from harnessrl_jax.tasks.facts import BORDER, RELATIONS, Fact, FactTable, load_facts, slug
from harnessrl_jax.tasks.questions import make_tasks
from harnessrl_jax.trajectories.records import Task

ONSETS = re.findall(
    r"\w+", "b bl br c ch cr d dr f fl g gh gr h j k kh kl kr l m n p pl pr q r s sh sk st t th tr ts v w x y z zh"
)
VOWELS = re.findall(r"\w+", "a a a e e i i o o u u aa ai au ei ia ie io oa ou ua y")
CODAS = ["", "", "", "", *re.findall(r"\w+", "l m n n ng nd r r rg s s sh st t th v z k p d b c f x ll tt")]
COUNTRY_ENDINGS = ["ia", "land", "stan", "", "", "", "a", "o"]
DEMONYM_ENDINGS = ["n", "an", "ian", "ese", "er", "i", "ish", "ite"]
PEAKS = ["Mount", "Mont", "Monte", "Pico", "Cerro", "Jabal", "Gora", "Gunung", "Pic", "Volcan", ""]
NUMERALS = ["I", "II", "III", "IV", "V", "VI", "VIII", "X", "XII", "XIV"]
LINKS = ["of", "and", "de", "del", "la", "the", "ad", "al"]
COVERAGE = 0.9
"""Share of the fields that an invented country has; the real one has about 0.83 of them."""

MOST_COPIES = 8


class _Names:
    """A stream of invented names; uses only `rng.random()`, whose stream no Python version changes."""

    def __init__(self, rng: random.Random, words: Sequence[str]):
        self._rng = rng
        self._words = words
        self._lower = [word for word in words if word[0].islower() and word not in LINKS]

    def chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def pick(self, items: Sequence[str]) -> str:
        return items[int(self._rng.random() * len(items))]

    def syllables(self) -> str:
        count = 1 + int(self._rng.random() * 3)
        parts = [self.pick(ONSETS) + self.pick(VOWELS) + self.pick(CODAS) for _ in range(count)]
        start = self.pick(VOWELS) if self.chance(0.25) else ""
        return start + "".join(parts)

    def splice(self) -> str:
        one, two = self.pick(self._words), self.pick(self._words)
        cut_one = 1 + int(self._rng.random() * len(one))
        cut_two = int(self._rng.random() * len(two))
        return one[:cut_one] + two[cut_two:]

    def word(self) -> str:
        kind = self._rng.random()
        word = self.pick(self._words) if kind < 0.5 else self.splice() if kind < 0.8 else self.syllables()
        return word if len(word) <= 16 else word[:16]

    def capital_word(self) -> str:
        word = self.word().strip("'.-")
        return word[:1].upper() + word[1:] if word else self.capital_word()

    def name(self, longest: int = 3) -> str:
        words = [self.capital_word()]
        while len(words) < longest and self.chance(0.4):
            if self.chance(0.12):
                words.append(self.pick(LINKS))
            words.append(self.capital_word())
        return " ".join(words)

    def lower_word(self) -> str:
        return self.pick(self._lower) if self.chance(0.5) else self.word().strip("'.-").lower() or self.lower_word()


def _currency(names: _Names, country: str) -> str:
    if names.chance(0.3):
        return names.lower_word()
    return f"{_demonym(names, country) if names.chance(0.6) else names.name(2)} {names.lower_word()}"


def _highest_point(names: _Names, country: str) -> str:
    return f"{names.pick(PEAKS)} {names.name(2)}".strip()


def _leader(names: _Names, country: str) -> str:
    if names.chance(0.15):
        return f"{names.capital_word()} {names.pick(NUMERALS)}"
    return " ".join(names.capital_word() for _ in range(3 if names.chance(0.3) else 2))


def _anthem(names: _Names, country: str) -> str:
    words = [names.capital_word()]
    while len(words) < 4 and names.chance(0.6):
        words.append(names.lower_word() if names.chance(0.4) else names.capital_word())
    return " ".join(words)


def _demonym(names: _Names, country: str) -> str:
    if names.chance(0.3):
        return names.name(2)
    stem = country.split()[0].rstrip("aeiou") or country.split()[0]
    return stem + names.pick(DEMONYM_ENDINGS)


def _internet_code(names: _Names, country: str) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return names.pick(letters) + names.pick(letters)


VALUES: Mapping[str, Callable[[_Names, str], str]] = {
    "capital": lambda names, country: names.name(),
    "currency": _currency,
    "highest_point": _highest_point,
    "leader": _leader,
    "anthem": _anthem,
    "demonym": _demonym,
    "internet_code": _internet_code,
    "language": lambda names, country: names.name(2),
}


@cache
def real_words() -> tuple[str, ...]:
    """Every word of a name or value of the World Factbook, sorted, as often as it occurs, up to `MOST_COPIES` times.

    Frequent words are the ones a tokenizer has whole, so they must turn up often enough to be learnt.
    """
    text = " ".join(f"{fact.country} {fact.value}" for fact in load_facts() if len(fact.value) > 2)
    counts = Counter(word for word in text.split() if len(word.strip("'.")) > 1)
    return tuple(word for word in sorted(counts) for _ in range(min(counts[word], MOST_COPIES)))


def invented_facts(seed: int, countries: int) -> FactTable:
    """The facts of one invented world; the same for the same arguments on every machine.

    Args:
      seed: any integer; other worlds have other seeds.
      countries: how many, at least 2.

    Raises:
      TaskError: fewer than 2 countries.
    """
    if countries < 2:
        raise TaskError(f"invented_facts: countries is {countries}; a world needs at least 2, so that borders exist.")
    names = _Names(random.Random(f"invented world {seed}"), real_words())
    real = {slug(country) for country in load_facts().countries}
    titles: dict[str, str] = {}
    while len(titles) < countries:
        title = names.name() if names.chance(0.6) else names.capital_word() + names.pick(COUNTRY_ENDINGS)
        if slug(title) not in real:
            titles.setdefault(slug(title), title)
    listed = list(titles.values())
    facts = []
    for country in listed:
        for field in RELATIONS:
            value = names.pick(listed) if field == BORDER else VALUES[field](names, country)
            if value != country and names.chance(COVERAGE):
                facts.append(Fact(country, field, value))
    return FactTable(facts)


def invented_tasks(seed: int, table: FactTable, per_template: int) -> tuple[Task, ...]:
    """Questions over an invented world, all of them training questions; see `make_tasks` for the order."""
    return make_tasks(table, split="train", per_template=per_template, world=f"invented-{seed}")
