"""TOML text and `--section.key value` overrides -> one frozen Config.

The reader is strict: an unknown key, a wrong type or an impossible value is a ConfigError that names the place, what
was given and what was wanted. Units stand in the field names or beside them.
"""

from harnessrl_jax.config.algorithm import Policy, Supervised
from harnessrl_jax.config.reading import load, parse, to_toml
from harnessrl_jax.config.sampler import HTTPServer, InProcess, JetStreamProcess, SGLangServer, VLLMServer
from harnessrl_jax.config.section import Section
from harnessrl_jax.config.sections import (
    Behaviour,
    Checkpoint,
    Credit,
    Evaluation,
    Harness,
    Mesh,
    Model,
    Optimizer,
    Packing,
    Rollouts,
    Task,
    ToolCalls,
)
from harnessrl_jax.config.whole import Config

__all__ = [
    "Behaviour",
    "Checkpoint",
    "Config",
    "Credit",
    "Evaluation",
    "HTTPServer",
    "Harness",
    "InProcess",
    "JetStreamProcess",
    "Mesh",
    "Model",
    "Optimizer",
    "Packing",
    "Policy",
    "Rollouts",
    "SGLangServer",
    "Section",
    "Supervised",
    "Task",
    "ToolCalls",
    "VLLMServer",
    "load",
    "parse",
    "to_toml",
]
