"""Sample requests -> sampled tokens: the protocol, the engine over our decoder, and the driver that keeps it busy.

The protocol imports without JAX; the other names load JAX on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from harnessrl_jax.sampler.protocol import Sample, Sampler, SampleRequest

if TYPE_CHECKING:
    from harnessrl_jax.sampler.driver import LocalSampler
    from harnessrl_jax.sampler.engine import Engine

_LAZY = {"Engine": "engine", "LocalSampler": "driver"}

__all__ = ["Engine", "LocalSampler", "Sample", "SampleRequest", "Sampler"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its names are {', '.join(__all__)}")
