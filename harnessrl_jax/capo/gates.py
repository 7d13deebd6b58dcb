"""Linear maps whose backward pass lets a role's cotangents into the weights of its own units only: custom VJPs.

The forward pass is the plain one, and so are the cotangents of the inputs: whoever differentiates through these maps
sees the same network. Only the gradient of the weights is gated, and it is gated *before* the product over tokens, so
no role's gradient ever exists on its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float

ROLE_AXIS = "capo_role"
"""Name of the vmapped axis along which the cotangents of the roles lie."""


class RoleGate(NamedTuple):
    """Exact: works in a backward pass that is vmapped over the roles' cotangents under the name ROLE_AXIS.

    What it returns has no role axis any more.
    """

    masks: Bool[Array, "role ..."]

    def admit(self, cotangent: Float[Array, "..."]) -> Float[Array, "..."]:
        """Σ_r M_r ∘ d_r; the masks broadcast from the right."""
        # Not a psum of masked cotangents: XLA would store them, and sum an axis instead of adding two arrays.
        each = zip(self.masks, lax.all_gather(cotangent, ROLE_AXIS), strict=True)
        return sum((jnp.where(_wide(mask, part), part, 0) for mask, part in each), jnp.zeros((), cotangent.dtype))

    def admit_rows(self, hidden: Float[Array, "token unit"], cotangent: Array) -> Float[Array, "unit out"]:
        """Σ_r (h ∘ M_r)ᵀ d_r."""
        each = zip(self.masks, lax.all_gather(cotangent, ROLE_AXIS), strict=True)
        return sum((_product(jnp.where(mask[None, :], hidden, 0), part) for mask, part in each), jnp.zeros(()))


class SlotGate(NamedTuple):
    """Approximate: one backward pass of all roles together, in which each slot stands for some roles.

    A unit takes what arrives at a slot if every role of the slot trains the unit.
    """

    masks: Bool[Array, "role unit"]
    slots: Bool[Array, "role token"]

    def admit(self, cotangent: Float[Array, "token unit"]) -> Float[Array, "token unit"]:
        """W ∘ d, with W the units that each slot may train."""
        return jnp.where(self._trained(), cotangent, 0)

    def admit_rows(self, hidden: Float[Array, "token unit"], cotangent: Array) -> Float[Array, "unit out"]:
        """(h ∘ W)ᵀ d."""
        return _product(jnp.where(self._trained(), hidden, 0), cotangent)

    def _trained(self) -> Bool[Array, "token unit"]:
        return (~self.slots[:, :, None] | self.masks[:, None, :]).all(axis=0)


class Switch(NamedTuple):
    """Everything or nothing."""

    on: Bool[Array, ""]

    def admit(self, cotangent: Array) -> Array:
        """The cotangent, or 0."""
        return jnp.where(_wide(self.on, cotangent), cotangent, 0)


@jax.custom_vjp
def gated(x: Array, gate: RoleGate | SlotGate | Switch) -> Array:
    """The identity; its cotangent goes through the gate."""
    return x


@jax.custom_vjp
def columns(x: Float[Array, "token in"], kernel: Float[Array, "in unit"], gate: RoleGate | SlotGate) -> Array:
    """The product x W, where unit j owns column j: ∇W = xᵀ gate(d)."""
    return x @ kernel


@jax.custom_vjp
def rows(hidden: Float[Array, "token unit"], kernel: Float[Array, "unit out"], gate: RoleGate | SlotGate) -> Array:
    """The product h W, where unit j owns row j: the gate meets h instead of d, because d has no unit axis."""
    return hidden @ kernel


def _columns_backward(saved: tuple, cotangent: Array) -> tuple[Array, Array, None]:
    x, kernel, gate = saved
    return cotangent @ kernel.T, _product(x, gate.admit(cotangent)).astype(kernel.dtype), None


def _rows_backward(saved: tuple, cotangent: Array) -> tuple[Array, Array, None]:
    hidden, kernel, gate = saved
    return cotangent @ kernel.T, gate.admit_rows(hidden, cotangent).astype(kernel.dtype), None


def once_a_role(function: Callable[..., Array], floats: int) -> Callable[..., Array]:
    """The function, with its backward pass run once a role, one after the other, instead of on a role axis.

    For functions without parameters whose cotangents are much smaller than what they compute inside, as attention: a
    role axis would make XLA transpose the large arrays.

    Args:
      function: of arrays; differentiated in its first `floats` arguments.
      floats: how many.
    """

    @jax.custom_vjp
    def call(*arguments: Any) -> Array:
        return function(*arguments)

    def forward(*arguments: Any) -> tuple[Array, tuple[Any, list[None]]]:
        inputs, others = arguments[:floats], arguments[floats:]
        out, pull = jax.vjp(lambda *inputs: function(*inputs, *others), *inputs)
        return out, (pull, [None] * len(others))

    def backward(saved: tuple[Any, list[None]], cotangent: Array) -> tuple[Array | None, ...]:
        pull, nothing = saved
        leaves, structure = jax.tree.flatten(pull)
        apart = _one_after_the_other(lambda cotangent, *leaves: structure.unflatten(leaves)(cotangent))
        return (*apart(cotangent, *leaves), *nothing)

    call.defvjp(forward, backward)
    return call


def _one_after_the_other(pull: Callable[..., tuple[Array, ...]]) -> Callable[..., tuple[Array, ...]]:
    """The pull (cotangent, *saved), unrolled over vmapped axes that only the cotangent has: those of the roles."""

    @custom_vmap
    def call(cotangent: Array, *saved: Array) -> tuple[Array, ...]:
        return pull(cotangent, *saved)

    @call.def_vmap
    def _(size: int, batched: list[bool], cotangent: Array, *saved: Array):
        if any(batched[1:]):
            axes = [0 if each else None for each in batched]
            out = _one_after_the_other(jax.vmap(pull, in_axes=axes))(cotangent, *saved)
        else:
            out = tuple(map(jnp.stack, zip(*(call(cotangent[i], *saved) for i in range(size)), strict=True)))
        return out, (True,) * len(out)

    return call


gated.defvjp(lambda x, gate: (x, gate), lambda gate, cotangent: (gate.admit(cotangent), None))
columns.defvjp(lambda x, kernel, gate: (x @ kernel, (x, kernel, gate)), _columns_backward)
rows.defvjp(lambda hidden, kernel, gate: (hidden @ kernel, (hidden, kernel, gate)), _rows_backward)


def _product(left: Float[Array, "token a"], right: Float[Array, "token b"]) -> Float[Array, "a b"]:
    """leftᵀ right, summed in float32 at least."""
    wide = jnp.promote_types(left.dtype, jnp.float32)
    return lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=wide)


def _wide(mask: Array, like: Array) -> Array:
    """The mask with leading axes of size 1 up to the rank of `like`."""
    return mask.reshape((1,) * (like.ndim - mask.ndim) + mask.shape)
