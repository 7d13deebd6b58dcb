"""`[sampler]`: which engine answers the calls of the policy, and where it runs."""

from typing import Literal
from urllib.parse import urlsplit

import pydantic
from pydantic import Field

from harnessrl_jax.config.section import Section


class InProcess(Section):
    """The engine of this package, in the process of the run."""

    kind: Literal["in_process"] = "in_process"


class Elsewhere(Section):
    """What engines in other processes have in common: weights reach them as folders."""

    weights_dir: str | None = None
    """Where weights are written, one model folder a version; the engine must see it under the same path. Absent:
    `weights` in the run folder."""
    weights_timeout_s: float = Field(default=600.0, gt=0.0)
    """For the engine to load weights; where it serves one version at a time, calls under way end first."""


class HTTPServer(Elsewhere):
    """What engines behind HTTP have in common."""

    url: str
    """Of the server, as in `http://localhost:8000`; without `/v1`."""
    api_key_env: str | None = None
    """Environment variable that holds the server's key; the key itself is never written anywhere."""
    timeout_s: float = Field(default=600.0, gt=0.0)
    """For one call, waiting for its turn included."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "HTTPServer":
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise ValueError(f"url = {self.url!r} is not of the form 'http://HOST:PORT', without a path")
        return self


class VLLMServer(HTTPServer):
    """A running vLLM server."""

    kind: Literal["vllm"]
    model: str
    """The name under which it serves the model: `--served-model-name`, or the path that it was started with."""
    logprobs: Literal["processed", "raw"] = "processed"
    """What it was started with as `--logprobs-mode`."""


class SGLangServer(HTTPServer):
    """A running SGLang or sglang-jax server."""

    kind: Literal["sglang"]


class JetStreamProcess(Elsewhere):
    """The engine of this package under JetStream's server, in a process of its own that takes weights as it samples."""

    kind: Literal["jetstream"]
    address: str | None = None
    """HOST:PORT of one that runs, on this machine or at this end of a tunnel. Absent: the run starts one, which ends
    with it."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "JetStreamProcess":
        host, _, port = (self.address or "localhost:1").rpartition(":")
        if host not in ("localhost", "127.0.0.1", "[::1]") or not port.isdigit():
            raise ValueError(
                f"address = {self.address!r} is not 'localhost:PORT': the process talks to its own machine only; reach "
                "another one through a tunnel, as in `ssh -L 9000:localhost:9000 OTHER`"
            )
        return self
