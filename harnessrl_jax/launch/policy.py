"""A Config, a decoder and a run folder -> the sampler that answers with the policy that is trained."""

import os
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from harnessrl_jax.config import Config, HTTPServer, InProcess, SGLangServer, VLLMServer
from harnessrl_jax.errors import ConfigError
from harnessrl_jax.launch.model import export, first_params, model_folder
from harnessrl_jax.launch.run_folder import RunFolder
from harnessrl_jax.models import DecoderConfig
from harnessrl_jax.sampler import Engine, LocalSampler, Sampler
from harnessrl_jax.sampler.remote import RemoteSampler, Wire
from harnessrl_jax.sampler.sglang import SGLang
from harnessrl_jax.sampler.vllm import VLLM
from harnessrl_jax.sampler.vocabulary import Vocabulary


def make_sampler(config: Config, model: DecoderConfig, folder: RunFolder) -> Sampler:
    """The sampler that the configuration names; it serves once weights are loaded.

    Raises:
      ConfigError: the environment lacks the key of a server.
    """
    match config.sampler:
        case InProcess():
            return _in_process(config, model)
        case VLLMServer() as server:
            return _remote(config, server, VLLM(server.model, logprobs=server.logprobs), model, folder)
        case SGLangServer() as server:
            return _remote(config, server, SGLang(), model, folder)


def policy_sampler(config: Config, folder: RunFolder) -> Sampler:
    """The policy of the configuration, with the weights that it starts from."""
    model, params = first_params(config, model_folder(config))
    sampler = make_sampler(config, model, folder)
    sampler.load_weights(params, 0)
    return sampler


def api_key(name: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The key in that variable, None without a name. Raises ConfigError if there is no such variable."""
    if name is None:
        return None
    if not environment.get(name):
        raise ConfigError(f"sampler.api_key_env = {name!r}: the environment has no such variable. Set it to the key.")
    return environment[name]


def _in_process(config: Config, model: DecoderConfig) -> LocalSampler:
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


def _remote(config: Config, server: HTTPServer, wire: Wire, model: DecoderConfig, folder: RunFolder) -> RemoteSampler:
    source = model_folder(config)
    return RemoteSampler(
        server.url,
        wire,
        folder=folder.weights if server.weights_dir is None else Path(server.weights_dir),
        # A whole model folder: engines look for a tokenizer beside the weights.
        save=lambda path, params: export(model, params, source, path),
        api_key=api_key(server.api_key_env),
        timeout_s=server.timeout_s,
        weights_timeout_s=server.weights_timeout_s,
    )
