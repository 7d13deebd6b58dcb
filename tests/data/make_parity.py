"""Writes tests/data/parity: tiny random models of every family as `transformers` saves them, and their logits.

Needs torch and transformers, which the tests do not; run it in an environment of its own:

    python -m venv /tmp/parity && /tmp/parity/bin/pip install torch transformers safetensors
    /tmp/parity/bin/python tests/data/make_parity.py

Each folder holds config.json, model.safetensors (f16, to be small; the numbers are those of f32 arithmetic on them) and
logits.npz: `tokens` [sequence, length], padded with -1 behind the end, and `logits` [sequence, length, vocab]. The
sequences share prefixes, so that they are also the branches of a tree.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

OUT = Path(__file__).parent / "parity"
VOCAB = 48
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
THETA = {"rope_type": "default", "rope_theta": 100.0}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_experts": 4}
STRETCHED = SIZES | {"max_position_embeddings": 64}
FAMILIES = {
    "qwen2": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True, rope_parameters=THETA),
    "llama3": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "qwen3": transformers.Qwen3Config(**SIZES, tie_word_embeddings=True, rope_parameters=THETA),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SIZES, **MIXTURE, norm_topk_prob=True, rope_parameters=THETA),
    "gpt_oss": transformers.GptOssConfig(
        **STRETCHED, num_local_experts=4, num_experts_per_tok=2, sliding_window=6, rope_parameters=YARN
    ),
}


def sequences() -> np.ndarray:
    """Three branches of one trunk, one of them from further down, and a sequence that shares nothing."""
    rng = np.random.default_rng(0)
    new = lambda n: rng.integers(0, VOCAB, n)
    trunk = new(9)
    limb = np.concatenate([trunk, new(6)])
    branches = [
        np.concatenate([limb, new(9)]),
        np.concatenate([limb, new(5)]),
        np.concatenate([trunk, new(12)]),
        new(11),
    ]
    return np.stack([np.pad(s, (0, 24 - len(s)), constant_values=-1) for s in branches]).astype(np.int32)


def logits(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    """Each sequence alone, in f32."""
    out = np.zeros((*tokens.shape, VOCAB), np.float32)
    for row, sequence in zip(out, tokens, strict=True):
        length = int((sequence >= 0).sum())
        with torch.no_grad():
            row[:length] = model(torch.tensor(sequence[None, :length]).long()).logits[0].numpy()
    return out


def write(name: str, config: transformers.PretrainedConfig) -> None:
    """One family: weights far from their initial values, so that each of them matters."""
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            wide = 0.5 if parameter.dim() == 1 else 1.3 * parameter.shape[-1] ** -0.5
            around = 1.0 if parameter.dim() == 1 and parameter.mean() > 0.5 else 0.0
            parameter.copy_((around + wide * torch.randn_like(parameter)).half().float())
    tokens = sequences()
    answers = logits(model, tokens)  # before the rotary frequencies are rounded too
    model.half().save_pretrained(OUT / name)
    np.savez_compressed(OUT / name / "logits.npz", tokens=tokens, logits=answers)
    (OUT / name / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    for family in sys.argv[1:] or FAMILIES:
        write(family, FAMILIES[family])
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    (OUT / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")
