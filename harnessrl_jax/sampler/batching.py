"""Jobs in, samples out, one turn at a time: continuous batching over an Engine. Knows no threads and no clock."""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Int32, UInt8, UInt32

from harnessrl_jax.errors import SamplerError, WishError
from harnessrl_jax.sampler.engine import NO_TOKEN, STOP_IDS, DecodeState, Engine, Prefix, Settings
from harnessrl_jax.sampler.pages import PageTable, chunk_keys
from harnessrl_jax.sampler.placement import Placement
from harnessrl_jax.sampler.protocol import Sample, SampleRequest
from harnessrl_jax.sampler.reading import Unread, read
from harnessrl_jax.sampler.sampling import WORD
from harnessrl_jax.trajectories.records import LogpKind


class Guide(Protocol):
    """Says token by token what a grammar allows. Both raise SamplerError where it cannot go on."""

    def words(self) -> UInt32[np.ndarray, " word"]:
        """The tokens that may come next, as `sampling.Mask` has them; the caller's own."""
        ...

    def accept(self, token: int) -> None:
        """Goes on after this token."""
        ...


EndOf = Callable[[list[int], int], int | None]
"""All ids, and how many of them were looked at before -> the number of ids that complete a stop text, or None."""


@dataclasses.dataclass(eq=False)
class Job:
    """A request under way, and what was sampled for it so far."""

    request: SampleRequest
    guide: Guide | None = None  # of `request.grammar`
    end_of: EndOf | None = None  # of `request.stop`
    blocks: list[Int32[np.ndarray, "token 4"]] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)  # of each block
    ids: list[int] = dataclasses.field(default_factory=list)
    experts: UInt8[np.ndarray, "token layer active"] | None = None  # of every token read, once it has ended
    stopped: bool = False  # whether a stop id or a stop text ended it
    failure: SamplerError | None = None  # why it cannot go on
    cancelled: bool = False

    def add(self, block: Int32[np.ndarray, "token 4"], version: int) -> None:
        """Appends tokens that one generate call sampled; nothing after a stop text."""
        before, ids = len(self.ids), block[:, 0].tolist()
        self.ids += ids
        end = self.end_of(self.ids, before) if self.end_of is not None and ids else None
        if end is not None:
            block, self.ids[end:] = block[: end - before], []
        self.stopped = end is not None or (bool(ids) and ids[-1] in self.request.stop_ids)
        self.blocks.append(block)
        self.versions.append(version)

    def words(self, size: int) -> UInt32[np.ndarray, " word"] | None:
        """The tokens that may be sampled next, as `size` words; None if there are none, which is its failure."""
        try:
            if self.guide is not None and self.ids:
                self.guide.accept(self.ids[-1])
            words = np.full(size, 2**WORD - 1, np.uint32) if self.guide is None else self.guide.words()
        except SamplerError as error:
            self.failure = error
            return None
        banned = np.asarray(self.request.banned_ids, np.uint32)
        np.bitwise_and.at(words, banned // WORD, ~(np.uint32(1) << banned % WORD))
        if not words.any():
            self.failure = WishError(
                f"Request {self.request.request_id!r}: banned_ids forbid every token that the grammar allows next. Ban "
                "fewer, or change the grammar."
            )
            return None
        return words

    @property
    def ended(self) -> bool:
        """Whether nothing is left to sample. The engine knows it too, but for stop texts and failures."""
        return self.stopped or self.failure is not None or len(self.ids) == self.request.max_new_tokens


@dataclasses.dataclass
class Lane:
    """One decoding state and the jobs in its slots."""

    state: DecodeState
    free: list[int]
    running: dict[int, Job] = dataclasses.field(default_factory=dict)
    restricted: dict[int, UInt32[np.ndarray, " word"]] = dataclasses.field(default_factory=dict)  # new words of slots

    @property
    def prefix(self) -> Prefix:
        """What the slots have read."""
        return Prefix(self.state.cache, self.state.hidden)

    @prefix.setter
    def prefix(self, new: Prefix) -> None:
        self.state = self.state._replace(cache=new.cache, hidden=new.hidden)

    def drop_cancelled(self) -> None:
        """Frees the slots of cancelled jobs; the next prompt overwrites them."""
        for slot in [slot for slot, job in self.running.items() if job.cancelled]:
            self.release(slot)

    def restrict(self, slot: int, size: int) -> None:
        """Notes what the slot's job may sample next."""
        words = self.running[slot].words(size)
        if words is not None:
            self.restricted[slot] = words

    def release(self, slot: int) -> None:
        """Gives the slot to whoever comes next."""
        del self.running[slot]
        self.restricted.pop(slot, None)
        self.free.append(slot)


@dataclasses.dataclass
class Counts:
    """Work done since the start."""

    jobs: int = 0
    tokens: int = 0
    chunks_read: int = 0
    chunks_reused: int = 0
    generate_calls: int = 0


class Batcher:
    """Keeps an engine's slots busy.

    Slots come in lanes, each a state of its own that is decoded by its own call: a lane without jobs costs nothing, and
    on a processor a small state stays in its caches. One lane is right for an accelerator.

    Args:
      engine: sizes; its slots are those of one lane.
      lanes: number of decoding states.
      turn_chunks: prompt chunks that one turn may read before the running jobs go on. At least one prompt is read.
      placement: where the states and the kept chunks live.
    """

    def __init__(self, engine: Engine, *, lanes: int, turn_chunks: int, placement: Placement) -> None:
        self.engine = engine
        self.counts = Counts()
        self._turn_chunks = turn_chunks
        self._params: Any = None
        self._version = 0
        self._table = PageTable(engine.pages)
        self._waiting: deque[Job] = deque()
        self._settle = placement.settle
        self._pages = _made(engine.init_pages, placement)()
        init = _made(engine.init_state, placement)
        self._lanes = [Lane(init(), free=list(range(engine.slots))[::-1]) for _ in range(lanes)]

    @property
    def busy(self) -> bool:
        """Whether a turn would do anything."""
        return bool(self._waiting) or any(lane.running for lane in self._lanes)

    def load(self, params: Any, version: int) -> None:
        """Goes on with these weights. Jobs under way keep the keys and values they have; kept chunks are dropped."""
        self._params, self._version = params, version
        self._table.clear()

    def submit(self, job: Job) -> None:
        """Queues a job."""
        self._waiting.append(job)

    def turn(self) -> list[tuple[Job, Sample | SamplerError]]:
        """Reads waiting prompts into free slots, then samples one block everywhere.

        Returns:
          The jobs that ended, with their results. Cancelled jobs are not returned.
        """
        for lane in self._lanes:
            lane.drop_cancelled()
        self._admit()
        started = [lane for lane in self._lanes if lane.running]
        blocks = []
        for lane in started:
            self._restrict(lane)
        for lane in started:  # all calls are under way before the first result is awaited
            state, block = self.engine.generate(self._params, lane.state)
            lane.state = self._settle(state)
            blocks.append(block.data)
        self.counts.generate_calls += len(started)
        done = [self._collect(lane, np.asarray(data)) for lane, data in zip(started, blocks, strict=True)]
        return [(job, result_of(job)) for jobs in done for job in jobs]

    def _admit(self) -> None:
        limit = self.counts.chunks_read + self._turn_chunks
        while self._waiting and self.counts.chunks_read < limit:
            # The fullest lane with room: few full lanes are cheaper than many half empty ones.
            lane = max((lane for lane in self._lanes if lane.free), key=lambda lane: len(lane.running), default=None)
            if lane is None:
                return
            self._fill(lane, limit)

    def _fill(self, lane: Lane, limit: int) -> None:
        """Gives waiting jobs to free slots; their prompts are read together."""
        unread: list[Unread] = []
        while self._waiting and lane.free and self.counts.chunks_read < limit:
            job = self._waiting.popleft()
            if job.cancelled:
                continue
            prompt, slot = np.asarray(job.request.prompt_ids, np.int32), lane.free.pop()
            keys = chunk_keys(prompt, self.engine.chunk)
            kept = self._table.leading(keys)
            if any(page in kept for one in unread for page in one.pages):  # not written yet
                self._read(lane, unread)
                unread = []
            self._restore(lane, slot, kept)
            unread.append(Unread(slot, prompt, [self._table.claim(key) for key in keys[len(kept) :]]))
            lane.state = self._settle(self.engine.begin(lane.state, slot, len(prompt), settings_of(job.request)))
            lane.running[slot] = job
            if masked(job.request):
                lane.restrict(slot, self.engine.words)
            self.counts.jobs += 1
            self.counts.chunks_reused += len(kept)
            self.counts.chunks_read += len(keys) - len(kept)
        self._read(lane, unread)

    def _restrict(self, lane: Lane) -> None:
        """Brings new words of masks to the device, where there are any."""
        if not lane.restricted:
            return
        changed = np.zeros(self.engine.slots, np.bool_)
        words = np.zeros((self.engine.slots, self.engine.words), np.uint32)
        for slot, row in lane.restricted.items():
            changed[slot], words[slot] = True, row
        lane.restricted.clear()
        lane.state = self._settle(self.engine.restrict(lane.state, changed, words))

    def _restore(self, lane: Lane, slot: int, kept: list[int]) -> None:
        """Lets a slot begin with kept chunks."""
        page = np.zeros(self.engine.length // self.engine.chunk, np.int32)
        page[: len(kept)] = kept
        lane.prefix = self._settle(self.engine.restore(lane.prefix, self._pages, slot, page, len(kept)))

    def _read(self, lane: Lane, prompts: list[Unread]) -> None:
        """Reads what no kept chunk holds."""
        lane.prefix, self._pages = read(self.engine, self._params, lane.prefix, self._pages, prompts, self._settle)

    def _collect(self, lane: Lane, data: Int32[np.ndarray, "step slot 4"]) -> list[Job]:
        """Hands a block's tokens to the lane's jobs; the jobs that ended."""
        lengths, ended = (data[:, :, 0] != NO_TOKEN).sum(0), []
        for slot, job in list(lane.running.items()):
            job.add(data[: lengths[slot], slot], self._version)
            self.counts.tokens += int(lengths[slot])
            if job.guide is not None and not job.ended:
                lane.restrict(slot, self.engine.words)
            if job.ended:
                job.experts = self._experts(lane, slot, job)
                lane.release(slot)
                ended.append(job)
        return ended

    def _experts(self, lane: Lane, slot: int, job: Job) -> UInt8[np.ndarray, "token layer active"] | None:
        """Those of every token that the job's slot has read; None if the model has none."""
        if self.engine.config.experts is None:
            return None
        tokens = len(job.request.prompt_ids) + len(job.ids) - 1
        return np.asarray(self.engine.experts(lane.state, slot))[:tokens]


def _made(init: Callable[[], Any], placement: Placement) -> Any:
    """Compiles what makes a state, so that it is made where it belongs."""
    return jax.jit(init, out_shardings=placement.states(jax.eval_shape(init)))


def masked(request: SampleRequest) -> bool:
    """Whether some tokens may never be sampled."""
    return bool(request.banned_ids or request.grammar)


def settings_of(request: SampleRequest) -> Settings:
    """A request's wishes as the engine takes them."""
    stop_ids = np.full(STOP_IDS, NO_TOKEN, np.int32)
    stop_ids[: len(request.stop_ids)] = request.stop_ids
    fields: dict[str, Any] = {  # NumPy values: `begin` moves them to the device together
        "temperature": np.float32(request.temperature),
        "top_p": np.float32(request.top_p),
        "top_k": np.int32(request.top_k),
        "min_p": np.float32(request.min_p),
        "masked": np.bool_(masked(request)),
        "guided": np.bool_(request.grammar),
        "seed": np.array([request.seed >> 32, request.seed & 0xFFFFFFFF], np.uint32),
        "stop_ids": stop_ids,
        "remaining": np.int32(request.max_new_tokens),
    }
    return Settings(**fields)


def tell(request: SampleRequest, blocks: Sequence[Int32[np.ndarray, "token 4"]]) -> None:
    """Hands new tokens to a caller who wants them early."""
    if not blocks:
        return
    data = np.concatenate(blocks)
    if request.on_logps is not None:
        request.on_logps(data[:, 2].copy().view(np.float32).tolist())
    if request.on_tokens is not None:
        request.on_tokens(data[:, 0].tolist())


def check(request: SampleRequest, engine: Engine) -> None:
    """Refuses what the engine cannot sample. Raises SamplerError."""
    name = f"Request {request.request_id!r}: "
    prompt, new, vocab = len(request.prompt_ids), request.max_new_tokens, engine.config.vocab_size
    if prompt + new > engine.length:
        fix = f"Ask for at most {engine.length - prompt}" if prompt < engine.length else "Shorten the prompt"
        raise SamplerError(
            f"{name}a prompt of {prompt} tokens and max_new_tokens {new} need {prompt + new} tokens, but the sampler's "
            f"context is {engine.length}. {fix}, or start the sampler with a longer context."
        )
    if (largest := max((*request.prompt_ids, *request.banned_ids))) >= vocab:
        raise SamplerError(
            f"{name}token id {largest} is outside the vocabulary of {vocab}. "
            "Render the prompt with this model's own tokenizer."
        )
    if len(set(request.banned_ids)) == vocab:
        raise WishError(f"{name}every token is banned; leave at least one.")
    if len(request.stop_ids) > STOP_IDS:
        raise SamplerError(f"{name}{len(request.stop_ids)} stop ids; the sampler takes at most {STOP_IDS}.")


def result_of(job: Job) -> Sample | SamplerError:
    """What the caller gets for an ended job."""
    request, data = job.request, np.concatenate(job.blocks)
    logps, raw_logps, survival = (data[:, field].copy().view(np.float32) for field in (1, 2, 3))
    if not (np.isfinite(logps).all() and np.isfinite(raw_logps).all()):
        return SamplerError(
            f"Request {request.request_id!r}: the model's logits are not finite with the weights of version "
            f"{job.versions[-1]}. The weights have diverged or were damaged: load those of an earlier version."
        )
    if job.failure is not None:
        return job.failure
    cut = {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k, "min_p": request.min_p}
    greedy = request.temperature == 0.0  # a choice, not a draw: only the raw log-probability says anything
    return Sample(
        output_ids=data[:, 0].copy(),
        logps=logps,
        logp_kind=LogpKind(mode="raw", temperature=1.0, top_p=1.0, top_k=0)
        if greedy
        else LogpKind(mode="processed", **cut),
        versions=np.repeat(np.asarray(job.versions, np.int32), [len(block) for block in job.blocks]),
        finish="stop" if job.stopped else "length",
        raw_logps=raw_logps,
        survival=survival,
        experts=job.experts,
    )
