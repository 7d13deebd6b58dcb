"""A mixture is trained with the experts that sampled: from the engine through packed trees to the log-probabilities."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.errors import ModelError
from harnessrl_jax.models import DecoderConfig, Experts, init_params, row_hidden, target_logps
from harnessrl_jax.sampler import Engine, SampleRequest
from harnessrl_jax.sampler.batching import Batcher, Job
from harnessrl_jax.sampler.placement import on_device
from harnessrl_jax.training import context_row_fn, decoder_row_fn, make_mesh
from harnessrl_jax.training.prefix_parts import Piece, prefix_gradient
from harnessrl_jax.training.rows import Row
from harnessrl_jax.trajectories import Call, CreditedCall, CreditedCalls, LogpKind, pack_groups

CONFIG = DecoderConfig(
    vocab_size=20, hidden_size=8, layers=2, heads=2, kv_heads=1, head_dim=4, mlp_size=6,
    experts=Experts(count=5, active=2, renormalise=True),
)  # fmt: skip
HOW = {"temperature": 1.0, "implementation": "dense", "remat": "none", "collect": None}
END_OF = lambda ids, before: 2 if len(ids) >= 2 else None  # where a stop text ends
START = (7, 3, 11, 2, 5, 13)


def random_params(seed):
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: init_params(CONFIG, jax.random.key(0)))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(scale=0.7, size=x.shape) + (x.ndim == 1), jnp.float32), shapes)


@pytest.fixture(scope="module")
def params():
    return random_params(0)


def sampled(config, params, requests):
    engine = Engine(config=config, slots=2, length=32, chunk=4, steps=3, pages=8)
    batcher = Batcher(engine, lanes=1, turn_chunks=8, placement=on_device())
    batcher.load(params, 0)
    jobs, results = [Job(request, end_of=END_OF if request.stop else None) for request in requests], {}
    for job in jobs:
        batcher.submit(job)
    while batcher.busy:
        results.update(batcher.turn())
    return [results[job] for job in jobs], batcher.counts


@pytest.fixture(scope="module")
def calls(params):
    """Two turns of two rollouts, the second reads what the first sampled; and a reply that a stop text ends."""
    first = [
        SampleRequest(prompt_ids=START, max_new_tokens=5, seed=1),
        SampleRequest(prompt_ids=START, max_new_tokens=4, seed=2),
        SampleRequest(prompt_ids=START[:5], max_new_tokens=20, seed=3, stop=("x",)),
    ]
    samples, _ = sampled(CONFIG, params, first)
    second = [
        SampleRequest(prompt_ids=(*request.prompt_ids, *sample.output_ids.tolist(), 9), max_new_tokens=3, seed=4)
        for request, sample in zip(first[:2], samples)
    ]
    more, counts = sampled(CONFIG, params, [first[0], *second])
    assert counts.chunks_reused > 0  # their experts come from kept chunks
    assert (samples[2].finish, len(samples[2].output_ids)) == ("stop", 2)
    return [call_of(*each) for each in zip([*first, *second], [*samples, *more[1:]], range(5), strict=True)]


def call_of(request, sample, number):
    return Call(
        run_id="run", task_id="t", group_id="g", rollout_id=f"r{number % 3}", attempt=0, session_id="s", agent="a",
        trainable=True, parent_call_id=None, call_id=f"c{number}", seq=number, choice=0, harness="h",
        dialect="openai-chat", prompt_ids=request.prompt_ids, output_ids=sample.output_ids, logps=sample.logps,
        logp_kind=LogpKind(mode="processed", temperature=1.0, top_p=1.0, top_k=0), version_start=0, version_end=0,
        finish="stop", parse_status="none", tool_calls=(), spans=(), delivered=True, request_digest="", retry=False,
        request="", started_s=0.0, finished_s=1.0, experts=sample.experts,
    )  # fmt: skip


@pytest.fixture(scope="module")
def step(calls):
    """One row of 32 slots, and one of which half is padding."""
    credited = CreditedCalls(tuple(CreditedCall(call=call, advantage=1.0, success=True) for call in calls), dropped={})
    return pack_groups(credited, loss_mean="token", row_slots=32, row_targets=16, max_rows=4)


@pytest.fixture(scope="module")
def by_hand():
    """Log-probabilities of a call's output, from its own sequence alone."""

    @jax.jit
    def whole(params, token, experts, source, target):
        slots = jnp.arange(len(token))
        end = jnp.full_like(slots, len(token))
        hidden, _ = row_hidden(CONFIG, params, token, slots, end, implementation="dense", experts=experts)
        return target_logps(CONFIG, params, hidden, source, target)[0]

    def run(params, call, experts):
        size, first, outputs = 32, len(call.prompt_ids), len(call.output_ids)
        ids = np.concatenate([call.prompt_ids, call.output_ids])
        padded = None if experts is None else np.pad(experts, ((0, size - len(experts)), (0, 0), (0, 0)))
        source = np.resize(np.arange(first - 1, first - 1 + outputs), 8)
        return np.asarray(whole(params, np.resize(ids, size), padded, source, ids[source + 1]))[:outputs]

    return run


def test_every_token_that_was_read_has_its_experts(params, calls):
    free = jax.jit(lambda token, end: row_hidden(
        CONFIG, params, token, jnp.arange(32), end, implementation="dense", collect="experts"
    )[1])  # fmt: skip
    for call in calls:
        ids = np.concatenate([call.prompt_ids, call.output_ids])
        chosen = np.stack(free(np.resize(ids, 32), np.full(32, 32)), axis=1)[: len(ids) - 1]
        assert call.experts.shape == (len(ids) - 1, CONFIG.layers, 2)
        np.testing.assert_array_equal(np.sort(call.experts, -1), np.sort(chosen, -1), err_msg=call.call_id)
    assert len({call.experts.tobytes() for call in calls}) == 5


def test_training_computes_what_was_sampled(params, calls, step, by_hand):
    """With the weights that sampled; and with others, whose routers would choose otherwise, by hand call by call."""
    batch, later = step.batch, random_params(1)
    assert step.report.reuse > 1.5  # calls share what they have in common
    row_fn = jax.jit(jax.vmap(decoder_row_fn(CONFIG, **HOW), (None, 0)))
    rows = Row(*batch)
    logp = np.asarray(row_fn(params, rows).logp)
    np.testing.assert_allclose(logp[batch.has_logp], batch.logp_behaviour[batch.has_logp], atol=2e-5)
    logp, free = (np.asarray(row_fn(later, each).logp) for each in (rows, rows._replace(experts=())))
    depth = np.take_along_axis(batch.position, batch.source, axis=1)
    for number, credited in enumerate(step.calls):
        own = np.nonzero(batch.call == number)
        own = tuple(each[np.argsort(depth[own])] for each in own)
        np.testing.assert_allclose(logp[own], by_hand(later, credited.call, credited.call.experts), atol=2e-5)
        np.testing.assert_allclose(free[own], by_hand(later, credited.call, None), atol=2e-5)
    assert np.abs(logp - free)[batch.weight > 0].max() > 0.1


def test_slots_that_are_spread_over_devices_keep_their_experts(step):
    mesh, params = make_mesh(data=1, fsdp=1, tensor=1, context=8), random_params(1)
    one, spread = decoder_row_fn(CONFIG, **HOW), context_row_fn(CONFIG, mesh, **HOW)
    row = Row(*jax.tree.map(lambda leaf: leaf[0], step.batch))
    np.testing.assert_allclose(jax.jit(spread)(params, row).logp, jax.jit(one)(params, row).logp, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "said"), [({"experts": None}, "has none"), ({"layers": 3}, r"wanted \[slots, 3, 2\]")]
)
def test_experts_of_another_model_are_refused_by_every_row_function(step, changes, said):
    config, row = (
        dataclasses.replace(CONFIG, **changes),
        Row(*jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), step.batch)),
    )
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    mesh, how = make_mesh(data=1, fsdp=1, tensor=1, context=8), {name: HOW[name] for name in HOW if name != "collect"}
    one = Piece(row, np.arange(len(row.token)))
    parts = jax.tree.map(lambda leaf: leaf[None], one)
    for run in (
        lambda params: decoder_row_fn(config, **HOW)(params, row),
        lambda params: context_row_fn(config, mesh, **HOW)(params, row),
        lambda params: prefix_gradient(config, params, one, parts, lambda output, row: output.logp.sum(), **how),
    ):
        with pytest.raises(ModelError, match=said):
            jax.eval_shape(run, params)
