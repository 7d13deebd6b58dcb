"""Roles on real byte-level tokenizers: any text, cut into tokens at any place, ended anywhere."""

import functools
import json
import pathlib
import random

import hypothesis
import hypothesis.strategies as st
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import harnessrl_jax
from harnessrl_jax.trajectories import Role, assign_roles
from harnessrl_jax.trajectories.formats import (
    BARE_JSON,
    GLM4,
    HERMES,
    LLAMA3,
    MISTRAL,
    QWEN3_CODER,
    REACT,
    Delimited,
    FunctionTags,
    SpecialTags,
    Tag,
)
from harnessrl_jax.trajectories.roles import token_characters

SEARCH = SpecialTags(tags=(Tag("search", "<search>", "</search>"), Tag("stop", "<stop>", None)))
FUNCTION = Delimited(open="<function=", between=">", close=("</function>",), served=True)
BARE_TAGS = FunctionTags()
CONTROL = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<search>", "</search>", "<stop>"]
FORMATS = [HERMES, BARE_JSON, LLAMA3, MISTRAL, QWEN3_CODER, GLM4, REACT, SEARCH, FUNCTION, BARE_TAGS]
SHIPPED = pathlib.Path(harnessrl_jax.__file__).parent / "assets/quickstart/tokenizer.json"


class Words:
    """A tokenizer with the bytes of its tokens, which spells a text in any way its vocabulary allows."""

    def __init__(self, tokenizer):
        # GPT-2's table: the bytes that print as themselves, then the others from U+0100 on.
        kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
        rest = [byte for byte in range(256) if byte not in kept]
        table = {chr(byte): byte for byte in kept} | {chr(256 + at): byte for at, byte in enumerate(rest)}
        added = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
        vocabulary = tokenizer.get_vocab()
        self.control = added
        self.bytes = {i: bytes(table[c] for c in word) for word, i in vocabulary.items() if word not in added}
        self.ids = {data: i for i, data in self.bytes.items()}
        self.bytes |= {i: content.encode() for content, i in added.items()}
        self.size = len(self.bytes)
        self.decode = lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)

    def spell(self, pieces, cut):
        """Ids of texts and (as 1-tuples) control tokens; `cut` draws where ordinary tokens end."""
        ids = []
        for piece in pieces:
            if isinstance(piece, tuple) and piece[0] in self.control:
                ids.append(self.control[piece[0]])
                continue
            data = (piece[0] if isinstance(piece, tuple) else piece).encode()
            while data:
                fitting = [n for n in range(1, min(len(data), 12) + 1) if data[:n] in self.ids]
                size = cut.choice(fitting)
                ids.append(self.ids[data[:size]])
                data = data[size:]
        return ids


@functools.cache
def words(which):
    if which == "shipped":
        return Words(Tokenizer.from_file(str(SHIPPED)))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False, max_token_length=12
    )
    # Without a split into words, tokens reach over names, quotes and braces.
    lines = [f'{{"name": "{n}", "arguments": {{"{k}": "{k} é 😀"}}}}' for n in ("find", "go") for k in ("q", "to", "x")]
    lines += ["Action: find\nAction Input: go", "<function=find>\n<parameter=q>\ngo\n</parameter>\n</function>"]
    tokenizer.train_from_iterator(lines * 3, trainer)
    return Words(tokenizer)


WORDS = st.sampled_from(["shipped", "trained"]).map(words)
NAMES = st.sampled_from(["find", "go", "é", "😀x", "a.b-c"])
TEXTS = st.text(max_size=6) | st.sampled_from(["go", "é😀", '"}', "</tool_call>", "\\", "\ufffd", "<search>"])
VALUES = st.dictionaries(TEXTS, TEXTS | st.integers() | st.lists(TEXTS, max_size=2), max_size=2)


def written(known, name, values, ascii_only=False):
    """One call in this format, as pieces for `Words.spell`."""
    arguments = json.dumps(values, ensure_ascii=ascii_only)
    match known:
        case _ if known is REACT:
            return [f"\nAction: {name}\nAction Input: {arguments}\nObservation:"]
        case _ if known is SEARCH:
            return [("<search>",), name, ("</search>",)]
        case _ if known is FUNCTION:
            return [f"<function={name}>{arguments}</function>"]
        case _ if known is MISTRAL:
            return [("[TOOL_CALLS]",), name, ("[ARGS]",), arguments]
        case _ if known is LLAMA3:
            return [("<|python_tag|>",), f'{{"name": "{name}", "parameters": {arguments}}}']
        case _ if known is BARE_JSON:
            return [f'\n```json\n{{"name": "{name}", "arguments": {arguments}}}\n```\n']
        case _ if known is HERMES:
            return [("<tool_call>",), f'{{"name": "{name}", "arguments": {arguments}}}', ("</tool_call>",)]
        case _ if known is GLM4:
            texts = "".join(f"<arg_key>k{i}</arg_key>\n<arg_value>{v}</arg_value>" for i, v in enumerate(values))
            return [("<tool_call>",), f"{name}\n{texts}", ("</tool_call>",)]
    texts = "".join(f"<parameter=k{i}>{v}</parameter>" for i, v in enumerate(values))
    function = f"<function={name}>{texts}</function>"
    return [function] if known is BARE_TAGS else [("<tool_call>",), function, ("</tool_call>",)]


@st.composite
def outputs(draw):
    """A format, a tokenizer, and ids of an output with whole calls, broken ones, quoted marks and prose."""
    known, vocabulary = draw(st.sampled_from(FORMATS)), draw(WORDS)
    pieces = []
    for _ in range(draw(st.integers(0, 4))):
        call = written(known, draw(NAMES), draw(VALUES), draw(st.booleans()))
        match draw(st.sampled_from(["whole", "whole", "whole", "cut", "quoted", "prose", "bytes"])):
            case "whole":
                pieces += call
            case "cut":
                pieces += [*call[:-1], call[-1][: draw(st.integers(0, 20))] if isinstance(call[-1], str) else ""]
            case "quoted":
                pieces += [piece[0] if isinstance(piece, tuple) else piece for piece in call]
            case "prose":
                pieces.append(draw(TEXTS))
            case "bytes":
                pieces.append(draw(st.integers(0, vocabulary.size - 1)))
    cut = random.Random(draw(st.integers(0, 2**16)))
    ids = []
    for piece in pieces:
        ids += [piece] if isinstance(piece, int) else vocabulary.spell([piece], cut)
    return known, vocabulary, ids


def roles(case, ids, finish="stop"):
    known, vocabulary, _ = case
    return assign_roles(ids, vocabulary.decode, known, finish=finish, control=vocabulary.control)


def overlap(vocabulary, ids, text, span):
    """Which tokens hold bytes of these characters; from the bytes, not from the decoder."""
    edges = np.cumsum([0, *(len(vocabulary.bytes[i]) for i in ids)])
    start, end = (len(text[:at].encode()) for at in span)
    return (edges[:-1] < end) & (edges[1:] > start) & (start < end)


@hypothesis.settings(max_examples=100)
@hypothesis.given(outputs())
def test_every_token_has_the_one_role_that_its_bytes_say(case):
    _, vocabulary, ids = case
    out = roles(case, ids)
    text = vocabulary.decode(ids)
    masks = [out.role == kind for kind in (Role.ACTION, Role.ARGS, Role.OTHER)]
    assert (np.sum(masks, axis=0) == 1).all()
    said = np.full(len(ids), Role.OTHER)
    for span in out.spans:
        said[span.start : span.end] = span.role
    assert said.tolist() == out.role.tolist()
    if "\ufffd" in text or text.encode() != b"".join(vocabulary.bytes[i] for i in ids):
        return
    action, arguments = np.zeros((2, len(ids)), bool)
    for block in out.parsed.blocks:
        action |= overlap(vocabulary, ids, text, block.name_span)
        arguments |= overlap(vocabulary, ids, text, block.arguments_span)
    assert (masks[0] == action).all()
    assert (masks[1] == arguments & ~action).all()


@hypothesis.settings(max_examples=40)
@hypothesis.given(outputs(), st.sampled_from(["stop", "length"]))
def test_cut_anywhere_nothing_breaks_and_closed_blocks_stay(case, finish):
    ids = case[2]
    full = roles(case, ids, finish)
    known = {(b.name, b.name_span, b.arguments_span) for b in full.parsed.blocks}
    for size in range(len(ids)):
        part = roles(case, ids[:size], "length")
        assert part.parsed.status in {"none", "truncated"}
        assert part.parsed.calls == ()
        assert {(b.name, b.name_span, b.arguments_span) for b in part.parsed.blocks if b.closed} <= known
        # A token is labelled once its block can be read, and then for good, unless a later name begins inside it.
        kept = (full.role[:size] == part.role) | (full.role[:size] == Role.ACTION)
        assert kept[part.role != Role.OTHER].all()


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.sampled_from(FORMATS), WORDS, st.data())
def test_any_ids_at_all(known, vocabulary, data):
    ids = data.draw(st.lists(st.integers(0, vocabulary.size + 3), max_size=40))
    out = assign_roles(ids, vocabulary.decode, known, control=vocabulary.control)
    assert out.role.shape == (len(ids),)
    assert set(out.role.tolist()) <= {Role.ACTION, Role.ARGS, Role.OTHER}


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.sampled_from([HERMES, BARE_JSON, LLAMA3, MISTRAL, FUNCTION]), WORDS, NAMES, VALUES, st.booleans())
def test_a_call_comes_back_as_it_was_written(known, vocabulary, name, values, ascii_only):
    ids = vocabulary.spell(written(known, name, values, ascii_only), random.Random(len(str(values))))
    out = assign_roles(ids, vocabulary.decode, known, control=vocabulary.control)
    assert out.parsed.status == "ok"
    assert [(call.name, json.loads(call.arguments)) for call in out.parsed.calls] == [(name, values)]


def test_text_that_spells_a_control_token_calls_nothing():
    vocabulary = words("shipped")
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    read = functools.partial(assign_roles, decode=vocabulary.decode, format=HERMES, control=vocabulary.control)
    for seed in range(5):
        quoted = vocabulary.spell([text], random.Random(seed))
        assert vocabulary.decode(quoted) == text
        assert read(quoted).parsed.status == "none"
        # An id opens a block, and a spelled tag does not close it.
        half = [vocabulary.control["<tool_call>"], *vocabulary.spell([text[11:]], random.Random(seed))]
        assert read(half).parsed.status == "malformed"


def test_a_decoder_with_one_token_for_each_byte():
    bytes_ = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=bytes_ | {"▁a": 256, "b": 257}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
    emoji = list("😀".encode())
    text, low, high = token_characters([256, *emoji, 257, 256, *"é".encode(), 257], decode)
    assert text == "a😀b aéb"
    assert low.tolist() == [0, 1, 1, 1, 1, 2, 3, 5, 5, 6]
    assert high.tolist() == [1, 2, 2, 2, 2, 3, 5, 6, 6, 7]


def test_a_long_output_is_read_in_windows():
    vocabulary = words("trained")
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids)) if len(ids) < size else longest
        return vocabulary.decode(ids)

    # Bytes that never become a character, characters of several tokens, and ids without text.
    single = [vocabulary.ids[bytes([byte])] for byte in b"\xe2\x82\xac\xff\xf0\x9f\x98\x80"]
    ids = single * 200 + [vocabulary.ids[b"\xff"]] * 500 + single * 50
    size = len(ids)
    text, low, high = token_characters(ids, decode)
    assert text == vocabulary.decode(ids)
    assert longest < 80
    # The last byte of the emoji, and the stray byte before the emoji that it may not tell from it.
    assert (high[-1], low[-1], low[0]) == (len(text), len(text) - 2, 0)
    # The euro sign, a stray byte, the emoji: the same in every window.
    assert (np.diff(high[: 200 * len(single)].reshape(200, -1), axis=0) == 3).all()
