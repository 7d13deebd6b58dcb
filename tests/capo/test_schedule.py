"""The schedule: warm-up, moving average, refresh, postponement; one compilation for all of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.capo import UP_RELU, Probe, advance, decoder_units, default, fixed_partition, init_capo, reproduction
from harnessrl_jax.errors import PartitionError

CHOICES = dataclasses.replace(
    default(decoder_units(1, include_gate=True)),
    score="raw",
    hysteresis=1.0,
    ema=0.5,
    warmup_rollouts=5,
    warmup_steps=100,
    refresh_steps=3,
)


def probe(best, tokens=1.0):
    total = np.zeros((2, 1, 4), np.float32)
    total[0, 0, best], total[1, 0, 3 - best] = tokens, tokens
    return Probe(jnp.asarray(total), jnp.full((2, 1, 4), tokens, jnp.float32), jnp.zeros(()))


NOTHING = Probe(jnp.zeros((2, 1, 4)), jnp.zeros((2, 1, 4)), jnp.zeros(()))


def run(events, **changes):
    """Events (probe, rollouts, allowed) -> the states after each."""
    choices = dataclasses.replace(CHOICES, **changes)
    step = jax.jit(lambda state, probe, rollouts, allowed: advance(state, probe, rollouts, allowed, choices))
    state, states = init_capo(1, 4), []
    for each, rollouts, allowed in events:
        state = step(state, each, jnp.int32(rollouts), jnp.array(allowed))
        states.append(jax.tree.map(np.asarray, state))
    assert step._cache_size() == 1
    return states


def action_units(states):
    return [np.flatnonzero(state.units[0, 0]).tolist() for state in states]


def test_warm_up_ends_when_enough_rollouts_were_probed():
    states = run([(probe(1), 2, True), (probe(1), 2, True), (probe(1), 2, True)])
    assert [bool(state.active) for state in states] == [False, False, True]
    assert action_units(states) == [[], [], [1]]
    assert [int(state.rollouts) for state in states] == [2, 4, 6]


def test_warm_up_ends_after_its_steps():
    states = run([(probe(1), 1, True)] * 4, warmup_steps=3)
    assert [bool(state.active) for state in states] == [False, False, True, True]


def test_warm_up_does_not_end_without_a_statistic():
    states = run([(NOTHING, 0, True), (NOTHING, 0, True), (NOTHING, 0, True), (probe(2), 1, True)], warmup_steps=2)
    assert [bool(state.active) for state in states] == [False, False, False, True]


def test_a_partition_lives_for_refresh_steps():
    states = run([(probe(1), 9, True)] + [(probe(2, 100.0), 9, True)] * 4)
    assert action_units(states) == [[1], [1], [1], [2], [2]]
    assert [int(state.age) for state in states] == [0, 1, 2, 0, 1]
    assert int(states[-1].refreshes) == 2


def test_statistics_decay_only_when_something_was_probed():
    states = run([(probe(1, 8.0), 1, True), (NOTHING, 0, True), (probe(2, 3.0), 1, True)])
    np.testing.assert_array_equal(states[1].total, states[0].total)
    np.testing.assert_array_equal(states[2].total[0, 0], [0, 4, 3, 0])
    np.testing.assert_array_equal(states[2].tokens, np.full((2, 1, 4), 7))


def test_no_successful_rollout_keeps_the_partition():
    states = run([(probe(1), 9, True)] + [(NOTHING, 0, True)] * 4)
    assert action_units(states) == [[1]] * 5
    assert all(np.isfinite(states[-1].total).ravel())


def test_a_step_that_changed_nothing_postpones():
    states = run([(probe(1), 9, False), (probe(1), 9, True)] + [(probe(2, 100.0), 9, i != 2) for i in range(4)])
    assert action_units(states) == [[], [1], [1], [1], [1], [2]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"top_fraction": 0.0},
            "top_fraction must be above 0 and at most 1, got 0.0; 0 would leave the roles without units",
        ),
        ({"top_fraction": 1.5}, "top_fraction must be above 0 and at most 1, got 1.5"),
        ({"ema": 1.0}, "ema must be at least 0 and below 1, got 1.0"),
        ({"hysteresis": 0.9}, "hysteresis must be at least 1.0, got 0.9"),
        ({"refresh_steps": 0}, "refresh_steps must be at least 1, got 0"),
        ({"cagrad": 1.0}, "cagrad must be at least 0 and below 1, got 1.0"),
        ({"min_tokens": 0}, "min_tokens must be at least 1, got 0"),
        ({"shared": "pcgrad", "routing": "fused"}, "needs the gradients of both roles, which routing = 'fused' never"),
        ({"other_role": "ungated", "routing": "position_local"}, "use routing = 'fused', or other_role = 'args'"),
        ({"other_role": "ungated", "ungated": "frozen"}, "use ungated = 'sum', or other_role = 'args' or 'drop'"),
    ],
)
def test_impossible_choices_are_refused(change, message):
    with pytest.raises(PartitionError, match=message):
        dataclasses.replace(CHOICES, **change)


def test_a_static_partition_is_never_replaced():
    states = run([(probe(1), 9, True)] + [(probe(2, 100.0), 9, True)] * 4, refresh_steps=None)
    assert action_units(states) == [[1]] * 5
    assert int(states[-1].refreshes) == 1


def test_a_given_partition_stays_for_good():
    units = jnp.arange(8).reshape(2, 1, 4) % 3 == 0
    choices = dataclasses.replace(CHOICES, refresh_steps=None)
    state = fixed_partition(units)
    for _ in range(3):
        state = advance(state, probe(1), jnp.int32(9), jnp.array(True), choices)
    assert state.active
    np.testing.assert_array_equal(state.units, units)
    assert state.refreshes == 0


def test_a_unit_seen_too_rarely_waits():
    states = run([(probe(1, 3.0), 9, True)] * 4, min_tokens=5, ema=0.9)
    assert [bool(state.active) for state in states] == [False, True, True, True]  # 3 tokens, then 5.7


def test_the_presets():
    family = decoder_units(1, include_gate=False)
    paper = reproduction(family)
    assert (paper.score, paper.refresh_steps, paper.warmup) == ("raw", None, "probe")
    assert (paper.ungated, paper.other_role, paper.top_fraction) == ("frozen", "drop", 0.25)
    assert paper.statistic is UP_RELU
    ours = default(family)
    assert (ours.score, ours.refresh_steps, ours.warmup) == ("contrast", 20, "train")
    assert ours.hysteresis == 1.1
