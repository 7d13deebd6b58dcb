"""SGLang and sglang-jax as a sampler: prompt ids in; sampled ids and their log-probabilities out. No JAX.

    python -m sglang.launch_server --model-path MODEL_FOLDER --enable-deterministic-inference

Grammars need `--grammar-backend llguidance`.
"""

from typing import Any

import numpy as np

from harnessrl_jax.errors import WishError
from harnessrl_jax.sampler.protocol import Sample, SampleRequest
from harnessrl_jax.sampler.remote import Json, check_count
from harnessrl_jax.trajectories.records import LogpKind


class SGLang:
    """The wire of SGLang's native endpoint.

    Its log-probabilities are those at the request's temperature over the whole vocabulary, before any cut: what
    training computes.
    """

    path = "/generate"
    swapping = "Use a version of SGLang that can update weights from disk."

    def body(self, request: SampleRequest) -> Json:
        """The request; everything is given, because the server's defaults come from the model folder."""
        if request.banned_ids:
            raise WishError(f"Request {request.request_id!r}: SGLang cannot ban token ids. Leave out banned_ids.")
        grammar = {"ebnf": request.grammar} if request.grammar else {}
        return {
            "rid": request.request_id or None,
            "input_ids": list(request.prompt_ids),
            "return_logprob": True,
            "stream": False,
            "sampling_params": grammar
            | {
                "max_new_tokens": request.max_new_tokens,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": request.top_k or -1,
                "min_p": request.min_p,
                "sampling_seed": (request.seed ^ request.seed >> 32) % 2**31,  # an int32 on the other side
                "stop": list(request.stop),
                "stop_token_ids": list(request.stop_ids),
                "no_stop_trim": True,
                "skip_special_tokens": False,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
            },
        }

    def sample(self, reply: Any, request: SampleRequest, version: int) -> Sample:
        """Ids are taken from beside their log-probabilities, so that the two cannot be out of step."""
        meta = reply["meta_info"]
        finish = meta["finish_reason"]["type"]
        if finish not in ("stop", "length"):
            raise ValueError(f"finish_reason {meta['finish_reason']!r}")
        check_count(meta["output_token_logprobs"], meta["completion_tokens"])
        ids = np.asarray([token for _, token, *_ in meta["output_token_logprobs"]], np.int32)
        logps = np.asarray([logp for logp, *_ in meta["output_token_logprobs"]], np.float32)
        greedy = request.temperature == 0.0
        kind = LogpKind(
            mode="raw" if greedy else "processed", temperature=request.temperature or 1.0, top_p=1.0, top_k=0
        )
        return Sample(
            output_ids=ids,
            logps=logps,
            logp_kind=kind,
            versions=np.full(len(ids), version, np.int32),
            finish=finish,
            raw_logps=logps if greedy or request.temperature == 1.0 else None,
        )

    def swap(self, folder: str, version: int) -> list[tuple[str, Json]]:
        """Loads a checkpoint in place; the prefix cache is dropped with it."""
        body = {"model_path": folder, "flush_cache": True, "weight_version": str(version)}
        return [("/update_weights_from_disk", body)]

    def abort(self, request: SampleRequest) -> tuple[str, Json] | None:
        """By the request's own id, where it has one."""
        return ("/abort_request", {"rid": request.request_id}) if request.request_id else None
