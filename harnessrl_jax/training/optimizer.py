"""Plain numbers -> an optax optimiser and its learning-rate schedule."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, PyTree


def learning_rate_schedule(
    *, peak: float, warmup_steps: int, decay: Literal["constant", "cosine"], steps: int, final_fraction: float
) -> optax.Schedule:
    """Linear warm-up to `peak`, reached at update `warmup_steps`, then constant or half a cosine down.

    Args:
      peak: largest learning rate.
      warmup_steps: updates of the warm-up; 0 starts at the peak.
      decay: what follows.
      steps: the update at which the cosine ends; it stays at its end afterwards.
      final_fraction: the cosine ends at this share of the peak.
    """

    def rate(count: ArrayLike) -> Float[Array, ""]:
        done = jnp.asarray(count, jnp.float32) + 1
        warm = jnp.minimum(done / max(warmup_steps, 1), 1.0)
        if decay == "constant":
            return peak * warm
        progress = jnp.clip((done - warmup_steps) / max(steps - warmup_steps, 1), 0.0, 1.0)
        return peak * warm * (final_fraction + (1 - final_fraction) * 0.5 * (1 + jnp.cos(jnp.pi * progress)))

    return rate


def train_only(optimizer: optax.GradientTransformation, where: Callable[[str], bool]) -> optax.GradientTransformation:
    """The optimiser for some parameters; the others keep their bits, whatever their gradients, and have no moments.

    For a critic's warm start: `train_only(optimizer, lambda path: path.startswith("value_head/"))`.

    Args:
      optimizer: sees the parameters that are trained, and their gradients, alone.
      where: whether the parameter of this path ("layers_0/mlp/up/kernel") is trained.
    """

    def labels(params: PyTree) -> PyTree[str]:
        name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
        return jax.tree_util.tree_map_with_path(lambda path, _: "trained" if where(name(path)) else "kept", params)

    # -0.0, because x + -0.0 is x for every x, while -0.0 + 0.0 is 0.0.
    keep = optax.stateless(lambda updates, _: jax.tree.map(lambda leaf: jnp.full_like(leaf, -0.0), updates))
    return optax.partition({"trained": optimizer, "kept": keep}, labels)


def make_optimizer(
    *, learning_rate: float | optax.Schedule, b1: float, b2: float, eps: float, weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm. Only matrices decay: norm scales and biases do not."""

    def matrices(params: PyTree) -> PyTree[Bool[Array, ""]]:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=matrices),
    )
