"""A Config -> the text codec of its model, which knows how the model writes tool calls."""

from harnessrl_jax.config import Config, ToolCalls
from harnessrl_jax.errors import ConfigError, RecordError
from harnessrl_jax.gateway import TextCodec
from harnessrl_jax.launch.model import model_folder
from harnessrl_jax.trajectories.formats import (
    GLM4,
    HERMES,
    LLAMA3,
    MISTRAL,
    NO_CALLS,
    QWEN3_CODER,
    REACT,
    BareJson,
    Delimited,
    JsonCall,
    SpecialTags,
    Tag,
    ToolFormat,
)


def text_codec(config: Config) -> TextCodec:
    """Tokenizer, chat template and tool-call format of the model.

    Raises:
      ConfigError: [tool_calls] describes no format.
      TextError: a file of the model folder cannot be used.
    """
    return TextCodec(model_folder(config), tool_format=tool_format(config.tool_calls))


def tool_format(given: ToolCalls) -> ToolFormat | None:
    """The format that is asked for; None: as the chat template writes calls. Raises ConfigError."""
    try:
        return _format(given)
    except RecordError as error:
        raise ConfigError(f"[tool_calls] format = {given.format!r}: {error}") from error


def _format(given: ToolCalls) -> ToolFormat | None:
    match given.format:
        case "template":
            return None
        case "none":
            return NO_CALLS
        case "hermes":
            return HERMES
        case "qwen3_coder":
            return QWEN3_CODER
        case "glm4":
            return GLM4
        case "llama3":
            return LLAMA3
        case "mistral":
            return MISTRAL
        case "react":
            return REACT
        case "json":
            call = JsonCall(
                name_key=given.name_key,
                arguments_key=given.arguments_key,
                other_keys=given.other_keys,
                any_arguments=not given.served,
            )
            return BareJson(call=call, served=given.served)
        case "delimited":
            return Delimited(
                open=given.open,
                between=given.between,
                close=given.close,
                until=given.until,
                end_closes=given.end_closes,
                line_start=given.line_start,
                text_key=given.text_key or None,
                served=given.served,
            )
        case "tags":
            tags = tuple(Tag(name, open, close or None) for name, open, close in given.tags)
            return SpecialTags(tags=tags, text_key=given.text_key or "input", served=given.served)
