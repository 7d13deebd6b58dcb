"""The rule table covers the parameters of every family, and splits what is large."""

import json
import math
from pathlib import Path

import jax
import pytest

from harnessrl_jax.models import DecoderConfig, init_params, init_value_head
from harnessrl_jax.training.sharding import DECODER_RULES, make_mesh, parameter_specs

FAMILIES = Path(__file__).parents[1] / "data" / "parity"


@pytest.mark.parametrize("family", ["qwen2", "llama3", "qwen3", "qwen3_moe", "gpt_oss"])
def test_every_matrix_of_a_family_is_split(family):
    config = DecoderConfig.from_huggingface(json.loads((FAMILIES / family / "config.json").read_text()))
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)) | {"value_head": init_value_head(config)})
    mesh = make_mesh(data=1, fsdp=2, tensor=2, context=2)
    specs = parameter_specs(params, mesh, DECODER_RULES)
    for (path, _), spec in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(specs), strict=True):
        split = math.prod(mesh.shape[axis] for axis in spec if axis is not None)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        whole = name.endswith(("scale", "bias", "sinks")) or "router" in name or "value_head" in name
        assert whole or split == 4, name
