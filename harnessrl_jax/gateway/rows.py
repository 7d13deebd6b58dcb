"""Call and Rollout records <-> database rows, sealed by a digest. Pure."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from harnessrl_jax.errors import StoreError
from harnessrl_jax.trajectories.records import Call, Rollout

# Columns of their own, not part of the `record` text.
_COLUMNS = ("prompt_ids", "output_ids", "logps", "request")


class CallKey(NamedTuple):
    """Names one row. `life` counts how often the attempt was opened; only its latest life is read."""

    rollout_id: str
    attempt: int
    life: int
    call_id: str


class Intent(NamedTuple):
    """What is known of a call before it is sampled."""

    key: CallKey
    group_id: str
    seq: int
    choice: int
    prompt_ids: Int32[np.ndarray, " p"]
    request: str


class StoredCall(NamedTuple):
    """A call with what the gateway noted about it: effective limits, rewrites, ignored fields."""

    call: Call
    state: str
    notes: Mapping[str, Any]


class CallRow(NamedTuple):
    """A call as it lies in the database; `logps` is NULL where the sampler gave none."""

    call_id: str
    state: str
    record: str
    prompt_ids: bytes
    output_ids: bytes
    logps: bytes | None
    request: str
    notes: str
    digest: str


def pack_call(call: Call) -> tuple[str, bytes, bytes | None, str]:
    """Record, output ids, log-probabilities and digest of a call; its prompt and request are in the row already."""
    record = json.dumps({name: value for name, value in call.to_json().items() if name not in _COLUMNS})
    output = call.output_ids.tobytes()
    logps = None if call.logps is None else call.logps.tobytes()
    return record, output, logps, digest(record, call.prompt_ids.tobytes(), output, logps or b"", call.request)


def unpack_call(row: CallRow, where: str) -> StoredCall:
    """The record of a row.

    Raises:
      StoreError: the row is not what was written.
    """
    if digest(row.record, row.prompt_ids, row.output_ids, row.logps or b"", row.request) != row.digest:
        raise StoreError(
            f"{where}: call {row.call_id!r} does not match its digest; the row was changed or damaged after it was "
            "written. Restore the file from a copy, or delete that row to train without it."
        )
    fields = json.loads(row.record) | {
        "prompt_ids": np.frombuffer(row.prompt_ids, np.int32),
        "output_ids": np.frombuffer(row.output_ids, np.int32),
        "logps": None if row.logps is None else np.frombuffer(row.logps, np.float32),
        "request": row.request,
        "delivered": row.state == "delivered",
    }
    return StoredCall(Call.from_json(fields), row.state, json.loads(row.notes))


def pack_rollout(rollout: Rollout) -> tuple[str, str]:
    """Record and digest of a rollout."""
    record = json.dumps(rollout.to_json())
    return record, digest(record)


def unpack_rollout(record: str, seal: str, where: str) -> Rollout:
    """The record of a row; StoreError if it is not what was written."""
    if digest(record) != seal:
        raise StoreError(
            f"{where}: a rollout does not match its digest; the row was changed or damaged after it was written (it "
            f"begins {record[:80]!r}). Restore the file from a copy."
        )
    return Rollout.from_json(json.loads(record))


def digest(*parts: str | bytes) -> str:
    """SHA-256 over the parts and their lengths, in hexadecimal."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8") if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()
