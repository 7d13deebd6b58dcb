"""A store through files and back, and documents of other programs into a store."""

import dataclasses
import json
import sqlite3

import pytest

from harnessrl_jax.gateway import Store
from harnessrl_jax.launch import __main__ as command_line
from harnessrl_jax.launch.doctor import audit
from harnessrl_jax.launch.kept import attempts
from harnessrl_jax.trajectories.interchange import kept, to_lines


def held(path):
    with Store(path, read_only=True) as store:
        return list(attempts(store))


@pytest.mark.parametrize("form", ["jsonl", "atif"])
def test_a_store_through_files_and_back(tmp_path, store_path, model, form, capsys):
    out, back = tmp_path / "out", tmp_path / "back.sqlite"
    assert command_line.main(["export", str(store_path), str(out), "--format", form, "--model", str(model)]) == 0
    shown = capsys.readouterr().out
    assert "1 calls that are intent, which have no answer that counts" in shown
    assert "1 calls that are abandoned" in shown
    files = [str(out)] if form == "jsonl" else sorted(map(str, out.iterdir()))
    assert command_line.main(["import", *files, "--format", form, "--store", str(back)]) == 0
    assert "6 calls and 2 outcomes in" in capsys.readouterr().out
    assert held(back) == held(store_path)
    assert audit(back, model).findings == ()


def test_what_people_said_is_in_the_documents(tmp_path, store_path, model, capsys):
    out = tmp_path / "out"
    assert command_line.main(["export", str(store_path), str(out), "--format", "atif", "--model", str(model)]) == 0
    assert "6 calls whose weights, sampling, roles and request stand in `extra`" in capsys.readouterr().out
    document = json.loads((out / "a.0.json").read_text())
    assert [(step["source"], step["message"]) for step in document["steps"]] == [
        ("system", "You answer."),
        ("user", "What is the capital of Chad?"),
        ("agent", ""),
        ("agent", "N'Djamena"),
        ("user", "more"),
        ("agent", "Late."),
    ]
    assert document["steps"][2]["observation"]["results"][0] == {"content": "N'Djamena", "source_call_id": "t0"}
    (researcher,) = document["subagent_trajectories"]
    assert [step["message"] for step in researcher["steps"]] == ["capital of Chad", "I look.", "N'Djamena, it says."]


def test_attempts_may_come_in_any_order(tmp_path, calls, capsys):
    lines, back = tmp_path / "lines.jsonl", tmp_path / "back.sqlite"
    backwards = [dataclasses.replace(calls["other"], attempt=n, call_id=f"b{n}") for n in (2, 0, 1)]
    lines.write_text("\n".join(to_lines(map(kept, backwards), ())))
    assert command_line.main(["import", str(lines), "--format", "jsonl", "--store", str(back)]) == 0
    assert [attempt.calls[0].call.attempt for attempt in held(back)] == [0, 1, 2]


def test_a_rollout_without_a_call_is_named(tmp_path, store_path, model, capsys):
    connection = sqlite3.connect(store_path)
    connection.execute("DELETE FROM calls WHERE rollout_id = 'b'")
    connection.commit()
    connection.close()
    out = tmp_path / "out"
    assert command_line.main(["export", str(store_path), str(out), "--format", "atif", "--model", str(model)]) == 0
    assert "1 rollouts without a call" in capsys.readouterr().out
    assert [path.name for path in out.iterdir()] == ["a.0.json"]


def test_another_programs_document(tmp_path, capsys):
    step = {"step_id": 1, "source": "agent", "message": "x"}
    metrics = {"prompt_token_ids": [1, 2], "completion_token_ids": [3], "logprobs": [-0.5]}
    document = {
        "schema_version": "ATIF-v1.5",
        "session_id": "s",
        "agent": {"name": "swe", "version": "2"},
        "steps": [step | {"metrics": metrics}],
    }
    path, store = tmp_path / "trial-7.json", tmp_path / "new.sqlite"
    path.write_text(json.dumps(document))
    more = ["--logprobs", "raw", "--temperature", "0.5", "--version", "3", "--agent", "other", "--task-id", "T"]
    assert command_line.main(["import", str(path), "--format", "atif", "--store", str(store), *more]) == 0
    assert "1 documents without a reward" in capsys.readouterr().out
    ((rollout, (kept,)),) = held(store)
    call = kept.call
    assert rollout is None
    assert (call.run_id, call.rollout_id, call.task_id, call.version_start) == ("imported", "trial-7", "T", 3)
    assert (call.logps.tolist(), call.logp_kind.temperature, call.trainable) == ([-0.5], 0.5, False)


def message(capsys, *arguments):
    assert command_line.main([str(argument) for argument in arguments]) == 2
    return capsys.readouterr().err


def test_nothing_is_overwritten_and_errors_name_the_file(tmp_path, store_path, model, capsys):
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"format": "harnessrl_jax.calls", "version": 1}\n{"record": "cal')
    assert "exists already" in message(capsys, "export", store_path, lines)
    assert "exists already" in message(capsys, "import", lines, "--store", store_path)
    assert f"{lines}: line 2: not JSON" in message(capsys, "import", lines, "--store", tmp_path / "n.sqlite")
    assert "--model" in message(capsys, "export", store_path, tmp_path / "o", "--format", "atif")
    assert "none.jsonl: No such file" in message(
        capsys, "import", tmp_path / "none.jsonl", "--store", tmp_path / "n.sqlite"
    )
    assert f"{lines}: not JSON" in message(
        capsys, "import", lines, "--format", "atif", "--store", tmp_path / "n.sqlite"
    )
    assert not (tmp_path / "n.sqlite").exists()


def test_a_record_that_is_there_twice_is_refused(tmp_path, store_path, capsys):
    out, new = tmp_path / "out.jsonl", tmp_path / "n.sqlite"
    assert command_line.main(["export", str(store_path), str(out)]) == 0
    assert "the id is used by 2 calls" in message(capsys, "import", out, out, "--store", new)
    only = [line for line in out.read_text().splitlines() if '"call"' not in line]
    out.write_text("\n".join([*only, only[-1]]))
    assert "has two outcomes" in message(capsys, "import", out, "--store", new)
    out.write_text("\n".join([*only, only[-1].replace('"run"', '"walk"').replace('"b"', '"c"')]))
    assert "records of 2 runs (run, walk)" in message(capsys, "import", out, "--store", new)
    assert not new.exists()
