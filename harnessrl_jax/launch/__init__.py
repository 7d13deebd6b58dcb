"""The commands: `python -m harnessrl_jax.launch`."""
