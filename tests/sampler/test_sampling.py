import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from harnessrl_jax.sampler.sampling import LEAST, WORD, Cut, Mask, draw, pick, survivors, uniforms

draw, pick, survivors, uniforms = map(jax.jit, (draw, pick, survivors, uniforms))
LARGEST = np.float32(1 - 2**-23)  # the largest number that jax.random.uniform returns
ROWS, VOCAB = 64, 97  # every call has this shape, so that everything compiles once
NEVER = -1e4


def words_of(allowed):
    """Rows of booleans -> the words of a mask."""
    bits = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % WORD)))
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


def ask(logits, uniform=0.0, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, allowed=None):
    """`draw` for some rows; a wish that is a number holds for all of them. `allowed` masks the first rows."""
    logits = np.asarray(logits, np.float32)
    rows, vocab = logits.shape
    padded = np.pad(logits, ((0, ROWS - rows), (0, VOCAB - vocab)), constant_values=NEVER)
    wishes = ((uniform, np.float32), (temperature, np.float32), (top_p, np.float32), (top_k, np.int32))
    wishes = (*wishes, (min_p, np.float32))
    filled = [np.resize(np.asarray(value, dtype), ROWS) for value, dtype in wishes]
    masked, open_to = np.zeros(ROWS, bool), np.zeros((ROWS, VOCAB), bool)
    if allowed is not None:
        masked[: len(allowed)], open_to[: len(allowed), :vocab] = True, allowed
    drawn = draw(padded, filled[0], filled[1], Cut(*filled[2:]), Mask(masked, words_of(open_to)))
    return jax.tree.map(lambda x: np.asarray(x)[:rows], drawn)


def choose(weight, uniform):
    weight = np.asarray(weight, np.float32)
    padded = np.pad(weight, ((0, ROWS - weight.shape[0]), (0, 150 - weight.shape[1])))
    padded[len(weight) :, 0] = 1.0
    return np.asarray(pick(padded, np.resize(np.asarray(uniform, np.float32), ROWS)))[: len(weight)]


def test_pick_by_hand():
    # Running sums 0 2 2 3 4: a token owns [sum before, sum), in quarters of the total.
    uniform = [0.0, 0.49, 0.5, 0.74, 0.75, LARGEST]
    assert choose(np.tile([0.0, 2.0, 0.0, 1.0, 1.0], (6, 1)), uniform).tolist() == [1, 1, 3, 3, 4, 4]


def test_pick_crosses_blocks():
    # Small whole numbers add up exactly in f32, so the reference must agree everywhere, borders included.
    weight = np.random.default_rng(0).integers(0, 3, (64, 150))
    uniform = np.arange(64) / 64
    want = [np.searchsorted(np.cumsum(row), u * row.sum(), side="right") for row, u in zip(weight, uniform)]
    assert choose(weight, uniform).tolist() == want


def test_pick_survives_the_rounding_at_the_end_of_a_block():
    # Tokens without weight lie around the end of the second block, and the goal within a few roundings of it.
    rng = np.random.default_rng(0)
    for step in range(-8, 8):
        weight = rng.random((ROWS, 150)).astype(np.float32)
        weight[:, 120:130] = 0.0
        uniform = weight[:, :128].sum(1, dtype=np.float64) / weight.sum(1, dtype=np.float64) * (1 - step * 2.0**-25)
        chosen = choose(weight, uniform)
        assert (np.take_along_axis(weight, chosen[:, None], 1) > 0).all()
        assert set(chosen.tolist()) <= {119, 130}


@given(
    arrays(np.float32, (4, 130), elements=st.sampled_from([0.0, 1e-30, 1e-7, 0.3, 1.0]), fill=st.just(0.0)),
    st.sampled_from([0.0, 0.3, 0.9999999, float(LARGEST)]),
)
def test_pick_never_takes_a_token_without_weight(weight, uniform):
    weight[:, 77] += np.float32(1e-6)
    assert (np.take_along_axis(weight, choose(weight, uniform)[:, None], 1) > 0).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_they_should(temperature):
    logits, rows = np.array([0.3, -1.0, 2.0, 0.0, 1.1]), 32 * ROWS
    want = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    grid = ((np.arange(rows) + 0.5) / rows).reshape(32, ROWS)
    drawn = [ask(np.tile(logits, (ROWS, 1)), part, temperature) for part in grid]
    token, logp = (np.concatenate(parts) for parts in list(zip(*drawn))[:2])
    np.testing.assert_allclose(np.bincount(token, minlength=5) / rows, want, atol=1.5 / rows)
    np.testing.assert_allclose(np.exp(logp), want[token], rtol=1e-5)


def test_log_probabilities_by_hand():
    # p = .5 .3 .2; at T = 1/2 it is .25 .09 .04 of .38. The third token is drawn, or the second where it is cut.
    logits = np.log([[0.5, 0.3, 0.2]])
    plain = ask(logits, 0.99)
    assert plain.token == 2
    np.testing.assert_allclose([plain.logp[0], plain.raw_logp[0], plain.survival[0]], [np.log(0.2)] * 2 + [1.0], 1e-6)
    cold = ask(logits, 0.99, temperature=0.5)
    np.testing.assert_allclose([cold.logp[0], cold.raw_logp[0]], np.log([0.04 / 0.38, 0.2]), rtol=1e-6)
    two = ask(logits, 0.99, temperature=0.5, top_k=2)
    assert two.token == 1
    np.testing.assert_allclose(two.logp, np.log([0.09 / 0.34]), rtol=1e-6)
    np.testing.assert_allclose(two.survival, [0.34 / 0.38], rtol=1e-6)
    np.testing.assert_allclose(two.raw_logp, np.log([0.3]), rtol=1e-6)
    nucleus = ask(logits, 0.99, top_p=0.6)
    assert nucleus.token == 1
    np.testing.assert_allclose(nucleus.survival, [0.8], rtol=1e-6)
    # top-k first: of .5 .3 the first alone reaches 0.6 of what is left.
    assert ask(logits, 0.99, top_p=0.6, top_k=2).token == 0
    np.testing.assert_allclose(ask(logits, 0.99, top_p=0.6, top_k=2).survival, [0.5], rtol=1e-6)


def test_greedy_takes_the_first_of_the_best():
    drawn = ask([[0.0, 3.0, 3.0, -1.0]], 0.99, temperature=0.0, top_p=0.1, top_k=1)
    assert drawn.token == 1
    np.testing.assert_allclose(drawn.logp, drawn.raw_logp)
    np.testing.assert_allclose(drawn.raw_logp, 3.0 - np.log(2 * np.exp(3.0) + 1 + np.exp(-1.0)), rtol=1e-6)
    assert drawn.survival == 1.0


def kept_by_sorting(row, top_p, top_k, min_p):
    """The usual definition, in float64; equal tokens stand or fall together."""
    first = row >= np.sort(row)[::-1][min(top_k or len(row), len(row)) - 1]
    weight = np.where(first, np.exp(np.float64(row)), 0.0)
    weight = np.where(weight >= min_p * weight.max(), weight, 0.0)
    ranked = np.sort(weight)[::-1]
    last = ranked[(np.cumsum(ranked) >= top_p * weight.sum() - 1e-9).argmax()]
    return (weight > 0) & (weight >= last)


@given(
    arrays(np.float32, (8, 40), elements=st.integers(-8, 8).map(lambda n: n / 4)),
    st.sampled_from([0.05, 0.31, 0.77, 0.95, 1.0]),
    st.sampled_from([0, 1, 3, 20, 40, 90]),
    st.sampled_from([0.0, 0.01, 0.13, 0.9]),  # no power of exp(1/4), which would sit on the border
)
def test_survivors_equal_those_found_by_sorting(logits, top_p, top_k, min_p):
    logits[:, 0] = 3.0  # no row is flat: sums of equal weights would sit on the border of top_p
    filled = (np.full(8, top_p, np.float32), np.full(8, top_k, np.int32), np.full(8, min_p, np.float32))
    got = survivors(jnp.asarray(logits), Cut(*filled))
    np.testing.assert_array_equal(got, [kept_by_sorting(row, top_p, top_k, min_p) for row in logits])


def test_min_p_by_hand():
    # p = .5 .3 .2: a share of 0.5 keeps what has at least .25.
    logits = np.log([[0.5, 0.3, 0.2]])
    drawn = ask(logits, 0.99, min_p=0.5)
    assert drawn.token == 1
    np.testing.assert_allclose([drawn.logp[0], drawn.survival[0]], [np.log(0.3 / 0.8), 0.8], rtol=1e-6)
    assert ask(logits, 0.99, min_p=0.61).token == 0
    assert ask(logits, 0.99, min_p=0.39).token == 2
    # The most probable token first, then the nucleus of what is left: .5 reaches 0.6 of .8.
    assert ask(logits, 0.99, min_p=0.5, top_p=0.6).token == 0


def test_a_mask_by_hand():
    # p = .5 .3 .2 without the first: .6 .4, and half of the mass survives.
    logits, allowed = np.log([[0.5, 0.3, 0.2]]), np.array([[False, True, True]])
    low, high = ask(logits, 0.59, allowed=allowed), ask(logits, 0.61, allowed=allowed)
    assert (low.token[0], high.token[0]) == (1, 2)
    np.testing.assert_allclose([low.logp[0], high.logp[0]], np.log([0.6, 0.4]), rtol=1e-6)
    np.testing.assert_allclose([low.raw_logp[0], high.raw_logp[0]], np.log([0.3, 0.2]), rtol=1e-6)
    np.testing.assert_allclose([low.survival[0], high.survival[0]], [0.5, 0.5], rtol=1e-6)
    cold = ask(logits, 0.99, temperature=0.5, top_k=1, allowed=allowed)
    assert cold.token == 1
    np.testing.assert_allclose([cold.logp[0], cold.survival[0]], [0.0, 0.09 / 0.38], rtol=1e-6, atol=1e-6)
    greedy = ask(logits, 0.99, temperature=0.0, allowed=allowed)
    assert greedy.token == 1
    np.testing.assert_allclose([greedy.logp[0], greedy.survival[0]], [np.log(0.3), 0.5], rtol=1e-6)


def test_a_mask_that_leaves_next_to_nothing_still_gives_numbers():
    drawn = ask([[200.0, 0.0, 0.0]], 0.7, allowed=np.array([[False, True, True]]))
    assert (drawn.token[0], drawn.survival[0]) == (2, LEAST)
    np.testing.assert_allclose([drawn.logp[0], drawn.raw_logp[0]], [np.log(0.5), -200.0], rtol=1e-6)


@given(st.integers(0, 2**32 - 1))
def test_a_masked_token_is_never_sampled(seed):
    rng = np.random.default_rng(seed)
    allowed = rng.random((8, 97)) < rng.choice([0.02, 0.5])
    allowed[np.arange(8), rng.integers(97, size=8)] = True
    wishes = {
        "temperature": rng.choice([0.0, 1.0], 8),
        "top_k": rng.choice([0, 5], 8),
        "top_p": rng.choice([1, 0.5], 8),
    }
    drawn = ask(rng.normal(size=(8, 97)) * 30, rng.random(8), allowed=allowed, **wishes)
    assert allowed[np.arange(8), drawn.token].all()
    assert np.isfinite(drawn.logp).all()
    assert ((drawn.survival > 0) & (drawn.survival <= 1)).all()


def test_rows_do_not_see_each_other():
    rng = np.random.default_rng(1)
    logits, uniform = rng.normal(size=(6, 97)).astype(np.float32), rng.random(6).astype(np.float32)
    wishes = {"temperature": [1, 0, 0.7, 1, 1, 2], "top_p": [1, 1, 0.5, 1, 0.9, 1], "top_k": [0, 0, 0, 4, 9, 0]}
    wishes["min_p"] = [0.1, 0, 0, 0, 0, 0]
    allowed = rng.random((2, 97)) < 0.5
    together = ask(logits, uniform, allowed=allowed, **wishes)
    for row in range(6):
        only = {name: v[row] for name, v in wishes.items()}
        mask = np.tile(allowed[row], (60, 1)) if row < 2 else None
        alone = ask(np.tile(logits[row], (60, 1)), uniform[row], allowed=mask, **only)
        for got, want in zip(together, alone, strict=True):
            assert got[row] == want[59]


def test_a_random_number_belongs_to_its_seed_and_position():
    seed = np.array([[0, 5], [0, 5], [1, 5], [0, 6]], np.uint32)
    got = uniforms(jnp.asarray(seed), jnp.array([7, 8, 7, 7]))
    want = jax.random.uniform(jax.random.fold_in(jax.random.key(5), 7))
    assert got[0] == want
    assert len(set(got.tolist())) == 4
    assert uniforms(jnp.asarray(seed[::-1]), jnp.array([7, 7, 8, 7]))[3] == want


def test_random_numbers_are_spread_evenly():
    seed = np.stack([np.zeros(4096), np.arange(4096)], 1).astype(np.uint32)
    got = np.asarray(uniforms(jnp.asarray(seed), jnp.full(4096, 300)))
    assert got.min() >= 0.0
    assert got.max() < 1.0
    # Expected 256 in each of 16 bins, with a standard deviation of 15.5.
    assert np.abs(np.histogram(got, 16, (0, 1))[0] - 256).max() < 62
