import asyncio
import concurrent.futures
import dataclasses
import threading

import jax
import numpy as np
import pytest

from harnessrl_jax.errors import SamplerError
from harnessrl_jax.sampler import Engine, LocalSampler, SampleRequest

SHORT = SampleRequest(prompt_ids=(1, 2, 3), max_new_tokens=2, seed=1, request_id="short")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldEngine(Engine):
    """Stops in the first generate call after `hold` was set, until `go` is; may then fail like a lost device."""

    hold: threading.Event
    held: threading.Event
    go: threading.Event
    fails: bool

    def generate(self, params, state):
        if self.hold.is_set() and not self.go.is_set():
            self.held.set()
            assert self.go.wait(60)
            if self.fails:
                raise RuntimeError("device lost")
        return super().generate(params, state)


def held(engine, *, fails=False):
    sizes = {field.name: getattr(engine, field.name) for field in dataclasses.fields(engine)}
    return HeldEngine(**sizes, hold=threading.Event(), held=threading.Event(), go=threading.Event(), fails=fails)


async def begin(sampler, *requests):
    """Tasks for requests that are under way, or waiting for a slot, and a thread that stands still."""
    sampler.engine.hold.set()
    tasks = [asyncio.create_task(sampler.complete(request)) for request in requests]
    assert await asyncio.to_thread(sampler.engine.held.wait, 60)
    return tasks


def serving(engine, params, test, **options):
    """Runs `await test(sampler)` against a started sampler, which is closed in any case."""

    async def run():
        sampler = LocalSampler(engine, **options)
        sampler.load_weights(params, 3)
        await sampler.start()
        try:
            return await test(sampler)
        finally:
            await sampler.close()

    return asyncio.run(run())


def requests(number):
    return [SampleRequest(prompt_ids=(i, i + 1), max_new_tokens=1 + i % 9, seed=i) for i in range(number)]


def test_many_at_once_get_what_each_gets_alone(engine, params):
    async def test(sampler):
        together = await asyncio.gather(*[sampler.complete(request) for request in requests(20)])
        alone = [await sampler.complete(request) for request in requests(20)]
        return together, alone

    together, alone = serving(engine, params, test, lanes=2)
    for request, one, two in zip(requests(20), together, alone, strict=True):
        assert len(one.output_ids) == request.max_new_tokens
        assert one.output_ids.tobytes() == two.output_ids.tobytes()
        assert one.logps.tobytes() == two.logps.tobytes()
        assert one.versions.tolist() == [3] * request.max_new_tokens
        assert one.output_ids.dtype == one.versions.dtype == np.int32


def test_tokens_are_told_block_by_block_before_the_answer(engine, params):
    async def test(sampler):
        told, logps = [], []

        def hear(ids):
            assert not done.is_set()
            told.append(ids)
            assert sum(map(len, told)) == len(logps)  # those of these tokens were told just before

        done = asyncio.Event()
        request = SampleRequest(
            prompt_ids=(1, 2, 3), max_new_tokens=8, temperature=0.6, seed=4, on_tokens=hear, on_logps=logps.extend
        )
        plain = dataclasses.replace(request, on_tokens=None, on_logps=None)
        assert plain == request
        sample = await sampler.complete(request)
        done.set()
        assert [len(ids) for ids in told] == [3, 3, 2]  # the engine's steps
        assert [token for ids in told for token in ids] == sample.output_ids.tolist()
        assert logps == sample.raw_logps.tolist()
        assert (await sampler.complete(plain)).output_ids.tolist() == sample.output_ids.tolist()

    serving(engine, params, test)


def test_cancelling_frees_the_slot_and_leaves_the_others(engine, params):
    long = SampleRequest(prompt_ids=(7,), max_new_tokens=40, seed=2)

    async def test(sampler):
        want = await sampler.complete(long)
        tasks = await begin(sampler, *[long] * (2 * engine.slots))
        for task in tasks[1:]:
            task.cancel()
        await asyncio.sleep(0)  # the sampler hears of it before it goes on
        sampler.engine.go.set()
        first, *ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in ended)
        # Of the cancelled calls, those in a slot got the tokens of one block, and those that waited got none.
        assert sampler.counts.tokens == 1 + 40 + 40 + (engine.slots - 1) * engine.steps
        again = await asyncio.gather(*[sampler.complete(long) for _ in range(engine.slots)])
        return want, first, *again

    want, *got = serving(held(engine), params, test)
    assert {sample.output_ids.tobytes() for sample in got} == {want.output_ids.tobytes()}


def numbered(number):
    return [SampleRequest(prompt_ids=(i,), max_new_tokens=30, request_id=f"r-{i}") for i in range(number)]


def test_a_failure_reaches_everyone_at_once_and_for_good(engine, params):
    async def test(sampler):
        # Some run, some wait for a slot, some have not been seen by the thread.
        tasks = await begin(sampler, *numbered(7)[:5])
        tasks += [asyncio.create_task(sampler.complete(request)) for request in numbered(7)[5:]]
        await asyncio.sleep(0)
        sampler.engine.go.set()
        async with asyncio.timeout(30):
            errors = await asyncio.gather(*tasks, return_exceptions=True)
        for number, error in enumerate(errors):
            assert isinstance(error, SamplerError)
            assert str(error).startswith(f"Request 'r-{number}': the sampler has failed and serves nothing any more: ")
            assert "RuntimeError: device lost" in str(error)
            assert isinstance(error.__cause__, RuntimeError)
        with pytest.raises(SamplerError, match=r"Request 'short': the sampler has failed .* device lost"):
            await sampler.complete(SHORT)
        with pytest.raises(SamplerError, match=r"Weights of version 4: the sampler is not running any more\."):
            sampler.load_weights(params, 4)

    serving(held(engine, fails=True), params, test)


def test_closing_fails_what_is_pending(engine, params):
    async def test(sampler):
        tasks = await begin(sampler, *numbered(7)[:5])
        tasks += [asyncio.create_task(sampler.complete(request)) for request in numbered(7)[5:]]
        await asyncio.sleep(0)
        closing = asyncio.create_task(sampler.close())
        await asyncio.sleep(0.05)
        sampler.engine.go.set()
        async with asyncio.timeout(30):
            errors = await asyncio.gather(*tasks, return_exceptions=True)
        for number, error in enumerate(errors):
            assert isinstance(error, SamplerError)
            assert str(error) == f"Request 'r-{number}': the sampler was closed before it was answered."
        await closing
        with pytest.raises(SamplerError, match=r"Request 'short': the sampler is not running\. It was closed; make"):
            await sampler.complete(SHORT)
        await sampler.close()
        assert "sampler" not in [thread.name for thread in threading.enumerate()]

    serving(held(engine), params, test)


def test_the_order_of_use_is_explained(engine, params):
    async def run():
        sampler = LocalSampler(engine)
        with pytest.raises(SamplerError, match=r"Request 'short': the sampler is not running\. Await start\(\) first"):
            await sampler.complete(SHORT)
        with pytest.raises(
            SamplerError, match=r"LocalSampler\.start: no weights\. Call load_weights\(params, version\)"
        ):
            await sampler.start()
        await sampler.close()

    async def twice(sampler):
        with pytest.raises(SamplerError, match=r"LocalSampler\.start: it was started before"):
            await sampler.start()
        with pytest.raises(SamplerError, match="need 70 tokens"):
            await sampler.complete(SampleRequest(prompt_ids=(1,) * 30, max_new_tokens=40))

    asyncio.run(run())
    serving(engine, params, twice)


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_weights_of_another_model_are_refused(engine, params, change):
    wrong = jax.tree.map(lambda x: x, params)
    if change == "missing":
        del wrong["final_norm"]
    elif change == "extra":
        wrong["head"] = wrong["final_norm"]
    else:
        wrong["final_norm"] = {"scale": np.ones(31)}
    message = {
        "missing": r"1 parameters do not fit .*: \['final_norm'\]\['scale'\]: wanted \(32,\), got nothing\. Load",
        "extra": r"\['head'\]\['scale'\]: wanted nothing, got \(32,\)",
        "shape": r"\['final_norm'\]\['scale'\]: wanted \(32,\), got \(31,\)",
    }[change]
    with pytest.raises(SamplerError, match=message):
        LocalSampler(engine).load_weights(wrong, 0)


@pytest.mark.parametrize("kind", ["numpy", "donated"])
def test_weights_are_the_samplers_own(engine, params, other_params, kind):
    """The caller's next training step may overwrite what it handed over."""

    async def test(sampler):
        old = await sampler.complete(SHORT)
        theirs = jax.tree.map(lambda x: np.array(x) if kind == "numpy" else x + 0, params)
        sampler.load_weights(theirs, 4)
        if kind == "numpy":
            jax.tree.map(lambda x: x.fill(0.1), theirs)
        else:
            jax.tree.map(lambda x: jax.jit(lambda y: y * 0, donate_argnums=0)(x), theirs)
        new = await sampler.complete(SHORT)
        assert new.versions.tolist() == [4, 4]
        assert new.logps.tobytes() == old.logps.tobytes()
        sampler.load_weights(other_params, 5)
        assert (await sampler.complete(SHORT)).logps.tobytes() != old.logps.tobytes()

    serving(engine, params, test)


def test_weights_change_under_way_from_another_thread(engine, params, other_params):
    async def test(sampler):
        requests = [SampleRequest(prompt_ids=(i,), max_new_tokens=40, seed=i) for i in range(12)]
        tasks = await begin(sampler, *requests)
        with concurrent.futures.ThreadPoolExecutor(1) as trainer:
            await asyncio.wrap_future(trainer.submit(sampler.load_weights, other_params, 9))
        sampler.engine.go.set()
        return await asyncio.gather(*tasks)

    samples = serving(held(engine), params, test, lanes=2)
    assert all(len(sample.output_ids) == 40 for sample in samples)
    assert all((np.diff(sample.versions) >= 0).all() for sample in samples)
    assert samples[0].versions[0] == 3
    assert all(sample.versions[-1] == 9 for sample in samples)


def test_event_loops_may_come_and_go(engine, params):
    async def test(sampler):
        here = await sampler.complete(SHORT)
        there = await asyncio.to_thread(lambda: asyncio.run(sampler.complete(SHORT)))
        assert here.output_ids.tobytes() == there.output_ids.tobytes()

    serving(engine, params, test)
