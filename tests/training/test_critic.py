"""A critic in the training step: its loss by hand, what it trains, and that nothing but the targets matters to it."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from harnessrl_jax.capo import decoder_units, default
from harnessrl_jax.errors import LossError
from harnessrl_jax.models import DecoderConfig, init_params, init_value_head, row_hidden, values
from harnessrl_jax.training import (
    ActorCritic,
    Critic,
    Policy,
    RowOutput,
    critic_row_fn,
    decoder_row_fn,
    init_state,
    make_mesh,
    make_step,
    make_values,
    place_batch,
    place_state,
    state_shardings,
    train_only,
)
from harnessrl_jax.training.assignment import assign
from harnessrl_jax.training.gradients import batch_gradient
from harnessrl_jax.training.rows import Row, TwoPartRowFn
from harnessrl_jax.training.sharding import ShardingRule
from harnessrl_jax.training.state import routing_of
from harnessrl_jax.training.tally import named_metrics
from harnessrl_jax.trajectories import Role

VOCAB, HIDDEN, CLIP = 8, 4, 0.3
POLICY = Policy(clip_low=0.2, clip_high=0.28, capo=None)
PLAIN, CLIPPED = Critic(clip=None), Critic(clip=CLIP)
BOTH = ActorCritic(policy=POLICY, critic=CLIPPED, coefficient=0.7)
WARM = train_only(optax.adamw(0.05, weight_decay=1e-3), lambda path: path.startswith("value_head/"))
CAPO = dataclasses.replace(default(decoder_units(1, include_gate=True)), warmup_rollouts=1)
ROUTED = ActorCritic(policy=dataclasses.replace(POLICY, capo=CAPO), critic=CLIPPED, coefficient=0.7)


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def trunk(params, row):
    """Each slot's own token and the mean of its ancestors', then one gated MLP."""
    i = jnp.arange(row.token.shape[0])
    sees = (i[None] <= i[:, None]) & (i[:, None] < row.subtree_end[None])
    x, mlp = params["embed"][row.token], params["layers_0"]["mlp"]
    x = x + sees.astype(x.dtype) / sees.sum(1, keepdims=True) @ x
    units = jax.nn.silu(x @ mlp["gate"]["kernel"]) * (x @ mlp["up"]["kernel"])
    return (x + units @ mlp["down"]["kernel"])[row.source], (units[row.source],)


def head(params, features, row):
    every = jax.nn.log_softmax(features @ params["embed"].T)
    return RowOutput(every[jnp.arange(len(row.target)), row.target], -(jnp.exp(every) * every).sum(-1), ())


MODEL = TwoPartRowFn(trunk, head)
TRAINED, DETACHED = (critic_row_fn(MODEL, trunk=each) for each in ("trained", "detached"))


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape, scale=0.5))
    shapes = {"gate": (HIDDEN, 4), "up": (HIDDEN, 4), "down": (4, HIDDEN)}
    return {
        "embed": normal(VOCAB, HIDDEN),
        "layers_0": {"mlp": {name: {"kernel": normal(*shape)} for name, shape in shapes.items()}},
        "value_head": {"kernel": normal(HIDDEN, 1), "bias": normal(1)},
    }


def with_returns(batch, rows):
    """The same numbers for a target wherever it lies; NaN where nothing is read."""
    used = batch.weight > 0
    number = np.where(used, batch.advantage, 0)
    poison = lambda array: np.where(used, array, np.nan).astype(np.float32)
    old, target = poison(np.sin(5 * number)), poison(np.cos(7 * number))
    return batch._replace(value_behaviour=old, target_return=target), rows


WIDE = {"row_slots": 24, "row_targets": 36, "max_rows": 4}


@pytest.fixture(scope="module")
def packed(tree_batch):
    return lambda **shape: with_returns(*tree_batch(VOCAB, **shape))


@pytest.fixture(scope="module")
def batch(packed):
    return packed(**WIDE)


# Nearly all the time of these tests is LLVM optimising steps that then run once.
def fast(function):
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


@cache
def compiled(objective, row_fn, micro_rows):
    gradient_of = batch_gradient(row_fn, objective, micro_rows=micro_rows, shardings=None)

    def run(state, batch, rows):
        found = gradient_of(state.params, assign(objective, batch, rows), routing_of(objective, state.capo), rows)
        return found.gradient, named_metrics(objective, found.tally) | {"loss": found.losses.sum()}

    return fast(run)


def gradient(objective, row_fn, params, batch, micro_rows=2, units=None):
    """The gradient and the metrics of a batch."""
    state = init_state(params, optax.identity(), objective)
    if units is not None:
        state = state._replace(capo=state.capo._replace(units=units, active=jnp.array(True)))
    return jax.tree.map(np.asarray, compiled(objective, row_fn, micro_rows)(state, *batch))


def flat(batch):
    """(features, value, old value, return, weight) of all targets, from the model row by row."""

    @fast
    def features(params):
        rows = Row(*jax.tree.map(jnp.asarray, batch[0]))
        return jax.vmap(trunk, in_axes=(None, 0))(params, rows)[0].reshape(-1, HIDDEN)

    used = (batch[0].weight > 0).reshape(-1)
    pick = lambda array: array.reshape(-1)[used].astype(np.float64)
    arrays = (pick(each) for each in (batch[0].value_behaviour, batch[0].target_return, batch[0].weight))
    return lambda params: np.asarray(features(params))[used], *arrays


def largest(got, want):
    return max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True))


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_the_gradient_of_the_head_by_hand_and_of_the_trunk_by_differences(params, batch):
    features, _, target, weight = flat(batch)

    def loss(params):
        error = np.asarray(values(params["value_head"], features(params))) - target
        return (weight * error**2).sum() / weight.sum() / 2, error

    want, error = loss(params)
    share = weight * error / weight.sum()
    got, metrics = gradient(PLAIN, TRAINED, params, batch)
    np.testing.assert_allclose(got["value_head"]["kernel"][:, 0], share @ features(params), rtol=0, atol=1e-12)
    np.testing.assert_allclose(got["value_head"]["bias"], [share.sum()], rtol=0, atol=1e-12)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-6)  # losses are summed in float32
    for place in [(1, 0), (3, 2), (6, 3)]:
        moved = [params | {"embed": params["embed"].at[place].add(by)} for by in (1e-5, -1e-5)]
        difference = (loss(moved[0])[0] - loss(moved[1])[0]) / 2e-5
        np.testing.assert_allclose(got["embed"][place], difference, rtol=1e-6, atol=1e-9)
        assert abs(difference) > 1e-3
    apart, _ = gradient(PLAIN, DETACHED, params, batch)
    assert largest(apart["value_head"], got["value_head"]) == 0
    assert not any(leaf.any() for name, part in apart.items() if name != "value_head" for leaf in jax.tree.leaves(part))
    explained = 1 - np.var(error) / np.var(target)
    for name, value in {"value_loss": want, "value_explained": explained, "value_error": error.mean()}.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(metrics["return_mean"], target.mean(), rtol=1e-4)
    assert metrics["value_explained_valid"] == 1


def test_the_clip_holds_values_near_those_before(params, batch):
    features, old, target, weight = flat(batch)
    value = np.asarray(values(params["value_head"], features(params)))
    held = old + np.clip(value - old, -CLIP, CLIP)
    worse = np.maximum((value - target) ** 2, (held - target) ** 2)
    got, metrics = gradient(CLIPPED, TRAINED, params, batch)
    np.testing.assert_allclose(metrics["loss"], (weight * worse).sum() / weight.sum() / 2, rtol=1e-6)
    share = np.where(worse > (value - target) ** 2, 0, weight * (value - target)) / weight.sum()
    share = np.where((worse > (value - target) ** 2) & (held == value), np.nan, share)
    np.testing.assert_allclose(got["value_head"]["bias"], [share.sum()], rtol=0, atol=1e-12)
    assert 0 < (share == 0).sum() < len(share)


def test_micro_batches_order_and_packing_change_nothing(params, batch, packed):
    want, measured = gradient(BOTH, TRAINED, params, batch)
    order = np.random.default_rng(1).permutation(int(batch[1]))
    order = np.append(order, np.arange(len(order), 4))
    shuffled = jax.tree.map(lambda leaf: leaf[order], batch[0]), batch[1]
    narrow = packed(row_slots=6, row_targets=8, max_rows=16)
    assert narrow[1] > batch[1]
    for other, micro_rows in [(shuffled, 2), (narrow, 4)]:
        got, metrics = gradient(BOTH, TRAINED, params, other, micro_rows)
        assert largest(got, want) < 1e-12
        for name in ("value_loss", "value_explained", "loss"):
            np.testing.assert_allclose(metrics[name], measured[name], rtol=1e-5)


def test_both_losses_add_up_and_routing_takes_each_role_s_share(params, batch):
    got, _ = gradient(BOTH, TRAINED, params, batch)
    actor, critic = (gradient(each, TRAINED, params, batch)[0] for each in (POLICY, CLIPPED))
    assert largest(got, jax.tree.map(lambda a, c: a + 0.7 * c, actor, critic)) < 1e-12
    assert largest(critic, jax.tree.map(np.zeros_like, critic)) > 0.01
    units = jnp.array([[[True, True, False, False]], [[False, True, True, False]]])
    fused = dataclasses.replace(
        ROUTED, policy=dataclasses.replace(POLICY, capo=dataclasses.replace(CAPO, routing="fused"))
    )
    routed = [gradient(each, TRAINED, params, batch, units=units)[0] for each in (ROUTED, fused)]
    assert largest(*routed) < 1e-12
    only = lambda role: batch[0]._replace(weight=np.where(batch[0].role == role, batch[0].weight, 0))
    action, args = (gradient(BOTH, TRAINED, params, (only(role), batch[1]))[0] for role in (Role.ACTION, Role.ARGS))
    assert largest(routed[0]["value_head"], jax.tree.map(np.add, action["value_head"], args["value_head"])) < 1e-12
    columns = lambda tree: tree["layers_0"]["mlp"]["up"]["kernel"]
    want = np.stack([columns(action), columns(action) + columns(args), columns(args), 0 * columns(args)])
    np.testing.assert_allclose(columns(routed[0]), want[np.arange(4), :, np.arange(4)].T, rtol=0, atol=1e-12)


@cache
def step_of(objective, row_fn, optimizer):
    return fast(make_step(row_fn, optimizer, objective, micro_rows=2))


def test_with_coefficient_0_it_is_the_step_of_the_policy_bit_for_bit(params, packed):
    adamw = optax.adamw(1e-2, weight_decay=0.1)
    states = []
    for objective in (POLICY, dataclasses.replace(BOTH, coefficient=0.0)):
        step, state = step_of(objective, TRAINED, adamw), init_state(params, adamw, objective)
        for seed in range(3):
            state, metrics = step(state, *packed(**WIDE, seed=seed))
            assert metrics["applied"] == 1
        states.append(state)
    assert bits(states[0].params) == bits(states[1].params)
    assert largest(states[0].params["embed"], params["embed"]) > 1e-3


def test_a_warm_start_learns_constant_returns_and_leaves_the_policy_as_it_is(params, batch):
    constant = batch[0]._replace(target_return=np.where(batch[0].weight > 0, 0.75, np.nan).astype(np.float32))
    state = init_state(params, WARM, PLAIN)
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt_state)) < 2 * (HIDDEN + 1) + 5  # no moments of others
    step, values_of = step_of(PLAIN, DETACHED, WARM), fast(make_values(DETACHED, micro_rows=2))
    for _ in range(400):
        state, metrics = step(state, constant, batch[1])
    found = np.asarray(values_of(state.params, constant, batch[1]))[constant.weight > 0]
    np.testing.assert_allclose(found, 0.75, atol=0.02)
    rest = lambda tree: {name: part for name, part in tree.items() if name != "value_head"}
    assert bits(rest(state.params)) == bits(rest(params))
    assert metrics["value_explained_valid"] == 0  # returns without variance


def test_rows_on_several_devices_give_the_same_step(params, batch):
    mesh = make_mesh(data=2, fsdp=1, tensor=1, context=1, devices=jax.devices()[:2])
    state = init_state(params, WARM, PLAIN)
    shardings = state_shardings(state, WARM, mesh, [ShardingRule(".*", jax.sharding.PartitionSpec())])
    step = fast(make_step(DETACHED, WARM, PLAIN, micro_rows=2, shardings=shardings))
    got, _ = step(place_state(state, shardings), place_batch(batch[0], mesh), batch[1])
    want, _ = step_of(PLAIN, DETACHED, WARM)(state, *batch)
    assert largest(got.params, want.params) < 1e-12
    assert largest(got.params["value_head"], params["value_head"]) > 0.01


def test_values_are_those_of_the_slot_that_predicts_the_target(packed):
    config = DecoderConfig(vocab_size=VOCAB, hidden_size=4, layers=1, heads=1, kv_heads=1, head_dim=4, mlp_size=4)
    rng, shapes = np.random.default_rng(0), jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), shapes)
    params["value_head"] = jax.tree.map(
        lambda leaf: leaf + jnp.arange(1.0, leaf.size + 1).reshape(leaf.shape), init_value_head(config)
    )
    decoder = decoder_row_fn(config, temperature=1.0, implementation="dense", remat="none", collect=None)
    batch, rows = packed(**WIDE)
    got = fast(make_values(critic_row_fn(decoder, trunk="trained"), micro_rows=2))(params, batch, rows)
    row = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), batch)
    where = (row.token, row.position, row.subtree_end)
    hidden = fast(lambda params: row_hidden(config, params, *where, implementation="dense")[0])(params)
    np.testing.assert_allclose(got[0], values(params["value_head"], hidden)[row.source], rtol=1e-5)


def test_misuse_is_refused(params, batch):
    run = lambda objective, row_fn, batch: jax.eval_shape(
        make_step(row_fn, optax.sgd(1.0), objective, micro_rows=2),
        init_state(params, optax.sgd(1.0), objective),
        *batch,
    )
    with pytest.raises(LossError, match="the row function gives none; wrap it in critic_row_fn"):
        run(BOTH, MODEL, batch)
    with pytest.raises(LossError, match="make_values: the row function gives no values"):
        jax.eval_shape(make_values(MODEL, micro_rows=2), params, *batch)
    for missing, objective, words in (
        ({"target_return": ()}, PLAIN, "needs returns, and this batch has none; use trajectories.with_values"),
        ({"value_behaviour": ()}, CLIPPED, "needs the values before; use trajectories.with_values"),
    ):
        with pytest.raises(LossError, match=words):
            run(objective, TRAINED, (batch[0]._replace(**missing), batch[1]))
    for coefficient in (-0.5, float("nan"), float("inf")):
        with pytest.raises(LossError, match="coefficient must be finite and at least 0"):
            dataclasses.replace(BOTH, coefficient=coefficient)
    frozen = dataclasses.replace(POLICY, capo=dataclasses.replace(CAPO, ungated="frozen"))
    with pytest.raises(LossError, match="would freeze the value head"):
        ActorCritic(policy=frozen, critic=PLAIN, coefficient=1.0)
