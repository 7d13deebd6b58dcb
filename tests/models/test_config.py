import dataclasses
import math

import pytest

from harnessrl_jax.errors import ModelError
from harnessrl_jax.models import DecoderConfig, Experts, Llama3Rope, YarnRope

QWEN2 = {  # Qwen/Qwen2.5-0.5B
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA = {  # TinyLlama/TinyLlama-1.1B
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


def test_a_qwen2_file():
    assert DecoderConfig.from_huggingface(QWEN2) == DecoderConfig(
        vocab_size=151936,
        hidden_size=896,
        layers=24,
        heads=14,
        kv_heads=2,
        head_dim=64,
        mlp_size=4864,
        rope_theta=1e6,
        rms_eps=1e-6,
        tie_embeddings=True,
        qkv_bias=True,
    )


def test_a_llama_file_with_defaults():
    assert DecoderConfig.from_huggingface(LLAMA) == DecoderConfig(
        vocab_size=32000,
        hidden_size=2048,
        layers=22,
        heads=32,
        kv_heads=4,
        head_dim=64,
        mlp_size=5632,
        rope_theta=1e4,
        rms_eps=1e-5,
        tie_embeddings=False,
        qkv_bias=False,
    )


def test_the_newer_place_of_the_rotary_base():
    file = {k: v for k, v in QWEN2.items() if k != "rope_theta"}
    file["rope_parameters"] = {"rope_theta": 5e5, "rope_type": "default"}
    assert DecoderConfig.from_huggingface(file).rope_theta == 5e5


@pytest.mark.parametrize("file", [QWEN2, LLAMA, LLAMA | {"head_dim": 128}])
def test_what_is_written_reads_back(file):
    config = DecoderConfig.from_huggingface(file)
    written = config.to_huggingface()
    assert DecoderConfig.from_huggingface(written) == config
    shared = file.keys() & written.keys() - {"torch_dtype"}
    assert {k: written[k] for k in shared} == {k: file[k] for k in shared}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, r"model_type is 'gpt2'; this decoder runs llama, qwen2, qwen3, qwen3_moe, gpt_oss\."),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            r"rope_type is 'linear'; this decoder has 'default', 'llama3' and 'yarn'\.",
        ),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'; this decoder has only 'silu'\."),
        ({"attention_bias": True}, r"attention_bias is True; this decoder has only False\."),
        ({"num_key_value_heads": 5}, r"kv_heads must divide heads, got heads 32 and kv_heads 5\."),
        ({"num_hidden_layers": 0}, r"DecoderConfig\.layers must be at least 1, got 0\."),
        ({"head_dim": 7}, r"DecoderConfig\.head_dim must be even"),
    ],
)
def test_a_network_that_is_not_ours_is_refused(change, message):
    with pytest.raises(ModelError, match=message):
        DecoderConfig.from_huggingface(LLAMA | change)


def test_a_missing_field_is_named():
    with pytest.raises(ModelError, match=r"config\.json: hidden_size is missing\. It has: architectures, hidden_act"):
        DecoderConfig.from_huggingface({k: v for k, v in LLAMA.items() if k != "hidden_size"})


SIZES = {k: v for k, v in LLAMA.items() if k not in ("model_type", "architectures", "rope_scaling", "hidden_act")}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 16.0}
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
FEATURES = {
    "qwen3": (SIZES | {"model_type": "qwen3", "head_dim": 128}, {"qk_norm": True, "head_dim": 128}),
    "llama3": (
        LLAMA | {"rope_scaling": LLAMA3_ROPE},
        {"rope": Llama3Rope(factor=32.0, low_turns=1.0, high_turns=4.0, original_length=8192)},
    ),
    "yarn": (
        QWEN2 | {"rope_scaling": YARN},
        {"rope": YarnRope(factor=4.0, original_length=4096, high_turns=16.0, magnitude=0.1 * math.log(4.0) + 1.0)},
    ),
    "qwen3_moe": (
        SIZES | MIXTURE | {"model_type": "qwen3_moe"},
        {"qk_norm": True, "mlp_size": 96, "experts": Experts(count=8, active=2, renormalise=True)},
    ),
    "gpt_oss": (
        SIZES | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 128},
        {
            "sinks": True,
            "output_bias": True,
            "windows": (128, None) * 11,
            "experts": Experts(count=4, active=1, renormalise=True, form="clamped"),
        },
    ),
}


@pytest.mark.parametrize("name", FEATURES)
def test_features_of_the_other_families_read_and_write(name):
    file, wanted = FEATURES[name]
    config = DecoderConfig.from_huggingface(file)
    assert {field: getattr(config, field) for field in wanted} == wanted
    assert DecoderConfig.from_huggingface(config.to_huggingface()) == config


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, r"decoder_sparse_step is 2; this decoder has only 1\."),
        ("qwen3_moe", {"num_experts": None}, r"num_experts is missing"),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 22}, "layer_types has chunked_attention"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias is False; this decoder has only True"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "Save the model dequantised first"),
        ("llama3", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"rope scaling lacks low_freq_factor"),
        ("yarn", {"rope_scaling": YARN | {"mscale": 1.0}}, "rope scaling has mscale"),
    ],
)
def test_what_a_family_can_have_and_ours_not_is_refused(name, change, message):
    with pytest.raises(ModelError, match=message):
        DecoderConfig.from_huggingface(FEATURES[name][0] | change)


def test_features_that_no_family_has_are_not_written():
    config = dataclasses.replace(DecoderConfig.from_huggingface(LLAMA), sinks=True)
    with pytest.raises(ModelError, match=r"no Hugging Face model type has .*sinks True"):
        config.to_huggingface()


def test_windows_must_fit_the_layers():
    config = DecoderConfig.from_huggingface(LLAMA)
    with pytest.raises(ModelError, match="one entry for each of 22 layers, got 1"):
        dataclasses.replace(config, windows=(4,))
    with pytest.raises(ModelError, match="at least 1 token"):
        dataclasses.replace(config, windows=(0,) * 22)
