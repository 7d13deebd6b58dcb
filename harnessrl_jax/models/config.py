"""config.json of a Hugging Face Qwen2 or Llama model <-> the sizes of our decoder. No JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from harnessrl_jax.errors import ModelError

SUPPORTED = ("llama", "qwen2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and constants of one decoder of the Llama / Qwen2 family."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int  # query heads
    kv_heads: int  # key-value heads; divides `heads`
    head_dim: int  # even: rotary embedding turns pairs
    mlp_size: int  # units of the gated MLP
    rope_theta: float = 10_000.0
    rms_eps: float = 1e-6
    tie_embeddings: bool = True  # the output projection is the embedding, transposed
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "mlp_size"):
            value = getattr(self, name)
            if value < 1:
                raise ModelError(f"DecoderConfig.{name} must be at least 1, got {value}.")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"DecoderConfig: kv_heads must divide heads, got heads {self.heads} and kv_heads {self.kv_heads}. "
                "Each key-value head serves the same number of query heads."
            )
        if self.head_dim % 2:
            raise ModelError(f"DecoderConfig.head_dim must be even (rotary pairs), got {self.head_dim}.")
        for name in ("rope_theta", "rms_eps"):
            if not getattr(self, name) > 0.0:
                raise ModelError(f"DecoderConfig.{name} must be above 0, got {getattr(self, name)}.")

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any]) -> Self:
        """Reads the fields of a `config.json`.

        Args:
          config: the parsed file; `model_type` is `llama` or `qwen2`. Both places of the rotary base are read:
            `rope_theta` and `rope_parameters.rope_theta`.

        Returns:
          The decoder's sizes.

        Raises:
          ModelError: another model type, a missing field, or a feature the decoder does not have.
        """
        kind = config.get("model_type")
        if kind not in SUPPORTED:
            raise ModelError(f"config.json: model_type is {kind!r}; this decoder runs {' and '.join(SUPPORTED)}.")
        _refuse_unsupported(config)
        heads = _required(config, "num_attention_heads")
        hidden = _required(config, "hidden_size")
        rope = config.get("rope_parameters") or {}
        return cls(
            vocab_size=_required(config, "vocab_size"),
            hidden_size=hidden,
            layers=_required(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            mlp_size=_required(config, "intermediate_size"),
            rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2",
        )

    def to_huggingface(self) -> dict[str, Any]:
        """The `config.json` under which Hugging Face builds the same network: Qwen2 with biases, else Llama."""
        qwen = self.qkv_bias
        return {
            "architectures": ["Qwen2ForCausalLM" if qwen else "LlamaForCausalLM"],
            "model_type": "qwen2" if qwen else "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.mlp_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_embeddings,
            "torch_dtype": "float32",
        } | ({} if qwen else {"attention_bias": False, "mlp_bias": False})


def _required(config: Mapping[str, Any], name: str) -> int:
    if name not in config:
        raise ModelError(f"config.json: {name} is missing. It has: {', '.join(sorted(config))}.")
    return int(config[name])


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raises for settings that would change the numbers if they were ignored."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = scaling.get("rope_type", scaling.get("type", "default"))
    refused = {
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "rope_type": (rope, "default"),
        "attention_bias": (bool(config.get("attention_bias", False)), False),
        "mlp_bias": (bool(config.get("mlp_bias", False)), False),
        "use_sliding_window": (bool(config.get("use_sliding_window", False)), False),
    }
    for name, (given, wanted) in refused.items():
        if given != wanted:
            raise ModelError(f"config.json: {name} is {given!r}; this decoder has only {wanted!r}.")
