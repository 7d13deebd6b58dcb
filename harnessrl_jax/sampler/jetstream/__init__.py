"""Our engine under JetStream's own orchestrator and gRPC server, in a process of its own, and the Sampler that asks it.

    python -m harnessrl_jax.sampler.jetstream serve MODEL_FOLDER --port 9000
    echo '{"prompt_ids": [1, 5, 9], "max_tokens": 8}' | python -m harnessrl_jax.sampler.jetstream ask localhost:9000

Needs the extra `[jetstream]` (google-jetstream 0.2.2, which brings TensorFlow: seconds to import, hence only inside
functions). What it samples is what `LocalSampler` samples, log-probabilities and versions included.
"""
