import subprocess
import sys

import pytest

import harnessrl_jax.sampler
from harnessrl_jax.errors import SamplerError
from harnessrl_jax.sampler import SampleRequest

GOOD = {"prompt_ids": (1, 2), "max_new_tokens": 3, "request_id": "r-7"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": ()}, r"^Request 'r-7': the prompt is empty; .* at least one token"),
        ({"prompt_ids": (4, -1)}, r"a token id is negative; ids are 0 or more"),
        ({"stop_ids": (-2,)}, r"a token id is negative"),
        ({"max_new_tokens": 0}, r"max_new_tokens is 0; ask for at least 1"),
        ({"temperature": -0.5}, r"temperature is -0\.5; give 0 \(greedy\) or a positive number"),
        ({"temperature": float("nan")}, r"temperature is nan"),
        ({"temperature": float("inf")}, r"temperature is inf"),
        ({"top_p": 0.0}, r"top_p is 0\.0; it must be in \(0, 1\]"),
        ({"top_p": 1.5}, r"top_p is 1\.5"),
        ({"min_p": -0.1}, r"min_p is -0\.1; it must be in \[0, 1\), and 0 keeps every token"),
        ({"min_p": 1.0}, r"min_p is 1\.0"),
        ({"banned_ids": (-2,)}, r"a token id is negative"),
        ({"stop": ("a", "")}, r"a stop text is empty; leave it out"),
        ({"grammar": "start: %json {}"}, r"a grammar ends with a stop id, and there is none"),
        ({"top_k": -1}, r"top_k is -1; it must be 0 or more"),
        ({"seed": 2**64}, r"seed is 18446744073709551616; it must be in \[0, 2\*\*64\)"),
        ({"seed": -1}, r"seed is -1"),
    ],
)
def test_impossible_requests_are_refused(change, message):
    SampleRequest(**GOOD)
    with pytest.raises(SamplerError, match=message):
        SampleRequest(**GOOD | change)


def test_the_protocol_loads_no_jax():
    script = "import sys, harnessrl_jax.sampler; print('jax' in sys.modules, 'harnessrl_jax' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output.split() == ["False", "True"]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"no attribute 'Batch'; its names are Engine, LocalSampler, Sample,"):
        harnessrl_jax.sampler.__getattr__("Batch")
