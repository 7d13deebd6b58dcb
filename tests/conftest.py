"""A strict house: eight virtual devices, no silent rank promotion, reproducible property tests."""

import os
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C, and so would every process that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

collect_ignore = ["tunix"]  # a root of its own, with another environment: see docs/guides/compose.md

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_ignore_collect(collection_path):
    """Programs beside the tests (benchmarks, workers, generators) stay unread; doctests would import every file."""
    return True if collection_path.suffix == ".py" and not collection_path.name.startswith("test_") else None


hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50, database=None)
hypothesis.settings.load_profile("ci")
