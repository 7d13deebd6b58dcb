import pytest

from harnessrl_jax import config
from harnessrl_jax.errors import ConfigError
from harnessrl_jax.launch.run_folder import open_run

VLLM = "name = 'x'\nsteps = 1\n[sampler]\nkind = 'vllm'\nurl = 'http://one:1'\nmodel = 'tiny'\n"


def opened(folder, *overrides):
    with open_run(folder, config.parse(VLLM, "x.toml", overrides)):
        return (folder / "config.toml").read_text()


def test_an_engine_may_move_while_a_run_rests(tmp_path):
    first = opened(tmp_path)
    assert opened(tmp_path, "--sampler.url", "http://two:2", "--sampler.weights_dir", "/w") == first
    with pytest.raises(ConfigError, match=r"another configuration\.\n  sampler\.model: 'tiny' there, 'other' now\n"):
        opened(tmp_path, "--sampler.model", "other")
    with pytest.raises(ConfigError, match=r"another configuration\.\n  steps: 1 there, 2 now\n"):
        opened(tmp_path, "--steps", "2", "--sampler.url", "http://two:2")
