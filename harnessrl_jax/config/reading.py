"""TOML text and `--section.key value` overrides -> one Config, and back to TOML.

The reader is strict: an unknown key, a wrong type or an impossible value is a ConfigError that names the place, what
was given and what was wanted.
"""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pydantic

from harnessrl_jax.config.section import Section
from harnessrl_jax.config.whole import Config
from harnessrl_jax.errors import ConfigError


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a TOML file and applies overrides such as `["--optimizer.learning_rate", "1e-3"]`.

    Raises:
      ConfigError: the file is missing, is not TOML, or a key or value cannot be used.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}). Give the path of a TOML file.") from error
    return parse(text, str(path), overrides)


def parse(text: str, where: str, overrides: Sequence[str] = ()) -> Config:
    """Parses TOML text; `where` names it in errors. Raises ConfigError."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not valid TOML: {error}.") from error
    for key, value in _pairs(overrides):
        _assign(values, key, value)
    try:
        return Config.model_validate(_tuples(values))
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(_explain(where, item) for item in error.errors())) from None


def _pairs(overrides: Sequence[str]) -> list[tuple[str, Any]]:
    """["--a.b", "1", "--c=2"] -> [("a.b", 1), ("c", 2)]. `--sampler vllm` is short for `--sampler.kind vllm`."""
    pairs, items = [], list(overrides)
    while items:
        flag = items.pop(0)
        if not flag.startswith("--") or flag == "--":
            raise ConfigError(f"Override {flag!r}: expected --section.key VALUE.")
        key, equals, value = flag[2:].partition("=")
        if not equals:
            if not items:
                raise ConfigError(f"Override {flag}: a value is missing.")
            value = items.pop(0)
        pairs.append((f"{key}.kind" if _kinds(key) else key, _value(value)))
    return pairs


def _value(text: str) -> Any:
    """A TOML value where it is one, the plain text otherwise."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"Override --{key}: {section!r} is a value, not a section.")
    values[last] = value


def _tuples(value: Any) -> Any:
    """TOML arrays as tuples: a frozen configuration holds nothing mutable."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _explain(where: str, item: Mapping[str, Any]) -> str:
    location = tuple(map(str, item["loc"]))
    kinds = _kinds(location[0]) if location else {}
    # Pydantic puts the kind of a table after its name; users know only the name.
    path = location[:1] + location[2:] if kinds else location
    place = ".".join(path)
    if item["type"] == "extra_forbidden":
        known = sorted(_table(location).model_fields)
        near = difflib.get_close_matches(path[-1], known, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        section = f"[{'.'.join(path[:-1])}] " if path[:-1] else ""
        return f"{where}: {section}unknown key {path[-1]!r}.{hint}\n  Known keys: {', '.join(known)}."
    if item["type"] == "union_tag_not_found":
        return f"{where}: [{place}] does not say which it is. Give {place}.kind: {', '.join(kinds)}."
    if item["type"] == "missing":
        return f"{where}: missing required key: {place}."
    message = item["msg"].removeprefix("Value error, ")
    given = "" if item["type"] == "value_error" else f", got {item['input']!r}"
    return f"{where}: {place + ': ' if place else ''}{message}{given}."


def _table(location: tuple[str, ...]) -> type[Section]:
    """The table that a key is in."""
    if len(location) == 1:
        return Config
    kinds = _kinds(location[0])
    return kinds[location[1]] if kinds else type(Config.model_fields[location[0]].default)


def _kinds(section: str) -> dict[str, type[Section]]:
    """The kinds that a table comes in; none if it is always the same."""
    field = Config.model_fields.get(section)
    if field is None or field.discriminator is None:
        return {}
    return {get_args(kind.model_fields["kind"].annotation)[0]: kind for kind in get_args(field.annotation)}


def to_toml(config: Config) -> str:
    """The whole configuration, every default written out, as TOML that `parse` reads back to an equal Config."""
    values = config.model_dump(mode="json", exclude_none=True)
    lines = [f"{key} = {_literal(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for section, table in values.items():
        if isinstance(table, dict):
            lines += ["", f"[{section}]", *(f"{key} = {_literal(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
        return f'"{escaped}"'
    return repr(value)
