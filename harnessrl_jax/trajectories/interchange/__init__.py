"""Records <-> what other programs read: lines of JSON, loss-free, and Harbor's ATIF, where losses are counted."""

from harnessrl_jax.trajectories.interchange.atif_export import Exported, to_atif
from harnessrl_jax.trajectories.interchange.atif_import import Imported, Origin, from_atif
from harnessrl_jax.trajectories.interchange.heard import heard
from harnessrl_jax.trajectories.interchange.json_lines import KeptCall, Records, from_lines, kept, to_lines

__all__ = [
    "Exported",
    "Imported",
    "KeptCall",
    "Origin",
    "Records",
    "from_atif",
    "from_lines",
    "heard",
    "kept",
    "to_atif",
    "to_lines",
]
