"""config.json of a Hugging Face model <-> the fields of a `DecoderConfig`: one model type for each set of features."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harnessrl_jax.errors import ModelError
from harnessrl_jax.models.rope import scaling_from_huggingface, scaling_to_huggingface

if TYPE_CHECKING:
    from harnessrl_jax.models.config import DecoderConfig

# What each model type has besides sizes, in the fields of a DecoderConfig.
PLAIN = {"qkv_bias": False, "output_bias": False, "qk_norm": False, "sinks": False}
FAMILIES = {
    "llama": PLAIN,
    "qwen2": PLAIN | {"qkv_bias": True},
    "qwen3": PLAIN | {"qk_norm": True},
    "qwen3_moe": PLAIN | {"qk_norm": True},
    "gpt_oss": PLAIN | {"qkv_bias": True, "output_bias": True, "sinks": True},
}
EXPERTS = {"qwen3_moe": "silu", "gpt_oss": "clamped"}  # the form of the families that are mixtures
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
WINDOWED, FULL = "sliding_attention", "full_attention"


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `DecoderConfig`, `experts` as a dict. Raises ModelError."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ModelError(f"config.json: model_type is {kind!r}; this decoder runs {', '.join(FAMILIES)}.")
    _refuse_unsupported(config)
    heads, hidden = _required(config, "num_attention_heads"), _required(config, "hidden_size")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    fields = {
        "vocab_size": _required(config, "vocab_size"),
        "hidden_size": hidden,
        "layers": _required(config, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "mlp_size": _required(config, "moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"),
        "rope_theta": float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
        "rope": scaling_from_huggingface(rope),
        "rms_eps": float(config.get("rms_norm_eps", 1e-6)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "windows": _windows(config) if kind == "gpt_oss" else (),
    }
    return fields | FAMILIES[kind] | ({"experts": _experts(config, kind)} if kind in EXPERTS else {})


def write(config: "DecoderConfig") -> dict[str, Any]:
    """The `config.json` of a `DecoderConfig`. Raises ModelError if no family has its features."""
    kind = _family(config)
    common = {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling_to_huggingface(config.rope) if config.rope else None,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": "float32",
    }
    return common | _own_fields(config, kind)


def _own_fields(config: "DecoderConfig", kind: str) -> dict[str, Any]:
    """What only this model type's file has."""
    experts = config.experts
    match kind:
        case "llama":
            return {"attention_bias": False, "mlp_bias": False}
        case "qwen3":
            return {"attention_bias": False}
        case "qwen3_moe" if experts is not None:
            mixture = {"num_experts": experts.count, "num_experts_per_tok": experts.active}
            sizes = {"moe_intermediate_size": config.mlp_size, "norm_topk_prob": experts.renormalise}
            return mixture | sizes | {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
        case "gpt_oss" if experts is not None:
            mixture = {"num_local_experts": experts.count, "num_experts_per_tok": experts.active}
            kinds = [FULL if config.window(i) is None else WINDOWED for i in range(config.layers)]
            window = next((w for w in config.windows if w is not None), None)
            return mixture | {"layer_types": kinds, "sliding_window": window, "attention_bias": True}
        case _:
            return {}


def _family(config: "DecoderConfig") -> str:
    """The model type that has the features of the configuration."""
    experts = config.experts
    form = experts.form if experts else None
    weighted = experts is None or experts.form == "silu" or experts.renormalise
    for kind, features in FAMILIES.items():
        same = all(getattr(config, name) == value for name, value in features.items())
        windows = not config.windows or (kind == "gpt_oss" and len(set(config.windows) - {None}) < 2)
        if same and windows and EXPERTS.get(kind) == form and weighted:
            return kind
    features = ", ".join(f"{name} {getattr(config, name)}" for name in (*PLAIN, "windows", "experts"))
    raise ModelError(f"DecoderConfig: no Hugging Face model type has {features}. It runs here but cannot be written.")


def _experts(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    counts = [name for name in ("num_experts", "num_local_experts") if name in config]
    return {
        "count": _required(config, counts[0] if counts else "num_experts"),
        "active": _required(config, "num_experts_per_tok"),
        "renormalise": kind == "gpt_oss" or bool(config.get("norm_topk_prob", False)),
        "form": EXPERTS[kind],
    }


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    layers = _required(config, "num_hidden_layers")
    kinds = config.get("layer_types") or [WINDOWED if i % 2 == 0 else FULL for i in range(layers)]
    if unknown := sorted(set(kinds) - {WINDOWED, FULL}):
        raise ModelError(f"config.json: layer_types has {', '.join(unknown)}; this decoder has {WINDOWED} and {FULL}.")
    width = _required(config, "sliding_window") if WINDOWED in kinds else None
    return tuple(width if kind == WINDOWED else None for kind in kinds)


def _required(config: Mapping[str, Any], name: str) -> int:
    if config.get(name) is None:
        raise ModelError(f"config.json: {name} is missing. It has: {', '.join(sorted(config))}.")
    return int(config[name])


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raises for settings that would change the numbers if they were ignored."""
    biased = config["model_type"] == "gpt_oss"
    refused = {
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(config.get("attention_bias", biased)), biased),
        "mlp_bias": (bool(config.get("mlp_bias", False)), False),
        "use_sliding_window": (bool(config.get("use_sliding_window", False)), False),
        "decoder_sparse_step": (config.get("decoder_sparse_step", 1), 1),
        "mlp_only_layers": (list(config.get("mlp_only_layers") or []), []),
    }
    for name, (given, wanted) in refused.items():
        if given != wanted:
            raise ModelError(f"config.json: {name} is {given!r}; this decoder has only {wanted!r}.")
    if config.get("quantization_config"):
        raise ModelError(
            "config.json: quantization_config is there, so the weights are stored in fewer bits. Save the model "
            "dequantised first, as `transformers` does with `dequantize=True`."
        )
