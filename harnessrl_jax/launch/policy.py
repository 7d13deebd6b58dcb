"""A Config and a decoder -> the sampler that answers with the policy that is trained."""

from tokenizers import Tokenizer

from harnessrl_jax.config import Config
from harnessrl_jax.launch.model import model_folder
from harnessrl_jax.models import DecoderConfig
from harnessrl_jax.sampler import Engine, LocalSampler
from harnessrl_jax.sampler.vocabulary import Vocabulary


def make_sampler(config: Config, model: DecoderConfig) -> LocalSampler:
    """The continuous-batching sampler in this process; it serves once weights are loaded."""
    behaviour = config.behaviour
    chunk = behaviour.prefill_chunk_tokens
    engine = Engine(
        config=model,
        slots=behaviour.slots // behaviour.lanes,
        length=-(-behaviour.context_tokens // chunk) * chunk,
        chunk=chunk,
        steps=behaviour.decode_steps,
        pages=behaviour.prefix_cache_chunks,
    )
    tokenizer = Tokenizer.from_file(str(model_folder(config) / "tokenizer.json"))
    return LocalSampler(engine, lanes=behaviour.lanes, vocabulary=Vocabulary(tokenizer, model.vocab_size))
