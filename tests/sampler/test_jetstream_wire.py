import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harnessrl_jax.errors import SamplerError, WishError
from harnessrl_jax.sampler import SampleRequest
from harnessrl_jax.sampler.jetstream.wire import MARK, decode, encode, rows

ids = st.integers(0, 2**31 - 1)


@settings(max_examples=50, deadline=None)
@given(
    st.builds(
        SampleRequest,
        prompt_ids=st.lists(ids, min_size=1, max_size=5).map(tuple),
        max_new_tokens=st.integers(1, 2**31 - 1),
        temperature=st.floats(0, 100),
        top_p=st.floats(0.01, 1),
        top_k=ids,
        min_p=st.floats(0, 0.99),
        seed=st.integers(0, 2**64 - 1),
        stop_ids=st.lists(ids, max_size=8).map(tuple),
        request_id=st.text(max_size=20),
    ),
    st.integers(0, 2**62),
)
def test_a_request_survives(request, number):
    numbers = encode(request, number)
    assert all(-(2**31) <= one < 2**31 for one in numbers)
    assert decode(numbers) == (request, number)


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"banned_ids": (1,)}, r"Request 'r': this sampler has no banned_ids\. Leave it out"),
        ({"grammar": "start: /a/", "stop_ids": (1,)}, r"Request 'r': this sampler has no grammar\. Leave it out"),
        ({"stop_ids": tuple(range(200))}, r"Request 'r': its stop ids and its name take \d+ bytes; at most 504 can be"),
    ],
)
def test_what_has_no_place_is_refused(wishes, message):
    with pytest.raises(WishError, match=message):
        encode(SampleRequest(**{"prompt_ids": (1,), "max_new_tokens": 1, "request_id": "r"} | wishes), 0)


whole = encode(SampleRequest(prompt_ids=(1,), max_new_tokens=1), 3)


@pytest.mark.parametrize("numbers", [[], [5, 6], [MARK, 400], [5, *whole[1:]], whole[:-1], [MARK, 1, 0x7B7B7B7B, 4]])
def test_what_is_no_request_is_refused(numbers):
    with pytest.raises(SamplerError, match=r"^Request ''|\d numbers are not a request"):
        decode(numbers)


def test_the_numbers_of_a_token_are_taken_apart():
    bits = lambda value: int(np.float32(value).view(np.int32))
    (first, one), (second, two) = rows([7, bits(-0.5), bits(-0.25), bits(1), -1, 8, bits(-3), bits(-2), bits(0.5), -13])
    assert (first[0, 0], one, second[0, 0], two) == (7, 0, 8, 12)
    assert first[0, 1:].view(np.float32).tolist() == [-0.5, -0.25, 1.0]
    assert second[0, 1:].view(np.float32).tolist() == [-3.0, -2.0, 0.5]
