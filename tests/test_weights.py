import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from harnessrl_jax.errors import ModelError, WeightsError
from harnessrl_jax.models import DecoderConfig, init_params
from harnessrl_jax.weights import entries, load_model, save_model

TINY = DecoderConfig(
    vocab_size=20, hidden_size=8, layers=2, heads=4, kv_heads=2, head_dim=4, mlp_size=12, qkv_bias=True
)


def random_params(config):
    rng, params = np.random.default_rng(0), {}
    for entry in entries(config):
        inner = params
        for key in entry.path[:-1]:
            inner = inner.setdefault(key, {})
        inner[entry.path[-1]] = rng.normal(size=entry.shape).astype(np.float32)
    return params


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path, TINY, random_params(TINY))
    return tmp_path


def rewrite(folder, change):
    """Applies `change` to the tensors of a folder's file."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    safetensors.numpy.save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shard_bytes", [10**9, 3000])
def test_what_is_saved_loads_identical(tmp_path, tied, bias, shard_bytes):
    config = dataclasses.replace(TINY, tie_embeddings=tied, qkv_bias=bias)
    params = random_params(config)
    save_model(tmp_path / "new", config, params, shard_bytes=shard_bytes)
    loaded, arrays = load_model(str(tmp_path / "new"))
    assert loaded == config
    assert jax.tree.structure(arrays) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, arrays, params)
    files = sorted(path.name for path in (tmp_path / "new").iterdir())
    if shard_bytes == 10**9:
        assert files == ["config.json", "model.safetensors"]
    else:
        assert "model.safetensors.index.json" in files
        assert len(files) > 3
        assert all((tmp_path / "new" / name).stat().st_size < 3000 + 1500 for name in files)


@pytest.mark.parametrize(("tied", "bias"), [(True, True), (False, False)])
def test_the_list_of_entries_is_what_the_model_creates(tied, bias):
    config = dataclasses.replace(TINY, tie_embeddings=tied, qkv_bias=bias)
    created = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    assert jax.tree.map(lambda x: x.shape, created) == jax.tree.map(lambda x: x.shape, random_params(config))


def test_names_and_layout_are_those_of_hugging_face(folder):
    params = random_params(TINY)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].shape == (20, 8)
    assert "lm_head.weight" not in tensors
    layer = params["layers_1"]
    for name, want in {
        "model.layers.1.self_attn.k_proj.weight": layer["attn"]["k"]["kernel"].T,
        "model.layers.1.self_attn.q_proj.bias": layer["attn"]["q"]["bias"],
        "model.layers.1.mlp.down_proj.weight": layer["mlp"]["down"]["kernel"].T,
        "model.layers.1.post_attention_layernorm.weight": layer["post_norm"]["scale"],
        "model.norm.weight": params["final_norm"]["scale"],
    }.items():
        np.testing.assert_array_equal(tensors[name], want)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"


def test_half_precision_files_become_f32(folder):
    rewrite(folder, lambda tensors: {name: x.astype(np.float16) for name, x in tensors.items()})
    _, params = load_model(folder)
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    want = np.asarray(random_params(TINY)["embed"]["embedding"]).astype(np.float16)
    np.testing.assert_array_equal(params["embed"]["embedding"], want)


def test_a_stored_copy_of_the_tied_embedding_must_agree(folder):
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    load_model(folder)
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1})
    with pytest.raises(
        WeightsError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight.*Set it to false"
    ):
        load_model(folder)


def test_saving_again_removes_the_files_of_the_model_before(tmp_path):
    params = random_params(TINY)
    save_model(tmp_path, TINY, params, shard_bytes=3000)
    save_model(tmp_path, TINY, params)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def without(tensors, name):
    return {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: without(t, "model.norm.weight"),
            r"do not fit config\.json\. Missing: model\.norm\.weight\. Unexpected: none\.",
        ),
        (lambda t: t | {"model.extra.weight": np.zeros(1)}, r"Missing: none\. Unexpected: model\.extra\.weight\."),
        (
            lambda t: t | {"model.layers.0.mlp.up_proj.weight": np.zeros((8, 12), np.float32)},
            r"model\.layers\.0\.mlp\.up_proj\.weight has shape \[8, 12\], config\.json wants \[12, 8\]\.",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(WeightsError, match=message):
        load_model(folder)


def test_derived_tensors_of_old_files_are_ignored(folder):
    rewrite(folder, lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2)})
    _, arrays = load_model(folder)
    jax.tree.map(np.testing.assert_array_equal, arrays, random_params(TINY))


def point_outside(folder):
    """The index names a file that exists, but not in the folder."""
    damage_index(folder, lambda weight_map: weight_map | {"model.norm.weight": "../outside.safetensors"})
    tensors = {"model.norm.weight": np.ones(8, np.float32)}
    safetensors.numpy.save_file(tensors, folder.parent / "outside.safetensors")


def damage_index(folder, change):
    save_model(folder, TINY, random_params(TINY), shard_bytes=3000)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": change(weight_map)}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: (f / "config.json").unlink(),
            r"config\.json: no such file\. Give the folder of a Hugging Face model\.",
        ),
        (lambda f: (f / "config.json").write_text("{"), r"config\.json: not valid JSON"),
        (lambda f: (f / "config.json").write_text("[]"), r"config\.json: must hold one JSON object, got list\."),
        (
            lambda f: (f / "model.safetensors").unlink(),
            r"neither model\.safetensors nor model\.safetensors\.index\.json",
        ),
        (lambda f: (f / "model.safetensors").write_bytes(b"xx"), r"model\.safetensors: not a whole safetensors file"),
        (
            point_outside,
            r"names the file '\.\./outside\.safetensors', which is not in the folder\.",
        ),
        (
            lambda f: damage_index(f, lambda m: m | {"model.norm.weight": m["model.embed_tokens.weight"]}),
            r"model-00001-of-\d+\.safetensors: model\.safetensors\.index\.json expects model\.norm\.weight in it\.",
        ),
    ],
)
def test_broken_folders_are_explained(folder, damage, message):
    damage(folder)
    with pytest.raises(WeightsError, match=message):
        load_model(folder)


def test_another_architecture_is_a_model_error(folder):
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mamba"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="model_type is 'mamba'"):
        load_model(folder)


def test_parameters_that_do_not_fit_are_not_written(tmp_path):
    params = random_params(TINY)
    wrong = params | {"final_norm": {"scale": np.ones(9)}}
    with pytest.raises(WeightsError, match=r"final_norm/scale has shape \[9\], the configuration wants \[8\]\."):
        save_model(tmp_path, TINY, wrong)
    with pytest.raises(WeightsError, match=r"Missing: final_norm/scale\. Unexpected: extra\."):
        save_model(tmp_path, TINY, without(params, "final_norm") | {"extra": np.ones(1)})
    assert list(tmp_path.iterdir()) == []
