"""A two-token bandit whose roles conflict: routing keeps a step for the action away from the args policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.capo import (
    ACTION,
    ARGS,
    RELU,
    UnitMap,
    UnitSlice,
    conflict,
    partition,
    probe_row,
    role_gradients,
)
from harnessrl_jax.capo.routing import RoleMasks, route

ACTIONS, ARGUMENTS, HIDDEN, UNITS = 4, 6, 12, 48
MAP = UnitMap(1, (UnitSlice("up", 1), UnitSlice("down", 0)))
GOOD_ACTION, GOOD_ARGUMENT = 2, np.array([0, 3, 1, 5])  # the argument that is right after each action


def unit_activations(params, x):
    return jnp.maximum(x @ params["up"], 0)


def logp(params, x, read):
    return jax.nn.log_softmax((x + unit_activations(params, x) @ params["down"]) @ read)


@pytest.fixture(scope="module")
def bandit():
    """Parameters, and what the network sees before the action (one vector) and before the argument (one an action)."""
    rng = np.random.default_rng(8)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) * shape[0] ** -0.5, jnp.float32)
    params = {"up": normal(HIDDEN, UNITS), "down": normal(UNITS, HIDDEN)}
    before_action = normal(HIDDEN)[None] * 3
    before_argument = before_action * 0.7 + normal(ACTIONS, HIDDEN) * 4
    return params, before_action, before_argument, normal(HIDDEN, ACTIONS), normal(HIDDEN, ARGUMENTS)


def role_losses(bandit):
    _, before_action, before_argument, read_action, read_argument = bandit

    def losses(params):
        action = jnp.exp(logp(params, before_action, read_action))[0]
        argument = jnp.exp(logp(params, before_argument, read_argument))
        # Expected rewards: of the action alone, and of the argument after each action.
        return jnp.stack([-action[GOOD_ACTION], -argument[jnp.arange(ACTIONS), GOOD_ARGUMENT].mean()]), None

    return losses


@pytest.fixture(scope="module")
def routed(bandit):
    """Role gradients, the contrast partition of a real probe, and the conflict between the two."""
    params, before_action, before_argument, *_ = bandit
    seen = unit_activations(params, jnp.concatenate([before_action, before_argument]))
    role = jnp.array([ACTION] + [ARGS] * ACTIONS)
    mean = probe_row((seen,), role, role >= 0, statistic=RELU).mean()
    nothing = jnp.zeros(mean.shape, bool)
    units = partition(mean, nothing, ~nothing, score="contrast", top_fraction=0.25, hysteresis=1.0)
    gradients, _, _ = role_gradients(role_losses(bandit), params)
    return gradients, units, conflict(MAP, gradients, units)


def drift(bandit, direction, length=0.5):
    """KL of the args policy, before and after a step of this length down the direction, mean over actions; nats."""
    params, _, before_argument, _, read = bandit
    norm = jnp.sqrt(sum((leaf * leaf).sum() for leaf in jax.tree.leaves(direction)))
    after = jax.tree.map(lambda leaf, step: leaf - length * step / norm, params, direction)
    old, new = logp(params, before_argument, read), logp(after, before_argument, read)
    return float((jnp.exp(old) * (old - new)).sum(axis=-1).mean()), after


def test_the_roles_conflict(routed):
    assert float(routed[2].cosine.value) < -0.05


def test_a_step_for_the_action_moves_the_args_policy_less(bandit, routed):
    gradients, units, _ = routed
    only_action = jax.tree.map(lambda leaf: leaf.at[ARGS].set(0), gradients)
    plain = jax.tree.map(lambda leaf: leaf[ACTION], gradients)
    through = route(MAP, only_action, RoleMasks(units, jnp.zeros(2, bool)))
    moved_plain, after_plain = drift(bandit, plain)
    moved, after = drift(bandit, through)
    assert moved < 0.5 * moved_plain
    loss = role_losses(bandit)
    start = float(loss(bandit[0])[0][ACTION])
    assert float(loss(after)[0][ACTION]) < start  # and it does serve the action
    assert float(loss(after_plain)[0][ACTION]) < start
