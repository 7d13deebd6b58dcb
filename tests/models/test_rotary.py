"""Scaled rotary frequencies: known limits, and by hand."""

import dataclasses
import math

import numpy as np
import pytest

from harnessrl_jax.errors import ModelError
from harnessrl_jax.models import DecoderConfig, Llama3Rope, YarnRope
from harnessrl_jax.models.rotary import frequencies

PLAIN = DecoderConfig(
    vocab_size=2, hidden_size=4, layers=1, heads=1, kv_heads=1, head_dim=16, mlp_size=2, rope_theta=1e4
)
TRAINED = 1e4 ** -(np.arange(8) / 8)
LLAMA = Llama3Rope(factor=8.0, low_turns=1.0, high_turns=4.0, original_length=100)
YARN = YarnRope(factor=8.0, original_length=100, high_turns=8.0, low_turns=1.0, magnitude=1.3)


def scaled(rope):
    frequency, magnitude = frequencies(dataclasses.replace(PLAIN, rope=rope))
    return np.asarray(frequency), magnitude


def test_frequencies_as_trained():
    frequency, magnitude = scaled(None)
    np.testing.assert_allclose(frequency, TRAINED, rtol=1e-6)
    assert magnitude == 1.0


def test_llama3_keeps_fast_pairs_slows_slow_ones_and_blends_between():
    turns = TRAINED * 100 / (2 * math.pi)  # 15.9, 5.03, 1.59, 0.503, ...
    frequency, magnitude = scaled(LLAMA)
    kept = (turns[2] - 1) / 3
    want = np.array([1.0, 1.0, kept + (1 - kept) / 8, *[1 / 8] * 5]) * TRAINED
    np.testing.assert_allclose(frequency, want, rtol=1e-5)
    assert magnitude == 1.0


@pytest.mark.parametrize("whole", [True, False])
def test_yarn_ramps_over_the_pairs(whole):
    pair_of = lambda turns: 16 * math.log(100 / (turns * 2 * math.pi)) / (2 * math.log(1e4))
    first, last = pair_of(8.0), pair_of(1.0)  # 0.6 and 2.4
    if whole:
        first, last = 0, 3
    slowed = np.clip((np.arange(8) - first) / (last - first), 0, 1)
    frequency, magnitude = scaled(dataclasses.replace(YARN, whole_pairs=whole))
    np.testing.assert_allclose(frequency, TRAINED * (1 - slowed + slowed / 8), rtol=1e-5)
    assert magnitude == 1.3


@pytest.mark.parametrize("rope", [LLAMA, YARN])
def test_a_factor_of_one_changes_nothing(rope):
    np.testing.assert_allclose(scaled(dataclasses.replace(rope, factor=1.0))[0], TRAINED, rtol=1e-6)


def test_impossible_scalings_are_refused():
    with pytest.raises(ModelError, match=r"Llama3Rope\.factor must be above 0, got 0"):
        dataclasses.replace(LLAMA, factor=0.0)
    with pytest.raises(ModelError, match=r"low_turns must be below high_turns, got 5\.0 and 4\.0"):
        dataclasses.replace(LLAMA, low_turns=5.0)
