"""The gradient of a batch in float64: against direct formulas, and against itself rearranged."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from harnessrl_jax.capo import UNGATED, expand, gradient_roles
from harnessrl_jax.training import Supervised, init_state, make_step
from harnessrl_jax.training.assignment import assign
from harnessrl_jax.training.gradients import batch_gradient
from harnessrl_jax.training.state import routing_of
from harnessrl_jax.training.tally import named_metrics
from harnessrl_jax.trajectories import Role

ROWS = 5
DROP = {"other_role": "drop"}
UNGATED_SHARED = {"other_role": "ungated", "denominator": "shared"}


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def gradient(toy):
    """(objective, batch, rows, micro_rows, units) -> (gradient, metrics); compiled once for each objective and size."""
    params = toy.params(np.float64)

    @cache
    def compiled(objective, micro_rows):
        gradient_of = batch_gradient(toy.row_fn, objective, micro_rows=micro_rows, shardings=None)

        def run(state, batch, rows):
            found = gradient_of(state.params, assign(objective, batch, rows), routing_of(objective, state.capo), rows)
            return found.gradient, named_metrics(objective, found.tally) | found.conflict | {"loss": found.losses.sum()}

        return toy.jit(run)

    def run(objective, batch, rows=ROWS, micro_rows=2, units=None):
        state = init_state(params, optax.identity(), objective)
        if units is not None:
            state = state._replace(capo=state.capo._replace(units=jnp.asarray(units), active=jnp.array(True)))
        return jax.tree.map(np.asarray, compiled(objective, micro_rows)(state, batch, jnp.int32(rows)))

    return run


@pytest.fixture(scope="module")
def units():
    rng = np.random.default_rng(3)
    return rng.random((2, 2, 8)) < 0.4


@pytest.fixture(scope="module")
def direct(toy):
    """(batch, weight) -> (loss, gradient) of one weighted mean: no micro-batches, no masks, one breath."""
    value_and_grad = toy.jit(jax.value_and_grad(lambda *arguments: mean_loss(toy, *arguments)))
    return lambda batch, weight: jax.tree.map(np.asarray, value_and_grad(toy.params(np.float64), batch, weight))


def mean_loss(toy, params, batch, weight):
    out = jax.vmap(toy.row_fn, in_axes=(None, 0))(params, batch)
    used = weight > 0
    behaviour = jnp.where(batch.has_logp, batch.logp_behaviour, jax.lax.stop_gradient(out.logp))
    ratio = jnp.exp(jnp.where(used, out.logp - behaviour, 0))
    advantage = jnp.where(used, batch.advantage, 0)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.28) * advantage)
    return -(weight * gain).sum() / weight.sum()


def assert_same(got, want, tolerance=1e-12):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance), got, want)


def differ(got, want):
    return max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))


def test_plain_gradient_is_that_of_the_global_mean(toy, gradient, plain_policy, direct):
    batch = toy.batch(rows=ROWS, missing=0.3)
    got, metrics = gradient(plain_policy, batch)
    value, want = direct(batch, batch.weight)
    assert_same(got, want)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-12)
    assert differ(got, jax.tree.map(np.zeros_like, got)) > 0.01


@pytest.mark.parametrize("changes", [DROP, UNGATED_SHARED])
def test_routed_gradient_is_the_masked_sum_of_role_gradients(toy, gradient, units, direct, changes):
    batch = toy.batch(rows=ROWS, missing=0.3)
    objective = toy.capo(**changes)
    got, metrics = gradient(objective, batch, units=units)
    role = np.asarray(gradient_roles(batch.role, batch.call, batch.weight > 0, other_role=changes["other_role"]))
    weights = [np.where(role == each, batch.weight, 0) for each in range(objective.capo.roles)]
    want, total = jax.tree.map(np.zeros_like, got), 0.0
    for weight, mask in zip(weights, [*units, np.zeros_like(units[0])]):
        share = float(weight.sum()) / float(np.sum(weights)) if "denominator" in changes else 1.0
        value, full = direct(batch, weight)
        masks = expand(objective.capo.unit_map, full, jnp.asarray(mask), jnp.array(True))
        want = jax.tree.map(lambda sum_, mask, part, share=share: sum_ + share * mask * part, want, masks, full)
        total += share * value
    assert_same(got, want)
    np.testing.assert_allclose(metrics["loss"], total, rtol=1e-12)
    assert (role == UNGATED).any() == (changes["other_role"] == "ungated")


def of_units(tree, layer, chosen):
    """Everything that the chosen neurons of a layer own, as one vector."""
    mlp = {name: part["kernel"] for name, part in tree[f"layers_{layer}"]["mlp"].items()}
    return np.concatenate([mlp["gate"][:, chosen].ravel(), mlp["up"][:, chosen].ravel(), mlp["down"][chosen].ravel()])


def test_shared_units_lose_what_the_roles_disagree_on(toy, gradient, units, direct):
    """PCGrad by hand, layer by layer, with the args' advantages as they are and turned round: one of them conflicts."""
    both, conflicts = units | np.roll(units, 1, axis=0) & (np.arange(8) < 4), 0  # more shared units than by chance
    for sign in (1, -1):
        batch = toy.batch(rows=ROWS, missing=0.3)
        batch = batch._replace(advantage=np.where(batch.role == Role.ARGS, sign, 1) * batch.advantage)
        got, _ = gradient(toy.capo(shared="pcgrad", **DROP), batch, units=both)
        apart = [direct(batch, np.where(batch.role == r, batch.weight, 0))[1] for r in (Role.ACTION, Role.ARGS)]
        for layer in range(2):
            chosen = both[:, layer].all(axis=0)
            a, g = (of_units(each, layer, chosen) for each in apart)
            lost = min(a @ g, 0)
            conflicts += lost < 0
            want = a - lost / (g @ g) * g + g - lost / (a @ a) * a
            np.testing.assert_allclose(of_units(got, layer, chosen), want, rtol=0, atol=1e-12)
            alone = both[0, layer] & ~both[1, layer]
            np.testing.assert_allclose(
                of_units(got, layer, alone), of_units(apart[0], layer, alone), rtol=0, atol=1e-12
            )
    assert 0 < conflicts < 4


def test_both_forms_agree(toy, gradient, units):
    batch = toy.batch(rows=ROWS, missing=0.3)
    vjp, measured = gradient(toy.capo(**DROP), batch, units=units)
    reference, also_measured = gradient(toy.capo(routing="reference", **DROP), batch, units=units)
    assert_same(vjp, reference)
    np.testing.assert_allclose(measured["loss"], also_measured["loss"], rtol=1e-12)
    assert measured["capo/cosine_valid"]
    assert not also_measured["capo/cosine_valid"]
    assert measured["capo/retained_args_valid"]
    assert not also_measured["capo/retained_args_valid"]
    assert 0 < measured["capo/retained_args"] < 1
    assert {*measured} - {*also_measured} == {"capo/norm_action", "capo/norm_args"}
    np.testing.assert_array_equal(also_measured["capo/shared_layer"], measured["capo/shared_layer"])


def test_full_masks_and_one_denominator_are_plain_training(toy, gradient, plain_policy):
    batch, objective = toy.batch(rows=ROWS, missing=0.3), toy.capo(**UNGATED_SHARED)
    batch = batch._replace(role=np.where(batch.role == Role.OTHER, Role.ARGS, batch.role).astype(np.int8))
    plain, _ = gradient(plain_policy, batch)
    assert_same(gradient(objective, batch, units=np.ones((2, 2, 8), bool))[0], plain)
    assert_same(gradient(objective, batch)[0], plain)  # and so is warm-up
    assert differ(gradient(toy.capo(**DROP), batch)[0], plain) > 0.01


def test_rows_may_come_in_any_order(toy, gradient, units):
    batch, objective = toy.batch(rows=ROWS, missing=0.3), toy.capo(**DROP)
    want, metrics = gradient(objective, batch, units=units)
    order = np.r_[np.random.default_rng(0).permutation(ROWS), ROWS : len(batch.token)]
    shuffled = jax.tree.map(lambda leaf: leaf[order], batch)
    got, same = gradient(objective, shuffled, units=units)
    assert_same(got, want)
    for name in metrics:
        np.testing.assert_allclose(same[name], metrics[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_micro_batch_of_one_row_is_no_different(toy, gradient, plain_policy):
    batch = toy.batch(rows=ROWS, missing=0.3)
    assert_same(gradient(plain_policy, batch, micro_rows=1)[0], gradient(plain_policy, batch)[0])


def test_means_of_each_micro_batch_would_be_wrong(toy, gradient, units):
    batch, objective = toy.batch(rows=8), toy.capo(**DROP)
    whole, _ = gradient(objective, batch, rows=8, units=units)
    halves = [
        gradient(objective, jax.tree.map(lambda leaf, by=by: np.roll(leaf, by, 0), batch), rows=4, units=units)[0]
        for by in (0, 4)
    ]
    assert differ(jax.tree.map(lambda a, b: (a + b) / 2, *halves), whole) > 0.01


def test_rows_beyond_the_used_ones_do_not_count(toy, gradient, plain_policy):
    full = toy.batch(rows=8)
    cut = full._replace(weight=np.where(np.arange(8)[:, None] < 3, full.weight, 0))
    got, metrics = gradient(plain_policy, full, rows=3)
    assert_same(got, gradient(plain_policy, cut, rows=8)[0])
    assert metrics["targets"] == (cut.weight > 0).sum()


def test_targets_without_a_behaviour_logp_are_reinforce(toy, gradient, plain_policy):
    batch = toy.batch(rows=ROWS, missing=1.0)
    got, metrics = gradient(plain_policy, batch)

    @jax.grad
    def reinforce(params):
        out = jax.vmap(toy.row_fn, in_axes=(None, 0))(params, batch)
        credit = np.where(batch.weight > 0, batch.weight * batch.advantage, 0)
        return -(credit * out.logp).sum() / batch.weight.sum()

    assert_same(got, toy.jit(reinforce)(toy.params(np.float64)))
    assert metrics["missing_logp"] == (batch.weight > 0).sum()
    assert metrics["ratio_mean"] == 0  # no ratio was seen


def test_supervised_is_cross_entropy_of_every_target(toy, gradient):
    batch = toy.batch(rows=ROWS)._replace(advantage=np.full((8, 6), np.nan, np.float32))
    got, metrics = gradient(Supervised(), batch)

    @jax.value_and_grad
    def cross_entropy(params):
        out = jax.vmap(toy.row_fn, in_axes=(None, 0))(params, batch)
        return -(batch.weight * out.logp).sum() / batch.weight.sum()

    value, want = toy.jit(cross_entropy)(toy.params(np.float64))
    assert_same(got, want)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-12)
    assert "ratio_mean" not in metrics


def test_metrics_by_count(toy, gradient, plain_policy, direct):
    batch = toy.batch(rows=ROWS, missing=0.3)
    _, metrics = gradient(plain_policy, batch)
    used = batch.weight > 0
    assert metrics["targets"] == used.sum()
    assert metrics["missing_logp"] == (used & ~batch.has_logp).sum() > 0
    for name, role in (("action", 1), ("args", 2), ("other", 3)):
        weight = np.where(batch.role == role, batch.weight, 0)
        assert metrics[f"weight_{name}"] == weight.sum()
        np.testing.assert_allclose(metrics[f"loss_{name}"], direct(batch, weight)[0], rtol=1e-5)
    out = toy.jit(jax.vmap(toy.row_fn, in_axes=(None, 0)))(toy.params(np.float64), batch)
    log_ratio = (np.asarray(out.logp) - batch.logp_behaviour)[batch.has_logp]
    advantage = batch.advantage[batch.has_logp]
    cut = np.where(advantage > 0, log_ratio > np.log(1.28), log_ratio < np.log(0.8))
    wanted = {
        "mismatch_max": np.abs(log_ratio).max(),
        "mismatch_mean": np.abs(log_ratio).mean(),
        "ratio_mean": np.exp(log_ratio).mean(),
        "ratio_max": np.exp(log_ratio).max(),
        "kl": (np.exp(log_ratio) - 1 - log_ratio).mean(),
        "clip_fraction": cut.mean(),
        "entropy": np.asarray(out.entropy)[used].mean(),
        "logp": np.asarray(out.logp)[used].mean(),
        "advantage_abs": np.abs(batch.advantage[used]).mean(),
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


def test_a_step_keeps_the_types_of_its_state(toy):
    """Else its second call would compile again, and a checkpoint would not fit."""
    state = init_state(toy.params(np.float64), optax.adam(1.0), toy.capo())
    step = make_step(toy.row_fn, optax.adam(1.0), toy.capo(), micro_rows=2)
    after, _ = jax.eval_shape(step, state, toy.batch(), jnp.int32(ROWS))
    types = lambda tree: [(leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(tree)]
    assert types(after) == types(state)


def test_conflict_is_measured_before_the_masks(toy, gradient, units):
    batch, objective = toy.batch(rows=ROWS, missing=0.3), toy.capo(**DROP)
    _, routed = gradient(objective, batch, units=units)
    _, warm = gradient(objective, batch)
    assert routed["capo/cosine_layer"].shape == (2,)
    np.testing.assert_array_equal(routed["capo/cosine_layer"], warm["capo/cosine_layer"])
    np.testing.assert_array_equal(routed["capo/shared_layer"], (units[0] & units[1]).sum(-1))
