"""`data/factbook.jsonl` -> facts: (country, field, value), each readable as one line of text and back.

A passage is one line, `Peru, capital: Lima`, with the id `peru/capital`. The table `RELATIONS` holds every wording of a
field: the label of its line, and the two phrases that ask for it.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from harnessrl_jax.errors import TaskError

DATA = Path(__file__).parent / "data" / "factbook.jsonl"
BORDER = "longest_border"


class Passage(NamedTuple):
    """One line of the encyclopedia, as the search tool returns it."""

    id: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Relation:
    """How one field is written.

    Attributes:
      label: the words of the field in a passage and in `{label} of Peru`.
      invertible: whether `country whose {label} is ...` may be asked (its values are mostly unique).
    """

    label: str
    invertible: bool


RELATIONS: Mapping[str, Relation] = {
    "capital": Relation(label="capital", invertible=True),
    "currency": Relation(label="currency", invertible=True),
    "highest_point": Relation(label="highest point", invertible=True),
    "leader": Relation(label="leader", invertible=True),
    "anthem": Relation(label="anthem", invertible=True),
    "demonym": Relation(label="demonym", invertible=True),
    "internet_code": Relation(label="internet code", invertible=True),
    "language": Relation(label="language", invertible=False),
    BORDER: Relation(label="longest border", invertible=False),
}
FIELD_OF_LABEL: Mapping[str, str] = {relation.label: field for field, relation in RELATIONS.items()}


@dataclass(frozen=True, slots=True)
class Fact:
    """One field of one country; `country` and `value` are plain text without `, ` and `: `."""

    country: str
    field: str
    value: str

    @property
    def id(self) -> str:
        """The passage id, e.g. `peru/highest_point`."""
        return f"{slug(self.country)}/{self.field}"

    @property
    def text(self) -> str:
        """The passage, e.g. `Peru, highest point: Nevado Huascaran`."""
        return f"{self.country}, {RELATIONS[self.field].label}: {self.value}"

    @property
    def passage(self) -> Passage:
        """The passage with its id."""
        return Passage(self.id, self.text)


def slug(name: str) -> str:
    """A name as an identifier: `Cote d'Ivoire` -> `cote-d-ivoire`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def read_passage(text: str) -> Fact | None:
    """The fact a passage states, or None if the text is not a passage."""
    match = re.fullmatch(r"(?P<country>.+?), (?P<label>[a-z ]+): (?P<value>.+)", text)
    if match is None or match["label"] not in FIELD_OF_LABEL:
        return None
    return Fact(match["country"], FIELD_OF_LABEL[match["label"]], match["value"])


class FactTable:
    """Facts of one world with the look-ups that questions need; iterates in the given order.

    Raises:
      TaskError: two facts have the same id, or a field has no wording.
    """

    def __init__(self, facts: Iterable[Fact]):
        self._facts = tuple(facts)
        self._by_id: dict[str, Fact] = {}
        for fact in self._facts:
            if fact.field not in RELATIONS:
                raise TaskError(
                    f"fact of {fact.country!r}: field {fact.field!r} has no wording; known fields: "
                    f"{', '.join(RELATIONS)}. Add it to RELATIONS or drop the fact."
                )
            if fact.id in self._by_id:
                raise TaskError(
                    f"fact {fact.id!r} is given twice ({self._by_id[fact.id].value!r} and {fact.value!r}); a country "
                    "has one value a field. Rename one country or drop one fact."
                )
            self._by_id[fact.id] = fact
        self._count = Counter((fact.field, fact.value.lower()) for fact in self._facts)

    def __iter__(self):
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)

    def get(self, country: str, field: str) -> Fact | None:
        """The fact about one field of one country, or None."""
        return self._by_id.get(f"{slug(country)}/{field}")

    def __getitem__(self, passage_id: str) -> Fact:
        if passage_id not in self._by_id:
            raise TaskError(f"no fact has the id {passage_id!r} (like 'peru/capital'); use the facts of its own world.")
        return self._by_id[passage_id]

    def invertible(self, fact: Fact) -> bool:
        """Whether the value names its country: the field can be inverted and no other country has the value."""
        return RELATIONS[fact.field].invertible and self._count[fact.field, fact.value.lower()] == 1

    @property
    def countries(self) -> tuple[str, ...]:
        """Every country once, in the order of the facts."""
        return tuple(dict.fromkeys(fact.country for fact in self._facts))


def load_facts(path: Path = DATA) -> FactTable:
    """The vendored facts, sorted by country, fields in the order of `RELATIONS`.

    Raises:
      TaskError: the file is missing or a line is not a record of strings.
    """
    if not path.is_file():
        raise TaskError(f"{path}: no such file; regenerate it with python -m harnessrl_jax.tasks.build_factbook.")
    facts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        record = json.loads(line)
        if "country" not in record or not all(isinstance(value, str) for value in record.values()):
            raise TaskError(f'{path}, line {number}: got {line[:60]!r}, wanted {{"country": "...", "capital": "..."}}.')
        facts.extend(Fact(record["country"], field, record[field]) for field in RELATIONS if field in record)
    return FactTable(facts)
