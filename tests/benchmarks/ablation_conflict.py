"""Do the two roles want different things? Their conflict in the small task, with the sampling noise taken out.

The cosine that a training step can measure is that of two noisy gradients. The noise of the roles is nearly
independent, so it lengthens both gradients and leaves their product alone: such a cosine is near 0 whatever the roles
want. Over many batches of the same policy, products of gradients from *different* batches have no noise in their mean:

    P_rs = mean over i != j of g_i,r . g_j,s
    cos(E g_action, E g_args) = P_action,args / sqrt(P_action,action P_args,args)

The share of signal in a step's squared gradient is P_rr over the mean of |g_i,r|^2.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ablation_arms import ARMS
from ablation_batch import packed
from ablation_policy import play, repeated, rules_of, warm_start
from ablation_small import GROUPS, RATE, REGIMES, ROLLOUTS, learner_of
from ablation_task import Task, problems
from flax.traverse_util import flatten_dict

from harnessrl_jax.capo import ACTION, ARGS
from harnessrl_jax.training import decoder_row_fn
from harnessrl_jax.training.rows import Row
from harnessrl_jax.trajectories import PackedBatch, Role

BATCHES = 200


class Products(NamedTuple):
    """Sums over batches: of the gradients, and of the products of the gradients of one batch."""

    total: jax.Array  # [role, parameter]
    within: jax.Array  # [role, role]


class Place(NamedTuple):
    """Where conflict is measured: after some steps of the arm `plain`."""

    regime: str
    mode: Literal["central", "joint"]
    steps: int
    seed: int


def measure(place: Place) -> dict[str, float]:
    """Cosines and shares of signal, over the MLP's parameters and over all."""
    task, seed, joint = REGIMES[place.regime], place.seed, place.mode == "joint"
    rules, start = rules_of(task, seed), warm_start(task, seed)
    rng, key = np.random.default_rng([seed, 5]), jax.random.key(seed + 77)

    def batch_of(params: Any, i: int) -> PackedBatch:
        asked = repeated(problems(task, rng, GROUPS), ROLLOUTS)
        played = play(task, rules, asked, params, params if joint else start, jax.random.fold_in(key, i))
        return packed(played.central, played.worker if joint else None, played.outcome.reward, ROLLOUTS)

    learner = learner_of(task, ARMS["plain"].form)
    state = learner.init(start, RATE)
    for i in range(place.steps):
        state, _ = learner.step(state, batch_of(state.params, BATCHES + i), np.int32(GROUPS))
    mlp = _places_of_mlp(start)
    found = {
        name: Products(jnp.zeros((2, n)), jnp.zeros((2, 2))) for name, n in (("mlp", mlp.sum()), ("all", mlp.size))
    }
    for i in range(BATCHES):
        gradient = _role_gradients(task, state.params, batch_of(state.params, i))
        found = {name: _add(found[name], g) for name, g in (("mlp", gradient[:, mlp]), ("all", gradient))}
    return {f"{name}_{key}": round(value, 4) for name, each in found.items() for key, value in _summary(each).items()}


def _places_of_mlp(params: Any) -> np.ndarray:
    flat = flatten_dict(params, sep="/")
    return np.concatenate([np.full(leaf.size, "/mlp/" in name) for name, leaf in flat.items()])


@functools.partial(jax.jit, static_argnums=0)
def _role_gradients(task: Task, params: Any, batch: PackedBatch) -> jax.Array:
    """Policy gradient of the action tokens and of the other tokens, each divided by its number: [role, parameter]."""
    row_fn = decoder_row_fn(task.model, temperature=1.0, implementation="dense", remat="none", collect=None)
    counted = jnp.stack([batch.role == Role.ACTION, batch.role != Role.ACTION])

    def losses(params: Any) -> jax.Array:
        output = jax.vmap(row_fn, (None, 0))(params, Row(*(getattr(batch, name) for name in Row._fields[:-1])))
        return -(output.logp * batch.advantage * counted).sum((1, 2)) / counted.sum((1, 2))

    flat = flatten_dict(jax.jacrev(losses)(params), sep="/")
    return jnp.concatenate([leaf.reshape(2, -1) for leaf in flat.values()], axis=1)


@jax.jit
def _add(sums: Products, gradient: jax.Array) -> Products:
    return Products(sums.total + gradient, sums.within + gradient @ gradient.T)


def _summary(sums: Products) -> dict[str, float]:
    total, within = np.asarray(sums.total, np.float64), np.asarray(sums.within, np.float64)
    between = (total @ total.T - within) / (BATCHES * (BATCHES - 1))
    cosine = lambda p: float(p[ACTION, ARGS] / np.sqrt(p[ACTION, ACTION] * p[ARGS, ARGS]))
    signal = between.diagonal() / within.diagonal() * BATCHES
    return {"step_cosine": cosine(within), "cosine": cosine(between)} | {
        f"signal_{name}": float(signal[role]) for name, role in (("action", ACTION), ("args", ARGS))
    }
