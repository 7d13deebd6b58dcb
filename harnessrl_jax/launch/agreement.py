"""Whether trainer and sampler compute the same log-probabilities: by what calls say of theirs, and by the first step.

Pure.
"""

from collections.abc import Iterable, Mapping

from harnessrl_jax.errors import SamplerError
from harnessrl_jax.trajectories import Call

LARGEST = 0.05
"""Mean difference of log-probabilities in nats: far above rounding, bfloat16's included; far below another model."""
LEAST_CORRELATION = 0.98
"""Of the two probabilities of the sampled tokens; healthy runs are above 0.99."""


def check_logp_kinds(calls: Iterable[Call], temperature: float) -> None:
    """Stops a run before it compares log-probabilities of two kinds: the ratio of such two says nothing.

    Calls without log-probabilities pass: they have no ratio, and are counted as such.

    Args:
      calls: those that are trained.
      temperature: T of the log softmax(logits / T) over the whole vocabulary that the trainer computes.

    Raises:
      SamplerError: a call's log-probabilities are of another temperature, raw where T is not 1, or of what a cut left.
    """
    for call in calls:
        kind = call.logp_kind
        if kind is not None and not kind.drawn_at(temperature):
            raise SamplerError(
                f"Call {call.call_id!r} of rollout {call.rollout_id!r} was sampled with {kind}, but training computes "
                f"log-probabilities at behaviour.temperature = {temperature:g} over the whole vocabulary, and the two "
                "must not be compared. Let the engine report them after temperature and before any cut (vLLM: "
                "--logprobs-mode processed_logprobs and no top-p), or train with the temperature of the calls."
            )


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
