"""How XLA should compile an optimiser step, where its own choice would waste memory."""

import jax


def step_compiler_options() -> dict[str, str]:
    """Options for `jax.jit(step, compiler_options=...)` on the default backend.

    On CPU, XLA orders operations for concurrency and drops the barriers that hold a recomputed layer back until the
    backward pass reaches it: all layers are recomputed at once, and rematerialisation saves nothing. Ordered for
    memory, a step needs a sixth to a half less in the same time (docs/results/capo_cost.md). Other backends do that
    anyway.
    """
    if jax.default_backend() != "cpu":
        return {}
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
