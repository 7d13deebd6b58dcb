"""The format of a chat template: small templates in the manner of each family."""

import jinja2
import pytest

from harnessrl_jax.errors import TextError
from harnessrl_jax.trajectories import format_of_template
from harnessrl_jax.trajectories.formats import BARE_JSON, GLM4, HERMES, LLAMA3, MISTRAL, QWEN3_CODER

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>
{% endfor %}{% if generate %}<|im_start|>assistant
{% endif %}"""
FUNCTION = "{{ c.function.name }}"
ARGUMENTS = "{{ c.function.arguments | tojson }}"
LLAMA = """{{ '<|begin_of_text|>' }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{% if m.tool_calls %}{% set c = m.tool_calls[0] %}CALL{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}
{%- if generate %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
INST = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}CALL</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
XML = (
    "\n<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
ARRAY = (
    '[TOOL_CALLS] [{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": '
    '{{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{{ ", " if not loop.last }}{% endfor %}]'
)
NAMED = "{% set c = m.tool_calls[0] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
KEYS = (
    "\n<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>"
)
HERMES_CALL = f'\n<tool_call>\n{{"name": "{FUNCTION}", "arguments": {ARGUMENTS}}}\n</tool_call>'
BARE_CALL = f'{{"name": "{FUNCTION}", "arguments": {ARGUMENTS}}}'
LLAMA_CALL = f'{{"name": "{FUNCTION}", "parameters": {ARGUMENTS}}}'


def renderer(source):
    template = jinja2.Environment().from_string(source)
    return lambda messages, tools, *, generate: template.render(messages=messages, tools=tools, generate=generate)


def chosen(source, call):
    return format_of_template(renderer(source.replace("CALL", call)), "a template")


@pytest.mark.parametrize(
    ("source", "call", "known"),
    [
        (CHATML, HERMES_CALL, HERMES),
        # Thinking models close empty thoughts first.
        (CHATML, "<think>\n\n</think>\n" + HERMES_CALL, HERMES),
        (CHATML, XML, QWEN3_CODER),
        (CHATML, KEYS, GLM4),
        (CHATML, BARE_CALL, BARE_JSON),
        (LLAMA, LLAMA_CALL, LLAMA3),
        (LLAMA, "<|python_tag|>" + LLAMA_CALL, LLAMA3),
        (INST, ARRAY, MISTRAL),
        (INST, NAMED, MISTRAL),
    ],
)
def test_the_format_is_the_one_that_reads_back_what_the_template_writes(source, call, known):
    assert chosen(source, call) is known


@pytest.mark.parametrize(
    "call",
    [
        "",
        "{{ c.function.name }}({{ c.function.arguments }})",
        '<tool_call>{"name": "{{ c.function.name }}", "arguments": {}}</tool_call>',
        f'<tool_call>{{"name": "other", "arguments": {ARGUMENTS}}}</tool_call>',
        HERMES_CALL * 2,
    ],
)
def test_a_template_that_no_format_reads_is_refused(call):
    with pytest.raises(TextError, match=r"a template writes a tool call as .*which no known format reads\. Say how"):
        chosen(CHATML, call)


def test_two_formats_that_fit_are_refused():
    render = renderer(CHATML.replace("CALL", HERMES_CALL))
    with pytest.raises(TextError, match=r"which several formats read \(JsonTags, JsonTags\)"):
        format_of_template(render, "a template", (HERMES, HERMES))
