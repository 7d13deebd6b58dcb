"""Model files <-> our configuration and parameters: folders in Hugging Face layout, and GGUF files."""

from harnessrl_jax.weights.converting import convert_gguf, packaged_gguf
from harnessrl_jax.weights.folder import load_model, save_model
from harnessrl_jax.weights.gguf_tensors import load_gguf
from harnessrl_jax.weights.layout import Entry, entries

__all__ = ["Entry", "convert_gguf", "entries", "load_gguf", "load_model", "packaged_gguf", "save_model"]
