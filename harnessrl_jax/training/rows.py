"""Parameters and one packed row -> log-probability and entropy of its targets, and unit activations before them."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int, PyTree

from harnessrl_jax.attention import Implementation
from harnessrl_jax.models import DecoderConfig, row_hidden, target_logps


class Row(NamedTuple):
    """One row of a `trajectories.PackedBatch` on the device: the same fields, as JAX arrays without the row axis."""

    token: Int[Array, " slot"]
    position: Int[Array, " slot"]
    subtree_end: Int[Array, " slot"]
    source: Int[Array, " target"]
    target: Int[Array, " target"]
    logp_behaviour: Float[Array, " target"]
    has_logp: Bool[Array, " target"]
    advantage: Float[Array, " target"]
    role: Int[Array, " target"]
    weight: Float[Array, " target"]
    success: Bool[Array, " target"]
    call: Int[Array, " target"]
    rollout: Int[Array, " target"]
    call_log_ratio: Float[Array, " target"] | tuple[()] = ()
    """Mean of logp - logp_behaviour over the target's call, nats; not in a packed batch, see `with_call_ratios`."""


class RowOutput(NamedTuple):
    """What a model says about the targets of one row. Padding targets may hold anything."""

    logp: Float[Array, " target"]
    """log π(target | its ancestors) in nats, at the temperature at which the behaviour's log-probs were reported."""
    entropy: Float[Array, " target"]
    """Of the same distribution, in nats."""
    units: tuple[Float[Array, "target unit"], ...]
    """Per layer, unit activations at the slot that predicts the target; () where nothing probes them."""


RowFn = Callable[[PyTree, Row], RowOutput]
"""(params, row) -> RowOutput. Whatever computes it can be trained."""


def decoder_row_fn(
    config: DecoderConfig, *, temperature: float, implementation: Implementation, remat: bool, collect_units: bool
) -> RowFn:
    """The row function of `models.Decoder`.

    Args:
      config: sizes.
      temperature: of the sampler, above 0; log-probabilities are of the tempered distribution.
      implementation: which attention computes it.
      remat: recompute the layers in the backward pass.
      collect_units: whether to return unit activations, which CAPO needs.
    """

    def row_fn(params: PyTree, row: Row) -> RowOutput:
        hidden, units = row_hidden(
            config,
            params,
            row.token,
            row.position,
            row.subtree_end,
            implementation=implementation,
            remat=remat,
            collect_units=collect_units,
        )
        logp, entropy = target_logps(config, params, hidden, row.source, row.target, temperature=temperature)
        return RowOutput(logp, entropy, tuple(layer[row.source] for layer in units))

    return row_fn
