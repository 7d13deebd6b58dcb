"""How a model was stretched beyond the context it was trained on: two ways to scale the rotary frequencies. No JAX."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from harnessrl_jax.errors import ModelError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Slow pairs are slowed by `factor`, fast ones kept, those between interpolated; as Llama 3.1 does.

    A pair is slow if it turns fewer than `low_turns` times over `original_length` tokens, fast above `high_turns`.
    """

    factor: float
    low_turns: float
    high_turns: float
    original_length: int  # tokens

    def __post_init__(self) -> None:
        _check_positive(self)
        if not self.low_turns < self.high_turns:
            raise ModelError(
                f"Llama3Rope: low_turns must be below high_turns, got {self.low_turns} and {self.high_turns}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnRope:
    """YaRN: as above with a ramp over the index of the pair, and cosine and sine multiplied by `magnitude`.

    References:
      Peng et al. 2023, https://arxiv.org/abs/2309.00071
    """

    factor: float
    original_length: int  # tokens
    high_turns: float = 32.0  # beta_fast
    low_turns: float = 1.0  # beta_slow
    whole_pairs: bool = True  # the ends of the ramp are rounded outwards to whole pairs
    magnitude: float  # sqrt(1/t) of the paper

    def __post_init__(self) -> None:
        _check_positive(self)


RopeScaling = Llama3Rope | YarnRope


def scaling_from_huggingface(rope: Mapping[str, Any]) -> RopeScaling | None:
    """`rope_scaling` or `rope_parameters` of a config.json -> the scaling; None where frequencies are as trained.

    Raises:
      ModelError: another kind of scaling, or a missing number.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    match kind:
        case "default":
            return None
        case "llama3":
            return Llama3Rope(
                factor=_number(rope, "factor"),
                low_turns=_number(rope, "low_freq_factor"),
                high_turns=_number(rope, "high_freq_factor"),
                original_length=int(_number(rope, "original_max_position_embeddings")),
            )
        case "yarn":
            return _yarn(rope)
        case _:
            raise ModelError(f"config.json: rope_type is {kind!r}; this decoder has 'default', 'llama3' and 'yarn'.")


def scaling_to_huggingface(scaling: RopeScaling) -> dict[str, Any]:
    """The `rope_scaling` of a config.json."""
    common = {"factor": scaling.factor, "original_max_position_embeddings": scaling.original_length}
    if isinstance(scaling, Llama3Rope):
        ends = {"low_freq_factor": scaling.low_turns, "high_freq_factor": scaling.high_turns}
        return {"rope_type": "llama3"} | common | ends
    ends = {"beta_fast": scaling.high_turns, "beta_slow": scaling.low_turns}
    rest = {"truncate": scaling.whole_pairs, "attention_factor": scaling.magnitude}
    return {"rope_type": "yarn"} | common | ends | rest


def _yarn(rope: Mapping[str, Any]) -> YarnRope:
    if rope.get("mscale") or rope.get("mscale_all_dim"):
        raise ModelError("config.json: rope scaling has mscale, as DeepSeek models do; this decoder has none.")
    factor = _number(rope, "factor")
    magnitude = rope.get("attention_factor")
    return YarnRope(
        factor=factor,
        original_length=int(_number(rope, "original_max_position_embeddings")),
        high_turns=float(rope.get("beta_fast") or 32.0),
        low_turns=float(rope.get("beta_slow") or 1.0),
        whole_pairs=bool(rope.get("truncate", True)),
        magnitude=float(magnitude) if magnitude is not None else 0.1 * math.log(max(factor, 1.0)) + 1.0,
    )


def _number(rope: Mapping[str, Any], name: str) -> float:
    if rope.get(name) is None:
        raise ModelError(f"config.json: rope scaling lacks {name}. It has: {', '.join(sorted(rope))}.")
    return float(rope[name])


def _check_positive(scaling: "RopeScaling") -> None:
    for field in dataclasses.fields(scaling):
        value = getattr(scaling, field.name)
        if not isinstance(value, bool) and not value > 0:
            raise ModelError(f"{type(scaling).__name__}.{field.name} must be above 0, got {value}.")
