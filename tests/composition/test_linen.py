"""A linen model and a `TrainState` loop of somebody else's, with our batch, loss, credit and CAPO."""

import dataclasses
import itertools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from harnessrl_jax import capo
from harnessrl_jax.losses import clipped_surrogate

LAYERS, WIDTH, UNITS, VOCAB = 2, 16, 24, 12


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        y = nn.LayerNorm(name="before_attention")(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, name="attention")(y, mask=mask)
        hidden = nn.gelu(nn.Dense(UNITS, name="wide")(nn.LayerNorm(name="before_mlp")(x)))
        self.sow("intermediates", "hidden", hidden)
        return x + nn.Dense(WIDTH, name="narrow")(hidden)


class Policy(nn.Module):
    @nn.compact
    def __call__(self, token, position, mask):
        x = nn.Embed(VOCAB, WIDTH, name="tokens")(token) + nn.Embed(4, WIDTH, name="positions")(position)
        for layer in range(LAYERS):
            x = Block(name=f"block_{layer}")(x, mask)
        return nn.Dense(VOCAB, name="head")(x)


BLOCK = "block_{layer}/"
NEURONS = capo.Attachment(
    reads=(BLOCK + "hidden",),
    statistic=capo.RELU,
    unit_map=capo.UnitMap(
        LAYERS,
        (
            capo.UnitSlice(BLOCK + "wide/kernel", 1),
            capo.UnitSlice(BLOCK + "wide/bias", 0),
            capo.UnitSlice(BLOCK + "narrow/kernel", 0),
        ),
    ),
)
SETTINGS = dataclasses.replace(capo.default(NEURONS.unit_map), warmup_rollouts=32, warmup_steps=3, refresh_steps=3)


def tree_mask(subtree_end):
    """[row, 1, query, key]"""
    slot = jnp.arange(subtree_end.shape[-1])
    causal = slot[None, None, :] <= slot[None, :, None]
    return (causal & (slot[None, :, None] < subtree_end[:, None, :]))[:, None]


def role_losses(apply_fn, batch, role):
    """params -> (one loss a role, probe of the same forward pass)."""
    probed, _ = capo.probe_targets(role, batch.rollout, batch.success)
    weights = jnp.stack([jnp.where(role == each, batch.weight, 0) for each in (capo.ACTION, capo.ARGS)])
    loss = jax.vmap(lambda *arrays: clipped_surrogate(*arrays, clip_low=0.2, clip_high=0.2))

    def losses(params):
        logits, captured = apply_fn(
            {"params": params}, batch.token, batch.position, tree_mask(batch.subtree_end), mutable=["intermediates"]
        )
        every = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.source[:, :, None], axis=1)
        logp = jnp.take_along_axis(every, batch.target[:, :, None], axis=2)[:, :, 0]
        totals = [loss(logp, batch.logp_behaviour, batch.advantage, weight).total.sum() for weight in weights]
        probe = NEURONS.probe(captured["intermediates"], batch.source, role, probed)
        return jnp.stack(totals) / weights.sum(axis=(1, 2)), probe

    return losses


class Step(NamedTuple):
    state: TrainState
    partition: capo.CapoState
    gradient: dict
    masks: capo.RoleMasks


@jax.jit
def train_step(state, partition, batch):
    role = capo.gradient_roles(batch.role, batch.call, batch.weight > 0, other_role=SETTINGS.other_role)
    masks = capo.role_masks(partition, roles=2, ungated=SETTINGS.ungated)
    gradients, _, probe = capo.role_gradients(role_losses(state.apply_fn, batch, role), state.params)
    gradient = capo.route(NEURONS.unit_map, gradients, masks)
    state = state.replace(opt_state=state.opt_state._replace(factors=capo.trained_units(masks)))
    state = state.apply_gradients(grads=gradient)
    _, rollouts = capo.probe_targets(role, batch.rollout, batch.success)
    return Step(state, capo.advance(partition, probe, rollouts, jnp.array(True), SETTINGS), gradient, masks)


@jax.jit
def answers(state, questions):
    mask = tree_mask(jnp.full(questions.shape, 2))
    return jax.nn.log_softmax(state.apply_fn({"params": state.params}, questions, jnp.arange(2)[None], mask))


@jax.jit
def first_params():
    token = jnp.zeros((1, 2), jnp.int32)
    params = Policy().init(jax.random.key(0), token, token, tree_mask(jnp.full((1, 2), 2)))["params"]
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)


def start():
    everything = capo.trained_units(capo.everything(2, LAYERS, UNITS))
    optimizer = capo.stored_factors(optax.adamw(0.02, weight_decay=0.1), NEURONS.unit_map, everything)
    return TrainState.create(apply_fn=Policy().apply, params=first_params(), tx=optimizer)


@pytest.fixture(scope="module")
def run(game):
    """Every step of a short training, and the expected reward before and after it."""
    rng = np.random.default_rng(0)
    state, partition, steps, batches = start(), capo.init_capo(LAYERS, UNITS), [], []
    rewards = []
    for _ in range(10):
        logp = answers(state, game.questions)
        rewards.append(game.expected_reward(logp))
        batches.append(game.batch(logp, rng))
        steps.append(train_step(state, partition, batches[-1]))
        state, partition = steps[-1].state, steps[-1].partition
    return steps, batches, rewards


def test_the_map_fits_the_model():
    token = jnp.zeros((1, 2), jnp.int32)
    mask = tree_mask(jnp.full((1, 2), 2))
    params = jax.eval_shape(first_params)
    capture = lambda params: Policy().apply({"params": params}, token, token, mask, mutable=["intermediates"])[1]
    assert NEURONS.check(params, jax.eval_shape(capture, params)["intermediates"]) == UNITS


def test_the_reward_grows(run):
    _, _, rewards = run
    assert rewards[-1] > rewards[0] + 0.2


def test_the_gradient_is_that_of_the_reference(run):
    steps, batches, _ = run
    at = next(i for i, step in enumerate(steps) if step.partition.active) + 1
    before, batch, step = steps[at - 1].state, batches[at], steps[at]
    role = capo.gradient_roles(batch.role, batch.call, batch.weight > 0, other_role=SETTINGS.other_role)
    losses = role_losses(before.apply_fn, batch, role)
    reference = jax.jit(lambda params: capo.reference_gradient(losses, params, NEURONS.unit_map, step.masks)[0])
    scale = float(optax.tree.norm(step.gradient))
    assert scale > 1e-3
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=0, atol=1e-12 * scale),
        step.gradient,
        reference(before.params),
    )


def test_what_no_role_owns_keeps_its_bits_through_decay_momentum_and_refresh(run):
    steps, _, _ = run
    frozen = moved = 0
    for before, after in itertools.pairwise(steps):
        trained = after.masks.trained(NEURONS.unit_map, after.state.params)
        for mask, old, new in zip(*map(jax.tree.leaves, (trained, before.state.params, after.state.params))):
            outside = ~np.broadcast_to(mask, old.shape)
            np.testing.assert_array_equal(np.asarray(new)[outside], np.asarray(old)[outside])
            frozen, moved = frozen + outside.sum(), moved + (np.asarray(new) != np.asarray(old)).sum()
    assert frozen > 0
    assert moved > 0
    assert len({after.partition.units.tobytes() for after in steps if after.partition.active}) > 1
