"""HTTP requests of a harness -> replies, and calls in a durable store. Tokens in, tokens out; no JAX here."""

from harnessrl_jax.gateway.app import create_app
from harnessrl_jax.gateway.budget import Limits
from harnessrl_jax.gateway.conversation import Prompt, build_prompt
from harnessrl_jax.gateway.refusal import Refusal
from harnessrl_jax.gateway.registry import Endpoint, Rollouts
from harnessrl_jax.gateway.rows import StoredCall
from harnessrl_jax.gateway.sampling import SamplingPolicy
from harnessrl_jax.gateway.server import Server
from harnessrl_jax.gateway.service import Gateway
from harnessrl_jax.gateway.store import Store
from harnessrl_jax.gateway.text import TextCodec
from harnessrl_jax.gateway.traffic import Traffic
from harnessrl_jax.gateway.turns import Turn, Turns

__all__ = [
    "Endpoint",
    "Gateway",
    "Limits",
    "Prompt",
    "Refusal",
    "Rollouts",
    "SamplingPolicy",
    "Server",
    "Store",
    "StoredCall",
    "TextCodec",
    "Traffic",
    "Turn",
    "Turns",
    "build_prompt",
    "create_app",
]
