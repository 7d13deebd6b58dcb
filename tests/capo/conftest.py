"""Two gated MLPs with mixing between tokens, and one loss a role over them: small enough for float64 differences."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harnessrl_jax.capo import UnitMap, decoder_units

TOKENS, HIDDEN, UNITS, LAYERS = 6, 4, 8, 2


class Toy(NamedTuple):
    params: dict
    unit_map: UnitMap
    losses: object  # params -> ([2], None)
    units: np.ndarray  # [role, layer, unit]: every one of the four sets is present


def _params(rng):
    normal = lambda *shape: rng.normal(size=shape) * shape[0] ** -0.5
    mlp = lambda: {
        "gate": {"kernel": normal(HIDDEN, UNITS)},
        "up": {"kernel": normal(HIDDEN, UNITS)},
        "down": {"kernel": normal(UNITS, HIDDEN)},
    }
    return {"mix": normal(HIDDEN, HIDDEN)} | {f"layers_{i}": {"mlp": mlp()} for i in range(LAYERS)}


@pytest.fixture(scope="session")
def toy():
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(TOKENS, HIDDEN)), rng.normal(size=(2, TOKENS))

    def losses(params):
        y = jnp.asarray(x)
        for layer in (params[f"layers_{i}"]["mlp"] for i in range(LAYERS)):
            y = y + jnp.cumsum(y, axis=0) @ params["mix"] / TOKENS
            y = y + (jax.nn.silu(y @ layer["gate"]["kernel"]) * (y @ layer["up"]["kernel"])) @ layer["down"]["kernel"]
        return jnp.asarray(weight) @ jnp.tanh(y).sum(-1), None

    units = np.zeros((2, LAYERS, UNITS), bool)
    units[0, :, [0, 1, 2]], units[1, :, [2, 3, 4]] = True, True
    units[:, 1] = np.roll(units[:, 1], 2, axis=-1)
    return Toy(_params(rng), decoder_units(LAYERS, include_gate=True), losses, units)
