"""Shapes of a training step -> FLOPs, bytes on the fullest device and seconds at a chip's peak, before anything runs.

Parameters and optimiser are counted leaf by leaf from their shapes and shardings, so they are exact. Activations are a
count of the arrays that the backward pass keeps. `tests/training/test_cost_model.py` holds both against XLA's own
`cost_analysis` and `memory_analysis` of the compiled step.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
from jaxtyping import PyTree

from harnessrl_jax.attention import Implementation
from harnessrl_jax.models import DecoderConfig, Remat, init_cache
from harnessrl_jax.training.chips import Chip
from harnessrl_jax.training.state import TrainState

HEAD_CHUNK = 512
"""Targets whose logits exist together, as in `models.picked_logps`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What one step computes."""

    rows: int
    """Filled rows."""
    micro_rows: int
    """Rows whose activations are in memory together, on all devices."""
    slots: int
    """Unique tokens of a row, padding included."""
    targets: int
    """Of a row."""
    pairs: float
    """Computed (query, key) pairs of a row: `slots` squared for dense attention."""
    roles: int
    """Gradients that are kept apart; 1 without CAPO or with its fused form."""
    cotangents: int
    """Cotangents that flow through the layers; more than `roles` in CAPO's fused form."""
    extra_forwards: int
    """Forward passes beside the one that is differentiated, such as for the ratios of whole calls."""
    implementation: Implementation
    remat: Remat


class Flops(NamedTuple):
    """Floating-point operations of one step, a multiply and an add apart; elementwise ones are left out."""

    layers: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)


class Memory(NamedTuple):
    """Bytes on one device of the mesh."""

    parameters: float
    optimiser: float
    gradients: float
    """The running sum, one micro-batch's own, and what the update makes of them beyond the place of the activations."""
    activations: float
    """Of one micro-batch, for the backward pass."""
    logits: float
    """Of one chunk of targets, forward and backward."""

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)


class Sampler(NamedTuple):
    """Bytes of the sampler, all on one device."""

    parameters: float
    cache: float

    @property
    def total(self) -> float:
        """Both."""
        return sum(self)


def matrix_sizes(params: PyTree) -> tuple[int, int, int]:
    """Entries of the matrices every token passes in the layers, of those only that `down` holds, and of the head.

    Args:
      params: parameters of a `models.Decoder`, or their shapes.
    """
    layers = down = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if leaf.ndim > 1 and name.startswith("layers_"):
            layers += leaf.size
            down += leaf.size if "/down/" in name else 0
    return layers, down, params["embed"]["embedding"].size


def step_flops(config: DecoderConfig, params: PyTree, work: Work) -> Flops:
    """FLOPs of one optimiser step over all devices.

    A matrix costs 2 FLOPs an entry and token forward, 2 for the cotangent of its input and 2 for its own gradient.
    Attention costs 4 FLOPs a pair and channel forward; backward 8, or 10 where scores are computed again (all but
    dense). Remat computes a layer again up to what its backward pass needs: not the last projection, and not attention
    where its output is kept.
    """
    layers, down, head = matrix_sizes(params)
    tokens, pairs, targets = (work.rows * each for each in (work.slots, work.pairs, work.targets))
    forwards = 1 + work.extra_forwards
    again = 2 * (layers - down) if work.remat in ("attention", "full") else 0
    backward = 2 * layers * work.cotangents + 2 * layers * work.roles
    channels = pairs * config.heads * config.head_dim * config.layers
    back_pairs = 8 if work.implementation == "dense" else 10
    # Dense attention keeps no log-sum-exp, so its weights are computed again wherever the layer is.
    weights_again = 2 if work.implementation == "dense" else 0
    attention_again = {"none": 0, "dots": weights_again, "attention": weights_again, "full": 4}[work.remat]
    chunked = work.targets > HEAD_CHUNK
    return Flops(
        layers=tokens * (2 * layers * forwards + again + backward),
        attention=channels * (4 * forwards + attention_again + back_pairs * work.cotangents),
        head=targets * head * (2 * (forwards + chunked) + 4 * work.roles),
    )


def device_bytes(shapes: PyTree, shardings: PyTree) -> int:
    """Bytes of a tree of arrays on one device, exact."""
    size = lambda leaf, sharding: math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return sum(jax.tree.leaves(jax.tree.map(size, shapes, shardings)))


def step_memory(config: DecoderConfig, state: TrainState, shardings: TrainState, work: Work) -> Memory:
    """Bytes of one optimiser step on a device.

    Args:
      config: sizes.
      state: shapes of the state, from `jax.eval_shape`.
      shardings: `state_shardings` of it, on a mesh or a `jax.sharding.AbstractMesh`.
      work: the step.
    """
    sizes = jax.tree.leaves(shardings)[0].mesh.shape
    params = device_bytes(state.params, shardings.params)
    itemsize = jax.tree.leaves(state.params)[0].dtype.itemsize
    rows = work.micro_rows / (sizes["data"] * sizes["fsdp"])
    wide = params / itemsize * max(4, itemsize)
    targets = min(work.targets, HEAD_CHUNK)
    activations = rows * row_activations(config, work, sizes["tensor"], sizes["context"]) * itemsize
    logits = rows * LOGITS * targets / sizes["context"] * config.vocab_size / sizes["tensor"] * 4
    # The update makes another gradient when the activations are gone.
    more = max(0.0, wide - activations - logits)
    return Memory(
        parameters=params,
        optimiser=device_bytes(state.opt_state, shardings.opt_state),
        gradients=work.roles * (wide + params) + more,
        activations=activations,
        logits=logits,
    )


LOGITS = 3
"""Arrays [target, vocab] that are alive together: the scores, their exponentials, and the cotangent of the scores."""


def row_activations(config: DecoderConfig, work: Work, tensor: int, context: int) -> float:
    """Numbers that a device keeps of one row from the forward to the backward pass, and while one layer goes back.

    With remat this holds for a compiler that computes one layer again at a time. XLA for CPU does so only with
    `step_compiler_options`; with its own order no recomputation saves memory. docs/results/performance.md compares the
    forecast with the compiler.
    """
    slots, hidden = work.slots / context, config.hidden_size
    q, kv = (heads * config.head_dim / tensor for heads in (config.heads, config.kv_heads))
    units = config.mlp_size * (config.experts.count if config.experts else 1) / tensor
    score = work.slots * config.heads / tensor if work.implementation == "dense" else 0
    # Residual stream twice and both normed inputs; queries, keys, values and the mix; gate, up and their product;
    # scores and weights.
    layer = 4 * hidden + 2 * q + 2 * kv + 3 * units + 2 * score
    match work.remat:
        case "none":  # the activation function's derivative and the exponentials too
            kept = layer = layer + units + score
        case "dots":  # the layer's input, and the outputs of all products but `down`, which nothing reads again
            kept = 2 * hidden + 2 * q + 2 * kv + 2 * units
        case "attention":
            kept = hidden + q
        case "full":  # the mix is computed again, and for it the exponentials
            kept, layer = hidden, layer + score
    cotangents = work.cotangents * (hidden + 2 * units)  # of the MLP, where they are most
    return slots * (config.layers * kept + layer - kept + cotangents)


def sampler_memory(config: DecoderConfig, params: PyTree, cached_tokens: int) -> Sampler:
    """Bytes of the sampler: a whole copy of the parameters, and what `models.init_cache` keeps of its tokens."""
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    token = jax.tree.leaves(jax.eval_shape(lambda: init_cache(config, 1, 1)))
    return Sampler(whole, cached_tokens * sum(leaf.size * leaf.dtype.itemsize for leaf in token))


class Seconds(NamedTuple):
    """Least time of one step: no run is faster. What overlaps depends on the compiler."""

    compute: float
    communication: float


def step_seconds(config: DecoderConfig, params: PyTree, work: Work, sizes: dict[str, int], chip: Chip) -> Seconds:
    """Seconds of one step at the peak of every chip and link.

    Parameters are gathered over `fsdp` forward and backward, gradients reduced over `fsdp` and `data`, in every
    micro-batch; the layers' outputs are summed over `tensor`; keys and values are gathered over `context`.
    """
    leaf = jax.tree.leaves(params)[0]
    rate = chip.bfloat16 if leaf.dtype.itemsize == 2 else chip.float32
    devices = math.prod(sizes.values())
    share = {axis: (size - 1) / size for axis, size in sizes.items()}
    micro_batches = math.ceil(work.rows / work.micro_rows)
    held = sum(leaf.size for leaf in jax.tree.leaves(params)) * leaf.dtype.itemsize / sizes["tensor"]
    of_params = held * share["fsdp"] * (2 + work.roles) + 2 * held / sizes["fsdp"] * share["data"] * work.roles
    slots = work.micro_rows * work.slots / (sizes["data"] * sizes["fsdp"] * sizes["context"]) * leaf.dtype.itemsize
    again = work.remat in ("attention", "full")
    sums = (2 + 2 * work.cotangents + again) * 2 * slots * config.hidden_size * share["tensor"]
    keys = 2 * config.kv_heads * config.head_dim / sizes["tensor"]
    gathers = (1 + again + work.cotangents) * slots * sizes["context"] * keys * share["context"]
    moved = micro_batches * (of_params + config.layers * (sums + gathers))
    return Seconds(step_flops(config, params, work).total / devices / rate, moved / (chip.link / 2))
