"""The forecast of a run: whether a real model fits real chips, and the words that say so."""

import json

import pytest

from harnessrl_jax import config as configuration
from harnessrl_jax.errors import ShardingError
from harnessrl_jax.launch.__main__ import CHIP_NAMES
from harnessrl_jax.launch.plan import forecast, plan
from harnessrl_jax.training.chips import CHIPS

QWEN_3B = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "intermediate_size": 11008,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
TEXT = """
name = "qwen"
steps = 1
[model]
path = "{folder}"
remat = "full"
[behaviour]
context_tokens = 8192
slots = 8
[packing]
row_slots = 8192
row_targets = 2048
max_rows = 64
micro_rows = 16
[mesh]
fsdp = 16
"""


@pytest.fixture
def config(tmp_path):
    """Qwen2.5-3B, of which nothing but its config.json is at hand."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_3B))
    return lambda *more: configuration.parse(TEXT.format(folder=tmp_path), "test", more)


def test_a_model_of_3_billion_parameters_on_a_slice(config):
    found = forecast(config(), "v5e", 16)
    assert found.parameters == 3_085_938_688  # as its model card counts them: 3.09 B
    assert found.sizes == {"data": 1, "fsdp": 16, "tensor": 1, "context": 1}
    assert found.memory.parameters == pytest.approx(4 * found.parameters / 16, rel=2e-3)  # norms and biases are not cut
    assert found.memory.optimiser == pytest.approx(2 * found.memory.parameters, rel=2e-3)
    assert found.sampler.parameters == 4 * found.parameters
    more = forecast(config("--mesh.tensor", "2"), "v5e", 32)
    assert more.memory.parameters == pytest.approx(found.memory.parameters / 2, rel=2e-3)
    assert more.seconds.compute == pytest.approx(found.seconds.compute / 2)


def test_what_does_not_fit_is_said_and_is_the_exit_status(config, capsys):
    assert plan(config("--model.remat", "none"), "v5e", 16) == 1
    said = capsys.readouterr().out
    assert "36 layers, 3.09 B parameters" in said
    assert "16 x v5e: mesh data 1 x fsdp 16 x tensor 1 x context 1" in said
    assert said.count("DOES NOT FIT") == 2
    assert plan(config(), "h200", 16) == 0
    assert capsys.readouterr().out.count("fits, ") == 2
    assert plan(config(), "cpu", 16) == 0


def test_a_mesh_of_other_chips_is_refused(config):
    with pytest.raises(ShardingError, match="24 devices cannot be cut into fsdp 16"):
        forecast(config(), "v5e", 24)
    with pytest.raises(ShardingError, match=r"16 devices, --chips says 32"):
        forecast(config("--mesh.data", "1"), "v5e", 32)


def test_the_command_knows_every_chip():
    assert set(CHIP_NAMES) == set(CHIPS)
