"""What accelerators can do, by their vendors' figures."""

from typing import Literal, NamedTuple

ChipName = Literal["v4", "v5e", "v5p", "v6e", "h100", "h200", "cpu"]


class Chip(NamedTuple):
    """One chip, as JAX counts devices (both cores of a v4 or v5p together)."""

    bfloat16: float
    """Dense bfloat16 matrix FLOP/s at the peak."""
    float32: float
    """FLOP/s of a float32 matrix product at JAX's default precision: one bfloat16 pass on TPU, TF32 on GPU."""
    memory: float | None
    """Bytes; None where it is whatever the machine has."""
    link: float
    """Bytes per second to other chips, both directions together."""


# TPU: https://cloud.google.com/tpu/docs/v4, /v5e, /v5p and /v6e ("HBM capacity", "Peak compute per chip (bf16)",
# "Interchip interconnect"). GPU: NVIDIA's data sheets of the H100 SXM and the H200 SXM, without sparsity, NVLink.
# CPU: one AMD Zen 3 core; 80 GFLOP/s was measured on large float32 products with XLA and with NumPy.
CHIPS: dict[ChipName, Chip] = {
    "v4": Chip(275e12, 275e12, 32 * 2**30, 300e9),
    "v5e": Chip(197e12, 197e12, 16e9, 400e9),
    "v5p": Chip(459e12, 459e12, 95e9, 1200e9),
    "v6e": Chip(918e12, 918e12, 32e9, 800e9),
    "h100": Chip(989e12, 495e12, 80e9, 900e9),
    "h200": Chip(989e12, 495e12, 141e9, 900e9),
    "cpu": Chip(80e9, 80e9, None, 10e9),
}
