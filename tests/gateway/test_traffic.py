"""Requests that real harnesses sent, two turns each: the second prompt extends the first and its sample.

`tests/data/chat_traffic.json` holds bodies of chat completions requests as the named programs sent them to a server on
loopback, long texts replaced by a hash and a length, all but one or two tools left out where there were many.
"""

import json
import pathlib

import pytest

from harnessrl_jax.gateway.chat import parse_request
from harnessrl_jax.gateway.conversation import Turn, Turns, build_prompt
from harnessrl_jax.trajectories.records import ToolCall

TRAFFIC = json.loads((pathlib.Path(__file__).parents[1] / "data/chat_traffic.json").read_text())


@pytest.mark.parametrize("harness", sorted(TRAFFIC))
def test_the_second_turn_extends_the_first(codec, harness):
    first, second = (parse_request(json.dumps(body)) for body in TRAFFIC[harness])
    echo = next(message for message in reversed(second.messages) if message["role"] == "assistant")
    [echoed] = echo["tool_calls"]
    # As sampled: other white space than most of them send back.
    arguments = json.dumps(echoed["function"]["arguments"], indent=1)
    call = ToolCall(id=echoed["id"], name=echoed["function"]["name"], arguments=arguments)
    turns = Turns()
    prompt = build_prompt(codec, turns, "s", first.messages, first.tools)
    output = (*codec.encode_plain(arguments), *codec.stop_ids)
    turns.add(
        Turn(
            call_id="c0",
            session_id="s",
            prompt_ids=tuple(prompt.ids),
            output_ids=output,
            content="",
            tool_calls=(call,),
        )
    )
    result = build_prompt(codec, turns, "s", second.messages, second.tools)
    known = [*prompt.ids, *output]
    assert result.ids[: len(known)] == known
    assert result.spliced == ("c0",)
    assert codec.decode(result.ids[len(known) :]).endswith("<|im_end|>\n<|im_start|>assistant\n")
