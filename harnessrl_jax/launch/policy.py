"""A Config, a decoder and a run folder -> the sampler that answers with the policy that is trained."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from harnessrl_jax.config import (
    Config,
    HTTPServer,
    InProcess,
    JetStreamProcess,
    SGLangServer,
    VLLMServer,
)
from harnessrl_jax.config.sampler import Elsewhere
from harnessrl_jax.errors import ConfigError
from harnessrl_jax.launch.model import export, first_params, model_folder
from harnessrl_jax.launch.run_folder import RunFolder
from harnessrl_jax.models import DecoderConfig
from harnessrl_jax.sampler import Engine, LocalSampler, Sampler
from harnessrl_jax.sampler.jetstream.client import JetStreamSampler
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
        case JetStreamProcess() as process:
            return _jetstream(config, process, model, folder)
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
    engine = Engine(
        config=model,
        slots=behaviour.slots // behaviour.lanes,
        length=_slot_length(config),
        chunk=behaviour.prefill_chunk_tokens,
        steps=behaviour.decode_steps,
        pages=behaviour.prefix_cache_chunks,
        rows=behaviour.prefill_rows,
    )
    return LocalSampler(engine, lanes=behaviour.lanes, vocabulary=_vocabulary(config, model))


def _jetstream(config: Config, process: JetStreamProcess, model: DecoderConfig, folder: RunFolder) -> JetStreamSampler:
    behaviour = config.behaviour
    sizes = {
        "slots": behaviour.slots + 1,  # one is held, see `sampler.jetstream.server`
        "length": _slot_length(config),
        "chunk": behaviour.prefill_chunk_tokens,
        "rows": behaviour.prefill_rows,
    }
    return JetStreamSampler(
        process.address,
        folder=_weights_dir(process, folder),
        save=_save(config, model),
        vocabulary=_vocabulary(config, model),
        options=[text for name, size in sizes.items() for text in (f"--{name}", str(size))],
        log=folder.logs / "sampler.log",
        timeout_s=process.weights_timeout_s,
    )


def _remote(config: Config, server: HTTPServer, wire: Wire, model: DecoderConfig, folder: RunFolder) -> RemoteSampler:
    return RemoteSampler(
        server.url,
        wire,
        folder=_weights_dir(server, folder),
        save=_save(config, model),
        api_key=api_key(server.api_key_env),
        timeout_s=server.timeout_s,
        weights_timeout_s=server.weights_timeout_s,
    )


def _save(config: Config, model: DecoderConfig) -> Callable[[Path, Any], None]:
    """Writes a whole model folder: engines look for a tokenizer beside the weights."""
    source = model_folder(config)
    return lambda path, params: export(model, params, source, path)


def _weights_dir(engine: Elsewhere, folder: RunFolder) -> Path:
    return folder.weights if engine.weights_dir is None else Path(engine.weights_dir)


def _vocabulary(config: Config, model: DecoderConfig) -> Vocabulary:
    tokenizer = Tokenizer.from_file(str(model_folder(config) / "tokenizer.json"))
    return Vocabulary(tokenizer, model.vocab_size)


def _slot_length(config: Config) -> int:
    """Tokens of one slot: the context, in whole prefill chunks."""
    chunk = config.behaviour.prefill_chunk_tokens
    return -(-config.behaviour.context_tokens // chunk) * chunk
