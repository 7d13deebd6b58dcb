"""Parameters and one packed row -> hidden states and log-probabilities of its targets: pure functions."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from harnessrl_jax.attention import (
    Implementation,
    default_implementation,
    plan_for,
    row_mask,
)
from harnessrl_jax.errors import ModelError
from harnessrl_jax.models.config import DecoderConfig
from harnessrl_jax.models.decoder import Decoder, Remat
from harnessrl_jax.models.mlp import ExpertUnits

Params = dict[str, Any]
Activation = Literal["hidden", "gate", "up", "heads", "residual", "experts"]
"""A quantity of every layer that `row_hidden` can return."""


def init_params(config: DecoderConfig, key: Key[Array, ""]) -> Params:
    """Random f32 parameters of a decoder.

    Args:
      config: sizes.
      key: consumed.

    Returns:
      A plain nested dict: `embed/embedding`, `layers_{i}/attn/{q,k,v,o}/kernel` (and `bias`), `layers_{i}/attn/sinks`,
      `layers_{i}/attn/{q_norm,k_norm}/scale`, `layers_{i}/mlp/{gate,up,down}/kernel`, or `layers_{i}/experts/` with
      `{router,gate,up,down}/kernel` (and `bias`), `layers_{i}/{input_norm,post_norm}/scale`, `final_norm/scale` and,
      without tied embeddings, `lm_head/kernel`: those of the configuration's features. Kernels are [in, out], those of
      experts [expert, in, out].
    """
    one = jnp.zeros(1, jnp.int32)
    variables: Any = Decoder(config).init(key, one, one, row_mask(one + 1))
    return variables["params"]


def row_hidden(
    config: DecoderConfig,
    params: Params,
    token: Int[Array, " slot"],
    position: Int[Array, " slot"],
    subtree_end: Int[Array, " slot"],
    *,
    implementation: Implementation | None = None,
    block: int | None = None,
    remat: Remat = "none",
    collect: Activation | None = None,
    experts: Int[Array, "slot layer active"] | None = None,
) -> tuple[Float[Array, "slot hidden"], tuple[Any, ...]]:
    """Normed hidden states of one packed row of prefix trees.

    Args:
      config: sizes.
      params: as from `init_params`.
      token: token ids; anything valid on padding.
      position: depth of each slot in its tree.
      subtree_end: one past the last descendant of each slot; own index + 1 on padding.
      implementation: which attention computes it; None takes that of the platform.
      block: slots a side of a tile of attention; divides the row, or is at least as long. None takes what suits the
        implementation.
      remat: what of the layers the backward pass computes again.
      collect: the activation of every layer to return too: the input of the MLP's down projection ("hidden"), what
        its gate and up projections give, the input of the attention's output projection ("heads"), the layer's
        output ("residual"), or the experts that each slot chose ("experts").
      experts: the experts of each slot and layer, as the sampler recorded them, so that the row is computed by those
        that sampled it; valid numbers on padding too. None: the router chooses.

    Returns:
      The hidden states, and per layer the activation [slot, channel] (empty unless asked for); what the MLP would give
      comes from every expert as `ExpertUnits`.

    Raises:
      ModelError: a dense decoder is asked for experts, or `experts` has another shape.
    """
    if collect == "experts" and config.experts is None:
        raise ModelError("row_hidden: asked for experts, but the configuration has none. Leave them out.")
    mask = row_mask(subtree_end)
    implementation = implementation or default_implementation()
    windows = {config.window(i) for i in range(config.layers)}
    made = {w: plan_for(mask, window=w, implementation=implementation, block=block) for w in windows}
    plans = {window: plan for window, plan in made.items() if plan is not None}
    decoder = Decoder(config, implementation, remat)
    kept = [collect] if collect else []
    result: Any = decoder.apply({"params": params}, token, position, mask, plans, experts, method="row", mutable=kept)
    hidden, sown = result
    return hidden, collected(config, sown, collect)


def collected(config: DecoderConfig, sown: Any, collect: Activation | None) -> tuple[Any, ...]:
    """The activation of every layer, from the collections that `Decoder.row` has sown; empty without one."""
    whole = lambda node: isinstance(node, ExpertUnits)
    layers = range(config.layers if collect else 0)
    return tuple(jax.tree.leaves(sown[collect][f"layers_{i}"], is_leaf=whole)[0] for i in layers)


def logits(config: DecoderConfig, params: Params, hidden: Float[Array, "*axes hidden"]) -> Float[Array, "*axes vocab"]:
    """Logits of the next token, at least f32, for hidden states as `row_hidden` and `extend` return them."""
    scores: Any = Decoder(config).apply({"params": params}, hidden, method="logits")
    return scores.astype(jnp.promote_types(scores.dtype, jnp.float32))


def target_logps(
    config: DecoderConfig,
    params: Params,
    hidden: Float[Array, "slot hidden"],
    source: Int[Array, " target"],
    target: Int[Array, " target"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    chunk: int = 512,
) -> tuple[Float[Array, " target"], Float[Array, " target"]]:
    """Log-probability and entropy of the distribution that each target was drawn from.

        logp = log softmax(logits(hidden[source]) / temperature)[target]

    Only the slots that predict a target are projected, `chunk` at a time; with more than one chunk the backward pass
    projects them again. So nothing of size [slot, vocab] or [target, vocab] exists, forward or backward.

    Args:
      config: sizes.
      params: as from `init_params`.
      hidden: as `row_hidden` returns it.
      source: slot that predicts each target. Padding may name any slot.
      target: token id. Padding may name any id.
      temperature: divides the logits; above 0.
      chunk: targets projected at once.

    Returns:
      Log-probabilities, and entropies of the whole distributions, both in nats and f32.
    """
    return picked_logps(config, params, hidden[source], target, temperature=temperature, chunk=chunk)


def picked_logps(
    config: DecoderConfig,
    params: Params,
    picked: Float[Array, "target hidden"],
    target: Int[Array, " target"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    chunk: int = 512,
) -> tuple[Float[Array, " target"], Float[Array, " target"]]:
    """`target_logps` of hidden states that are already those of each target's source."""
    count = target.shape[0]
    if count <= chunk:
        return _chunk_logps(config, params, picked, target, temperature)
    padding = -count % chunk
    picked = jnp.pad(picked, ((0, padding), (0, 0))).reshape(-1, chunk, picked.shape[-1])
    targets = jnp.pad(target, (0, padding)).reshape(-1, chunk)
    one = jax.checkpoint(lambda part: _chunk_logps(config, params, part[0], part[1], temperature))
    logp, entropy = jax.lax.map(one, (picked, targets))
    return logp.reshape(-1)[:count], entropy.reshape(-1)[:count]


def _chunk_logps(
    config: DecoderConfig, params: Params, picked: Array, target: Array, temperature: float | Array
) -> tuple[Array, Array]:
    scores = logits(config, params, picked) / temperature
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1)
    log_total = jnp.log(total) + top[:, 0]
    # A comparison instead of a gather: it works the same when the vocabulary axis is sharded.
    chosen = jnp.where(jnp.arange(config.vocab_size)[None, :] == target[:, None], scores, 0.0).sum(-1)
    return chosen - log_total, log_total - (weights * scores).sum(-1) / total
