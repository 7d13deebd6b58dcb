import json

import jinja2.sandbox
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from harnessrl_jax.tasks.build_tokenizer import FOLDER, SPECIAL, VOCABULARY
from harnessrl_jax.tasks.facts import load_facts
from harnessrl_jax.tasks.invented import invented_facts
from harnessrl_jax.tasks.prompts import PROMPTS, tools_of

TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
PLACES = (
    "capital of {}",
    '{{"query": "capital of {}"}}',
    '{{"text": "{}"}}',
    "What is the capital of {}?",
    "country whose capital is {}",
    "country with the longest border with {}",
    "{}, capital: Z",
    "Z, capital: {}\nY",
    "What are the capital of {} and the currency of Z?",
    "{} and Z",
    "Z and {}",
)


def ids(text):
    return TOKENIZER.encode(text).ids


def test_control_tokens_have_the_first_ids_and_the_vocabulary_its_size():
    assert [TOKENIZER.token_to_id(token) for token in SPECIAL] == list(range(9))
    assert TOKENIZER.get_vocab_size() == VOCABULARY == 2048
    config = json.loads((FOLDER / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"], config["pad_token_id"]) == (2048, 2, 0)


@given(st.text())
def test_every_text_comes_back(text):
    assert TOKENIZER.decode(ids(text), skip_special_tokens=False) == text


def test_digits_stand_alone():
    assert len(ids("20261")) == 5
    assert not [token for token in TOKENIZER.get_vocab() if len(token) > 1 and any(c.isdigit() for c in token)]


@pytest.mark.parametrize("place", PLACES)
def test_a_name_has_the_same_tokens_wherever_it_stands(place):
    facts = [*load_facts(), *invented_facts(7, 40)]
    for name in {name for fact in facts for name in (fact.country, fact.value)}:
        alone, inside = ids(name), ids(place.format(name))
        assert any(inside[at : at + len(alone)] == alone for at in range(len(inside))), (name, place)


def test_fixed_words_cost_one_token_and_names_few():
    for text in (
        "search",
        "arguments",
        "question",
        "researcher ",
        ' ", "'.strip(" "),
        '": {"',
        '"}}',
        "capital ",
        "border ",
    ):
        assert len(ids(text)) == 1, text
    countries = load_facts().countries
    assert sum(len(ids(name)) for name in countries) / len(countries) < 1.5


def test_the_action_is_apart_from_its_arguments():
    tokens = TOKENIZER.encode('{"name": "search", "arguments": {"query": "x"}}').tokens
    assert tokens.count("search") == 1
    assert tokens.count("query") == 1


def template(**options):
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(**options)
    return environment.from_string((FOLDER / "chat_template.jinja").read_text())


MESSAGES = [
    {"role": "system", "content": "S."},
    {"role": "user", "content": "Q?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"function": {"name": "search", "arguments": '{"query": "x"}'}},
            {"function": {"name": "search", "arguments": {"query": "y"}}},
        ],
    },
    {"role": "tool", "content": "one\ntwo"},
    {"role": "tool", "content": "three"},
    {"role": "assistant", "content": "A"},
]
RENDERED = """<|im_start|>system
S.<tools>search(query): Search the encyclopedia.
report(text): Report the fact.</tools><|im_end|>
<|im_start|>user
Q?<|im_end|>
<|im_start|>assistant
<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>
<tool_call>{"name": "search", "arguments": {"query": "y"}}</tool_call><|im_end|>
<|im_start|>user
<tool_response>one
two</tool_response>
<tool_response>three</tool_response><|im_end|>
<|im_start|>assistant
A<|im_end|>
"""


@pytest.mark.parametrize("options", [{"trim_blocks": True, "lstrip_blocks": True}, {}])
def test_the_template_under_both_conventions(options):
    assert template(**options).render(messages=MESSAGES, tools=tools_of("researcher")) == RENDERED


def test_the_template_without_system_or_tools():
    chat = template(trim_blocks=True, lstrip_blocks=True)
    user = [{"role": "user", "content": "Q"}]
    assert (
        chat.render(messages=user, add_generation_prompt=True)
        == "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    )
    with_tools = chat.render(messages=user, tools=tools_of("researcher"))
    assert with_tools.startswith("<|im_start|>system\n<tools>search(query): ")
    bare = [{"type": "function", "function": {"name": "stop", "description": "Stop."}}]
    assert "<tools>stop(): Stop.</tools>" in chat.render(messages=user, tools=bare)


def test_a_conversation_only_grows_at_its_end():
    chat = template(trim_blocks=True, lstrip_blocks=True)
    whole = chat.render(messages=MESSAGES, tools=tools_of("researcher"))
    for length in (2, 3, 5):
        assert whole.startswith(chat.render(messages=MESSAGES[:length], tools=tools_of("researcher")))


def test_the_fixed_part_of_a_prompt_is_short():
    chat = template(trim_blocks=True, lstrip_blocks=True)
    for agent, most in (("central", 60), ("researcher", 45)):
        messages = [{"role": "system", "content": PROMPTS["agents"][agent]["system"]}, {"role": "user", "content": ""}]
        assert len(ids(chat.render(messages=messages, tools=tools_of(agent), add_generation_prompt=True))) <= most
