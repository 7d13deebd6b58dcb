"""The decoder: its configuration, its parameters and pure functions of both."""

from harnessrl_jax.models.cache import KVCache, extend, init_cache
from harnessrl_jax.models.config import DecoderConfig
from harnessrl_jax.models.decoder import Decoder
from harnessrl_jax.models.rows import Params, init_params, logits, row_hidden, target_logps

__all__ = [
    "Decoder",
    "DecoderConfig",
    "KVCache",
    "Params",
    "extend",
    "init_cache",
    "init_params",
    "logits",
    "row_hidden",
    "target_logps",
]
