"""What a harness sees of a sampled text, whole and while it grows."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from harnessrl_jax.gateway.live import Live
from harnessrl_jax.gateway.visible import cut_at_stop, reasoning_tokens, settled, split
from harnessrl_jax.sampler.protocol import Sample
from harnessrl_jax.trajectories.records import LogpKind

MARKS = ("<tool_call>", "STOP")


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("  plain ", False, "", "plain"),
        ("<think>\na\n</think>\n\nb", True, "a", "b"),
        ("a\n</think>b</think>", True, "a", "b</think>"),  # the prompt opened it
        ("<think>never closed", True, "never closed", ""),
        ("<think></think>b", True, "", "b"),
        ("", True, "", ""),
    ],
)
def test_split(text, thinking, reasoning, content):
    assert split(text, thinking=thinking) == (reasoning, content)


pieces = st.sampled_from(
    ["<think>", "</think>", "<", "think", "</thi", "<tool_call>", "<tool", "STOP", "ST", "a", " ", "\n"]
)


@hypothesis.given(st.lists(pieces, max_size=8).map("".join), st.lists(pieces, max_size=4).map("".join), st.booleans())
def test_what_is_settled_stays_whatever_follows(text, more, thinking):
    known = settled(text, thinking=thinking, marks=MARKS)
    # A call or a stop text takes everything from its mark on.
    whole = text + more
    ends = [whole.find(mark) for mark in MARKS if mark in whole]
    final = split(whole[: min(ends, default=len(whole))], thinking=thinking)
    assert final.reasoning.startswith(known.reasoning)
    assert final.content.startswith(known.content)


def test_everything_certain_is_settled():
    assert settled("Look. <tool", thinking=False, marks=MARKS) == ("", "Look.")
    assert settled("Look. <tools", thinking=False, marks=MARKS) == ("", "Look. <tools")
    assert settled("<think>a b</", thinking=True, marks=MARKS) == ("a b", "")
    assert settled("<think>a</think> b", thinking=True, marks=MARKS) == ("a", "b")


def live(codec, **options):
    thinks = lambda ids: codec.decode(ids).startswith("<think>")
    given = {"opened": False, "marks": MARKS, "stop_ids": codec.stop_ids} | options
    return Live(codec.decode, thinks, **given)


def shown(parts):
    out = {"reasoning": "", "content": ""}
    for kind, delta in parts:
        out[kind] += delta
    return out["reasoning"], out["content"]


@pytest.mark.parametrize("opened", [False, True])
def test_tokens_become_text_and_no_character_is_torn(codec, opened):
    text = "<think>Kenya 😀é</think>\n\nNairobi 😀 is it." if not opened else "Kenya 😀é</think>\n\nNairobi 😀 is it."
    ids = [i for letter in text for i in codec.encode_plain(letter)]
    feed = live(codec, opened=opened)
    deltas = [feed.feed([token]) for token in (*ids, codec.stop_ids[0])]
    parts = [part for delta in deltas for part in delta]
    assert shown(parts) == ("Kenya 😀é", "Nairobi 😀 is it.")
    assert len(parts) > 10
    assert not any("\ufffd" in delta for _, delta in parts)


def test_text_that_only_begins_like_reasoning(codec):
    feed = live(codec)
    assert shown([part for letter in "<thanks> a" for part in feed.feed(codec.encode_plain(letter))]) == (
        "",
        "<thanks> a",
    )


def sample(codec, ids):
    count = len(ids)
    return Sample(
        output_ids=np.array(ids, np.int32),
        logps=np.arange(count, dtype=np.float32),
        logp_kind=LogpKind(mode="raw", temperature=1.0, top_p=1.0, top_k=0),
        versions=np.arange(count, dtype=np.int32),
        finish="length",
        raw_logps=None,
        survival=np.linspace(0.5, 1.0, count, dtype=np.float32),
        experts=np.arange(count + 2, dtype=np.uint8)[:, None, None],  # of a prompt of three tokens
    )


def test_a_stop_text_ends_the_sample_at_the_token_that_completes_it(codec):
    ids = [i for letter in "a STOP b END" for i in codec.encode_plain(letter)]
    cut, stop = cut_at_stop(sample(codec, ids), codec.decode, ["END", "STOP", "OP b"])
    assert (stop.text, stop.rest) == ("STOP", "STOP")
    assert codec.decode(cut.output_ids) == "a STOP"
    assert cut.finish == "stop"
    assert cut.logps.tolist() == cut.versions.tolist() == list(range(6))
    assert cut.survival.tolist() == sample(codec, ids).survival[:6].tolist()
    assert cut.raw_logps is None
    assert cut.experts.ravel().tolist() == list(range(3 + 5))
    # What shares a token with the end of the stop text was sampled with it.
    whole = codec.encode_plain("a <tool")[-1:]
    cut, stop = cut_at_stop(sample(codec, [*codec.encode_plain("a "), 3, *whole]), codec.decode, ["<tool"])
    assert (stop.rest, len(cut.output_ids)) == ("<tool_call>", len(codec.encode_plain("a ")) + 1)


def test_no_stop_text_no_change(codec):
    whole = sample(codec, codec.encode_plain("a b"))
    assert cut_at_stop(whole, codec.decode, []) == (whole, None)
    assert cut_at_stop(whole, codec.decode, ["x"]) == (whole, None)


def test_reasoning_tokens_end_with_the_mark(codec):
    ids = [i for letter in "<think>ab</think>cd" for i in codec.encode_plain(letter)]
    assert reasoning_tokens(ids, codec.decode, thinking=True) == len("<think>ab</think>")
    assert reasoning_tokens(ids[:9], codec.decode, thinking=True) == 9
    assert reasoning_tokens(ids, codec.decode, thinking=False) == 0
