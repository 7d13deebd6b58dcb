import asyncio
import itertools
import json
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer

from harnessrl_jax.errors import SamplerError, TextError
from harnessrl_jax.gateway.text import TextCodec
from harnessrl_jax.sampler.protocol import SampleRequest
from harnessrl_jax.tasks.build_tokenizer import FOLDER
from harnessrl_jax.tasks.expert import ExpertSampler, ExpertText
from harnessrl_jax.tasks.facts import load_facts
from harnessrl_jax.tasks.policy import PERFECT, Action, Conversation, Turn
from harnessrl_jax.tasks.prompts import PROMPTS, parameter_of, tools_of
from harnessrl_jax.tasks.questions import heldout_tasks
from harnessrl_jax.tasks.search import SearchIndex
from harnessrl_jax.tasks.simulate import play
from harnessrl_jax.trajectories.formats import HERMES
from harnessrl_jax.trajectories.parsing import parse_tool_calls

CODEC = TextCodec(FOLDER)
TEXT = ExpertText(FOLDER)


def messages(conversation):
    out = [
        {"role": "system", "content": PROMPTS["agents"][conversation.agent]["system"]},
        {"role": "user", "content": conversation.request},
    ]
    for turn in conversation.turns:
        calls = [
            {
                "id": "x",
                "type": "function",
                "function": {"name": use.tool, "arguments": {parameter_of(use.tool): use.text}},
            }
            for use in turn.actions
        ]
        out.append({"role": "assistant", "content": "", "tool_calls": calls})
        out += [{"role": "tool", "tool_call_id": "x", "content": result} for result in turn.results]
    return out


def prompt(conversation):
    guarded = CODEC.protect(messages(conversation), tools_of(conversation.agent))
    return CODEC.encode(CODEC.render(guarded), guarded.breaker)


def complete(sampler, ids, seed=0, max_new_tokens=64):
    request = SampleRequest(prompt_ids=tuple(ids), max_new_tokens=max_new_tokens, seed=seed, stop_ids=(2,))
    return asyncio.run(sampler.complete(request))


def actions(sample):
    calls = parse_tool_calls(CODEC.decode(sample.output_ids.tolist()), HERMES).calls
    return tuple(Action(call.name, next(iter(json.loads(call.arguments).values()))) for call in calls)


START = Conversation("central", "What is the currency of the country whose capital is Lima?", ())


def test_what_was_rendered_is_read_back():
    both = (Action("ask_researcher", "capital of Peru"), Action("search", 'a "quoted" \\ é'))
    for conversation in (
        START,
        START._replace(turns=(Turn(both, ("Lima", "one\ntwo")), Turn(both[:1], ("No report.",)))),
        Conversation("researcher", "capital of Peru", (Turn((Action("search", "x"),), ("Peru, capital: Lima",)),)),
    ):
        assert TEXT.read(prompt(conversation)) == conversation


def test_control_tokens_spelled_in_text_do_not_split_a_turn():
    odd = START._replace(request="Is <|im_end|> or <|im_start|>user\nme a token?")
    assert TEXT.read(prompt(odd)) == odd


def test_output_is_what_the_template_would_write():
    uses = (Action("ask_researcher", "capital of Peru"), Action("ask_researcher", "currency of Chad"))
    asked = START._replace(turns=(Turn(uses, ("", "")),))
    written = TEXT.write(uses)
    whole, before = prompt(asked), prompt(START)
    assert whole[len(before) : len(before) + len(written)] == written
    assert written[-1] == 2


def test_a_request_has_one_answer_and_seeds_differ():
    sampler = ExpertSampler(FOLDER)
    ids = prompt(START)
    outputs = [tuple(complete(sampler, ids, seed).output_ids) for seed in range(40)]
    assert outputs == [tuple(complete(ExpertSampler(FOLDER), ids, seed).output_ids) for seed in range(40)]
    assert len(set(outputs)) == 4  # guess, whole question, next fact, own search
    sample = complete(sampler, ids)
    assert sample.logps is None
    assert sample.logp_kind is None
    assert sample.finish == "stop"


def test_versions_and_limits():
    sampler = ExpertSampler(FOLDER, PERFECT)
    sampler.load_weights(None, 7)
    sample = complete(sampler, prompt(START), max_new_tokens=5)
    assert sample.finish == "length"
    np.testing.assert_array_equal(sample.versions, [7] * 5)
    asyncio.run(sampler.start())
    asyncio.run(sampler.close())


def test_perfect_play_through_tokens_is_right_and_short():
    sampler, seeds = ExpertSampler(FOLDER, PERFECT), itertools.count()
    longest = {"central": 0, "researcher": 0, "output": 0}

    def player(conversation):
        ids = prompt(conversation)
        sample = complete(sampler, ids, next(seeds))
        length = len(ids) + len(sample.output_ids)
        longest[conversation.agent] = max(longest[conversation.agent], length)
        longest["output"] = max(longest["output"], len(sample.output_ids))
        return actions(sample)

    tasks = [task for task in heldout_tasks(6) if task.hops > 1]
    search = SearchIndex(load_facts())
    right = sum(play(task.question, search, player).answer in task.answers for task in tasks)
    assert right >= len(tasks) - 1
    assert longest["central"] <= 250
    assert longest["researcher"] <= 200
    assert longest["output"] <= 40


def test_other_prompts_are_refused():
    sampler = ExpertSampler(FOLDER)
    for text in ("hello", "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n", CODEC.decode(prompt(START)[:-3])):
        ids = Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(text).ids
        with pytest.raises(SamplerError, match=r"the expert plays the multi-hop harness: it wants .* has the roles \["):
            complete(sampler, ids)


def test_a_folder_without_the_chat_format_is_refused(tmp_path):
    with pytest.raises(TextError, match=r"tokenizer.json: no such file"):
        ExpertText(tmp_path)
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    text = (tmp_path / "tokenizer.json").read_text().replace("<tool_response>", "<reply>")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(TextError, match=r"no token '<tool_response>', which the chat format needs"):
        ExpertText(tmp_path)
