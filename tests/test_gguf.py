"""GGUF files: written here with the package `gguf`, as llama.cpp lays them out, and read back."""

import gguf
import jax
import numpy as np
import pytest

from harnessrl_jax.errors import WeightsError
from harnessrl_jax.gateway import TextCodec
from harnessrl_jax.launch.__main__ import main
from harnessrl_jax.models import DecoderConfig
from harnessrl_jax.weights import convert_gguf, entries, load_gguf, load_model, packaged_gguf

SIZES = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp_size": 64}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789", "Ġ", "Ċ", "th", "the"]
LETTERS += ["12"]  # has a merge, but is never used: digits stand alone
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *LETTERS]
TOKENS += [f"unused{i}" for i in range(64 - len(TOKENS))]  # rows of the embedding are quantised in blocks of 32
CONFIGS = {
    "llama": DecoderConfig(vocab_size=64, **SIZES, rms_eps=1e-5),
    "qwen2": DecoderConfig(vocab_size=64, **SIZES, qkv_bias=True, tie_embeddings=False, rope_theta=1e6),
    "qwen3": DecoderConfig(vocab_size=64, **SIZES, qk_norm=True),
}
OUTSIDE = {"embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INSIDE = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}


def gguf_name(name):
    name = name.replace("model.layers", "blk")
    for theirs, other in (OUTSIDE | INSIDE).items():
        name = name.replace(theirs, other)
    return name.replace("model.", "")


def interleaved(tensor, heads):
    """Channel i and i + half of each head side by side, as llama.cpp wants them for Llama."""
    halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, -1)
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(tensor.shape)


def write(path, kind, *, quantise=False, change=lambda writer, tensors: None, fields=lambda writer: None):
    """A random model of an architecture; returns the tensors under Hugging Face names."""
    config, rng = CONFIGS[kind], np.random.default_rng(0)
    truth = {e.name: rng.normal(size=e.stored).astype(np.float32) for e in entries(config)}
    stored = {gguf_name(name): tensor for name, tensor in truth.items()}
    if kind == "llama":
        for i in range(config.layers):
            for part, heads in (("q", config.heads), ("k", config.kv_heads)):
                stored[f"blk.{i}.attn_{part}.weight"] = interleaved(stored[f"blk.{i}.attn_{part}.weight"], heads)
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config.layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.mlp_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * 61)
    writer.add_token_merges(["t h", "th e", "1 2"])
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    fields(writer)
    change(writer, stored)
    for name, tensor in stored.items():
        kind_of = gguf.GGMLQuantizationType.Q8_0 if quantise and tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(tensor, kind_of), raw_dtype=kind_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return truth


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_file_gives_the_network_it_was_made_of(tmp_path, kind):
    truth = write(tmp_path / "m.gguf", kind)
    config, params = load_gguf(tmp_path / "m.gguf")
    assert config == CONFIGS[kind]
    for entry in entries(config):
        value = params
        for key in entry.path:
            value = value[key]
        want = truth[entry.name]
        np.testing.assert_array_equal(value, want.T if entry.transposed else want, err_msg=entry.name)


def test_quantised_tensors_become_numbers(tmp_path):
    truth = write(tmp_path / "m.gguf", "qwen3", quantise=True)
    _, params = load_gguf(tmp_path / "m.gguf")
    got, want = params["layers_1"]["mlp"]["up"]["kernel"], truth["model.layers.1.mlp.up_proj.weight"].T
    assert 0 < np.abs(got - want).max() < 0.5 * np.abs(want).max() / 127 + 1e-6
    np.testing.assert_array_equal(params["final_norm"]["scale"], truth["model.norm.weight"])


def test_the_folder_has_the_weights_the_tokenizer_and_the_template(tmp_path):
    write(tmp_path / "m.gguf", "llama")
    config = convert_gguf(tmp_path / "m.gguf", tmp_path / "model")
    loaded, params = load_model(tmp_path / "model")
    assert loaded == config == CONFIGS["llama"]
    jax.tree.map(np.testing.assert_array_equal, params, load_gguf(tmp_path / "m.gguf")[1])
    codec = TextCodec(tmp_path / "model")
    assert codec.stop_ids == (2,)
    ids = codec.prompt([{"role": "user", "content": "the 12"}])
    want = ["<|im_start|>", *"user", "Ċ", "the", "Ġ", "1", "2", "<|im_end|>", "Ċ", "<|im_start|>", *"assistant", "Ċ"]
    assert [TOKENS[i] for i in ids] == want
    assert codec.decode(ids).startswith("<|im_start|>user\nthe 12<|im_end|>")
    with pytest.raises(WeightsError, match=r"model: holds a model already\. Give a new folder"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "model")


def test_another_chat_template_can_be_given(tmp_path):
    write(tmp_path / "m.gguf", "llama")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "model", chat_template="mine")
    assert (tmp_path / "model" / "chat_template.jinja").read_text() == "mine"


def test_the_command_writes_a_folder(tmp_path, capsys):
    write(tmp_path / "m.gguf", "llama")
    command = ["convert", str(tmp_path / "m.gguf"), str(tmp_path / "model"), "--chat-template"]
    assert main([*command, "builtin:quickstart"]) == 0
    assert "model: 2 layers of 32, 64 tokens, from m.gguf" in capsys.readouterr().out
    assert "<tools>" in (tmp_path / "model" / "chat_template.jinja").read_text()
    assert main([*command, "builtin:none"]) == 2
    assert "chat_template.jinja cannot be read (No such file or directory). Give a file." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"change": lambda w, t: t.pop("blk.1.ffn_up.weight")}, r"Missing: blk\.1\.ffn_up\.weight\. Unexpected: none"),
        (
            {"change": lambda w, t: t.update({"rope_freqs.weight": np.ones(4, np.float32)})},
            r"Missing: none\. Unexpected: rope_freqs\.weight",
        ),
        (
            {"change": lambda w, t: t.update({"output_norm.weight": np.ones(8, np.float32)})},
            r"model\.norm\.weight has shape \[8\], config\.json wants \[32\]",
        ),
        ({"fields": lambda w: w.add_expert_count(4)}, "experts of GGUF files are not read"),
        (
            {"fields": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)},
            "rope scaling 'yarn' of GGUF files is not read",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, how, message):
    write(tmp_path / "m.gguf", "llama", **how)
    with pytest.raises(WeightsError, match=message):
        load_gguf(tmp_path / "m.gguf")


def test_other_files_are_refused(tmp_path):
    with pytest.raises(WeightsError, match=r"none\.gguf: no such file"):
        load_gguf(tmp_path / "none.gguf")
    (tmp_path / "m.gguf").write_bytes(b"not a model, whatever its name says")
    with pytest.raises(WeightsError, match="not a whole GGUF file"):
        load_gguf(tmp_path / "m.gguf")
    gguf_of_another = gguf.GGUFWriter(tmp_path / "o.gguf", "mamba")
    gguf_of_another.write_header_to_file()
    gguf_of_another.write_kv_data_to_file()
    gguf_of_another.write_tensors_to_file()
    gguf_of_another.close()
    with pytest.raises(WeightsError, match="architecture is 'mamba'; GGUF files of llama, qwen2, qwen3 can be read"):
        load_gguf(tmp_path / "o.gguf")


def test_a_package_is_searched_for_its_one_file(tmp_path, monkeypatch):
    (tmp_path / "carries_a_model").mkdir()
    (tmp_path / "carries_a_model" / "__init__.py").write_text("raise SystemExit('is not run')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WeightsError, match="package:carries_a_model: wanted a package with one GGUF file, it has 0"):
        packaged_gguf("carries_a_model")
    (tmp_path / "carries_a_model" / "m.gguf").touch()
    assert packaged_gguf("carries_a_model") == tmp_path / "carries_a_model" / "m.gguf"
    with pytest.raises(WeightsError, match=r"package:no_such_thing: .* it is not installed"):
        packaged_gguf("no_such_thing")
