"""Tools of the Responses dialect <-> functions that templates can show. Pure.

Tools come flat, in namespaces, or as custom tools that take text; all are shown as functions. `Origin` says how a call
has to be written back.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from harnessrl_jax.gateway.exchange import Json, Origin
from harnessrl_jax.gateway.fields import field, function_tool, not_used, said, thing

# A custom tool is a function of one text.
_TEXT = "input"
_TEXT_SCHEMA = {"type": "object", "properties": {_TEXT: {"type": "string"}}, "required": [_TEXT]}


def read_tools(tools: list[Any], ignored: Counter[str]) -> tuple[list[Json], dict[str, Origin]]:
    """Definitions for the template, and the origin of each tool that is no plain function.

    Tools that the service itself would run (search, files, a computer) are left out and counted. Two tools of one name
    are told apart by their namespaces.
    """
    found = list(_flat(tools, None, "tools", ignored))
    names = Counter(origin.name for origin, _ in found)
    definitions: list[Json] = []
    origins: dict[str, Origin] = {}
    for origin, tool in found:
        space = origin.namespace
        shown = origin.name if names[origin.name] == 1 or space is None else f"{space}.{origin.name}"
        parameters = _TEXT_SCHEMA if origin.custom else tool.get("parameters")
        definitions.append(function_tool(shown, tool.get("description"), parameters))
        if origin != Origin(shown):
            origins[shown] = origin
    return definitions, origins


def rendered_name(origins: Mapping[str, Origin], name: str, namespace: Any) -> str:
    """The name under which a tool of the wire is shown."""
    space = namespace if isinstance(namespace, str) else None
    return next((shown for shown, at in origins.items() if (at.name, at.namespace) == (name, space)), name)


def custom_arguments(text: str) -> Json:
    """The text of a custom tool call as arguments of the function it is shown as."""
    return {_TEXT: text}


def custom_text(arguments: str) -> str:
    """The text that a custom tool is called with; arguments of another shape are passed on as they were sampled."""
    value = json.loads(arguments)
    return value[_TEXT] if value.keys() == {_TEXT} and isinstance(value[_TEXT], str) else arguments


def _flat(tools: list[Any], space: str | None, where: str, ignored: Counter[str]) -> Iterator[tuple[Origin, Json]]:
    for at, tool in enumerate(tools):
        place = f"{where}[{at}]"
        tool = thing(tool, place)
        match tool.get("type"):
            case "function" | "custom" as kind:
                not_used(ignored, tool, ("type", "name", "description", "parameters"))
                yield Origin(said(tool, "name", place), space, kind == "custom"), tool
            case "namespace" if space is None:
                inner = field(tool, "tools", list, [], place)
                yield from _flat(inner, said(tool, "name", place), f"{place}.tools", ignored)
            case kind:
                ignored[f"tool:{kind}"] += 1
