"""An nnx module and an `nnx.Optimizer` loop of somebody else's, with our batch, loss, credit and CAPO."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from harnessrl_jax import capo
from harnessrl_jax.losses import clipped_surrogate

LAYERS, WIDTH, UNITS, VOCAB = 2, 16, 24, 12


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.mix = nnx.LinearGeneral(WIDTH, (2, 8), rngs=rngs, param_dtype=jnp.float64)
        self.out = nnx.LinearGeneral((2, 8), WIDTH, axis=(-2, -1), rngs=rngs, param_dtype=jnp.float64)
        self.gate = nnx.Linear(WIDTH, UNITS, use_bias=False, rngs=rngs, param_dtype=jnp.float64)
        self.up = nnx.Linear(WIDTH, UNITS, use_bias=False, rngs=rngs, param_dtype=jnp.float64)
        self.down = nnx.Linear(UNITS, WIDTH, use_bias=False, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x, share):
        """share: [row, query, key], how much of each slot a slot takes in."""
        x = x + self.out(jnp.einsum("rqk,rkhd->rqhd", share, self.mix(x)))
        hidden = nnx.silu(self.gate(x)) * self.up(x)
        self.sow(nnx.Intermediate, "hidden", hidden)
        return x + self.down(hidden)


class Policy(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs, param_dtype=jnp.float64)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, token, subtree_end):
        slot = jnp.arange(token.shape[-1])
        sees = (slot[None, None, :] <= slot[None, :, None]) & (slot[None, :, None] < subtree_end[:, None, :])
        share = sees / sees.sum(axis=-1, keepdims=True)
        x = self.tokens(token)
        for layer in self.layers:
            x = layer(x, share)
        return self.head(x)


NEURONS = capo.Attachment(
    reads=("layers/{layer}/hidden",),
    statistic=capo.RELU,
    unit_map=capo.UnitMap(
        LAYERS,
        (
            capo.UnitSlice("layers/{layer}/gate/kernel", 1),
            capo.UnitSlice("layers/{layer}/up/kernel", 1),
            capo.UnitSlice("layers/{layer}/down/kernel", 0),
        ),
    ),
)
SETTINGS = dataclasses.replace(capo.default(NEURONS.unit_map), warmup_rollouts=32, warmup_steps=3, refresh_steps=3)


def role_losses(graph, rest, batch, role):
    """params -> (one loss a role, probe of the same forward pass)."""
    probed, _ = capo.probe_targets(role, batch.rollout, batch.success)
    weights = jnp.stack([jnp.where(role == each, batch.weight, 0) for each in (capo.ACTION, capo.ARGS)])
    loss = jax.vmap(lambda *arrays: clipped_surrogate(*arrays, clip_low=0.2, clip_high=0.2))

    def losses(params):
        model = nnx.merge(graph, params, rest)
        logits, captured = nnx.capture(model, nnx.Intermediate)(batch.token, batch.subtree_end)
        every = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.source[:, :, None], axis=1)
        logp = jnp.take_along_axis(every, batch.target[:, :, None], axis=2)[:, :, 0]
        totals = [loss(logp, batch.logp_behaviour, batch.advantage, weight).total.sum() for weight in weights]
        return jnp.stack(totals) / weights.sum(axis=(1, 2)), NEURONS.probe(captured, batch.source, role, probed)

    return losses


class Step(NamedTuple):
    partition: capo.CapoState
    gradient: nnx.State
    masks: capo.RoleMasks


@nnx.jit
def train_step(model, optimizer, partition, batch):
    role = capo.gradient_roles(batch.role, batch.call, batch.weight > 0, other_role=SETTINGS.other_role)
    masks = capo.role_masks(partition, roles=2, ungated=SETTINGS.ungated)

    def loss(model):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        return capo.routed_loss(role_losses(graph, rest, batch, role), NEURONS.unit_map, masks)(params)

    (_, (_, probe)), gradient = nnx.value_and_grad(loss, has_aux=True)(model)
    optimizer.update(model, gradient, factors=capo.trained_units(masks))
    _, rollouts = capo.probe_targets(role, batch.rollout, batch.success)
    return Step(capo.advance(partition, probe, rollouts, jnp.array(True), SETTINGS), gradient, masks)


@nnx.jit
def answers(model, questions):
    return jax.nn.log_softmax(nnx.capture(model, nnx.Intermediate)(questions, jnp.full(questions.shape, 2))[0])


def params_of(model):
    """A copy that later updates of the model do not reach."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), nnx.split(model, nnx.Param, ...)[1])


@pytest.fixture(scope="module")
def run(game):
    """A short training: the model, the parameters before every step, the steps, their batches and the rewards."""
    model = nnx.jit(lambda: Policy(nnx.Rngs(0)))()
    optimizer = nnx.Optimizer(
        model, capo.routed_updates(optax.adamw(0.02, weight_decay=0.1), NEURONS.unit_map), wrt=nnx.Param
    )
    rng, partition = np.random.default_rng(0), capo.init_capo(LAYERS, UNITS)
    params, steps, batches, rewards = [params_of(model)], [], [], []
    for _ in range(8):
        logp = answers(model, game.questions)
        rewards.append(game.expected_reward(logp))
        batches.append(game.batch(logp, rng))
        steps.append(train_step(model, optimizer, partition, batches[-1]))
        partition = steps[-1].partition
        params.append(params_of(model))
    return model, params, steps, batches, rewards


def test_the_map_fits_the_state_and_its_pure_dict(run):
    model, params, _, batches, _ = run
    capture = lambda model: nnx.capture(model, nnx.Intermediate)(batches[0].token, batches[0].subtree_end)[1]
    captured = nnx.eval_shape(capture, model)
    assert NEURONS.check(params[0], captured) == UNITS
    assert NEURONS.check(nnx.to_pure_dict(params[0]), captured) == UNITS


def test_the_reward_grows(run):
    *_, rewards = run
    assert rewards[-1] > rewards[0] + 0.2


def test_the_plain_gradient_of_the_routed_loss_is_that_of_the_reference(run):
    model, params, steps, batches, _ = run
    at = next(i for i, step in enumerate(steps) if step.partition.active) + 1
    batch, step = batches[at], steps[at]
    role = capo.gradient_roles(batch.role, batch.call, batch.weight > 0, other_role=SETTINGS.other_role)
    graph, _, rest = nnx.split(model, nnx.Param, ...)
    losses = role_losses(graph, rest, batch, role)
    reference = jax.jit(lambda params: capo.reference_gradient(losses, params, NEURONS.unit_map, step.masks)[0])
    scale = float(optax.tree.norm(step.gradient))
    assert scale > 1e-3
    pairs = zip(*map(jax.tree.leaves, (step.gradient, reference(params[at]))), strict=True)
    for got, want in pairs:
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12 * scale)


def test_what_no_role_owns_keeps_its_bits_through_decay_momentum_and_refresh(run):
    _, params, steps, _, _ = run
    frozen = moved = 0
    for before, after, step in zip(params, params[1:], steps):
        trained = step.masks.trained(NEURONS.unit_map, before)
        for mask, old, new in zip(*map(jax.tree.leaves, (trained, before, after)), strict=True):
            outside = ~np.broadcast_to(mask, old.shape)
            np.testing.assert_array_equal(np.asarray(new)[outside], np.asarray(old)[outside])
            frozen, moved = frozen + outside.sum(), moved + (np.asarray(new) != np.asarray(old)).sum()
    assert frozen > 0
    assert moved > 0
    assert len({step.partition.units.tobytes() for step in steps if step.partition.active}) > 1
