"""A chat template -> the format in which its model writes calls: the one that reads back what the template writes.

The template shows the model its earlier calls, so the model was trained to write them so.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from harnessrl_jax.errors import TextError
from harnessrl_jax.trajectories.formats.bare_json import BARE_JSON
from harnessrl_jax.trajectories.formats.function_tags import GLM4, QWEN3_CODER
from harnessrl_jax.trajectories.formats.json_tags import HERMES
from harnessrl_jax.trajectories.formats.llama import LLAMA3
from harnessrl_jax.trajectories.formats.mistral import MISTRAL
from harnessrl_jax.trajectories.formats.said import Said, ToolFormat

FAMILIES: tuple[ToolFormat, ...] = (HERMES, QWEN3_CODER, GLM4, LLAMA3, MISTRAL, BARE_JSON)
"""Formats that chat templates of open models write."""

_NAME = "get_weather"
_ARGUMENTS = {"city": "Paris", "days": 2}
_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "A city."},
        "days": {"type": "integer", "description": "How many days ahead."},
    },
    "required": ["city", "days"],
}
_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": "Looks up the weather.", "parameters": _SCHEMA},
}
_ASKED = {"role": "user", "content": "How is the weather?"}
# Mistral's templates insist on nine letters or digits.
_CALL = {"id": "call00001", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


class Render(Protocol):
    """Renders a conversation as text: `TextCodec` and Hugging Face tokenizers can."""

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, generate: bool
    ) -> str:
        """Messages and tools as text, ending with the header of an assistant turn if `generate`."""
        ...


def format_of_template(render: Render, where: str, formats: Sequence[ToolFormat] = FAMILIES) -> ToolFormat:
    """Renders one call and finds the format that reads it back, name and arguments alike.

    Args:
      render: the template.
      where: what to call the template in messages.
      formats: those that may be meant.

    Returns:
      The only format that fits.

    Raises:
      TextError: none fits, or several do; also whatever `render` raises.
    """
    prompt = render([_ASKED], [_TOOL], generate=True)
    history = render([_ASKED, _CALLED], [_TOOL], generate=False)
    written = history.removeprefix(prompt) if history.startswith(prompt) else ""
    fitting = [known for known in formats if _reads(known, written)]
    if len(fitting) == 1:
        return fitting[0]
    kinds = ", ".join(type(known).__name__ for known in fitting)
    found = f"several formats read ({kinds})" if fitting else "no known format reads"
    raise TextError(
        f"{where} writes a tool call as {written[:200]!r}, which {found}. Say how the model writes its calls with "
        '[tool_calls] format; "none" is for a model that makes none.'
    )


def _reads(known: ToolFormat, written: str) -> bool:
    found = known.read(Said(text=written, control={}, whole=True, schemas={_NAME: _SCHEMA}))
    if not found.sound or len(found.blocks) != 1 or not found.blocks[0].closed:
        return False
    (block,) = found.blocks
    return (block.name, json.loads(block.arguments)) == (_NAME, _ARGUMENTS)
