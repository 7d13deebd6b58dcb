"""One tiny model and one engine for every test here: the functions are compiled once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from harnessrl_jax.models import DecoderConfig, init_params, row_hidden
from harnessrl_jax.sampler import Engine
from harnessrl_jax.sampler.vocabulary import Vocabulary

CONFIG = DecoderConfig(vocab_size=97, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_size=48)


@pytest.fixture(scope="session")
def params():
    # Larger than at initialisation, so that distributions are far from flat and mistakes show.
    return jax.tree.map(lambda x: 3.0 * x, init_params(CONFIG, jax.random.key(0)))


@pytest.fixture(scope="session")
def other_params():
    return jax.tree.map(lambda x: 3.0 * x, init_params(CONFIG, jax.random.key(1)))


@pytest.fixture(scope="session")
def engine():
    return Engine(config=CONFIG, slots=3, length=48, chunk=8, steps=3, pages=12)


@pytest.fixture(scope="session")
def one_pass(engine):
    """Hidden states of a sequence in one pass, without any cache."""
    size = engine.length

    @jax.jit
    def padded(params, token):
        end = jnp.full(size, size)  # one path: what stands behind a token never changes it
        return row_hidden(CONFIG, params, token, jnp.arange(size), end, implementation="dense")[0]

    return lambda params, tokens: padded(params, np.resize(np.array(tokens), size))[: len(tokens)]


END = 1  # the stop id of `letters`


@pytest.fixture(scope="session")
def letters():
    """A tokenizer of 97 tokens: two control tokens, then the printable characters of ASCII."""
    characters = ["Ġ", *(chr(code) for code in range(33, 127))]
    vocabulary = {"<s>": 0, "</s>": END} | {character: 2 + at for at, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.fixture(scope="session")
def vocabulary(letters):
    return Vocabulary(letters, CONFIG.vocab_size)
