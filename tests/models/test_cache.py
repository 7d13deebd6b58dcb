import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.models import KVCache, extend, init_cache, row_hidden

SLOTS, LENGTH = 8, 96


@pytest.fixture(scope="module")
def run(config, params):
    return jax.jit(lambda token, position, cache: extend(config, params, token, position, cache))


@pytest.fixture(scope="module")
def alone(config, params):
    end = jnp.full(LENGTH, LENGTH, jnp.int32)
    compiled = jax.jit(lambda token: row_hidden(config, params, token, jnp.arange(LENGTH), end, block=32)[0])
    return lambda token: compiled(np.pad(token, (0, LENGTH - len(token))))[: len(token)]


def random_cache(config, rng):
    array = lambda: rng.normal(size=(SLOTS, config.kv_heads, LENGTH, config.head_dim)).astype(np.float32)
    return KVCache(k=tuple(array() for _ in range(config.layers)), v=tuple(array() for _ in range(config.layers)))


def test_chunked_prefill_and_decoding_give_the_hidden_states_of_the_row(config, run, alone):
    tokens = np.random.default_rng(0).integers(0, 40, 80).astype(np.int32)
    want = alone(tokens)
    cache = init_cache(config, 1, LENGTH)
    parts = []
    for start in range(0, 75, 25):
        hidden, cache = run(tokens[None, start : start + 25], jnp.array([start]), cache)
        parts.append(hidden[0])
    for start in range(75, 80):
        hidden, cache = run(tokens[None, start : start + 1], jnp.array([start]), cache)
        parts.append(hidden[0])
    np.testing.assert_allclose(np.concatenate(parts), want, atol=2e-5)


@pytest.mark.parametrize("new", [1, 3])
def test_a_slot_depends_to_the_bit_on_itself_alone(config, run, new):
    rng = np.random.default_rng(new)
    cache = random_cache(config, rng)
    # all slots short at first, then some next to neighbours that fill the cache: more blocks are read
    tokens, position = rng.integers(0, 40, (SLOTS, new)), rng.integers(0, 25, SLOTS)
    hidden, filled = jax.tree.map(np.asarray, run(tokens, position, cache))
    moved = rng.permutation(SLOTS)
    same = np.arange(SLOTS) % 2 == 0  # the other half of the slots gets other work
    other = random_cache(config, rng)
    mixed = jax.tree.map(lambda mine, theirs: np.where(same[:, None, None, None], mine[moved], theirs), cache, other)
    beyond = np.arange(LENGTH)[None, None, :, None] >= (position[moved] + new)[:, None, None, None]
    mixed = jax.tree.map(lambda x: np.where(beyond & same[:, None, None, None], np.nan, x), mixed)
    tokens_2 = np.where(same[:, None], tokens[moved], 3)
    position_2 = np.where(same, position[moved], LENGTH - new)
    hidden_2, filled_2 = jax.tree.map(np.asarray, run(tokens_2, position_2, mixed))
    np.testing.assert_array_equal(hidden_2[same], hidden[moved][same])
    assert np.isfinite(hidden_2[same]).all()
    for mine, theirs in zip(jax.tree.leaves(filled_2), jax.tree.leaves(filled), strict=True):
        for slot in np.flatnonzero(same):
            stop = position_2[slot] + new
            np.testing.assert_array_equal(mine[slot, :, :stop], theirs[moved[slot], :, :stop])


def test_only_the_new_places_are_written(config, run):
    rng = np.random.default_rng(5)
    cache = random_cache(config, rng)
    position = rng.integers(0, LENGTH - 3, SLOTS)
    _, filled = run(rng.integers(0, 40, (SLOTS, 3)), position, cache)
    for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(filled), strict=True):
        changed = (before != np.asarray(after)).any((1, 3))
        np.testing.assert_array_equal(changed, (np.arange(LENGTH) - position[:, None]) // 3 == 0)


def test_tokens_beyond_the_cache_are_dropped_and_leave_the_rest_alone(config, run, alone):
    tokens = np.random.default_rng(6).integers(0, 40, LENGTH).astype(np.int32)
    cache = init_cache(config, 1, LENGTH)
    _, cache = run(tokens[None, :50], jnp.array([0]), cache)
    over = np.concatenate([tokens[50:], np.zeros(4, np.int32)])
    hidden, _ = run(over[None], jnp.array([50]), cache)
    np.testing.assert_allclose(hidden[0, :46], alone(tokens)[50:], atol=2e-5)
