"""Parameters and one packed row -> log-probability and entropy of its targets, and unit activations before them."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Int, PyTree

from harnessrl_jax.attention import Implementation
from harnessrl_jax.models import Activation, DecoderConfig, Remat, picked_logps, row_hidden


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
    value_behaviour: Float[Array, " target"] | tuple[()] = ()
    target_return: Float[Array, " target"] | tuple[()] = ()
    experts: Int[Array, "slot layer active"] | tuple[()] = ()
    sequence_log_ratio: Float[Array, " target"] | tuple[()] = ()
    """Mean of logp - logp_behaviour over the target's sequence, nats; not in a packed batch: `with_sequence_ratios`."""


class RowOutput(NamedTuple):
    """What a model says about the targets of one row. Padding targets may hold anything."""

    logp: Float[Array, " target"]
    """log π(target | its ancestors) in nats, at the temperature at which the behaviour's log-probs were reported."""
    entropy: Float[Array, " target"]
    """Of the same distribution, in nats."""
    units: tuple[Any, ...]
    """Per layer, the activation [target, channel] or `ExpertUnits` at the slot that predicts the target, as
    `capo.probe_row` reads it; () where nothing probes them."""
    value: Float[Array, " target"] | tuple[()] = ()
    """A critic's prediction before each target, in units of reward; () without a critic."""


RowFn = Callable[[PyTree, Row], RowOutput]
"""(params, row) -> RowOutput. Whatever computes it can be trained."""


@dataclasses.dataclass(frozen=True)
class TwoPartRowFn:
    """A row function cut where each target has its own features, so that what follows is computed once for all roles.

    Works wherever a RowFn does.
    """

    trunk: Callable[[PyTree, Row], tuple[PyTree, tuple[Any, ...]]]
    """(params, row) -> (features with a leading target axis, `RowOutput.units`)."""
    head: Callable[[PyTree, PyTree, Row], RowOutput]
    """(params, features, row) -> the output without units; each target's depends on its own features only."""

    def __call__(self, params: PyTree, row: Row) -> RowOutput:
        """The whole row function."""
        features, units = self.trunk(params, row)
        return self.head(params, features, row)._replace(units=units)


def in_two_parts(row_fn: RowFn) -> TwoPartRowFn:
    """The row function itself if it has two parts, else one whose head is the identity."""
    if isinstance(row_fn, TwoPartRowFn):
        return row_fn

    def trunk(params: PyTree, row: Row) -> tuple[PyTree, tuple[Any, ...]]:
        output = row_fn(params, row)
        return output._replace(units=()), output.units

    return TwoPartRowFn(trunk, lambda params, features, row: features)


def replayed(row: Row) -> Int[Array, "slot layer active"] | None:
    """The experts that the row says its slots went to, as `models.row_hidden` takes them."""
    return None if isinstance(row.experts, tuple) else row.experts


def decoder_row_fn(
    config: DecoderConfig,
    *,
    temperature: float,
    implementation: Implementation | None,
    remat: Remat,
    collect: Activation | None,
) -> TwoPartRowFn:
    """The row function of `models.Decoder`.

    Args:
      config: sizes.
      temperature: of the sampler, above 0; log-probabilities are of the tempered distribution.
      implementation: which attention computes it; None takes that of the platform.
      remat: what of the layers the backward pass computes again.
      collect: the activation that CAPO's statistic reads; None where nothing probes.
    """

    def trunk(params: PyTree, row: Row) -> tuple[Array, tuple[Array, ...]]:
        hidden, units = row_hidden(
            config,
            params,
            row.token,
            row.position,
            row.subtree_end,
            implementation=implementation,
            remat=remat,
            collect=collect,
            experts=replayed(row),
        )
        return hidden[row.source], jax.tree.map(lambda layer: layer[row.source], units)

    def head(params: PyTree, features: Array, row: Row) -> RowOutput:
        return RowOutput(*picked_logps(config, params, features, row.target, temperature=temperature), ())

    return TwoPartRowFn(trunk, head)
