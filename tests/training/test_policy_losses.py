"""The losses a policy can be trained with, through the gradient of a whole batch, against formulas in float64."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from harnessrl_jax.errors import LossError
from harnessrl_jax.losses import authored_weight, distillation_advantage, self_distilled_advantage
from harnessrl_jax.training import Cispo, Clipped, DualClipped, Gspo, Policy, Reinforce, init_state
from harnessrl_jax.training.assignment import assign
from harnessrl_jax.training.gradients import batch_gradient
from harnessrl_jax.training.objectives import row_loss
from harnessrl_jax.training.rows import Row, RowOutput
from harnessrl_jax.training.state import routing_of
from harnessrl_jax.training.tally import named_metrics

ROWS = 5
TRUNCATED, MASKED = (Reinforce(importance=each, limit=1.3) for each in ("truncated", "masked"))
GSPO = tuple(Gspo(sequence=each) for each in ("call", "row", "rollout"))
LOSSES = (Clipped(), DualClipped(dual_clip=1.4), *GSPO, Cispo(), Reinforce(importance="none", limit=1.3))
LOSSES += (TRUNCATED, MASKED)


def name(loss):
    return type(loss).__name__ + getattr(loss, "importance", "") + getattr(loss, "sequence", "")


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def batch(toy):
    """Calls that lie in two rows each, rollouts of two calls, some targets without a log-prob of the sampler."""
    batch = toy.batch(rows=ROWS, missing=0.3)
    call = np.where(batch.weight > 0, batch.rollout, -1).astype(np.int32)
    return batch._replace(call=call, rollout=call // 2)


@pytest.fixture(scope="module")
def gradient(toy):
    """(loss, batch, micro_rows, capo) -> (gradient, metrics)."""
    params = toy.params(np.float64)

    @cache
    def compiled(objective, micro_rows):
        gradient_of = batch_gradient(toy.row_fn, objective, micro_rows=micro_rows, shardings=None)

        def run(state, batch):
            work = assign(objective, batch, jnp.int32(ROWS))
            found = gradient_of(state.params, work, routing_of(objective, state.capo), jnp.int32(ROWS))
            return found.gradient, named_metrics(objective, found.tally)

        return toy.jit(run)

    def run(loss, batch, micro_rows=2, capo=None):
        objective = Policy(clip_low=0.2, clip_high=0.28, capo=capo, loss=loss)
        return jax.tree.map(
            np.asarray, compiled(objective, micro_rows)(init_state(params, optax.identity(), objective), batch)
        )

    return run


def factors(loss, log_ratio, advantage, owners):
    """What the loss multiplies each counted target's gradient of -logp by, and whether its clip acts there."""
    ratio = np.exp(log_ratio)
    over = lambda ratio: np.where(advantage > 0, ratio > 1.28, ratio < 0.8)
    match loss:
        case Clipped():
            return np.where(over(ratio), 0, ratio), over(ratio)
        case DualClipped(dual_clip=limit):
            return np.where(over(ratio) | (advantage < 0) & (ratio > limit), 0, ratio), over(ratio)
        case Gspo(sequence=sequence):
            owner = owners[sequence]
            ratio = np.exp([log_ratio[owner == each].mean() for each in owner])
            return np.where(over(ratio), 0, ratio), over(ratio)
        case Cispo():
            return np.clip(ratio, 0.8, 1.28), (ratio > 1.28) | (ratio < 0.8)
        case Reinforce(importance="none"):
            return np.ones_like(ratio), np.zeros_like(ratio)
        case Reinforce(importance="truncated"):
            return np.minimum(ratio, 1.3), ratio > 1.3
        case Reinforce():
            outside = (ratio > 1.3) | (ratio < 1 / 1.3)
            return np.where(outside, 0, ratio), outside


@pytest.fixture(scope="module")
def model(toy, batch):
    """Log-probabilities of the batch, and the gradient of their sum under given coefficients."""
    logps = lambda params: jax.vmap(toy.row_fn, in_axes=(None, 0))(params, batch).logp
    pull = toy.jit(jax.grad(lambda params, c: (jnp.where(c == 0, 0, logps(params)) * c).sum()))
    return np.asarray(toy.jit(logps)(toy.params(np.float64))), lambda c: pull(toy.params(np.float64), c)


@pytest.mark.parametrize("loss", LOSSES, ids=name)
def test_gradient_and_metrics_are_those_of_the_formula(loss, gradient, batch, model):
    logp, pull = model
    known, used = batch.has_logp & (batch.weight > 0), batch.weight > 0
    log_ratio = (logp - batch.logp_behaviour)[known]
    number = np.arange(len(known))[:, None] + 0 * batch.call
    owners = {"call": batch.call[known], "row": number[known], "rollout": batch.rollout[known]}
    factor, acts = np.ones(known.shape), np.zeros(known.shape)
    factor[known], acts[known] = factors(loss, log_ratio, batch.advantage[known], owners)
    weight = batch.weight / batch.weight.sum(dtype=np.float64)
    want = pull(-np.where(used, weight * factor * np.where(used, batch.advantage, 0), 0))
    got, metrics = gradient(loss, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-7), got, want)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(got)) > 0.01
    np.testing.assert_allclose(metrics["clip_fraction"], acts[known].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["ratio_mean"], np.exp(log_ratio).mean(), rtol=1e-5)


def test_the_mismatch_of_sampler_and_trainer_is_reported(gradient, batch, model):
    logp, _ = model
    known = batch.has_logp & (batch.weight > 0)
    ours, theirs = logp[known], batch.logp_behaviour[known].astype(np.float64)
    ratio = np.exp(ours - theirs)
    _, metrics = gradient(Clipped(), batch)
    wanted = {
        "mismatch_effective_share": ratio.mean() ** 2 / (ratio**2).mean(),
        "mismatch_chi2": (ratio**2).mean() - 1,
        "mismatch_correlation": np.corrcoef(np.exp(ours), np.exp(theirs))[0, 1],
        "mismatch_correlation_valid": 1,
    }
    for key, value in wanted.items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-4, atol=1e-5, err_msg=key)


def test_a_call_has_one_ratio_however_its_targets_lie_in_rows(gradient, batch):
    """Micro-batches, and whole rows in another order; calls of one row each give another gradient."""
    want, _ = gradient(GSPO[0], batch)
    order = np.r_[np.random.default_rng(0).permutation(ROWS), ROWS : len(batch.token)]
    shuffled = jax.tree.map(lambda leaf: leaf[order], batch)
    for got, _ in (gradient(GSPO[0], batch, micro_rows=8), gradient(GSPO[0], shuffled)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), got, want)
    alone = batch._replace(call=np.where(batch.weight > 0, np.arange(8)[:, None], -1).astype(np.int32))
    other, _ = gradient(GSPO[0], alone)
    assert max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (other, want)), strict=True)) > 1e-3


def test_roles_share_the_ratio_of_their_call(toy, gradient, batch):
    """Routed by full masks with one denominator, GSPO is what it is unrouted."""
    want, _ = gradient(GSPO[0], batch)
    capo = toy.capo(other_role="args", denominator="shared").capo
    got, _ = gradient(GSPO[0], batch, capo=capo)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), got, want)


def by_teacher(batch, used):
    """RLSD: half of each advantage is scaled by what a teacher thinks of the token."""
    teacher = batch.logp_behaviour + np.where(used, 0.6 * np.cos(np.arange(used.size)).reshape(used.shape), np.nan)
    got = self_distilled_advantage(
        batch.advantage, batch.logp_behaviour, teacher, used, mix=0.5, clip_low=0.2, clip_high=0.3
    )
    factor = np.clip(np.exp(np.sign(batch.advantage) * (teacher - batch.logp_behaviour)), 0.8, 1.3)
    return batch._replace(advantage=got), np.where(used, batch.advantage * (0.5 + 0.5 * factor), 0)


def distilled(batch, used):
    """On-policy distillation: the advantage is what a teacher would rather have said."""
    teacher = np.where(used, -2.0 + np.sin(np.arange(used.size)).reshape(used.shape), np.nan)
    got = distillation_advantage(batch.logp_behaviour, teacher, used)
    return batch._replace(advantage=got), np.where(used, teacher - batch.logp_behaviour, 0)


def regressed(batch, used):
    """Advantage-weighted regression: imitation, the better rollouts more."""
    factor = np.minimum(np.exp(batch.advantage / 0.5), 3.0).astype(np.float32)
    return batch._replace(advantage=factor), np.where(used, factor, 0)


def in_tandem(batch, used):
    """Two authors take turns; one is trained, and nothing of the other's tokens is read."""
    author = np.where(used, np.arange(used.shape[1]) % 2, 2)
    weight = np.asarray(authored_weight(batch.weight, author, trained=1))
    hidden = np.where(weight > 0, batch.advantage, np.nan).astype(np.float32)
    return batch._replace(weight=weight, advantage=hidden), np.where(weight > 0, batch.advantage, 0)


@pytest.mark.parametrize("change", [by_teacher, distilled, regressed, in_tandem], ids=lambda change: change.__name__)
def test_what_credit_and_authors_change_enters_a_step_through_its_batch(change, gradient, toy, model):
    batch, (_, pull) = toy.batch(rows=ROWS), model
    changed, credit = change(batch, batch.weight > 0)
    got, _ = gradient(Reinforce(importance="none", limit=1.3), jax.tree.map(np.asarray, changed))
    weight = np.asarray(changed.weight, np.float64)
    want = pull(-weight / weight.sum() * credit)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), got, want)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(got)) > 0.01


def test_a_row_without_sequence_ratios_is_refused(toy):
    row = Row(*jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), toy.batch(rows=1)))
    output = RowOutput(jnp.zeros(6), jnp.zeros(6), ())
    objective = Policy(clip_low=3e-4, clip_high=4e-4, capo=None, loss=GSPO[0])
    with pytest.raises(LossError, match="Gspo needs the ratios of whole sequences, and this row has none"):
        row_loss(objective, output, row, row.weight)
