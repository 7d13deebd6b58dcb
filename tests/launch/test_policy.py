import pytest

from harnessrl_jax.errors import ConfigError
from harnessrl_jax.launch.policy import api_key


def test_the_key_of_a_server_comes_from_the_environment():
    assert api_key(None, {"ENGINE_KEY": "k"}) is None
    assert api_key("ENGINE_KEY", {"ENGINE_KEY": "k"}) == "k"
    for environment in ({}, {"ENGINE_KEY": ""}):
        with pytest.raises(ConfigError, match=r"sampler\.api_key_env = 'ENGINE_KEY': the environment has no such"):
            api_key("ENGINE_KEY", environment)
