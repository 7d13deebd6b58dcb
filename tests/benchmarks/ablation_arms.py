"""The arms of the small stage: which gradient reaches which weights, and how a partition is chosen."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from harnessrl_jax.capo import CapoState, Probe, RandomScore, partition

Masks = Literal["all", "raw", "contrast", "entropy", "random", "shuffled", "swapped", "own adapter"]
KAPPAS = (0.1, 0.25, 0.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """What a compiled step depends on; the masks are data."""

    adapters: Literal["none", "two", "one"] = "none"
    """Low-rank adapters of a frozen policy: one for each role, or one of twice the rank for both."""
    ungated: Literal["frozen", "sum"] = "frozen"
    denominator: Literal["role", "shared"] = "role"
    routing: Literal["vjp", "position_local"] = "vjp"
    refresh: int | None = None
    """Steps between two partitions by contrast; None keeps the first."""
    top_fraction: float = 1.0
    """Read by a refresh."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """A form, and the masks it starts with."""

    form: Form
    masks: Masks = "all"
    kappa: float = 1.0


def _grid() -> Mapping[str, Arm]:
    arms = {
        "plain": Arm(form=Form(ungated="sum", denominator="shared")),
        "plain, role means": Arm(form=Form(ungated="sum")),
        "ffn": Arm(form=Form(denominator="shared")),
        "ffn, role means": Arm(form=Form()),
        "two adapters": Arm(form=Form(adapters="two"), masks="own adapter"),
        "one adapter": Arm(form=Form(adapters="one")),
    }
    for masks, kappa, ungated in itertools.product(
        ("raw", "contrast", "entropy", "random", "shuffled", "swapped"), KAPPAS, ("frozen", "sum")
    ):
        arms[f"{masks} {kappa} {ungated}"] = Arm(form=Form(ungated=ungated), masks=masks, kappa=kappa)
    for kappa, ungated in itertools.product(KAPPAS, ("frozen", "sum")):
        local = Form(ungated=ungated, routing="position_local")
        arms[f"local contrast {kappa} {ungated}"] = Arm(form=local, masks="contrast", kappa=kappa)
    for ungated in ("frozen", "sum"):
        renewed = Form(ungated=ungated, refresh=10, top_fraction=0.25)
        arms[f"renewed contrast 0.25 {ungated}"] = Arm(form=renewed, masks="contrast", kappa=0.25)
    return arms


ARMS = _grid()


def masks_of(arm: Arm, probed: CapoState, seed: int) -> Bool[Array, "role layer unit"]:
    """The partition that an arm starts with.

    `shuffled` and `swapped` are the contrast partition with its units permuted (the same permutation for both roles, so
    that all overlaps keep their size), and with its roles exchanged.

    Args:
      arm: the arm.
      probed: a state that holds the statistics of the first batch.
      seed: for the arms that draw.
    """
    key = jax.random.key(seed)
    chosen = lambda score: partition(
        Probe(probed.total, probed.tokens, jnp.zeros(())).mean(),
        jnp.zeros_like(probed.units),
        probed.tokens > 0,
        score=score,
        top_fraction=arm.kappa,
        hysteresis=1.0,
    )
    match arm.masks:
        case "all":
            return jnp.ones_like(probed.units)
        case "own adapter":
            return jnp.array([[[True, False]], [[False, True]]])
        case "random":
            return chosen(RandomScore(seed))
        case "swapped":
            return chosen("contrast")[::-1]
        case "shuffled":
            units, keys = chosen("contrast"), jax.random.split(key, probed.units.shape[1])
            return jnp.stack([jax.random.permutation(k, units[:, i], axis=1) for i, k in enumerate(keys)], axis=1)
        case score:
            return chosen(score)
