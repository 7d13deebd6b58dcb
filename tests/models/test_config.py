import pytest

from harnessrl_jax.errors import ModelError
from harnessrl_jax.models import DecoderConfig

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
