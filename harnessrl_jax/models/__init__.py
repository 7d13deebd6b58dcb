"""The decoder: its configuration, its parameters and pure functions of both."""

from harnessrl_jax.models.cache import KVCache, extend, init_cache
from harnessrl_jax.models.config import DecoderConfig, Experts
from harnessrl_jax.models.decoder import Decoder, Remat
from harnessrl_jax.models.lora import Adapters, adapted, init_adapters
from harnessrl_jax.models.mlp import ExpertUnits
from harnessrl_jax.models.rope import Llama3Rope, YarnRope
from harnessrl_jax.models.rows import Activation, Params, init_params, logits, picked_logps, row_hidden, target_logps
from harnessrl_jax.models.value import init_value_head, values

__all__ = [
    "Activation",
    "Adapters",
    "Decoder",
    "DecoderConfig",
    "ExpertUnits",
    "Experts",
    "KVCache",
    "Llama3Rope",
    "Params",
    "Remat",
    "YarnRope",
    "adapted",
    "extend",
    "init_adapters",
    "init_cache",
    "init_params",
    "init_value_head",
    "logits",
    "picked_logps",
    "row_hidden",
    "target_logps",
    "values",
]
