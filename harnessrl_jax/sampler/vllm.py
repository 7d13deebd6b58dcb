"""vLLM, on GPUs or TPUs, as a sampler: prompt ids in; sampled ids and their log-probabilities out. No JAX.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL_FOLDER --logprobs-mode processed_logprobs

The development mode has the endpoints that load weights: bind such a server to a loopback or private address. Grammars
need `--structured-outputs-config '{"backend": "guidance"}'`.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np

from harnessrl_jax.errors import WishError
from harnessrl_jax.sampler.protocol import Sample, SampleRequest
from harnessrl_jax.sampler.remote import Json, check_count
from harnessrl_jax.trajectories.records import LogpKind

UNCUT = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
RAW = LogpKind(mode="raw", temperature=1.0, top_p=1.0, top_k=0)


class VLLM:
    """The wire of vLLM's completions endpoint (`return_token_ids`, since 0.10.2).

    Args:
      model: the name under which the server serves.
      logprobs: what the server was started with as `--logprobs-mode`: `processed` log-probabilities are those of what
        was left to sample from, `raw` ones the model's own, which training can use at temperature 1 only.
    """

    path = "/v1/completions"
    swapping = "Start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment."

    def __init__(self, model: str | Path, *, logprobs: Literal["raw", "processed"] = "processed") -> None:
        self._model = str(model)
        self._logprobs = logprobs

    def body(self, request: SampleRequest) -> Json:
        """The request; everything is given, because the server's defaults come from the model folder."""
        if request.banned_ids:
            raise WishError(f"Request {request.request_id!r}: vLLM cannot ban token ids. Leave out banned_ids.")
        grammar = {"structured_outputs": {"grammar": request.grammar}} if request.grammar else {}
        return grammar | {
            "model": self._model,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "min_p": request.min_p,
            "seed": request.seed % 2**63,  # signed on the other side
            "stop": list(request.stop),
            "stop_token_ids": list(request.stop_ids),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 0,  # of the sampled token alone
            "return_token_ids": True,
        }

    def sample(self, reply: Any, request: SampleRequest, version: int) -> Sample:
        """The one choice."""
        (choice,) = reply["choices"]
        check_count(choice["token_ids"], reply["usage"]["completion_tokens"])
        ids = np.asarray(choice["token_ids"], np.int32)
        logps = np.asarray(choice["logprobs"]["token_logprobs"], np.float32)
        finish = choice["finish_reason"]
        if finish not in ("stop", "length"):
            raise ValueError(f"finish_reason {finish!r}")
        kind = self._kind(request)
        return Sample(
            output_ids=ids,
            logps=None if kind is None else logps,
            logp_kind=kind,
            versions=np.full(len(ids), version, np.int32),
            finish=finish,
            raw_logps=logps if self._logprobs == "raw" else None,
        )

    def _kind(self, request: SampleRequest) -> LogpKind | None:
        """What the server's log-probabilities say of how a token was drawn; None if nothing."""
        cut = {"top_p": request.top_p, "top_k": request.top_k, "min_p": request.min_p}
        if request.temperature == 0.0:  # a choice, not a draw
            return RAW if self._logprobs == "raw" else None
        whole = request.temperature == 1.0 and cut == UNCUT and not request.grammar
        if self._logprobs == "raw" and not whole:
            return None
        return LogpKind(mode="processed", temperature=request.temperature, **cut)

    def swap(self, folder: str, version: int) -> list[tuple[str, Json]]:
        """Loads a checkpoint in place, then drops the prefix cache that the old weights filled."""
        load = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        return [("/collective_rpc", load), ("/reset_prefix_cache", {})]

    def abort(self, request: SampleRequest) -> None:
        """The server ends a request whose connection is closed."""
