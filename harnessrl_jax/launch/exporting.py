"""`export`: a call store -> a file of lines, or a folder of ATIF documents; what they cannot say is counted."""

import json
from collections import Counter
from pathlib import Path

from harnessrl_jax.errors import ConfigError
from harnessrl_jax.gateway import Store
from harnessrl_jax.gateway.capture import Reader
from harnessrl_jax.launch.kept import Format, attempts, file_name, locate, report
from harnessrl_jax.trajectories import Call
from harnessrl_jax.trajectories.interchange import heard, to_atif, to_lines

UNANSWERED = ("calls/intent", "calls/lost", "calls/failed", "calls/abandoned", "rollouts/abandoned")


def export(target: Path, model: Path | None, form: Format, out: Path) -> int:
    """Writes the calls of a store: one file of lines, or a folder with one ATIF document for each attempt.

    Raises:
      ConfigError: there is no store, the output exists, or ATIF has no tokenizer to say what was said.
      StoreError: a row cannot be trusted; `doctor` says which.
    """
    kept = locate(target, model)
    if out.exists():
        raise ConfigError(f"{out}: exists already. Give a path that does not.")
    codec = kept.codec() if form == "atif" else None
    if form == "atif" and codec is None:
        raise ConfigError("ATIF shows what was said in words: give the folder of the tokenizer with --model.")
    notes: Counter[str] = Counter()
    with Store(kept.store, read_only=True) as store:
        for name in UNANSWERED:
            if number := store.counts().get(name, 0):
                notes[f"{name.replace('/', ' that are ')}, which have no answer that counts"] += number
        written = _write_lines(store, out) if codec is None else _write_documents(store, Reader(codec), out, notes)
    report(f"{written:,} {'records' if form == 'jsonl' else 'documents'} in {out}", "not carried", notes)
    return 0


def _write_lines(store: Store, out: Path) -> int:
    calls = (item for attempt in attempts(store) for item in attempt.calls)
    part = out.with_suffix(out.suffix + ".part")
    written = -1  # the first line is no record
    with part.open("w", encoding="utf-8") as file:
        for line in to_lines(calls, store.rollouts()):
            file.write(line + "\n")
            written += 1
    part.replace(out)
    return written


def _write_documents(store: Store, reader: Reader, out: Path, notes: Counter[str]) -> int:
    def speak(call: Call) -> str:
        return reader.roles(call.output_ids.tolist(), "length" if call.finish == "length" else "stop").parsed.content

    out.mkdir(parents=True)
    written = 0
    for attempt in attempts(store):
        if not attempt.calls:
            notes["rollouts without a call: ATIF has no trajectory without a step"] += 1
            continue
        document, missing = to_atif(attempt.calls, attempt.rollout, speak=speak, listen=heard)
        (out / f"{file_name(attempt)}.json").write_text(json.dumps(document, allow_nan=False) + "\n", encoding="utf-8")
        notes.update(missing)
        written += 1
    return written
