"""Each dialect's words for the form of a reply -> a JSON schema, and the tools of which one must be called. Pure."""

from collections.abc import Sequence
from typing import Any

from harnessrl_jax.gateway.exchange import Json
from harnessrl_jax.gateway.fields import field, thing
from harnessrl_jax.gateway.refusal import bad_request

ANY_OBJECT: Json = {"type": "object"}


def schema_of(given: Any, where: str, *, inner: str | None = None) -> Json | None:
    """The JSON schema that a format asks for; None for plain text.

    Args:
      given: `{"type": "text" | "json_object" | "json_schema", ...}`, or None.
      where: the field, for errors.
      inner: the key under which the schema's own object lies, in chat completions.

    Raises:
      Refusal: it is no such format.
    """
    if given is None:
        return None
    match thing(given, where).get("type"):
        case "text":
            return None
        case "json_object":
            return ANY_OBJECT
        case "json_schema":
            holder, place = (
                (thing(given.get(inner), f"{where}.{inner}"), f"{where}.{inner}") if inner else (given, where)
            )
            return thing(holder.get("schema"), f"{place}.schema")
        case kind:
            raise bad_request(
                f"{where}.type is {kind!r}; this gateway knows text, json_object and json_schema.", param=where
            )


def openai_choice(choice: Any, tools: Sequence[str], *, inner: str | None = None) -> tuple[str, ...]:
    """Names of the tools of which one must be called, by OpenAI's `tool_choice`.

    Args:
      choice: "none", "auto", "required", one tool, or a list of allowed ones.
      tools: names on offer.
      inner: the key under which a tool's name or the allowed tools lie, in chat completions; it is also the type.

    Raises:
      Refusal: it is no such choice, or names a tool that is not on offer.
    """
    match choice:
        case None | "none" | "auto":
            return ()
        case "required":
            return _offered(tools, tools)
        case {"type": "allowed_tools"}:
            held = thing(choice.get("allowed_tools"), "tool_choice.allowed_tools") if inner else choice
            names = [_name(tool, inner) for tool in field(held, "tools", list, [], "tool_choice")]
            return _offered(names, tools) if held.get("mode") == "required" else ()
        case {"type": "function" | "custom"}:
            return _offered([_name(choice, inner)], tools)
        case _:
            raise bad_request(
                "tool_choice must be none, auto, required, or an object that names a tool; tools that the service "
                "would run itself cannot be chosen.",
                param="tool_choice",
            )


def anthropic_choice(choice: Any, tools: Sequence[str]) -> tuple[str, ...]:
    """The same by Anthropic's `tool_choice`: auto, none, any, or one tool."""
    match choice:
        case None | {"type": "auto" | "none"}:
            return ()
        case {"type": "any"}:
            return _offered(tools, tools)
        case {"type": "tool", "name": str(name)}:
            return _offered([name], tools)
        case _:
            raise bad_request("tool_choice.type must be auto, any, none, or tool with a name.", param="tool_choice")


def _name(tool: Any, inner: str | None) -> str:
    """The name of a chosen tool: under its type in chat completions, beside it elsewhere."""
    held = tool.get(tool.get("type")) if inner and isinstance(tool, dict) else tool
    if not isinstance(held, dict) or not isinstance(held.get("name"), str):
        raise bad_request("tool_choice must name its tool.", param="tool_choice")
    return held["name"]


def _offered(names: Sequence[str], tools: Sequence[str]) -> tuple[str, ...]:
    if not names:
        raise bad_request("tool_choice asks for a call, but there are no tools.", param="tool_choice")
    for name in names:
        if name not in tools:
            raise bad_request(f"tool_choice names {name!r}, which is not among the tools.", param="tool_choice")
    return tuple(dict.fromkeys(names))
