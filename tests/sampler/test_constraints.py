"""Requests that ban tokens, follow a grammar or end at a text, among others that do not."""

import dataclasses
import json
import re
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harnessrl_jax import models
from harnessrl_jax.errors import SamplerError
from harnessrl_jax.sampler import SampleRequest
from harnessrl_jax.sampler.batching import Batcher, Job
from harnessrl_jax.sampler.placement import on_device

END = 1
ITEM = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "bc"]}, "count": {"type": "integer", "minimum": 0, "maximum": 30}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
GRAMMAR = f"start: %json {json.dumps(ITEM | COMPACT)}"


def guided(seed, **wishes):
    wishes = {"prompt_ids": (seed, 3, 4), "max_new_tokens": 40, "stop_ids": (END,), "grammar": GRAMMAR} | wishes
    return SampleRequest(seed=seed, request_id=f"r-{seed}", **wishes)


def free(seed, **wishes):
    return SampleRequest(prompt_ids=(9, seed), max_new_tokens=12, seed=seed, **wishes)


@pytest.fixture(scope="module")
def server(engine, params):
    made = Batcher(engine, lanes=1, turn_chunks=100, placement=on_device())
    made.load(params, 0)
    return made


@pytest.fixture(scope="module")
def ask(server, vocabulary):
    """Results of requests that are sampled together."""

    def run(*requests):
        jobs = []
        for request in requests:
            guide = vocabulary.guide(request) if request.grammar else None
            jobs.append(Job(request, guide, vocabulary.end_of(request.stop) if request.stop else None))
            server.submit(jobs[-1])
        results = {}
        while server.busy:
            results.update(server.turn())
        return [results[job] for job in jobs]

    return run


def bits(sample):
    arrays = sample.output_ids, sample.logps, sample.raw_logps, sample.survival
    return (*(array.tobytes() for array in arrays), sample.finish)


def test_a_grammar_is_followed_by_a_random_model(ask, letters):
    samples = ask(*[guided(seed, temperature=seed % 3 / 2) for seed in range(12)])
    texts = [letters.decode(sample.output_ids.tolist()) for sample in samples]
    assert len(set(texts)) > 4
    for text, sample in zip(texts, samples, strict=True):
        value = json.loads(text)
        assert value.keys() == {"kind", "count"}
        assert value["kind"] in ("a", "bc")
        assert 0 <= value["count"] <= 30
        assert (sample.finish, sample.output_ids[-1]) == ("stop", END)


def test_constrained_log_probabilities_are_those_of_what_was_left(engine, params, one_pass, vocabulary, ask):
    """By hand: the mass of the tokens that a fresh guide allows, in one pass over the whole sequence."""
    request = guided(5, temperature=0.7, banned_ids=(vocabulary._tokenizer.token_to_id("b"),))
    (sample,) = ask(request)
    output, prompt, guide = sample.output_ids.tolist(), list(request.prompt_ids), vocabulary.guide(request)
    hidden = one_pass(params, prompt + output)[len(prompt) - 1 : -1]
    scores = np.asarray(models.logits(engine.config, params, hidden)) / 0.7
    logp = scores - np.logaddexp.reduce(scores, 1, keepdims=True)
    for at, token in enumerate(output):
        allowed = np.unpackbits(guide.words().view(np.uint8), bitorder="little")[:97].astype(bool)
        allowed[list(request.banned_ids)] = False
        mass = np.exp(logp[at][allowed]).sum()
        np.testing.assert_allclose(sample.survival[at], mass, rtol=2e-3)
        np.testing.assert_allclose(sample.logps[at], logp[at, token] - np.log(mass), rtol=2e-3, atol=2e-5)
        guide.accept(token)
    assert '"a"' in vocabulary.decode(output)


def test_a_grammar_changes_nothing_for_the_others(ask):
    requests = [free(0), guided(1), free(2, banned_ids=tuple(range(40))), guided(3), free(4, top_k=5), guided(5)]
    alone = [bits(*ask(request)) for request in requests]
    assert [bits(sample) for sample in ask(*requests)] == alone


def test_others_go_on_at_full_speed(server, engine, ask):
    before = server.counts.generate_calls
    ask(guided(1, max_new_tokens=4), free(1))
    assert server.counts.generate_calls - before == 12 / engine.steps


def test_banned_tokens_are_not_sampled(ask):
    (plain,) = ask(free(7))
    banned = tuple(set(plain.output_ids.tolist()))
    (sample,) = ask(free(7, banned_ids=banned))
    assert not set(sample.output_ids.tolist()) & set(banned)
    assert (sample.survival < 1.0).all()
    assert (plain.survival == 1.0).all()


def test_tokens_beyond_the_first_word_are_banned_too(ask):
    (sample,) = ask(free(3, banned_ids=tuple(i for i in range(97) if i not in (31, 64, 96))))
    assert set(sample.output_ids.tolist()) <= {31, 64, 96}


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_stop_text_ends_the_sample_wherever_its_tokens_lie(ask, letters, size):
    (open_ended,) = ask(free(11))
    ids = open_ended.output_ids.tolist()
    text = letters.decode(ids, skip_special_tokens=False)
    for start in range(len(ids) - size):
        stop = text[start : start + size]
        (sample,) = ask(free(11, stop=("never there", stop)))
        end = text.index(stop) + size
        assert sample.output_ids.tolist() == ids[:end]
        assert sample.logps.tobytes() == open_ended.logps[:end].tobytes()
        assert (sample.finish, len(sample.versions)) == ("stop", end)


def test_a_stop_text_frees_its_slot(server, engine, ask, letters):
    (open_ended,) = ask(free(11))
    stop = letters.decode(open_ended.output_ids[:1].tolist(), skip_special_tokens=False)
    before = server.counts.generate_calls
    ask(*[free(11, stop=(stop,))] * (2 * engine.slots))
    assert server.counts.generate_calls - before == 2


@given(
    st.text("abc", min_size=1, max_size=30), st.lists(st.text("abc", min_size=1, max_size=3), max_size=3, min_size=1)
)
def test_the_first_complete_stop_text_is_found_in_any_pieces(vocabulary, letters, text, stops):
    ids = letters.encode(text, add_special_tokens=False).ids
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    find, found, before = vocabulary.end_of(stops), None, 0
    while found is None and before < len(ids):
        size = min(before + 1 + before % 3, len(ids))
        found = find(ids[:size], before)
        before = size
    assert found == min(ends, default=None)


def test_a_contradiction_fails_its_own_request(ask, vocabulary):
    brace = vocabulary._tokenizer.token_to_id("{")
    wrong, right = ask(guided(1, banned_ids=(brace,)), free(2))
    assert isinstance(wrong, SamplerError)
    assert re.match(r"Request 'r-1': banned_ids forbid every token that the grammar allows next\. Ban", str(wrong))
    assert bits(right) == bits(*ask(free(2)))


def test_a_grammar_that_cannot_be_used_is_refused(vocabulary):
    with pytest.raises(SamplerError, match=r"^Request 'r-0': the grammar cannot be followed: (.|\n)*Simplify it\.$"):
        vocabulary.guide(guided(0, grammar="start: missing"))


def test_without_the_package_the_extra_is_named(vocabulary, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SamplerError, match=r"install it with `pip install 'harnessrl-jax\[schemas\]'`"):
        vocabulary.guide(guided(0))


def test_a_sampler_without_a_vocabulary_says_so(engine, params):
    import asyncio

    from harnessrl_jax.sampler import LocalSampler

    sampler = LocalSampler(engine)
    for request in (guided(0), free(0, stop=("a",))):
        named = dataclasses.replace(request, request_id="r-9")
        with pytest.raises(SamplerError, match=r"Request 'r-9': stop texts and grammars need the model's tokenizer"):
            asyncio.run(sampler.complete(named))
