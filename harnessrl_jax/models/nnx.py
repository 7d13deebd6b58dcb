"""Our decoder as a Flax nnx module, and any nnx module as parameters and a pure function."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from harnessrl_jax.models.config import DecoderConfig
from harnessrl_jax.models.rows import Params, logits, row_hidden


class DecoderModule(nnx.Module):
    """The decoder for code that is written with nnx: its optimisers, `nnx.grad` and `nnx.split` see every parameter.

    Args:
      config: sizes.
      params: as from `init_params`; `params()` gives them back, with whatever was changed.
    """

    def __init__(self, config: DecoderConfig, params: Params) -> None:
        self.config = config
        self.weights = nnx.data(jax.tree.map(nnx.Param, params))

    def params(self) -> Params:
        """The present parameters as a plain nested dict."""
        return jax.tree.map(lambda leaf: leaf[...], self.weights, is_leaf=lambda leaf: isinstance(leaf, nnx.Param))

    def __call__(
        self, token: Int[Array, " slot"], position: Int[Array, " slot"], subtree_end: Int[Array, " slot"]
    ) -> Float[Array, "slot vocab"]:
        """Logits of every slot of one packed row: small inputs only. Train on `target_logps` with `params()`."""
        params = self.params()
        return logits(self.config, params, row_hidden(self.config, params, token, position, subtree_end)[0])


def pure(module: nnx.Module) -> tuple[PyTree, Callable[..., Any]]:
    """An nnx module -> its parameters, and a function (parameters, *arguments) -> what the module returns.

    The parameters are a nested dict of arrays, which everything in this package can train, shard and keep. Other state
    of the module, such as statistics, stays as it is now.
    """
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def apply(params: PyTree, *arguments: Any, **options: Any) -> Any:
        merged: Any = nnx.merge(graph, nnx.State(params), rest)
        return merged(*arguments, **options)

    return nnx.to_pure_dict(params), apply
