from harnessrl_jax.launch.services import Collected
from harnessrl_jax.trajectories import LogpKind, build_lineage
from harnessrl_jax.trajectories.records import Call

RAW = LogpKind(mode="raw", temperature=1.0, top_p=1.0, top_k=0)


def call_of(call_id, rollout_id, prompt_ids, **changes):
    fields = {
        "run_id": "run", "task_id": "task", "group_id": "group", "rollout_id": rollout_id, "attempt": 0,
        "session_id": "s", "agent": "central", "trainable": True, "parent_call_id": None, "call_id": call_id,
        "seq": 0, "choice": 0, "harness": "h", "dialect": "openai-chat", "prompt_ids": prompt_ids, "output_ids": [2],
        "logps": [-1.0], "logp_kind": RAW, "version_start": 0, "version_end": 0, "finish": "stop",
        "parse_status": "none", "tool_calls": (), "spans": (), "delivered": True, "request_digest": call_id,
        "retry": False, "request": "", "started_s": 0.0, "finished_s": 1.0,
    }  # fmt: skip
    return Call(**(fields | changes))


def test_what_harnesses_did_is_summed_over_rollouts():
    lineages = (
        build_lineage([call_of("a", "r", [1]), call_of("b", "r", [1, 2, 3], seq=1)]),
        build_lineage([call_of("c", "q", [1]), call_of("d", "q", [1], seq=1, retry=True)]),
    )
    counts = Collected((), lineages, 3).counts()
    assert {name: counts[name] for name in ("lineage/link/opens", "lineage/link/extends", "count/late_calls")} == {
        "lineage/link/opens": 3,
        "lineage/link/extends": 1,
        "count/late_calls": 3,
    }
    assert (counts["lineage/state/superseded"], counts["lineage/sessions"]) == (1, 2)
