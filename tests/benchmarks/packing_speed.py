"""How fast calls become packed rows, against a plain dictionary trie of the same calls in the same run.

    python tests/benchmarks/packing_speed.py

Prints one line for each size: CPU seconds for building trees, targets and rows; CPU seconds for only inserting the
same token sequences into nested dictionaries; the ratio.
"""

import time
from functools import partial

import numpy as np

from harnessrl_jax.trajectories import Call, CreditedCall, CreditedCalls, LogpKind, pack_groups

RAW = LogpKind(mode="raw", temperature=1.0, top_p=1.0, top_k=0)


def agent_calls(rng, groups, rollouts=8, turns=8, system=400, question=60, output=60, result=90):
    """Groups of chats that share a system prompt and grow by one answer and one result a turn."""
    words = lambda size: rng.integers(7, 2048, size).astype(np.int32)
    calls = []
    for group in range(groups):
        start = np.concatenate([words(system), words(question)])
        for rollout in range(rollouts):
            name, context = f"{group}/{rollout}", start
            for turn in range(turns):
                answer = words(output)
                calls.append(_call(name, group, turn, context, answer))
                context = np.concatenate([context, answer, words(result)])
    return calls


def _call(rollout, group, turn, prompt, output):
    return Call(
        run_id="run", task_id="t", group_id=str(group), rollout_id=rollout, attempt=0, session_id="s", agent="central",
        trainable=True, parent_call_id=None, call_id=f"{rollout}/{turn}", seq=turn, choice=0, harness="h", dialect="d",
        prompt_ids=prompt, output_ids=output, logps=np.full(len(output), -1.0), logp_kind=RAW, version_start=0,
        version_end=0, finish="stop", parse_status="none", tool_calls=(), spans=(), delivered=True, request_digest="",
        retry=False, request="", started_s=0.0, finished_s=1.0,
    )  # fmt: skip


def dictionary_trie(calls):
    """The usual form: one dictionary for each node."""
    roots = {}
    for call in calls:
        node = roots.setdefault(call.group_id, {})
        for token in (*call.prompt_ids.tolist(), *call.output_ids.tolist()):
            node = node.setdefault(token, {})
    return roots


def seconds(work, times=3):
    """The best of a few runs."""
    best = float("inf")
    for _ in range(times):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def main():
    """Measures several sizes."""
    for groups in (2, 8, 32):
        calls = agent_calls(np.random.default_rng(0), groups)
        credited = CreditedCalls(calls=tuple(CreditedCall(c, 1.0, True) for c in calls), dropped={})
        shape = {"row_slots": 4096, "row_targets": 2048, "max_rows": 8 * groups}
        report = pack_groups(credited, loss_mean="rollout", **shape).report
        tokens = sum(len(c.prompt_ids) + len(c.output_ids) for c in calls)
        ours = seconds(partial(pack_groups, credited, loss_mean="rollout", **shape))
        trie = seconds(partial(dictionary_trie, calls))
        print(
            f"{tokens:8d} call tokens: rows {ours:.3f} s, dictionary trie {trie:.3f} s, ratio {trie / ours:.1f}; "
            f"reuse {report.reuse:.2f}, fill {report.fill:.2f}, repeated {report.repeated}, dropped {report.dropped}"
        )


if __name__ == "__main__":
    main()
