import pytest

from harnessrl_jax.errors import SamplerError
from harnessrl_jax.launch.agreement import check_agreement

GOOD = {"mismatch_mean": 3e-6, "mismatch_correlation": 0.9999, "mismatch_correlation_valid": 1.0}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"mismatch_mean": 0.02},  # bfloat16
        {"mismatch_correlation": 0.0, "mismatch_correlation_valid": 0.0},  # all tokens equally probable
    ],
)
def test_rounding_is_no_disagreement(change):
    check_agreement(GOOD | change)


@pytest.mark.parametrize("change", [{"mismatch_mean": 0.06}, {"mismatch_correlation": 0.9}])
def test_another_model_is_one(change):
    with pytest.raises(SamplerError, match=r"^Before the first update, .* They do not compute the same model: compare"):
        check_agreement(GOOD | change)
