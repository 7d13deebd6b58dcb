"""The golden rollouts, from records to packed rows: every number here was worked out by hand."""

import json
import pathlib

import numpy as np
import pytest

from harnessrl_jax.trajectories import (
    Call,
    Drop,
    Role,
    Rollout,
    assign_roles,
    build,
    build_lineage,
    call_advantages,
    call_roles,
    pack_groups,
    target_context,
)
from harnessrl_jax.trajectories.formats import HERMES

DATA = json.loads((pathlib.Path(__file__).parents[1] / "data" / "rollout.json").read_text())
without_note = lambda record: {key: value for key, value in record.items() if key != "what"}
CALLS = [Call.from_json(DATA["call_defaults"] | without_note(call)) for call in DATA["calls"]]
ROLLOUTS = [Rollout.from_json(DATA["rollout_defaults"] | rollout) for rollout in DATA["rollouts"]]
TAGS = {"<tool_call>": 3, "</tool_call>": 4}
BY_ID = {call.call_id: call for call in CALLS}

# (A0 - mean) / (std + 1e-6) of the process rewards 1 and 0 at call index 0: 0.5 / 0.500001
PROCESS = 0.5 / 0.500001


def lineages():
    return [build_lineage([call for call in CALLS if call.rollout_id == name]) for name in "ABC"]


def step(**changes):
    credited = call_advantages(ROLLOUTS, lineages(), process_weight=0.1)
    return pack_groups(
        credited, **({"loss_mean": "rollout", "row_slots": 32, "row_targets": 32, "max_rows": 2} | changes)
    )


def test_lineage_says_who_continues_whom_and_what_counts():
    linked = {linked.call.call_id: linked for lineage in lineages() for linked in lineage.calls}
    assert {name: (place.parent_call_id, place.link, place.state) for name, place in linked.items()} == {
        "A0": (None, "opens", "live"),
        "A1": (None, "opens", "live"),
        "A2": ("A0", "extends", "live"),
        "A3": ("A0", "extends", "live"),
        "B0": (None, "opens", "superseded"),
        "B1": (None, "opens", "live"),
        "B2": (None, "rewrites", "live"),
        "B3": (None, "opens", "live"),
        "C0": (None, "opens", "live"),
    }
    assert linked["A1"].opened_by == "A0"
    assert linked["B0"].words == "replaced by B1 (the client declared a retry)"
    assert linked["B2"].words == "history differs from B1 at token 3 of 5"


def test_roles_in_the_record_are_those_of_its_ids():
    words = DATA["vocabulary"]
    decode = lambda ids: "".join(words[i] for i in ids)
    out = assign_roles(BY_ID["A0"].output_ids, decode, HERMES, finish="tool_calls", control=TAGS)
    assert out.spans == BY_ID["A0"].spans
    assert out.parsed.status == "ok"
    a, g, o = Role.ACTION, Role.ARGS, Role.OTHER
    #                                   think <tc> {name ask args {q river "} }  </tc> end
    assert call_roles(BY_ID["A0"]).tolist() == [o, o, o, a, o, g, g, g, o, o, o]
    broken = assign_roles(BY_ID["B1"].output_ids, decode, HERMES, control=TAGS)
    assert (broken.spans, broken.parsed.status) == ((), "malformed")


def test_the_tree_of_the_trained_calls():
    names = ["A0", "A1", "A2", "A3", "B1", "B2"]
    tree, leaf = build([np.concatenate([BY_ID[n].prompt_ids, BY_ID[n].output_ids]) for n in names])
    #     shared   B1           A0                                  A2/A3            B2              A1
    token = [1, 5, 6, 3, 7, 8, 2, 17, 3, 7, 8, 9, 10, 11, 13, 14, 4, 2, 16, 15, 2, 18, 2, 20, 16, 15, 2, 19, 11, 18, 2]
    depth = [0, 1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 16, 17, 3, 4, 5, 6, 1, 2, 3, 4]
    end = [31, 27, 27, 7, 7, 7, 7, *[23] * 13, 21, 23, 23, *[27] * 4, *[31] * 4]
    parent = [-1, 0, 1, 2, 3, 4, 5, 2, *range(7, 19), 19, 19, 21, 2, 23, 24, 25, 0, 27, 28, 29]
    assert tree.token.tolist() == token
    assert tree.depth.tolist() == depth
    assert tree.subtree_end.tolist() == end
    assert tree.parent.tolist() == parent
    assert dict(zip(names, leaf.tolist(), strict=True)) == {"A0": 17, "A1": 30, "A2": 20, "A3": 22, "B1": 6, "B2": 26}


def test_advantages_and_what_is_not_trained():
    credited = call_advantages(ROLLOUTS, lineages(), process_weight=0.1)
    want = {"A0": 1 + 0.1 * PROCESS, "A1": 1, "A2": 1, "A3": 1, "B1": -1 - 0.1 * PROCESS, "B2": -1}
    assert credited.advantages() == pytest.approx(want, rel=1e-15)
    assert credited.dropped == {
        "frozen_agent": Drop(calls=1, tokens=3),
        "infra_failure": Drop(calls=1, tokens=2),
        "superseded": Drop(calls=1, tokens=2),
    }


def test_the_packed_row():
    batch, report, calls, rollouts = step()
    assert [c.call.call_id for c in calls] == ["A0", "A2", "A3", "A1", "B1", "B2"]
    assert rollouts == ("A", "B")
    # No target needs the last token of a branch: nodes 6, 20, 22, 26 and 30 take no slot.
    assert batch.token[0].tolist() == [
        *[1, 5, 6, 3, 7, 8, 17, 3, 7, 8, 9, 10, 11, 13, 14, 4, 2, 16, 15, 18, 20, 16, 15, 19, 11, 18], *[0] * 6
    ]  # fmt: skip
    assert batch.position[0].tolist() == [
        *[0, 1, 2, 3, 4, 5, *range(3, 17), 3, 4, 5, 1, 2, 3], *[0] * 6
    ]  # fmt: skip
    assert batch.subtree_end[0].tolist() == [26, 23, 23, 6, 6, 6, *[20] * 14, *[23] * 3, *[26] * 3, *range(27, 33)]
    want = [  # source, target, call: slot 2 predicts the first token of A0 and of B1, slot 17 that of A2 and of A3
        (2, 17, 0), (2, 3, 4), (3, 7, 4), (4, 8, 4), (5, 2, 4), (6, 3, 0), (7, 7, 0), (8, 8, 0), (9, 9, 0), (10, 10, 0),
        (11, 11, 0), (12, 13, 0), (13, 14, 0), (14, 4, 0), (15, 2, 0), (17, 15, 1), (17, 15, 2), (18, 2, 1),
        (18, 18, 2), (19, 2, 2), (21, 15, 5), (22, 2, 5), (24, 18, 3), (25, 2, 3),
    ]  # fmt: skip
    used = len(want)
    assert used == 24
    got = zip(batch.source[0].tolist(), batch.target[0].tolist(), batch.call[0].tolist(), strict=True)
    assert list(got) == want + [(0, 0, -1)] * 8
    rollout = np.array([0, 0, 0, 0, 1, 1])[batch.call[0, :used]]
    assert batch.rollout[0].tolist() == [*rollout.tolist(), *[-1] * 8]
    np.testing.assert_array_equal(batch.weight[0, :used], np.where(rollout == 0, np.float32(1 / 18), np.float32(1 / 6)))
    assert batch.weight[0, used:].tolist() == [0.0] * 8
    assert batch.success[0].tolist() == [*(rollout == 0).tolist(), *[False] * 8]
    no_logp = batch.call[0] == 1  # A2 came without log-probabilities
    assert batch.has_logp[0].tolist() == [*(~no_logp[:used]).tolist(), *[False] * 8]
    assert batch.logp_behaviour[0, [0, 5, 14]].tolist() == np.float32([-0.1, -0.2, -1.1]).tolist()
    assert report.dropped.keys() == {"frozen_agent", "infra_failure", "superseded"}
    assert (report.rows_used, report.slots_used, report.targets_used) == (1, 26, 24)
    assert report.call_slots == 13 + 16 + 17 + 4 + 6 + 6
    assert report.reuse == pytest.approx(62 / 26)
    assert report.fill == pytest.approx(26 / 32)
    assert report.repeated == 0


def test_cut_into_short_rows_each_target_keeps_its_context():
    batch, report, calls, _ = step(row_slots=18, row_targets=9, max_rows=8)
    assert report.rows_used > 1
    seen = []
    for row, target in zip(*np.nonzero(batch.weight), strict=True):
        call = calls[batch.call[row, target]].call
        full = np.concatenate([call.prompt_ids, call.output_ids]).tolist()
        context = target_context(batch, row, target).tolist()
        assert full[: len(context) + 1] == [*context, batch.target[row, target]]
        seen.append((call.call_id, len(context)))
    assert len(seen) == len(set(seen)) == 24
