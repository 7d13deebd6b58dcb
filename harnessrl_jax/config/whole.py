"""The whole configuration, and what its tables must agree on."""

import pydantic
from pydantic import Field

from harnessrl_jax.config.algorithm import Policy, Supervised
from harnessrl_jax.config.sampler import InProcess, JetStreamProcess, SGLangServer, VLLMServer
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


class Config(Section):
    """Everything a run depends on, apart from the code."""

    name: str
    steps: int = Field(ge=0)
    """Optimiser steps."""
    seed: int = Field(default=0, ge=0)
    model: Model = Model()
    tool_calls: ToolCalls = ToolCalls()
    task: Task = Task()
    harness: Harness = Harness()
    behaviour: Behaviour = Behaviour()
    sampler: InProcess | JetStreamProcess | VLLMServer | SGLangServer = Field(default=InProcess(), discriminator="kind")
    rollouts: Rollouts = Rollouts()
    credit: Credit = Credit()
    algorithm: Policy | Supervised = Field(default=Policy(), discriminator="kind")
    optimizer: Optimizer = Optimizer()
    packing: Packing = Packing()
    mesh: Mesh = Mesh()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    about: str = ""
    """What to tell the user before the run."""
    expected_minutes: float = Field(default=0.0, ge=0.0)
    """How long the run took on the hardware its file names; 0 = nobody has measured it."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "Config":
        if self.algorithm.kind == "policy" and self.behaviour.kind == "expert":
            raise ValueError('an expert reports no log-probabilities: use [algorithm] kind = "supervised" with it')
        behaviour = self.behaviour
        if self.algorithm.kind == "policy" and (
            behaviour.temperature == 0 or behaviour.top_p < 1 or behaviour.top_k > 0
        ):
            raise ValueError(
                "policy gradients need the log-probabilities of the whole distribution: use behaviour.temperature "
                f"above 0, top_p = 1 and top_k = 0; got {behaviour.temperature}, {behaviour.top_p} and "
                f"{behaviour.top_k}"
            )
        if self.algorithm.kind == "policy" and self.sampler.kind == "vllm":
            self._check_vllm(self.sampler)
        if self.algorithm.kind == "supervised" and self.packing.row_slots < behaviour.context_tokens:
            raise ValueError(
                f"packing.row_slots = {self.packing.row_slots} must be at least behaviour.context_tokens = "
                f"{behaviour.context_tokens}, so that every captured call fits a row"
            )
        self._multiple("behaviour.slots", self.behaviour.slots, "behaviour.lanes", self.behaviour.lanes)
        self._multiple("packing.micro_rows", self.packing.micro_rows, "mesh.data x mesh.fsdp", self.mesh.rows)
        self._multiple("packing.max_rows", self.packing.max_rows, "packing.micro_rows", self.packing.micro_rows)
        return self

    def _check_vllm(self, server: VLLMServer) -> None:
        if server.logprobs == "raw" and self.behaviour.temperature != 1:
            raise ValueError(
                "policy gradients need log-probabilities at behaviour.temperature = "
                f"{self.behaviour.temperature}: start vLLM with --logprobs-mode processed_logprobs and use "
                "sampler.logprobs = 'processed'"
            )

    @staticmethod
    def _multiple(name: str, value: int, of: str, unit: int) -> None:
        if value % unit:
            raise ValueError(f"{name} = {value} must be a multiple of {of} = {unit}")
