import pathlib

import pytest

import harnessrl_jax
from harnessrl_jax import config
from harnessrl_jax.errors import ConfigError, StoreError
from harnessrl_jax.gateway import TextCodec
from harnessrl_jax.launch.run_folder import RunFolder, open_run
from harnessrl_jax.launch.services import open_services
from harnessrl_jax.tasks import PERFECT, ExpertSampler

MODEL = pathlib.Path(harnessrl_jax.__file__).parent / "assets" / "quickstart"

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


def test_calls_that_another_run_left_in_the_folder_are_refused(tmp_path):
    def served(name):
        given = config.parse(f"name = '{name}'\nsteps = 1\n", "x.toml", [])
        with open_services(given, RunFolder(tmp_path), ExpertSampler(MODEL, PERFECT), TextCodec(MODEL)) as services:
            return services.store.groups()

    assert served("mine") == served("mine") == []
    with pytest.raises(StoreError, match=r"holds the calls of run 'mine', not of 'yours'.*its own folder"):
        served("yours")
