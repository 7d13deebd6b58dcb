"""Faults that other gateways had with streams and at the end of the context: the smallest input of each."""

import asyncio
import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from harnessrl_jax.gateway import TextCodec
from harnessrl_jax.rollouts.jobs import Outcome
from harnessrl_jax.rollouts.run import classify, limits_reached

ASK = [{"role": "user", "content": "Hi"}]
PATHS = {
    "/v1/chat/completions": {"messages": ASK},
    "/v1/responses": {"input": ASK},
    "/v1/messages": {"messages": ASK, "max_tokens": 100},
}


def said(event):
    """The text that an event of any dialect adds to the message."""
    if "choices" in event:
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    if event.get("type") == "response.output_text.delta":
        return event["delta"]
    return event["delta"]["text"] if event.get("type") == "content_block_delta" else ""


@pytest.fixture(scope="module")
def fallback(model_folder, tmp_path_factory):
    """A tokenizer in the manner of SentencePiece: letters, and bytes for what it has no letter for."""
    folder = tmp_path_factory.mktemp("fallback")
    (folder / "chat_template.jinja").write_text((model_folder / "chat_template.jinja").read_text())
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *map(chr, range(0x21, 0x7F))]
    vocabulary = {letter: at for at, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextCodec(folder)


@pytest.fixture(params=["byte-level", "byte-fallback"])
def codec(request, model_folder, fallback):
    return fallback if request.param == "byte-fallback" else TextCodec(model_folder)


@pytest.mark.parametrize("path", PATHS)
def test_a_character_of_several_tokens_is_streamed_whole(house, codec, path):
    """A token may hold a part of a character, and the last character may never become whole."""
    text = "a 😀 é b 😀😀"
    letters = [i for letter in text for i in codec.encode_plain(letter)]
    half = codec.encode_plain("😀")[:-1]
    assert len(letters) > len(text) + 2
    h = house(lambda prompt: [*letters, *half])
    h.sampler.pace = lambda: asyncio.sleep(0.002)  # each token goes out by itself
    lines = h.post(PATHS[path] | {"stream": True}, path=path).text.splitlines()
    pieces = [piece for line in lines if line.startswith("data: {") for piece in [said(json.loads(line[6:]))] if piece]
    assert "".join(pieces) == text + "\ufffd"
    assert "\ufffd" not in "".join(pieces[:-1])
    assert len(pieces) > 4
    [kept] = h.calls()
    assert kept.call.output_ids.tolist() == [*letters, *half, codec.stop_ids[0]]


@pytest.mark.parametrize("codec", ["byte-level"], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_one_token_too_many_is_an_overflow_and_truncates_the_rollout(house, codec, path, stream):
    h = house(lambda prompt: "Yes.", context_tokens=len(codec.prompt(ASK)))
    reply = h.post(PATHS[path] | {"stream": stream}, path=path)
    assert "context_length_exceeded" in reply.text
    # Codex looks for it in a stream only.
    assert reply.status_code == (200 if stream and path == "/v1/responses" else 400)
    reached = limits_reached(h.rollouts.close("run", "r0", 0))
    assert reached == "context_length_exceeded x1"
    ending = Outcome(ending="crash", answer=None, detail="exit status 1")
    assert classify(ending, reached) == ("truncated", "limit: context_length_exceeded x1")
    assert h.store.counts() == {}
