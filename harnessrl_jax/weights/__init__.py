"""Model files <-> our configuration and parameters: folders in Hugging Face layout, and GGUF files."""

from harnessrl_jax.weights.folder import load_model, save_model
from harnessrl_jax.weights.layout import Entry, entries

__all__ = ["Entry", "entries", "load_model", "save_model"]
