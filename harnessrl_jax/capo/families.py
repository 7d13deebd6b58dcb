"""Sizes or parameters of a model -> the unit map of one family of units."""

import jax
from jaxtyping import PyTree

from harnessrl_jax.capo.units import UnitMap, UnitSlice, Whole, leaf_name


def decoder_units(layers: int, *, include_gate: bool) -> UnitMap:
    """The MLP neurons of `models.Decoder`: columns of `gate` and `up`, rows of `down` (kernels are stored [in, out]).

    Args:
      layers: number of decoder layers.
      include_gate: whether a neuron owns its gate column too; False leaves the gate ungated.
    """
    columns = ("gate", "up") if include_gate else ("up",)
    slices = [UnitSlice(f"layers_{{layer}}/mlp/{name}/kernel", 1) for name in columns]
    return UnitMap(layers, (*slices, UnitSlice("layers_{layer}/mlp/down/kernel", 0)))


def expert_units(layers: int, *, include_gate: bool, bias: bool) -> UnitMap:
    """The neurons of every expert of `models.Mixture`; unit e · (neurons of an expert) + j is neuron j of expert e.

    A neuron owns its columns of its expert's `gate` and `up`, their bias entries, and its row of `down`. The router and
    the bias of `down` are ungated. Experts see different tokens: a `Capo.min_tokens` of 32 keeps neurons out of a
    partition whose expert has hardly been asked.

    Args:
      layers: number of decoder layers.
      include_gate: whether a neuron owns its gate column too; False leaves the gate ungated.
      bias: whether `gate` and `up` have one (`Experts.form` "clamped").
    """
    columns, name = ("gate", "up") if include_gate else ("up",), "layers_{layer}/experts/"
    kernels = [UnitSlice(f"{name}{part}/kernel", 2, expert_axis=0) for part in columns]
    biases = [UnitSlice(f"{name}{part}/bias", 1, expert_axis=0) for part in columns if bias]
    return UnitMap(layers, (*kernels, *biases, UnitSlice(f"{name}down/kernel", 1, expert_axis=0)))


def head_units(layers: int, *, heads: int, kv_heads: int, head_dim: int, bias: bool) -> UnitMap:
    """The key-value heads of `models.Decoder`, each with the query heads that read it.

    A unit owns its channels of `q`, `k` and `v` (and of their biases) and the rows of `o` that read them. Query heads
    that share a key-value head cannot be told apart by their gradients of `k` and `v`, hence one unit for all of them.

    Args:
      layers: number of decoder layers.
      heads: query heads.
      kv_heads: key-value heads; divides `heads`.
      head_dim: channels of a head.
      bias: whether `q`, `k` and `v` have one.
    """
    group = heads // kv_heads * head_dim
    widths = {"q": group, "k": head_dim, "v": head_dim}
    name = "layers_{layer}/attn/"
    kernels = [UnitSlice(f"{name}{part}/kernel", 1, width=width) for part, width in widths.items()]
    biases = [UnitSlice(f"{name}{part}/bias", 0, width=width) for part, width in widths.items() if bias]
    return UnitMap(layers, (*kernels, *biases, UnitSlice(f"{name}o/kernel", 0, width=group)))


def layer_units(params: PyTree, layers: int) -> UnitMap:
    """Whole layers of `models.Decoder`: unit j owns every parameter under `layers_j`. The map has one layer of units.

    Args:
      params: the parameters, or their shapes.
      layers: number of decoder layers.
    """
    return _owners(params, [f"layers_{layer}/" for layer in range(layers)])


def adapter_units(adapters: PyTree) -> UnitMap:
    """Two adapters {"action": ..., "args": ...} as two units: a partition that gives each role its own adapter.

    With the fixed partition [[[True, False]], [[False, True]]] each role's loss trains its own adapter and no other.
    """
    return _owners(adapters, ["action/", "args/"])


def lora_units(layers: int, *, include_gate: bool) -> UnitMap:
    """The MLP neurons of a decoder whose MLP kernels have adapters (`models.init_adapters`), by their outer factors.

    A neuron owns its column of B of `gate` and `up`, and its row of A of `down`. The inner factors are ungated.

    Args:
      layers: number of decoder layers.
      include_gate: whether a neuron owns its column of the gate's B too.
    """
    columns = ("gate", "up") if include_gate else ("up",)
    slices = [UnitSlice(f"layers_{{layer}}/mlp/{name}/kernel/b", 1) for name in columns]
    return UnitMap(layers, (*slices, UnitSlice("layers_{layer}/mlp/down/kernel/a", 0)))


def _owners(params: PyTree, prefixes: list[str]) -> UnitMap:
    names = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return UnitMap(
        1,
        tuple(
            Whole(name, unit, len(prefixes))
            for unit, prefix in enumerate(prefixes)
            for name in names
            if name.startswith(prefix)
        ),
    )
