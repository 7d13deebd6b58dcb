"""Parameters and low-rank adapters -> adapted parameters: a pure change of parameters, for any model."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from harnessrl_jax.errors import ModelError

Adapters = dict[str, dict[str, Float[Array, "..."]]]
"""Path of a kernel -> its factors {"a": [in, rank], "b": [rank, out]}."""


def init_adapters(params: PyTree, key: Key[Array, ""], *, rank: int, where: Callable[[str], bool]) -> Adapters:
    """Adapters that change nothing yet: `a` is normal with deviation in^-1/2, `b` is 0.

    Args:
      params: the parameters to adapt.
      key: consumed.
      rank: inner size of the factors, at least 1.
      where: whether the kernel of this path ("layers_0/mlp/up/kernel") is adapted.

    Raises:
      ModelError: no parameter was chosen, one that is not a matrix was, or the rank is below 1.

    References:
      Hu et al. 2021, https://arxiv.org/abs/2106.09685
    """
    if rank < 1:
        raise ModelError(f"init_adapters: rank must be at least 1, got {rank}.")
    chosen = {name: leaf for name, leaf in _named(params).items() if where(name)}
    if not chosen:
        raise ModelError(f"init_adapters: `where` chose no parameter of {', '.join(list(_named(params))[:5])}, ...")
    for name, leaf in chosen.items():
        if leaf.ndim != 2:
            raise ModelError(f"init_adapters: {name!r} {list(leaf.shape)} is not a matrix; exclude it in `where`.")
    keys = jax.random.split(key, len(chosen))
    return {
        name: {
            "a": jax.random.normal(each, (leaf.shape[0], rank), leaf.dtype) * leaf.shape[0] ** -0.5,
            "b": jnp.zeros((rank, leaf.shape[1]), leaf.dtype),
        }
        for each, (name, leaf) in zip(keys, chosen.items(), strict=True)
    }


def adapted(params: PyTree, *adapters: Adapters, scale: float) -> PyTree:
    """W + scale Σ A B for every adapter that has the kernel W, in the type of W; other parameters as they are."""

    def change(path: tuple, leaf: Array) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        delta = [each[name]["a"] @ each[name]["b"] for each in adapters if name in each]
        return (leaf + scale * sum(delta)).astype(leaf.dtype) if delta else leaf

    return jax.tree_util.tree_map_with_path(change, params)


def _named(params: PyTree) -> dict[str, Array]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
