"""A chat template, messages and tools -> the text of the prompt. Sandboxed: no template reaches the program."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from harnessrl_jax.errors import TextError

Message = Mapping[str, Any]

# What a template's own expressions raise on messages they were not written for.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

_DICT_NAMES = frozenset(dir(dict))
_LOOP_NAMES = frozenset({"index", "index0", "first", "last", "length", "previtem", "nextitem"})


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a short way to the members of dicts and of `loop`, which is most of what chat templates do."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`obj.attribute`: as everywhere in Jinja, a method of the object goes before an item of that name."""
        if type(obj) is dict and attribute not in _DICT_NAMES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in _LOOP_NAMES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class ChatTemplate:
    """A compiled Jinja chat template with the names that Hugging Face templates expect.

    No clock is offered (`strftime_now` is undefined), so that a prompt depends on the request alone.

    Args:
      source: the template's text.
      where: what to call the template in messages.
      variables: further names, such as `bos_token`.

    Raises:
      TextError: the source is not a Jinja template.
    """

    def __init__(self, source: str, where: str, variables: Mapping[str, Any]) -> None:
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self.source = source
        self._where = where
        self._variables = dict(variables)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TextError(
                f"{where}, line {error.lineno}: {error.message}. A chat template is Jinja text; take the one that "
                "belongs to the model."
            ) from error

    def render(self, messages: Sequence[Message], tools: Sequence[Message], *, generate: bool) -> str:
        """The conversation as text.

        Args:
          messages: chat messages, arguments of tool calls parsed.
          tools: tool definitions; none is the same as an empty list.
          generate: whether to end with the header of the next assistant turn.

        Raises:
          TextError: the template refuses these messages, or fails on them.
        """
        names = self._variables | {"messages": messages, "tools": tools or None, "add_generation_prompt": generate}
        try:
            return self._template.render(names)
        except _TEMPLATE_FAULTS as error:
            reason = str(error).rstrip(".") or type(error).__name__
            raise TextError(
                f"{self._where} cannot render these {len(messages)} messages: {reason}. Send roles and an order that "
                "the model's chat template knows."
            ) from error


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """The filter of Hugging Face templates: plain JSON, without HTML escapes."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateRuntimeError(message)
