"""What the official client hears of single tokens: log-probabilities, streamed or not, and tokens that it forbids."""

import asyncio
import dataclasses
import threading

import hypothesis
import hypothesis.strategies as st
import numpy as np
import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from harnessrl_jax.errors import WishError
from harnessrl_jax.gateway.capture import _behaviour
from harnessrl_jax.gateway.token_bytes import bytes_of
from harnessrl_jax.sampler.protocol import Sample
from harnessrl_jax.trajectories.records import LogpKind

ASK = [{"role": "user", "content": "Where is Nairobi?"}]
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "search", "arguments": {"query": "é"}}</tool_call>'
ALL = {"include": ["message.output_text.logprobs"]}
HALF = LogpKind(mode="processed", temperature=0.5, top_p=1.0, top_k=0)


def create(h, **wishes):
    with h.client() as client:
        return client.chat.completions.create(model="m", **({"messages": ASK, "logprobs": True} | wishes))


def told(choice):
    return [(token.token, token.logprob, bytes(token.bytes), token.top_logprobs) for token in choice.logprobs.content]


def kept(h, at=0):
    """What the store says of a call: each token's text and its log-probability."""
    call = h.calls()[at].call
    text = lambda token: h.codec.bytes_of(token).decode(errors="backslashreplace")
    return [(text(i), logp) for i, logp in zip(call.output_ids.tolist(), call.logps.tolist(), strict=True)]


def test_every_sampled_token_is_told_with_its_log_probability(house):
    h = house(lambda prompt: "In Kenya.")
    reply = create(h)
    tokens = told(reply.choices[0])
    assert [(text, logp) for text, logp, _, _ in tokens] == kept(h)
    assert tokens[-1][0] == "<|im_end|>"
    assert b"".join(data for _, _, data, _ in tokens) == b"In Kenya.<|im_end|>"
    assert len(tokens) == reply.usage.completion_tokens
    assert all(top == [] for *_, top in tokens)
    assert "logprobs" not in h.calls()[0].notes["asked"]
    assert create(h, logprobs=False).choices[0].logprobs is None


@pytest.mark.parametrize("text", ["In Kenya.", f"Look.\n{CALL}", CALL, ""])
def test_a_stream_tells_the_same_as_the_whole_reply(house, text):
    h = house(lambda prompt: text)
    wishes = {"tools": [SEARCH], "n": 2}
    whole = create(h, **wishes)
    streamed = {0: [], 1: []}
    with h.client() as client:
        for chunk in client.chat.completions.create(model="m", messages=ASK, logprobs=True, stream=True, **wishes):
            for choice in chunk.choices:
                streamed[choice.index] += told(choice) if choice.logprobs else []
    assert streamed == {choice.index: told(choice) for choice in whole.choices}
    assert [(text, logp) for text, logp, _, _ in streamed[1]] == kept(h)


def test_they_come_with_their_tokens(house):
    h = house(lambda prompt: f"In Kenya, at 5,199 metres. {CALL}")
    sampled, gate = [], threading.Event()

    async def pace():
        sampled.append(None)
        for _ in range(200 if len(sampled) == 7 else 0):
            if not gate.is_set():
                await asyncio.sleep(0.01)

    h.sampler.pace = pace
    chunks, early = [], []
    with h.client() as client:
        wishes = {"model": "m", "messages": ASK, "tools": [SEARCH], "logprobs": True, "stream": True}
        for chunk in client.chat.completions.create(**wishes):
            [choice] = chunk.choices
            if choice.logprobs:
                chunks.append((choice.delta.content or "", told(choice)))
                if not gate.is_set():
                    early += told(choice)
                    # Nothing is stored: the rest of the turn is not sampled yet.
                    assert h.store.counts().get("calls/sampled", 0) == 0
            if len(early) >= 4:
                gate.set()
    assert len(early) >= 4
    assert [(text, logp) for _, tokens in chunks for text, logp, *_ in tokens] == kept(h)
    # Up to the call, text and tokens go together; white space at a border is held back until it is known to stay.
    for said, tokens in chunks[:-1]:
        assert said.strip() == b"".join(data for _, _, data, _ in tokens).decode().strip()


@pytest.mark.parametrize("one_by_one", [True, False])
def test_no_token_is_told_that_a_stop_text_takes_back(house, one_by_one):
    h = house(lambda prompt: "One.END and more")
    h.sampler.pace = (lambda: asyncio.sleep(0)) if one_by_one else None
    with h.client() as client:
        wishes = {"model": "m", "messages": ASK, "stop": ["END"], "logprobs": True, "stream": True}
        chunks = [c for chunk in client.chat.completions.create(**wishes) for c in chunk.choices if c.logprobs]
    assert len(chunks) > one_by_one
    assert [(text, logp) for choice in chunks for text, logp, *_ in told(choice)] == kept(h)


def test_the_streaming_helper_collects_them(house):
    h = house(lambda prompt: f"Look.\n{CALL}")
    with (
        h.client() as client,
        client.chat.completions.stream(model="m", messages=ASK, tools=[SEARCH], logprobs=True) as events,
    ):
        kinds = [event.type for event in events]
        final = events.get_final_completion()
    assert "logprobs.content.done" in kinds
    assert [(text, logp) for text, logp, _, _ in told(final.choices[0])] == kept(h)


def test_the_models_own_log_probability_is_told_and_that_of_the_draw_is_kept(house):
    h = house(None)
    plain = h.sampler.sample("In Kenya.")
    raw = plain.logps - np.float32(1.0)
    h.sampler.script = lambda prompt: dataclasses.replace(plain, logp_kind=HALF, raw_logps=raw)
    assert [logp for _, logp, _, _ in told(create(h).choices[0])] == raw.tolist()
    call = h.calls()[0].call
    assert (call.logps.tolist(), call.logp_kind) == (plain.logps.tolist(), HALF)


@pytest.mark.parametrize("kind", [HALF, dataclasses.replace(HALF, temperature=1.0, top_p=0.9), None])
def test_log_probabilities_that_the_engine_does_not_tell_are_refused(house, kind):
    h = house(None)
    plain = h.sampler.sample("In Kenya.")
    h.sampler.script = lambda prompt: dataclasses.replace(
        plain, logp_kind=kind, logps=None if kind is None else plain.logps
    )
    with pytest.raises(openai.BadRequestError, match="Leave logprobs out") as refused:
        create(h)
    assert (refused.value.code, refused.value.param) == ("logprobs_not_served", "logprobs")
    assert create(h, logprobs=False).choices[0].message.content == "In Kenya."
    assert [kept.state for kept in h.calls()] == ["delivered"]


def test_a_stop_text_ends_the_tokens_that_are_told(house):
    h = house(lambda prompt: "One.END and more")
    assert [(text, logp) for text, logp, _, _ in told(create(h, stop=["END"]).choices[0])] == kept(h)
    assert "more" not in "".join(text for text, _ in kept(h))


def test_parts_of_a_character_are_told_as_bytes(house, codec):
    h = house(lambda prompt: codec.encode_plain("😀")[:-1])
    *parts, _ = told(create(h).choices[0])
    assert b"".join(data for _, _, data, _ in parts) == "😀".encode()[: len(parts)]
    assert parts[0][0] == "\\xf0"


@pytest.mark.parametrize("top", [1, 20, True, "2"])
def test_tokens_that_were_not_sampled_are_refused(house, top):
    h = house(lambda prompt: "Yes.")
    with pytest.raises(openai.BadRequestError, match="sampled token only") as refused:
        create(h, top_logprobs=top)
    assert (refused.value.code, refused.value.param) == ("top_logprobs_not_served", "top_logprobs")
    with h.client() as client, pytest.raises(openai.BadRequestError, match="sampled token only"):
        client.responses.create(model="m", input="Hi", top_logprobs=top)
    assert create(h, top_logprobs=0).choices[0].message.content == "Yes."


def test_responses_tell_those_of_the_message(thinking_house):
    h = thinking_house(lambda prompt: f"<think>\nHm.\n</think>\n\nIn Kenya. {CALL}")
    tool = {"type": "function", "name": "search", "parameters": {"type": "object"}}
    wishes = {"model": "m", "input": "Where is Nairobi?", "tools": [tool], **ALL}
    with h.client() as client:
        [_, message, _] = client.responses.create(**wishes).output
        [part] = message.content
        assert part.text == "In Kenya."
        assert "".join(token.token for token in part.logprobs).strip() == "In Kenya."
        assert "include" not in h.calls()[0].notes["asked"]
        known = dict(kept(h))
        assert all(token.logprob == known[token.token] for token in part.logprobs if token.token in ("In", "."))
        with client.responses.stream(**wishes) as events:
            done = [event for event in events if event.type == "response.output_text.done"]
            final = events.get_final_response()
        assert final.output[1].content[0].logprobs == part.logprobs
        assert [(t.token, t.logprob) for t in done[0].logprobs] == [(t.token, t.logprob) for t in part.logprobs]
        del wishes["include"]
        assert client.responses.create(**wishes).output[1].content[0].logprobs == []


def test_forbidden_tokens_reach_the_sampler(house, codec):
    h = house(lambda prompt: "Yes.")
    create(h, logit_bias={"300": -100, "7": -100, "9": 0})
    assert h.sampler.requests[0].banned_ids == (7, 300)
    assert "logit_bias" not in h.calls()[0].notes["asked"]


@pytest.mark.parametrize(
    ("bias", "said"),
    [
        ({"7": -50}, "Here a bias is -100"),
        ({"7": 100}, "Here a bias is -100"),
        ({"7": float("nan")}, "Here a bias is -100"),
        ({"7": "-100"}, "Here a bias is -100"),
        ({"x": -100}, "'x' is no token id"),
        ({"-1": -100}, "'-1' is no token id"),
        ({"9" * 40: -100}, "is no token id"),
        ({"999999": -100}, "the tokenizer has no token 999999"),
        ([7], "logit_bias must be of type dict"),
    ],
)
def test_another_bias_is_refused(house, bias, said):
    h = house(lambda prompt: "Yes.")
    refused = h.post({"messages": ASK, "logit_bias": bias})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logit_bias")
    assert said in refused.json()["error"]["message"]
    assert not h.sampler.requests


def test_a_wish_that_the_sampler_does_not_have_is_not_asked_again(house):
    def script(prompt):
        raise WishError("This engine cannot ban token ids.")

    h = house(script)
    with pytest.raises(openai.BadRequestError, match="cannot ban token ids") as refused:
        create(h, logit_bias={"7": -100})
    assert (refused.value.code, refused.value.response.headers["x-should-retry"]) == ("not_served", "false")
    assert len(h.sampler.requests) == 1


def test_under_a_ban_the_log_probabilities_of_the_whole_vocabulary_are_kept():
    one = np.float32([-1.0])
    half = np.float32([0.5])
    sample = Sample(
        output_ids=np.int32([3]),
        logps=one,
        logp_kind=dataclasses.replace(HALF, top_p=0.9),
        versions=np.int32([0]),
        finish="stop",
        survival=half,
    )
    logps, kind = _behaviour(sample, constrained=True)
    assert (logps, kind) == (pytest.approx(one + np.log(half)), HALF)


@hypothesis.given(st.text(max_size=30))
def test_the_bytes_of_tokens_are_the_text(codec, text):
    assert b"".join(map(codec.bytes_of, codec.encode_plain(text))) == text.encode()


def test_the_bytes_of_sentencepiece_tokens():
    vocabulary = {"<unk>": 0, "\u2581": 1, "a": 2, "\u2581a": 3, "<0xC3>": 4, "<0xA9>": 5, "\u0120": 6}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<|end|>"])
    of = bytes_of(tokenizer, {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]})
    ids = [*tokenizer.encode("aé a").ids, 7]
    assert [of(i) for i in ids] == [b" a", b"\xc3", b"\xa9", b" a", b"<|end|>"]
    assert (of(6), of(8)) == ("\u0120".encode(), None)
