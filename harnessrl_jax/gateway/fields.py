"""JSON of a request -> checked values. What every dialect needs to read; refusals name the field."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from harnessrl_jax.gateway.exchange import Json
from harnessrl_jax.gateway.refusal import bad_request


def load(body: str, wanted: str) -> Json:
    """The body as an object; `wanted` says what should have been sent."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"The body is not JSON ({error}). Send {wanted}.") from error
    if not isinstance(data, dict):
        raise bad_request(f"The body must be a JSON object, got {type(data).__name__}.")
    return data


_ENCODER = json.JSONEncoder(separators=(",", ":"))


def dump(value: Any) -> bytes:
    """JSON without white space."""
    return _ENCODER.encode(value).encode()


def field(data: Mapping[str, Any], name: str, kind: type, default: Any, where: str = "") -> Any:
    """A field of the given type; null and missing are the default."""
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        place = f"{where}.{name}" if where else name
        raise bad_request(f"{place} must be of type {kind.__name__}, got {type(value).__name__}.", param=place)
    return value


def count(data: Mapping[str, Any], name: str) -> int | None:
    """A whole number of at least 1, or None."""
    value = data.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise bad_request(f"{name} must be an integer of at least 1, got {value!r}.", param=name)
    return value


def texts(data: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """One text or a list of texts, none of them empty."""
    value = data.get(name)
    listed = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(listed, list) or not all(isinstance(text, str) and text for text in listed):
        raise bad_request(f"{name} must be a text or a list of texts, none empty.", param=name)
    return tuple(listed)


def thing(value: Any, where: str) -> Json:
    """An object."""
    if not isinstance(value, dict):
        raise bad_request(f"{where} must be an object, got {type(value).__name__}.", param=where)
    return value


def said(data: Json, name: str, where: str) -> str:
    """A text that must be there."""
    if not isinstance(data.get(name), str):
        raise bad_request(f"{where}.{name} must be a text.", param=f"{where}.{name}")
    return data[name]


def unreadable(part: Any, where: str) -> Exception:
    """The refusal of a content part that is no text."""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    return bad_request(f"{where} is of type {kind!r}; this model reads text only.", param=where)


def arguments_of(text: str) -> Any:
    """Arguments of an echoed call: parsed, or the text they are where the model's own were malformed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return str(text)


def function_call(identity: Any, name: str, arguments: Any) -> Json:
    """A tool call as templates expect it."""
    known = identity if isinstance(identity, str) else ""
    return {"id": known, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_tool(name: str, description: Any, parameters: Any) -> Json:
    """A tool definition as templates expect it."""
    function: Json = {"name": name}
    if isinstance(description, str):
        function["description"] = description
    function["parameters"] = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def asked(data: Mapping[str, Any], used: Iterable[str]) -> Json:
    """The fields that are not used: numbers and short texts as they are; the raw request keeps the rest."""
    return {name: _small(value) for name, value in data.items() if name not in set(used)}


def not_used(ignored: Counter[str], part: Json, used: Iterable[str]) -> None:
    """Counts the keys of a part that are not used."""
    ignored.update(part.keys() - set(used))


def _small(value: Any) -> Any:
    short = isinstance(value, str) and len(value) < 100
    return value if short or value is None or isinstance(value, (int, float)) else "..."
