import json
import shutil

import pytest

from harnessrl_jax import config
from harnessrl_jax.errors import ConfigError, TextError
from harnessrl_jax.gateway import TextCodec
from harnessrl_jax.launch.model import BUILTIN
from harnessrl_jax.launch.text import text_codec, tool_format
from harnessrl_jax.trajectories import parse_tool_calls
from harnessrl_jax.trajectories.formats import HERMES, LLAMA3, NO_CALLS, REACT, BareJson, JsonCall

MINIMAL = "name = 'x'\nsteps = 1\n"


def asked(section):
    return config.parse(MINIMAL + "[tool_calls]\n" + section, "f.toml")


def folder(path, before, after):
    """The bundled tokenizer with another way to write calls in its template."""
    shutil.copytree(BUILTIN / "quickstart", path, ignore=shutil.ignore_patterns("*.safetensors"))
    template = path / "chat_template.jinja"
    source = template.read_text()
    assert before in source
    template.write_text(source.replace(before, after))
    return path


def test_the_template_of_the_model_decides():
    assert text_codec(config.parse(MINIMAL, "f.toml")).tool_format is HERMES


def test_another_template_is_another_format(tmp_path):
    source = folder(
        tmp_path / "model",
        '<tool_call>{"name": "{{ call.function.name }}", "arguments": ',
        '{"name": "{{ call.function.name }}", "parameters": ',
    )
    (source / "chat_template.jinja").write_text(
        (source / "chat_template.jinja").read_text().replace("}</tool_call>", "}")
    )
    given = config.parse(MINIMAL, "f.toml", ["--model.path", str(source)])
    assert text_codec(given).tool_format is LLAMA3


def test_a_template_that_shows_no_calls_needs_a_word_in_the_configuration(tmp_path):
    source = folder(tmp_path / "model", "message.tool_calls or []", "[]")
    with pytest.raises(TextError, match=r"the chat template writes a tool call as .* \[tool_calls\] format"):
        _ = TextCodec(source).tool_format
    given = config.parse(MINIMAL, "f.toml", ["--model.path", str(source), "--tool_calls.format", "none"])
    assert text_codec(given).tool_format is NO_CALLS


@pytest.mark.parametrize("name", ["none", "hermes", "qwen3_coder", "glm4", "llama3", "mistral", "react"])
def test_every_name_is_a_format(name):
    known = tool_format(asked(f"format = '{name}'").tool_calls)
    assert parse_tool_calls("Nothing.", known).status == "none"


def test_a_harness_that_reads_json_itself():
    known = tool_format(asked("format='json'\nname_key='action'\narguments_key='args'\nother_keys=['why']").tool_calls)
    call = JsonCall(name_key="action", arguments_key="args", other_keys=("why",), any_arguments=True)
    assert known == BareJson(call=call, served=False)
    assert tool_format(asked("format='json'\nserved=true").tool_calls) == BareJson()


def test_a_harness_with_marks_of_its_own():
    section = (
        "format='delimited'\nopen='DO '\nbetween=': '\nuntil=[\"\\n\"]\nend_closes=true\nline_start=true\ntext_key='x'"
    )
    given = asked(section + "\nserved=true")
    assert config.parse(config.to_toml(given), "resolved.toml") == given
    out = parse_tool_calls("Well.\nDO find: Kenya\nDO stop: ", tool_format(given.tool_calls))
    assert [(call.name, json.loads(call.arguments)) for call in out.calls] == [
        ("find", {"x": "Kenya"}),
        ("stop", {"x": ""}),
    ]
    given = asked("format='delimited'\nopen='<f='\nbetween='>'\nclose=['</f>']\nserved=true")
    out = parse_tool_calls('<f=find>{"q": 1}</f>', tool_format(given.tool_calls))
    assert [(call.name, call.arguments) for call in out.calls] == [("find", '{"q": 1}')]
    assert tool_format(asked("format='react'").tool_calls) is REACT


def test_a_harness_with_a_tag_for_each_action():
    given = asked("format='tags'\ntags=[['search', '<s>', '</s>'], ['stop', '<end>', '']]\nserved=true")
    assert config.parse(config.to_toml(given), "resolved.toml") == given
    out = parse_tool_calls("<s>a</s><end>", tool_format(given.tool_calls))
    assert [(call.name, call.arguments) for call in out.calls] == [
        ("search", '{"input": "a"}'),
        ("stop", '{"input": ""}'),
    ]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("format='xml'", r"f\.toml: tool_calls\.format: Input should be 'template', 'none', 'hermes'"),
        ("open='<a>'", r"tool_calls\.open has no meaning with format = 'template'"),
        ("format='json'\ntags=[['a','<a>','']]", r"tool_calls\.tags has no meaning with format = 'json'"),
    ],
)
def test_a_section_that_cannot_be_meant_is_refused(section, message):
    with pytest.raises(ConfigError, match=message):
        asked(section)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            "format='delimited'\nopen='<a>'\nbetween=':'",
            r"\[tool_calls\] format = 'delimited': .*nothing ends the arguments",
        ),
        ("format='tags'", r"\[tool_calls\] format = 'tags': .*opening tags must be there"),
        ("format='json'\nname_key=''", r"\[tool_calls\] format = 'json': .*keys must be non-empty"),
    ],
)
def test_a_format_that_cannot_work_is_refused(section, message):
    with pytest.raises(ConfigError, match=message):
        tool_format(asked(section).tool_calls)
