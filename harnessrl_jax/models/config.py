"""The sizes and features that make a decoder. No JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self

from harnessrl_jax.errors import ModelError
from harnessrl_jax.models import huggingface
from harnessrl_jax.models.rope import RopeScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts instead of each layer's MLP: a token goes to the `active` experts its router scores best."""

    count: int
    active: int  # experts of one token
    renormalise: bool  # the weights of a token's experts sum to 1; else they are shares among all experts
    form: Literal["silu", "clamped"] = "silu"
    """`silu`: down(silu(gate(x)) * up(x)). `clamped`: the same with gate and up limited, and biases, as in gpt-oss."""

    def __post_init__(self) -> None:
        if not 1 <= self.active <= self.count:
            raise ModelError(f"Experts: active must be 1 to count = {self.count}, got {self.active}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and features of one decoder of the Llama / Qwen / gpt-oss family."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int  # query heads
    kv_heads: int  # key-value heads; divides `heads`
    head_dim: int  # even: rotary embedding turns pairs
    mlp_size: int  # units of the gated MLP, or of each expert
    rope_theta: float = 10_000.0
    rope: RopeScaling | None = None
    rms_eps: float = 1e-6
    tie_embeddings: bool = True  # the output projection is the embedding, transposed
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    qk_norm: bool = False  # RMS norm of every query and key head, before the rotation
    sinks: bool = False  # a learned score of each head that takes attention and gives nothing
    windows: tuple[int | None, ...] = ()
    """Tokens that each layer sees, itself included; None: all of them. Empty: no layer has a window."""
    experts: Experts | None = None

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
        if self.windows and len(self.windows) != self.layers:
            raise ModelError(
                f"DecoderConfig.windows wants one entry for each of {self.layers} layers, got {len(self.windows)}."
            )
        if any(window is not None and window < 1 for window in self.windows):
            raise ModelError(f"DecoderConfig.windows must be at least 1 token, got {self.windows}.")

    def window(self, layer: int) -> int | None:
        """Tokens that a layer sees, itself included; None: all before it."""
        return self.windows[layer] if self.windows else None

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any]) -> Self:
        """Reads the fields of a `config.json`.

        Args:
          config: the parsed file; `model_type` is one of `huggingface.FAMILIES`. Both places of the rotary base are
            read: `rope_theta` and `rope_parameters.rope_theta`.

        Returns:
          The decoder's sizes and features.

        Raises:
          ModelError: another model type, a missing field, or a feature the decoder does not have.
        """
        values = huggingface.read(config)
        experts = values.pop("experts", None)
        return cls(**values, experts=Experts(**experts) if experts else None)

    def to_huggingface(self) -> dict[str, Any]:
        """The `config.json` under which Hugging Face builds the same network.

        Raises:
          ModelError: no family has this combination of features.
        """
        return huggingface.write(self)
