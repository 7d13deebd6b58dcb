"""Reinforcement learning of language models through the agent harness they are deployed in.

Importing the package loads nothing heavy; each part is imported on first use.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harnessrl_jax import attention, capo, losses, models, training, trajectories

__version__ = "0.1.0"

__all__ = ["__version__", "attention", "capo", "losses", "models", "training", "trajectories"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its parts are {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
