"""Metrics of the first step -> whether trainer and sampler compute the same model. Pure."""

from collections.abc import Mapping

from harnessrl_jax.errors import SamplerError

LARGEST = 0.05
"""Mean difference of log-probabilities in nats: far above rounding, bfloat16's included; far below another model."""
LEAST_CORRELATION = 0.98
"""Of the two probabilities of the sampled tokens; healthy runs are above 0.99."""


def check_agreement(metrics: Mapping[str, float]) -> None:
    """Stops a run whose two halves disagree on tokens that the very weights sampled that are trained.

    Before the first update the difference can only be rounding. A larger one is a fault: another temperature,
    attention, template or precision on one side, and every importance ratio would be wrong from then on.

    Args:
      metrics: of a step that no update went before: `mismatch_mean`, the mean of |log p_trainer - log p_sampler|,
        `mismatch_correlation`, and `mismatch_correlation_valid`.

    Raises:
      SamplerError: they disagree.
    """
    mean, correlation = metrics["mismatch_mean"], metrics["mismatch_correlation"]
    apart = bool(metrics["mismatch_correlation_valid"]) and correlation < LEAST_CORRELATION
    if mean > LARGEST or apart:
        raise SamplerError(
            f"Before the first update, trainer and sampler give the sampled tokens log-probabilities that differ by "
            f"{mean:.3g} nats on average (at most {LARGEST} is rounding), and their probabilities correlate by "
            f"{correlation:.4f} (at least {LEAST_CORRELATION} is healthy). They do not compute the same model: compare "
            "behaviour.temperature, model.attention, precision and the rope settings of both, or the server's model "
            "folder with model.path."
        )
