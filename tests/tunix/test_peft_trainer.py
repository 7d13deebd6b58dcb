"""google-tunix's own model and its own `PeftTrainer`, with our loss, credit and CAPO."""

import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

from harnessrl_jax import capo
from harnessrl_jax.errors import PartitionError
from harnessrl_jax.losses import clipped_surrogate
from harnessrl_jax.trajectories import Role, leave_one_out

LAYERS, UNITS, VOCAB = 2, 24, 12
QUESTIONS, EACH, STEPS = 4, 16, 16
SEQUENCES = QUESTIONS * EACH
CONFIG = qwen3.ModelConfig(
    num_layers=LAYERS,
    vocab_size=VOCAB,
    embed_dim=16,
    hidden_dim=UNITS,
    num_heads=4,
    head_dim=4,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-6,
    use_tied_embedding=True,
)

MLP, ATTENTION = "layers/{layer}/mlp/", "layers/{layer}/attn/"
NEURONS = capo.Attachment(
    reads=(MLP + "gate_proj/__call__", MLP + "up_proj/__call__"),
    combine=lambda gate, up: nnx.silu(gate) * up,
    statistic=capo.RELU,
    unit_map=capo.UnitMap(
        LAYERS,
        (
            capo.UnitSlice(MLP + "gate_proj/kernel", 1),
            capo.UnitSlice(MLP + "up_proj/kernel", 1),
            capo.UnitSlice(MLP + "down_proj/kernel", 0),
        ),
    ),
)
HEADS = capo.UnitMap(
    LAYERS,
    (
        capo.UnitSlice(ATTENTION + "q_proj/w", 1, width=2),  # [embed, head, channel]; two query heads a key-value head
        capo.UnitSlice(ATTENTION + "k_proj/w", 1),
        capo.UnitSlice(ATTENTION + "v_proj/w", 1),
        capo.UnitSlice(ATTENTION + "o_proj/w", 0, width=2),
    ),
)
SETTINGS = dataclasses.replace(capo.default(NEURONS.unit_map), warmup_rollouts=32, warmup_steps=3, refresh_steps=3)


class Batch(NamedTuple):
    """Sequences of a question, an action and an argument; targets are the last two."""

    token: np.ndarray  # [sequence, 3]
    logp_behaviour: np.ndarray  # [sequence, 2], like what follows
    advantage: np.ndarray
    role: np.ndarray
    rollout: np.ndarray
    success: np.ndarray


def logits_and_captured(model, token):
    """tunix's model on whole sequences, and what every module of it gave out."""
    places = jnp.arange(token.shape[1])
    position = jnp.broadcast_to(places, token.shape)
    mask = jnp.broadcast_to(places[:, None] >= places[None, :], (len(token), *places.shape * 2))
    (logits, _), captured = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)(
        token, position, None, mask
    )
    return logits, captured


def role_losses(graph, rest, batch):
    """params -> (one loss a role, probe of the same forward pass)."""
    ones = jnp.ones(batch.role.shape)
    role = capo.gradient_roles(batch.role, batch.rollout, ones > 0, other_role=SETTINGS.other_role)
    probed, rollouts = capo.probe_targets(role, batch.rollout, batch.success)
    source = jnp.broadcast_to(jnp.arange(2), role.shape)  # the slot before each target
    weights = jnp.stack([ones * (role == each) for each in (capo.ACTION, capo.ARGS)])
    loss = jax.vmap(lambda *arrays: clipped_surrogate(*arrays, clip_low=0.2, clip_high=0.2))

    def losses(params):
        logits, captured = logits_and_captured(nnx.merge(graph, params, rest), batch.token)
        every = jax.nn.log_softmax(logits)[:, :-1]
        logp = jnp.take_along_axis(every, batch.token[:, 1:, None], axis=2)[:, :, 0]
        totals = [loss(logp, batch.logp_behaviour, batch.advantage, weight).total.sum() for weight in weights]
        return jnp.stack(totals) / weights.sum(axis=(1, 2)), (NEURONS.probe(captured, source, role, probed), rollouts)

    return losses


def routed(model, batch, masks):
    """What `PeftTrainer` differentiates: its plain gradient is CAPO's."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return capo.routed_loss(role_losses(graph, rest, batch), NEURONS.unit_map, masks)(params)


class Trainer(PeftTrainer):
    """`PeftTrainer` with the hook that it has for what a loss returns beside its value."""

    partition = capo.init_capo(LAYERS, UNITS)

    def _post_process_train_step(self, aux):
        _, (probe, rollouts) = aux
        self.partition = advance(self.partition, probe, rollouts)


@jax.jit
def advance(partition, probe, rollouts):
    return capo.advance(partition, probe, rollouts, jnp.array(True), SETTINGS)


@nnx.jit
def answers(model, token):
    return jax.nn.log_softmax(logits_and_captured(model, token)[0])


def play(model, rng):
    """A batch of the game: question q wants action 4 + q, then argument 8 + (q + 1) % 4."""
    pairs = np.asarray([[q, action] for q in range(QUESTIONS) for action in range(4, 8)], np.int32)
    p = np.exp(np.asarray(answers(model, pairs), np.float64)).reshape(QUESTIONS, 4, 2, VOCAB)
    question = np.arange(SEQUENCES) % QUESTIONS
    action = np.array([draw(rng, p[q, 0, 0], range(4, 8)) for q in question])
    argument = np.array([draw(rng, p[q, a - 4, 1], range(8, 12)) for q, a in zip(question, action)])
    reward = 0.5 * (action == 4 + question) + 0.5 * (argument == 8 + (question + 1) % 4)
    advantage = leave_one_out(reward, question, np.ones(SEQUENCES, bool)).astype(np.float32)
    right = [p[q, 0, 0, 4 + q] + p[q, 0, 0, 4:8] @ p[q, :, 1, 8 + (q + 1) % 4] for q in range(QUESTIONS)]
    return float(np.mean(right)) / 2, Batch(
        token=np.stack([question, action, argument], axis=1).astype(np.int32),
        logp_behaviour=np.log(
            np.stack([p[question, 0, 0, action], p[question, action - 4, 1, argument]], axis=1)
        ).astype(np.float32),
        advantage=np.repeat(advantage[:, None], 2, axis=1),
        role=np.tile(np.array([Role.ACTION, Role.ARGS], np.int32), (SEQUENCES, 1)),
        rollout=np.repeat(np.arange(SEQUENCES, dtype=np.int32)[:, None], 2, axis=1),
        success=np.repeat(reward[:, None] > 0, 2, axis=1),
    )


def draw(rng, p, among):
    return int(rng.choice(list(among), p=p[list(among)] / p[list(among)].sum()))


def tiny_model():
    """tunix leaves the MLP kernels 0, to be loaded; here they are drawn."""

    def drawn(path, leaf):
        key = jax.random.fold_in(jax.random.key(1), hash_of(path))
        return leaf if leaf.ndim < 2 else jax.random.normal(key, leaf.shape) * leaf.shape[0] ** -0.5

    model = qwen3.Qwen3(CONFIG, rngs=nnx.Rngs(0))
    nnx.update(model, jax.jit(lambda p: jax.tree_util.tree_map_with_path(drawn, p))(nnx.state(model, nnx.Param)))
    return model


def hash_of(path):
    return sum(map(ord, jax.tree_util.keystr(path)))


def params_of(model):
    """A copy that later updates of the model do not reach."""
    return jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


class Seen(NamedTuple):
    reward: float
    params: dict
    batch: Batch
    masks: capo.RoleMasks


@pytest.fixture(scope="module")
def run():
    """What every step of a training saw, and the trainer after it."""
    everything = capo.trained_units(capo.everything(2, LAYERS, UNITS))
    optimizer = capo.stored_factors(optax.adamw(0.02, weight_decay=0.1), NEURONS.unit_map, everything)
    trainer = Trainer(tiny_model(), optimizer, TrainingConfig(eval_every_n_steps=1000, max_steps=STEPS))
    trainer.with_loss_fn(routed, has_aux=True)
    rng, seen = np.random.default_rng(0), []

    def batches():
        while True:
            masks = capo.role_masks(trainer.partition, roles=2, ungated=SETTINGS.ungated)
            stored = trainer.optimizer.opt_state.factors
            stored.units[...], stored.rest[...] = capo.trained_units(masks)
            reward, batch = play(trainer.model, rng)
            seen.append(Seen(reward, params_of(trainer.model), batch, masks))
            yield {"batch": batch, "masks": masks}

    trainer.train(batches())
    return trainer, seen


def test_the_maps_fit_the_model(run):
    trainer, seen = run
    captured = nnx.eval_shape(lambda model: logits_and_captured(model, seen[0].batch.token)[1], trainer.model)
    assert NEURONS.check(nnx.state(trainer.model, nnx.Param), captured) == UNITS
    assert HEADS.units(nnx.state(trainer.model, nnx.Param)) == CONFIG.num_kv_heads


def test_a_wrong_map_names_the_module_and_its_shapes(run):
    trainer, seen = run
    captured = nnx.eval_shape(lambda model: logits_and_captured(model, seen[0].batch.token)[1], trainer.model)
    wrong = dataclasses.replace(NEURONS, reads=(MLP + "down_proj/__call__",), combine=None)
    with pytest.raises(
        PartitionError, match=r"layers/0/mlp/down_proj/__call__ \[64, 3, 16\].*gate_proj/kernel \[16, 24\]"
    ):
        wrong.check(nnx.state(trainer.model, nnx.Param), captured)


def test_the_reward_grows(run):
    _, seen = run
    assert seen[STEPS - 1].reward > seen[0].reward + 0.2


def test_what_tunix_differentiates_is_the_routed_gradient(run):
    trainer, seen = run
    at = next(each for each in seen if not each.masks.units.all())
    nnx.update(trainer.model, at.params)
    take = nnx.jit(nnx.value_and_grad(routed, has_aux=True))
    gradient = nnx.to_pure_dict(take(trainer.model, at.batch, at.masks)[1])
    graph, params, rest = nnx.split(trainer.model, nnx.Param, ...)
    losses = role_losses(graph, rest, at.batch)

    @jax.jit
    def oracles(params):
        apart, _, _ = capo.role_gradients(losses, params)
        by_definition, _, _ = capo.reference_gradient(losses, params, NEURONS.unit_map, at.masks)
        return capo.route(NEURONS.unit_map, apart, at.masks), by_definition

    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(gradient))
    assert scale > 1e-3
    for oracle in oracles(params):
        for got, want in zip(*map(jax.tree.leaves, (gradient, nnx.to_pure_dict(oracle))), strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * scale)


def test_what_no_role_owns_keeps_its_bits_through_decay_momentum_and_refresh(run):
    _, seen = run
    frozen = moved = 0
    for before, after in itertools.pairwise(seen):
        trained = before.masks.trained(NEURONS.unit_map, before.params)
        for mask, old, new in zip(*map(jax.tree.leaves, (trained, before.params, after.params)), strict=True):
            outside = ~np.broadcast_to(mask, old.shape)
            np.testing.assert_array_equal(new[outside], old[outside])
            frozen, moved = frozen + outside.sum(), moved + (new != old).sum()
    assert frozen > 0
    assert moved > 0
    assert len({np.asarray(each.masks.units).tobytes() for each in seen}) > 2  # warm-up and two partitions
