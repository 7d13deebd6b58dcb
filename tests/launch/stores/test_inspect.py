"""What a person sees of a store: in the terminal, as a page, with the credit of its run."""

import dataclasses
import sqlite3

import pytest

from harnessrl_jax import config as configuration
from harnessrl_jax.launch import __main__ as command_line
from harnessrl_jax.launch.credit import mask_reasons, packed_step
from harnessrl_jax.trajectories import build_lineage


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "220")


def shown(capsys, *arguments):
    assert command_line.main(["inspect", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments):
    assert command_line.main(["inspect", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def as_run(folder, *overrides):
    """Gives the folder of a store the configuration of a run."""
    config = configuration.load(command_line.find_config("quickstart"), overrides)
    (folder / "config.toml").write_text(configuration.to_toml(config))
    return config


def test_a_store_alone_is_listed_and_shown_with_a_tokenizer(store_path, model, capsys):
    listed = shown(capsys, store_path, "--model", model)
    assert [line.split()[:3] for line in listed.splitlines()] == [["a", "attempt", "0"], ["b", "attempt", "0"]]
    text = shown(capsys, store_path, "--model", model, "--rollout", "a")
    assert "#0 a0  live  not trained: no configuration says how it is credited" in text
    assert "#1 a1  superseded  not trained: superseded" in text
    assert "N'Djamena, it says." in text
    assert "Late." not in text


def test_a_run_folder_knows_tokenizer_and_credit(store_path, capsys):
    as_run(store_path.parent)
    text = shown(capsys, store_path.parent, "--rollout", "a", "--rollout", "b")
    assert "#0 a0  live  advantage +1.000  process reward 0.5" in text
    assert "#1 a1  superseded  not trained: superseded" in text
    assert "#0 b0  live  advantage -1.000" in text


def test_a_step_is_credited_and_laid_out_as_it_was_trained(store_path, rewrite, capsys):
    rewrite(store_path, "calls", group_id="00003-t")
    rewrite(store_path, "rollouts", group_id="00003-t")
    config = as_run(store_path.parent, "--packing.row_slots", "48", "--behaviour.context_tokens", "48")
    text = shown(capsys, store_path.parent, "--rollout", "a")
    assert config.packing.row_slots == 48
    assert "#3 a3  live  not trained: too_long" in text
    assert "#2 a2  live  advantage +1.000" in text


def test_every_mask_has_its_reason(calls, outcome, tmp_path):
    lineages = [build_lineage([calls[name] for name in ("ask", "first", "again", "answer")])]
    lineages.append(build_lineage([dataclasses.replace(calls["other"], trainable=False)]))
    config = as_run(tmp_path)
    rollouts = [outcome("a", 1.0), outcome("b", 0.0)]
    step = packed_step(config, rollouts, lineages)
    assert mask_reasons(config, rollouts, lineages, step) == {"a1": "superseded", "b0": "frozen_agent"}
    narrow = config.model_copy(update={"packing": config.packing.model_copy(update={"row_targets": 8, "max_rows": 1})})
    step = packed_step(narrow, rollouts, lineages)
    assert set(mask_reasons(narrow, rollouts, lineages, step).values()) == {"superseded", "frozen_agent", "no_room"}
    flat = config.model_copy(update={"credit": config.credit.model_copy(update={"flat_groups": "drop"})})
    even = [outcome("a", 1.0), outcome("b", 1.0)]
    reasons = mask_reasons(flat, even, lineages, packed_step(flat, even, lineages))
    assert reasons == {
        "a0": "flat_group",
        "a1": "superseded",
        "a2": "flat_group",
        "a3": "flat_group",
        "b0": "frozen_agent",
    }


def test_a_page_is_self_contained_and_escaped(tmp_path, store_path, model, rewrite, capsys):
    rewrite(store_path, "rollouts", answer="</p><script>alert(1)</script>")
    page = tmp_path / "a.html"
    text = shown(capsys, store_path, "--model", model, "--rollout", "a", "--html", page)
    assert text.strip() == str(page)
    html = page.read_text()
    assert html.startswith("<!doctype html>")
    assert "&lt;script&gt;alert(1)" in html
    for outside in ("<script", "http://", "https://", "src="):
        assert outside not in html
    assert "named by the harness" in html


def test_calls_without_an_outcome_are_shown(store_path, model, capsys):
    connection = sqlite3.connect(store_path)
    connection.execute("DELETE FROM rollouts")
    connection.commit()
    connection.close()
    text = shown(capsys, store_path, "--model", model, "--rollout", "b")
    assert "no outcome is recorded" in text
    assert "Moundou" in text


def test_what_is_missing_is_said(tmp_path, store_path, model, capsys):
    assert "give the folder of the tokenizer with --model" in refused(capsys, store_path)
    assert "add --rollout ID" in refused(capsys, store_path, "--model", model, "--html", tmp_path / "x")
    assert "no rollout 'zz'. List them" in refused(capsys, store_path, "--model", model, "--rollout", "zz")
    assert "no such file" in refused(capsys, tmp_path / "none")
