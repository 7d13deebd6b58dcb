"""Each rule is broken in a real store, and the doctor says so; an untouched store is sound."""

import io
import json
import sqlite3

import numpy as np
import pytest
from rich.console import Console

from harnessrl_jax.gateway.rows import digest
from harnessrl_jax.launch import __main__ as command_line
from harnessrl_jax.launch import doctor as doctor_module
from harnessrl_jax.launch.doctor import audit


def edit(path, statement, *values):
    connection = sqlite3.connect(path)
    changed = connection.execute(statement, values).rowcount
    connection.commit()
    connection.close()
    assert changed == -1 or changed > 0, "the edit touched nothing"


def seal(path):
    """Digests that fit the rows, as if the wrong record had been written so."""
    connection = sqlite3.connect(path)
    rows = connection.execute(
        "SELECT rowid, record, prompt_ids, output_ids, logps, request FROM calls WHERE record IS NOT NULL"
    ).fetchall()
    for number, record, prompt, output, logps, request in rows:
        connection.execute(
            "UPDATE calls SET digest = ? WHERE rowid = ?",
            (digest(record, prompt, output, logps or b"", request), number),
        )
    for number, record in connection.execute("SELECT rowid, record FROM rollouts").fetchall():
        connection.execute("UPDATE rollouts SET digest = ? WHERE rowid = ?", (digest(record), number))
    connection.commit()
    connection.close()


def change(path, name, *, table="calls", **fields):
    """New values in a record, well sealed; columns of the same name follow."""
    column = "call_id" if table == "calls" else "rollout_id"
    connection = sqlite3.connect(path)
    rows = connection.execute(f"SELECT rowid, record FROM {table} WHERE {column} = ? AND record IS NOT NULL", (name,))
    (row, *_) = rows.fetchall()[::-1]
    record = json.dumps(json.loads(row[1]) | fields)
    connection.execute(f"UPDATE {table} SET record = ? WHERE rowid = ?", (record, row[0]))
    connection.commit()
    connection.close()
    seal(path)


def rules(found):
    return [finding.rule for finding in found.findings]


def test_a_sound_store_has_no_findings(store_path, model):
    found = audit(store_path, model)
    assert found.findings == ()
    assert found.skipped == ()
    assert found.counts == {
        "delivered": 4, "undelivered": 1, "late": 1, "intent": 1, "abandoned": 1, "rollouts": 2,
    }  # fmt: skip


def test_what_was_not_looked_at_is_said(store_path, model):
    change(store_path, "a0", tool_calls=[])
    assert [len(audit(store_path, given).skipped) for given in (None, model)] == [1, 0]
    assert [rules(audit(store_path, given)) for given in (None, model)] == [[], ["parse"]]


def one(path, model, rule, what):
    """The one finding there is."""
    found = audit(path, model)
    assert rules(found) == [rule], found.findings
    assert what in found.findings[0].what
    assert found.findings[0].fix
    return found.findings[0]


def test_a_changed_byte_breaks_the_digest(store_path, model):
    edit(store_path, "UPDATE calls SET request = request || ' ' WHERE call_id = 'a3'")
    assert "call 'a3' of rollout 'a'" in one(store_path, model, "digest", "does not match its digest").where


def test_a_changed_outcome_breaks_the_digest(store_path, model):
    edit(store_path, "UPDATE rollouts SET record = replace(record, '1.0', '0.5') WHERE rollout_id = 'a'")
    assert "rollout 'a'" in one(store_path, model, "digest", "does not match its digest").where


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"schema": 2}, "got schema 2, this version reads schema 3"),
        ({"spans": [["ACTION", 0, 3], ["ARGS", 2, 4]]}, "ascending, disjoint"),
        ({"version_start": 5, "version_end": 4}, "version_end must be an integer of at least 5"),
        ({"finish": "done"}, "finish must be one of"),
    ],
)
def test_a_record_that_breaks_its_schema(store_path, model, fields, what):
    change(store_path, "a3", **fields)
    one(store_path, model, "record", what)


def test_log_probabilities_above_zero_or_not_finite(store_path, model, calls):
    for value in (0.5, np.nan):
        logps = calls["answer"].logps.copy()
        logps[0] = value
        edit(store_path, "UPDATE calls SET logps = ? WHERE call_id = 'a3'", logps.tobytes())
        seal(store_path)
        one(store_path, model, "record", "logps must be finite and at most 0")


@pytest.mark.parametrize(
    ("column", "what"),
    [("output_ids", "no whole number of ids"), ("prompt_ids", "no whole number of ids"), ("logps", "no whole number")],
)
def test_a_torn_array(store_path, model, column, what):
    edit(store_path, f"UPDATE calls SET {column} = substr({column}, 1, length({column}) - 1) WHERE call_id = 'a2'")
    found = audit(store_path, model)
    assert set(rules(found)) == {"torn"}
    assert what in found.findings[0].what


def test_fewer_log_probabilities_than_ids(store_path, model):
    edit(store_path, "UPDATE calls SET logps = substr(logps, 5) WHERE call_id = 'a2'")
    one(store_path, model, "torn", "log-probabilities for")


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("UPDATE calls SET state = 'done' WHERE call_id = 'a2'", "state 'done' is none of"),
        ("UPDATE calls SET record = NULL WHERE call_id = 'a2'", "record is missing: the answer was never stored"),
        ("UPDATE calls SET state = 'delivered' WHERE call_id = 'b1'", "the answer was never stored"),
        ("UPDATE calls SET state = 'lost' WHERE call_id = 'a2'", "state 'lost', but the row holds an answer"),
    ],
)
def test_a_call_is_in_one_state_and_a_delivered_one_is_there(store_path, model, statement, what):
    edit(store_path, statement)
    one(store_path, model, "state", what)


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("UPDATE calls SET seq = 7 WHERE call_id = 'a2'", "seq is 7 in its column and 2 in its record"),
        ("UPDATE rollouts SET status = 'truncated' WHERE rollout_id = 'b'", "status is 'truncated' in its column"),
        ("UPDATE settings SET value = 'another' WHERE name = 'run_id'", "belongs to run 'another'"),
    ],
)
def test_columns_say_what_records_say(store_path, model, statement, what):
    edit(store_path, statement)
    found = audit(store_path, model)
    assert set(rules(found)) == {"column"}
    assert what in found.findings[0].what


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("DELETE FROM attempts WHERE rollout_id = 'b'", "an attempt that was never opened"),
        ("UPDATE calls SET life = 9 WHERE call_id = 'b0' AND life = 2", "life 9 of an attempt that was opened 2 times"),
        ("UPDATE rollouts SET life = 9 WHERE rollout_id = 'b'", "life 9 of an attempt that was opened 2 times"),
    ],
)
def test_a_row_of_no_attempt_is_an_orphan(store_path, model, statement, what):
    edit(store_path, statement)
    found = audit(store_path, model)
    assert set(rules(found)) == {"orphan"}
    assert what in found.findings[0].what


def test_a_finished_run_has_an_outcome_for_every_attempt(store_path, model):
    edit(store_path, "DELETE FROM rollouts WHERE rollout_id = 'b'")
    assert rules(audit(store_path.parent, model)) == []
    (store_path.parent / "summary.json").write_text("{}")
    found = audit(store_path.parent, model)
    assert rules(found) == ["orphan"]
    assert "rollout 'b', attempt 0" in found.findings[0].where


def test_attempts_that_a_killed_process_left_need_no_outcome(store_path, model):
    (store_path.parent / "summary.json").write_text("{}")
    attempts = [("INSERT INTO attempts VALUES ('b', 1, 2)", []), ("INSERT INTO attempts VALUES ('c', 0, 1)", ["c"])]
    for statement, wrong in attempts:
        edit(store_path, statement)
        found = audit(store_path.parent, model).findings
        assert [finding.where for finding in found] == [f"rollout {name!r}, attempt 0" for name in wrong]


def test_a_call_id_and_a_place_are_used_once(store_path, model):
    change(store_path, "b0", call_id="a0")
    edit(store_path, "UPDATE calls SET call_id = 'a0' WHERE call_id = 'b0' AND life = 2")
    found = audit(store_path, model)
    assert "identity" in rules(found)
    assert "the id is used by 2 calls" in [f.what for f in found.findings]
    change(store_path, "a2", seq=3)
    edit(store_path, "UPDATE calls SET seq = 3 WHERE call_id = 'a2'")
    assert "request 3, choice 0, is taken by 2 calls" in [f.what for f in audit(store_path, model).findings]


@pytest.mark.parametrize(
    ("parent", "what"), [("b0", "is no call of its rollout"), ("a3", "has seq 3, not before its own 2")]
)
def test_a_parent_is_an_earlier_call_of_the_rollout(store_path, model, parent, what):
    change(store_path, "a2", parent_call_id=parent)
    one(store_path, model, "parent", what)


def test_a_call_belongs_to_the_group_of_its_rollout(store_path, model):
    change(store_path, "b0", task_id="another")
    one(store_path, model, "identity", "(run, task, group) is ('run', 'another', 'g')")


def test_a_late_record_that_counts(store_path, model):
    edit(store_path, "UPDATE calls SET state = 'delivered' WHERE call_id = 'a4'")
    one(store_path, model, "late", "began 10.000 s after its rollout had ended, and counts")


def test_weights_do_not_go_back(store_path, model):
    change(store_path, "b0", version_start=1)
    one(store_path, model, "version", "by weights 1, but its rollout began with weights 2")
    change(store_path, "b0", version_start=2)
    change(store_path, "a0", version_end=3)
    one(store_path, model, "version", "sampled by weights 2, after 'a0' ended with 3")


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"reward": None}, "status 'completed' without a reward"),
        ({"status": "infra_failure"}, "reward 1 of a rollout that the machine failed"),
    ],
)
def test_a_reward_fits_the_status(store_path, model, fields, what):
    change(store_path, "a", table="rollouts", **fields)
    edit(store_path, "UPDATE rollouts SET status = ? WHERE rollout_id = 'a'", fields.get("status", "completed"))
    one(store_path, model, "reward", what)


def test_process_rewards_name_calls_that_exist(store_path, model):
    change(store_path, "a", table="rollouts", process_rewards={"a0": 0.5, "nobody": 1.0})
    assert set(rules(audit(store_path, model))) == {"reward", "lineage"}


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"tool_calls": []}, "the record's tool calls are ()"),
        ({"spans": []}, "the record's spans are ()"),
        ({"parse_status": "malformed"}, "the record's parse_status are 'malformed'"),
    ],
)
def test_tool_calls_and_roles_are_those_of_the_sampled_ids(store_path, model, fields, what):
    change(store_path, "a0", **fields)
    one(store_path, model, "parse", what)


def test_a_request_that_allows_no_tool_call_was_handed_none(store_path, model):
    body = {"messages": [{"role": "user", "content": "Q"}], "tool_choice": "none"}
    edit(store_path, "UPDATE calls SET request = ? WHERE call_id = 'a0'", json.dumps(body))
    seal(store_path)
    one(store_path, model, "parse", "the sampled ids give ()")
    change(store_path, "a0", tool_calls=[])
    assert rules(audit(store_path, model)) == []


def test_a_prompt_holds_the_turns_it_claims(store_path, model, calls):
    edit(store_path, "UPDATE calls SET notes = ? WHERE call_id = 'a3'", json.dumps({"spliced": ["nobody"]}))
    one(store_path, model, "prompt", "claims the turn of 'nobody', which is unknown")
    edit(store_path, "UPDATE calls SET notes = ? WHERE call_id = 'a3'", json.dumps({"spliced": ["a0", "a0"]}))
    one(store_path, model, "prompt", "claims the turn of 'a0', but its")
    edit(store_path, "UPDATE calls SET notes = ? WHERE call_id = 'a3'", json.dumps({"spliced": ["a0"]}))
    ids = calls["answer"].prompt_ids.copy()
    ids[len(calls["ask"].prompt_ids)] += 1
    edit(store_path, "UPDATE calls SET prompt_ids = ? WHERE call_id = 'a3'", ids.tobytes())
    seal(store_path)
    one(store_path, model, "prompt", "sampled ids are not there")


def test_an_agent_is_trained_or_not(store_path, model):
    change(store_path, "a3", trainable=False)
    assert rules(audit(store_path, model))[0] == "lineage"
    assert "trainable in some calls and not in others" in audit(store_path, model).findings[0].what


def foreign(path):
    edit(path, "PRAGMA application_id = 1")


def newer(path):
    edit(path, "PRAGMA user_version = 99")


def torn(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "what"),
    [(foreign, "not a call store"), (newer, "store schema 99"), (torn, "damaged or not a SQLite file")],
)
def test_a_file_that_is_no_store(store_path, model, damage, what):
    damage(store_path)
    one(store_path, model, "file", what)


def test_the_command_prints_and_returns_one(store_path, model, capsys):
    assert command_line.main(["doctor", str(store_path), "--model", str(model)]) == 0
    assert capsys.readouterr().out.endswith("Nothing is wrong.\n")
    change(store_path, "a2", parent_call_id="\x1b[31m")
    assert command_line.main(["doctor", str(store_path)]) == 1
    shown = capsys.readouterr().out
    assert "parent: 1 wrong" in shown
    assert "not checked: tool calls and roles" in shown
    assert "fix:   Set parent_call_id" in shown
    assert "\x1b" not in shown
    assert command_line.main(["doctor", str(store_path.parent / "none.sqlite")]) == 2


def test_many_findings_of_one_kind_are_counted(store_path, model):
    found = audit(store_path, model)
    many = found._replace(findings=tuple(_finding(n) for n in range(7)))
    console = Console(file=io.StringIO(), width=100, highlight=False)
    doctor_module._print(console, many, 5)
    text = console.file.getvalue()
    assert text.count("found: x") == 5
    assert "and 2 more; --all prints every one" in text


def _finding(number):
    return doctor_module.Finding("late", f"call {number}", "x", "y")
