"""`await complete(request)` from any event loop -> one thread that owns the device and serves every request."""

import asyncio
import atexit
import concurrent.futures
import dataclasses
import functools
import threading
from collections import deque
from typing import Any

import jax
import numpy as np

from harnessrl_jax import models
from harnessrl_jax.errors import SamplerError
from harnessrl_jax.models import DecoderConfig
from harnessrl_jax.sampler.batching import Batcher, Counts, Job, check, tell
from harnessrl_jax.sampler.engine import Engine
from harnessrl_jax.sampler.placement import Placement, on_device
from harnessrl_jax.sampler.protocol import Sample, SampleRequest
from harnessrl_jax.sampler.vocabulary import Vocabulary

Result = concurrent.futures.Future[Sample]


@dataclasses.dataclass(eq=False)
class Pending:
    """A job and the promise made for it."""

    job: Job
    result: Result
    told: int = 0  # blocks that the caller has heard of

    def tell(self) -> None:
        """Hands new tokens to a caller who wants them early."""
        new, self.told = self.job.blocks[self.told :], len(self.job.blocks)
        tell(self.job.request, new)


class LocalSampler:
    """The Sampler that runs the engine in this process.

    Weights can be replaced at any time: jobs under way go on with the keys and values they have, and every token
    carries the version that sampled it.

    Args:
      engine: sizes; the sampler has `engine.slots * lanes` slots.
      lanes: decoding states, see `Batcher`.
      turn_chunks: prompt chunks read between two sampled blocks.
      placement: where to run; the first device if None.
      vocabulary: what tokens mean; needed by requests with stop texts or a grammar.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        lanes: int = 1,
        turn_chunks: int = 256,
        placement: Placement | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self.engine = engine
        self._vocabulary = vocabulary
        self._lanes, self._turn_chunks = lanes, turn_chunks
        self._placement = placement or on_device()
        self._changed = threading.Condition()  # guards everything below
        self._inbox: deque[Pending] = deque()
        self._weights: tuple[Any, int] | None = None  # not yet taken by the thread
        self._loaded = False
        self._thread: threading.Thread | None = None
        self._closing = False
        self._failure: Exception | None = None
        self._counts = Counts()

    @property
    def counts(self) -> Counts:
        """Work done since the start."""
        return self._counts

    def load_weights(self, params: Any, version: int) -> None:
        """Copies the weights and serves with them from the next block on. May be called from any thread.

        Args:
          params: parameters as from `models.init_params`, on any devices; the caller may donate them afterwards.
          version: their number, reported with every token.

        Raises:
          SamplerError: the parameters do not have the model's structure, or the sampler has ended.
        """
        _check_params(self.engine.config, params)
        # On a CPU, `may_alias` holds for JAX arrays only: memory of NumPy is taken over whatever it says.
        owned = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.array(x), params)
        copied = jax.block_until_ready(jax.device_put(owned, self._placement.weights(owned), may_alias=False))
        with self._changed:
            if self._closing:
                raise SamplerError(
                    f"Weights of version {version}: the sampler is not running any more."
                ) from self._failure
            self._weights, self._loaded = (copied, version), True

    async def start(self) -> None:
        """Starts the thread and compiles by answering one small request. Load weights first."""
        if not self._loaded:
            raise SamplerError("LocalSampler.start: no weights. Call load_weights(params, version) first.")
        if self._thread is not None:
            raise SamplerError("LocalSampler.start: it was started before. Make a new sampler instead.")
        # A daemon, so that a forgotten close cannot hang the interpreter; atexit still ends it in good order.
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        atexit.register(self._stop)
        self._thread.start()
        await self.complete(SampleRequest(prompt_ids=(0,), max_new_tokens=1, request_id="warm-up"))

    async def complete(self, request: SampleRequest) -> Sample:
        """Samples until a stop id, a stop text or the length limit. Cancelling the call frees its slot.

        Raises:
          SamplerError: the request does not fit the engine, its grammar cannot be used, or the sampler has failed or is
            closed.
        """
        check(request, self.engine)
        # A grammar may take a while to compile.
        job = await asyncio.to_thread(self._job, request) if request.grammar else self._job(request)
        pending = Pending(job, concurrent.futures.Future())
        with self._changed:
            self._refuse_if_down(request)
            self._inbox.append(pending)
            self._changed.notify()
        return await asyncio.wrap_future(pending.result)

    async def close(self) -> None:
        """Ends the thread; pending requests fail. Idempotent."""
        await asyncio.to_thread(self._stop)

    def _job(self, request: SampleRequest) -> Job:
        if not (request.stop or request.grammar):
            return Job(request)
        if self._vocabulary is None:
            raise SamplerError(
                f"Request {request.request_id!r}: stop texts and grammars need the model's tokenizer. Make the sampler "
                "with a vocabulary."
            )
        guide = self._vocabulary.guide(request) if request.grammar else None
        return Job(request, guide, self._vocabulary.end_of(request.stop) if request.stop else None)

    def _stop(self) -> None:
        atexit.unregister(self._stop)
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _refuse_if_down(self, request: SampleRequest) -> None:
        if self._failure is not None:
            raise _down(request, self._failure)
        if self._thread is None or self._closing:
            raise SamplerError(
                f"Request {request.request_id!r}: the sampler is not running. "
                + ("It was closed; make a new one." if self._closing else "Await start() first.")
            )

    def _run(self) -> None:
        """The thread: serves until closed. Whatever ends it, nobody is left waiting."""
        served: list[Pending] = []
        cause: Exception | None = None
        try:
            self._serve(served)
        except Exception as error:  # the thread's border: any cause must reach those who wait for it
            cause = error
        with self._changed:
            self._failure = cause
            self._closing = True
            served.extend(self._inbox)
            self._inbox.clear()
        for pending in served:
            if pending.result.set_running_or_notify_cancel():
                pending.result.set_exception(_down(pending.job.request, cause))

    def _serve(self, served: list[Pending]) -> None:
        """Turns of the batcher; `served` holds everything that is not answered yet."""
        batcher = Batcher(self.engine, lanes=self._lanes, turn_chunks=self._turn_chunks, placement=self._placement)
        self._counts = batcher.counts
        while self._take(batcher, served):
            for pending in served:
                pending.job.cancelled = pending.result.cancelled()
            answers = dict(batcher.turn())
            for pending in served:
                pending.tell()
            left = [p for p in served if not p.job.cancelled and p.job not in answers]
            ended = [p for p in served if p.job in answers]
            served[:] = left
            for pending in ended:
                _answer(pending.result, answers[pending.job])

    def _take(self, batcher: Batcher, served: list[Pending]) -> bool:
        """Waits for something to do and hands it to the batcher; False when the sampler closes."""
        with self._changed:
            self._changed.wait_for(lambda: batcher.busy or self._inbox or self._closing)
            if self._closing:
                return False
            new, weights = list(self._inbox), self._weights
            self._inbox.clear()
            self._weights = None
        if weights is not None:
            batcher.load(*weights)
        for pending in new:
            batcher.submit(pending.job)
        served.extend(new)
        return True


def _answer(result: Result, answer: Sample | SamplerError) -> None:
    if not result.set_running_or_notify_cancel():
        return
    if isinstance(answer, SamplerError):
        result.set_exception(answer)
    else:
        result.set_result(answer)


@functools.cache
def _shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    return _named_shapes(jax.eval_shape(lambda: models.init_params(config, jax.random.key(0))))


def _named_shapes(params: Any) -> dict[str, tuple[int, ...]]:
    return {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def _check_params(config: DecoderConfig, params: Any) -> None:
    """Raises SamplerError where the parameters differ from the model's."""
    wanted, given = _shapes(config), _named_shapes(params)
    wrong = [
        f"{name}: wanted {wanted.get(name, 'nothing')}, got {given.get(name, 'nothing')}"
        for name in sorted(wanted | given)
        if wanted.get(name) != given.get(name)
    ]
    if wrong:
        raise SamplerError(
            f"load_weights: {len(wrong)} parameters do not fit the sampler's model: {'; '.join(wrong[:3])}. "
            "Load parameters of the configuration the engine was made with."
        )


def _down(request: SampleRequest, cause: Exception | None) -> SamplerError:
    """The error of a request that the thread will not serve any more."""
    if cause is None:
        return SamplerError(f"Request {request.request_id!r}: the sampler was closed before it was answered.")
    error = SamplerError(
        f"Request {request.request_id!r}: the sampler has failed and serves nothing any more: "
        f"{type(cause).__name__}: {cause}. Make a new sampler once the cause is gone."
    )
    error.__cause__ = cause
    return error
