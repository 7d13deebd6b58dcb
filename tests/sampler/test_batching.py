import dataclasses
import re
from collections import Counter

import jax
import numpy as np
import pytest

from harnessrl_jax import models
from harnessrl_jax.errors import SamplerError
from harnessrl_jax.sampler import Sample, SampleRequest
from harnessrl_jax.sampler.batching import Batcher, Job, check, settings_of
from harnessrl_jax.sampler.placement import on_device


def batcher(engine, params, *, lanes=2, turn_chunks=100, version=0):
    made = Batcher(engine, lanes=lanes, turn_chunks=turn_chunks, placement=on_device())
    made.load(params, version)
    return made


def finish(server, jobs=None):
    """Turns until nothing is left; results in the order of the jobs."""
    results = {}
    while server.busy:
        results.update(server.turn())
    return [results[job] for job in jobs] if jobs is not None else results


def ask(server, *requests):
    jobs = [Job(request) for request in requests]
    for job in jobs:
        server.submit(job)
    return finish(server, jobs)


def requests_of(seed, number):
    """Requests of every kind; prompts share starts, some are equal."""
    rng = np.random.default_rng(seed)
    starts = [tuple(rng.integers(0, 97, 30).tolist()) for _ in range(3)]
    for i in range(number):
        prompt = starts[rng.integers(3)][: rng.integers(1, 31)] + tuple(
            rng.integers(0, 97, rng.integers(0, 6)).tolist()
        )
        yield SampleRequest(
            prompt_ids=prompt if rng.random() < 0.7 else starts[0][:17],
            max_new_tokens=int(rng.integers(1, 11)),
            temperature=float(rng.choice([0.0, 0.6, 1.0])),
            top_p=float(rng.choice([1.0, 1.0, 0.8])),
            top_k=int(rng.choice([0, 0, 12])),
            min_p=float(rng.choice([0.0, 0.0, 0.05])),
            banned_ids=tuple(rng.integers(0, 97, 30).tolist()) if rng.random() < 0.3 else (),
            seed=int(rng.integers(2**40)),
            stop_ids=(int(rng.integers(97)), 3),
            request_id=f"r-{i}",
        )


def bits(sample):
    arrays = sample.output_ids, sample.logps, sample.raw_logps, sample.survival, sample.versions
    return (*(array.tobytes() for array in arrays), sample.finish, sample.logp_kind)


def test_a_sample_depends_on_weights_and_request_alone(engine, params):
    requests = list(requests_of(0, 60))
    server, alone = batcher(engine, params, lanes=1), []
    for request in requests:
        server.load(params, 0)  # forgets the chunks of the requests before
        alone.append(bits(*ask(server, request)))
    assert server.counts.chunks_reused == 0
    assert len(set(alone)) > 50  # the requests really differ
    rng = np.random.default_rng(1)
    for lanes in (1, 3):
        server, order, results = batcher(engine, params, lanes=lanes), rng.permutation(len(requests)), {}
        while order.size or server.busy:
            arriving, order = np.split(order, [rng.choice([0, 1, 2, 7])])
            jobs = {Job(requests[i]): i for i in arriving}
            for job in jobs:
                server.submit(job)
            results.update({job: (i, None) for job, i in jobs.items()})
            for job, sample in server.turn():
                results[job] = results[job][0], bits(sample)
        assert sorted(results.values()) == list(enumerate(alone))
        assert server.counts.chunks_reused > 20


@pytest.mark.parametrize("rows", [2, 3])
def test_a_sample_does_not_depend_on_what_shares_its_calls(engine, params, rows):
    engine, requests = dataclasses.replace(engine, rows=rows), list(requests_of(7, 16))
    server, alone = batcher(engine, params, lanes=1), []
    for request in requests:
        server.load(params, 0)
        alone.append(bits(*ask(server, request)))
    for lanes, pages in ((1, 12), (2, 2), (2, 0)):
        server = batcher(dataclasses.replace(engine, pages=pages), params, lanes=lanes)
        assert [bits(sample) for sample in ask(server, *requests)] == alone


def test_equal_prompts_are_read_once(engine, params):
    server = batcher(engine, params)
    one, two = (SampleRequest(prompt_ids=tuple(range(20)), max_new_tokens=8, seed=seed) for seed in (1, 2))
    first, second, third = ask(server, one, two, one)
    assert server.counts.chunks_read == 3
    assert server.counts.chunks_reused == 6
    assert bits(first) == bits(third)
    assert bits(first) != bits(second)


def test_without_pages_nothing_is_reused_and_nothing_changes(engine, params):
    requests = list(requests_of(4, 6))
    server = batcher(dataclasses.replace(engine, pages=0), params)
    with_pages = [bits(sample) for sample in ask(batcher(engine, params), *requests)]
    assert [bits(sample) for sample in ask(server, *requests)] == with_pages
    assert server.counts.chunks_reused == 0


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_those_of_one_pass(engine, params, one_pass, temperature):
    prompt = tuple(range(30, 51))
    wishes = {"prompt_ids": prompt, "max_new_tokens": 12, "temperature": temperature, "seed": 5}
    plain, cut = ask(batcher(engine, params), SampleRequest(**wishes), SampleRequest(**wishes, top_p=0.7, top_k=20))

    def in_one_pass(output, temperature):
        hidden = one_pass(params, [*prompt, *output.tolist()])[len(prompt) - 1 : -1]
        scores = np.asarray(models.logits(engine.config, params, hidden)) / temperature
        return np.take_along_axis(scores - np.logaddexp.reduce(scores, 1, keepdims=True), output[:, None], 1)[:, 0]

    for sample in (plain, cut):
        at_temperature = in_one_pass(sample.output_ids, temperature)
        np.testing.assert_allclose(sample.logps + np.log(sample.survival), at_temperature, rtol=1e-3, atol=2e-5)
        np.testing.assert_allclose(sample.raw_logps, in_one_pass(sample.output_ids, 1.0), rtol=1e-3, atol=2e-5)
    assert (plain.survival == 1.0).all()
    assert (cut.survival < 1.0).any()
    assert (plain.logp_kind.mode, plain.logp_kind.temperature) == ("processed", temperature)
    assert (cut.logp_kind.top_p, cut.logp_kind.top_k) == (0.7, 20)


def test_greedy_reports_the_raw_log_probability(engine, params):
    (sample,) = ask(batcher(engine, params), SampleRequest(prompt_ids=(5,), max_new_tokens=4, temperature=0.0))
    assert sample.logp_kind.mode == "raw"
    assert sample.logps.tobytes() == sample.raw_logps.tobytes()


def test_the_reason_to_end_is_told(engine, params):
    server = batcher(engine, params)
    open_ended = SampleRequest(prompt_ids=(1, 2, 3), max_new_tokens=9, seed=4)
    (sample,) = ask(server, open_ended)
    assert (sample.finish, len(sample.output_ids)) == ("length", 9)
    assert sample.experts is None  # of a mixture alone
    ids = sample.output_ids.tolist()
    last = next(place for place in range(2, 8) if ids.index(ids[place]) == place)  # a token not sampled before
    stopped, limited = ask(
        server,
        dataclasses.replace(open_ended, stop_ids=(ids[last],)),
        dataclasses.replace(open_ended, max_new_tokens=2),
    )
    assert (stopped.finish, stopped.output_ids.tolist()) == ("stop", ids[: last + 1])
    assert (limited.finish, limited.output_ids.tolist()) == ("length", sample.output_ids[:2].tolist())


def test_new_weights_take_over_between_blocks(engine, params, other_params):
    server = batcher(engine, params, version=4)
    request = SampleRequest(prompt_ids=tuple(range(17)), max_new_tokens=12, seed=1)
    (old,) = ask(server, request)
    job = Job(request)
    server.submit(job)
    server.turn()
    server.load(other_params, 5)
    (mixed,) = finish(server, [job])
    before = engine.steps
    assert mixed.versions.tolist() == [4] * before + [5] * (12 - before)
    assert mixed.output_ids[:before].tolist() == old.output_ids[:before].tolist()
    assert mixed.raw_logps[:before].tobytes() == old.raw_logps[:before].tobytes()
    assert mixed.raw_logps[before] != old.raw_logps[before]
    read = server.counts.chunks_read
    (new,) = ask(server, request)
    assert server.counts.chunks_read - read == 3  # nothing kept from the old weights
    assert bits(new) == bits(*ask(batcher(engine, other_params, version=5), request))


def test_a_cancelled_job_frees_its_slot(engine, params):
    server = batcher(engine, params, lanes=1)
    requests = [SampleRequest(prompt_ids=(i,), max_new_tokens=10, seed=i) for i in range(6)]
    alone = [bits(*ask(server, request)) for request in requests]
    jobs = [Job(request) for request in requests]
    for job in jobs:
        server.submit(job)
    server.turn()  # three slots run, three jobs wait
    for cancelled in (0, 2, 4):
        jobs[cancelled].cancelled = True
    results = finish(server)
    assert set(results) == {jobs[1], jobs[3], jobs[5]}
    assert [bits(results[jobs[i]]) for i in (1, 3, 5)] == [alone[i] for i in (1, 3, 5)]
    assert server.counts.jobs == 6 + 5  # the fifth was never begun
    assert all(isinstance(sample, Sample) for sample in ask(server, *requests))


def test_running_jobs_go_on_while_prompts_are_read(engine, params):
    server = batcher(engine, params, turn_chunks=3)
    for i in range(4):
        server.submit(Job(SampleRequest(prompt_ids=(i,) * 16, max_new_tokens=3)))
    server.turn()
    assert server.counts.chunks_read == 4  # the prompt that passes the limit is still read
    assert server.counts.tokens == 6
    finish(server)
    assert server.counts.jobs == 4


def test_jobs_share_few_lanes(engine, params):
    server = batcher(engine, params, lanes=3)
    for i in range(3):
        server.submit(Job(SampleRequest(prompt_ids=(i,), max_new_tokens=3)))
    server.turn()
    assert server.counts.generate_calls == 1


def test_weights_that_give_no_numbers_fail_the_request(engine, params):
    broken = jax.tree.map(lambda x: x * np.float32("nan"), params)
    server = batcher(engine, broken, version=8)
    (error,) = ask(server, SampleRequest(prompt_ids=(1,), max_new_tokens=2, request_id="r-1"))
    assert isinstance(error, SamplerError)
    assert re.match(r"Request 'r-1': the model's logits are not finite with the weights of version 8\.", str(error))
    server.load(params, 9)
    want = ask(batcher(engine, params, version=9), SampleRequest(prompt_ids=(1,), max_new_tokens=2))
    assert [bits(x) for x in ask(server, SampleRequest(prompt_ids=(1,), max_new_tokens=2))] == [bits(x) for x in want]


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        (
            {"prompt_ids": (1,) * 40, "max_new_tokens": 9},
            r"^Request 'r-9': a prompt of 40 tokens and max_new_tokens 9 need 49 tokens, but the sampler's context is "
            r"48\. Ask for at most 8, or start",
        ),
        ({"prompt_ids": (1,) * 60, "max_new_tokens": 1}, r"need 61 tokens, .* is 48\. Shorten the prompt, or start"),
        ({"prompt_ids": (1, 97), "max_new_tokens": 1}, r"token id 97 is outside the vocabulary of 97\. Render"),
        ({"prompt_ids": (1,), "max_new_tokens": 1, "stop_ids": tuple(range(9))}, r"9 stop ids; .* at most 8"),
        (
            {"prompt_ids": (1,), "max_new_tokens": 1, "banned_ids": (98,)},
            r"token id 98 is outside the vocabulary of 97",
        ),
        ({"prompt_ids": (1,), "max_new_tokens": 1, "banned_ids": tuple(range(97))}, r"every token is banned; leave"),
    ],
)
def test_requests_that_do_not_fit_are_refused(engine, wishes, message):
    check(SampleRequest(prompt_ids=(1,) * 40, max_new_tokens=8), engine)
    with pytest.raises(SamplerError, match=message):
        check(SampleRequest(**wishes, request_id="r-9"), engine)


def test_a_seed_keeps_all_its_digits():
    request = SampleRequest(prompt_ids=(1,), max_new_tokens=1, seed=7 * 2**32 + 5)
    assert settings_of(request).seed.tolist() == [7, 5]


def test_nothing_recompiles(engine, params):
    server = batcher(engine, params)
    ask(server, *requests_of(2, 12))
    from harnessrl_jax.sampler import engine as functions

    compiled = (functions.prefill, functions.restore, functions.begin, functions.restrict, functions.generate)
    before = Counter({function.__name__: function._cache_size() for function in compiled})
    assert all(before.values())
    ask(server, *requests_of(3, 12))
    assert Counter({function.__name__: function._cache_size() for function in compiled}) == before
