"""What clients ask about single tokens: which they forbid, and how probable the sampled ones were. Pure."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Float32

from harnessrl_jax.gateway.exchange import Json, Request, TokenLogp
from harnessrl_jax.gateway.fields import field
from harnessrl_jax.gateway.refusal import Refusal, bad_request
from harnessrl_jax.sampler.protocol import Sample
from harnessrl_jax.trajectories.roles import OutputRoles, token_characters

_FORBIDS = -100


def banned_ids(data: Json) -> tuple[int, ...]:
    """The tokens that `logit_bias` forbids, ascending.

    A smaller bias is refused: it would bend the distribution that is trained. One of 0 says nothing.

    Raises:
      Refusal: it is no object from token ids to numbers, or asks for anything but -100 or 0.
    """
    banned: list[int] = []
    for name, bias in field(data, "logit_bias", dict, {}).items():
        if not (name.isascii() and name.isdigit()) or len(name) > 9:
            raise bad_request(f"logit_bias: {name[:40]!r} is no token id.", param="logit_bias")
        if not isinstance(bias, int | float) or not (bias == 0 or bias <= _FORBIDS):
            raise bad_request(
                f"logit_bias: token {name} has {bias!r}. Here a bias is -100, which forbids the token, or 0: any other "
                "would change the distribution that is trained. Leave it out.",
                code="logit_bias_not_served",
                param="logit_bias",
            )
        if bias:
            banned.append(int(name))
    return tuple(sorted(banned))


def refuse_alternatives(data: Json) -> None:
    """Refuses to name the tokens that were not sampled. Raises Refusal."""
    top = data.get("top_logprobs")
    if top is not None and (isinstance(top, bool) or top != 0):
        raise bad_request(
            f"top_logprobs is {top!r}; this gateway knows the log-probability of the sampled token only, so give 0.",
            code="top_logprobs_not_served",
            param="top_logprobs",
        )


def refuse_unknown(request: Request, bytes_of: Callable[[int], bytes | None]) -> None:
    """Refuses to forbid what the tokenizer does not have. Raises Refusal."""
    for token in request.banned:
        if bytes_of(token) is None:
            raise bad_request(f"logit_bias: the tokenizer has no token {token}.", param="logit_bias")


def token_logps(
    sample: Sample, bytes_of: Callable[[int], bytes | None], message: Bool[np.ndarray, " o"]
) -> tuple[TokenLogp, ...]:
    """Every sampled token with its log-probability under the model itself, the end of turn included.

    Args:
      sample: as it was cut.
      bytes_of: see `token_bytes.bytes_of`.
      message: which tokens belong to the text of the message.

    Raises:
      Refusal: the engine does not tell it.
    """
    spelled = [bytes_of(token) or b"" for token in sample.output_ids.tolist()]
    values = zip(spelled, _raw(sample).tolist(), message.tolist(), strict=True)
    return tuple(TokenLogp(data, logp, inside) for data, logp, inside in values)


def message_tokens(
    output_ids: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    roles: OutputRoles,
    *,
    reasoning: int,
    calls: bool,
) -> Bool[np.ndarray, " o"]:
    """Which tokens are text of the message: not reasoning, not the end of turn, and of no call that was handed over.

    Args:
      output_ids: the sampled ids.
      decode: ids -> text, control tokens spelled out.
      roles: of the output without its end of turn.
      reasoning: how many tokens at the start are reasoning.
      calls: whether calls were handed over.
    """
    inside = np.zeros(len(output_ids), bool)
    said = len(roles.role)
    _, low, high = token_characters(output_ids[:said], decode)
    inside[reasoning:said] = True
    for block in roles.parsed.calls if calls else ():
        start, end = block.span
        inside[:said] &= (low < start) | (high > end)
    return inside


def entry(token: TokenLogp) -> Json:
    """One token as OpenAI writes it; bytes that are no character by themselves are escaped in its text."""
    text = token.data.decode(errors="backslashreplace")
    return {"token": text, "logprob": token.logp, "bytes": list(token.data), "top_logprobs": []}


def _raw(sample: Sample) -> Float32[np.ndarray, " o"]:
    if sample.raw_logps is not None:
        return sample.raw_logps
    kind = sample.logp_kind
    if sample.logps is None or kind is None or not kind.of_the_model:
        raise Refusal(
            "The engine behind this gateway does not tell the model's own log-probabilities at this run's temperature, "
            "top-p, top-k and min-p. Leave logprobs out.",
            status=400,
            code="logprobs_not_served",
            param="logprobs",
        )
    return sample.logps
