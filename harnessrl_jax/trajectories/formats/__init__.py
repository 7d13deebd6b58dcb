"""How models and harnesses write tool calls, one file a format. A format is a plain value; pass the one you mean."""

from harnessrl_jax.trajectories.formats.bare_json import BARE_JSON, BareJson
from harnessrl_jax.trajectories.formats.delimited import REACT, Delimited
from harnessrl_jax.trajectories.formats.family import FAMILIES, format_of_template
from harnessrl_jax.trajectories.formats.function_tags import GLM4, QWEN3_CODER, Between, FunctionTags
from harnessrl_jax.trajectories.formats.json_calls import JsonCall
from harnessrl_jax.trajectories.formats.json_tags import HERMES, JsonTags
from harnessrl_jax.trajectories.formats.llama import LLAMA3, Llama3
from harnessrl_jax.trajectories.formats.mistral import MISTRAL, Mistral
from harnessrl_jax.trajectories.formats.no_calls import NO_CALLS, NoCalls
from harnessrl_jax.trajectories.formats.said import Found, Said, Schemas, ToolBlock, ToolFormat
from harnessrl_jax.trajectories.formats.special_tags import SpecialTags, Tag

__all__ = [
    "BARE_JSON",
    "FAMILIES",
    "GLM4",
    "HERMES",
    "LLAMA3",
    "MISTRAL",
    "NO_CALLS",
    "QWEN3_CODER",
    "REACT",
    "BareJson",
    "Between",
    "Delimited",
    "Found",
    "FunctionTags",
    "JsonCall",
    "JsonTags",
    "Llama3",
    "Mistral",
    "NoCalls",
    "Said",
    "Schemas",
    "SpecialTags",
    "Tag",
    "ToolBlock",
    "ToolFormat",
    "format_of_template",
]
