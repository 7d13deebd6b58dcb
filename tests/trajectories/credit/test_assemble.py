import numpy as np
import pytest

from harnessrl_jax.errors import LineageError
from harnessrl_jax.trajectories import Drop, build_lineage, call_advantages, supervised_calls
from harnessrl_jax.trajectories.credit import GroupReport, group_mean, group_report, max_rl


@pytest.fixture
def step(make_call, make_rollout):
    """Rollout a (reward 1) makes three calls, b (reward 0) one."""

    def build(a=None, b=None, **options):
        calls = {
            "a": [make_call(f"a{i}", [1, i], [2, 3], seq=i, rollout_id="a") for i in range(3)],
            "b": [make_call("b0", [1, 0], [4], rollout_id="b")],
        }
        rollouts = [
            make_rollout("a", **({"reward": 1.0} | (a or {}))),
            make_rollout("b", **({"reward": 0.0} | (b or {}))),
        ]
        lineages = [build_lineage(own) for own in calls.values()]
        return call_advantages(rollouts, lineages, **({"process_weight": 0.1} | options))

    return build


def test_the_baseline_counts_rollouts_not_calls(step):
    # Baselines of 1/2 a rollout, not of 3/4 a call.
    assert step().advantages() == {"a0": 1, "a1": 1, "a2": 1, "b0": -1}


def test_a_rollout_without_calls_still_counts(make_call, make_rollout):
    lineage = build_lineage([make_call("a0", [1], [2], rollout_id="a")])
    rollouts = [make_rollout("a", 1.0), make_rollout("b", 0.0)]
    assert call_advantages(rollouts, [lineage], process_weight=0.0).advantages() == {"a0": 1}


def test_each_group_has_its_own_baseline(make_call, make_rollout):
    names = {"a": ("g", 1.0), "b": ("g", 0.0), "c": ("h", 9.0), "d": ("h", 5.0)}
    lineages = [
        build_lineage([make_call(name, [1], [2], rollout_id=name, group_id=group)])
        for name, (group, _) in names.items()
    ]
    rollouts = [make_rollout(name, reward, group_id=group) for name, (group, reward) in names.items()]
    got = call_advantages(rollouts, lineages, process_weight=0.0)
    assert got.advantages() == {"a": 1, "b": -1, "c": 4, "d": -4}


def test_an_infrastructure_failure_is_in_neither_loss_nor_baseline(step):
    got = step(b={"status": "infra_failure", "reward": 0.0})
    assert got.advantages() == {"a0": 0, "a1": 0, "a2": 0}  # a is now alone
    assert got.dropped == {"infra_failure": Drop(calls=1, tokens=1)}


def test_a_policy_failure_keeps_its_reward(step):
    got = step(b={"status": "policy_failure", "reward": 0.25})
    assert got.advantages()["b0"] == -0.75


def test_a_rollout_without_a_reward_is_not_a_failure(step):
    got = step(b={"reward": None})
    assert got.advantages() == {"a0": 0, "a1": 0, "a2": 0}
    assert got.dropped == {"no_reward": Drop(calls=1, tokens=1)}


def test_truncated_rollouts_follow_the_option(step):
    kept = step(b={"status": "truncated"})
    assert kept.advantages()["b0"] == -1
    masked = step(b={"status": "truncated"}, truncated="mask")
    assert masked.advantages() == {"a0": 1, "a1": 1, "a2": 1}  # its reward stays in the baseline
    assert masked.dropped == {"truncated_rollout": Drop(calls=1, tokens=1)}


def test_only_the_last_attempt_is_used(make_call, make_rollout):
    calls = [make_call(f"c{i}", [1], [2, 3], attempt=i) for i in range(2)] + [make_call("d", [1], [2], rollout_id="d")]
    rollouts = [
        make_rollout(reward=0.0, attempt=0),
        make_rollout(reward=1.0, attempt=1),
        make_rollout("d", reward=0.5),
    ]
    got = call_advantages(rollouts, [build_lineage([call]) for call in calls], process_weight=0.0)
    assert got.advantages() == {"c1": 0.5, "d": -0.5}
    assert got.dropped == {"earlier_attempt": Drop(calls=1, tokens=2)}


def test_every_state_and_kind_of_call_that_is_not_trained_has_its_reason(make_call, make_rollout):
    calls = [
        make_call("live", [1], [2], seq=0),
        make_call("frozen", [1], [2], seq=1, agent="judge", trainable=False),
        make_call("lost", [3], [2, 2], seq=2, delivered=False),
        make_call("tried", [4], [2, 2, 2], seq=3, request_digest="x", delivered=False),
        make_call("again", [4], [2], seq=4, request_digest="x"),
        make_call("empty", [5], [], seq=5),
    ]
    stray = build_lineage([make_call("stray", [1], [2], rollout_id="unfinished")])
    got = call_advantages([make_rollout()], [build_lineage(calls), stray], process_weight=0.0)
    assert set(got.advantages()) == {"live", "again"}
    assert got.dropped == {
        "empty_output": Drop(calls=1, tokens=0),
        "frozen_agent": Drop(calls=1, tokens=1),
        "no_rollout": Drop(calls=1, tokens=1),
        "superseded": Drop(calls=1, tokens=3),
        "undelivered": Drop(calls=1, tokens=2),
    }


def test_process_rewards_meet_at_the_call_index_of_the_agent(make_call, make_rollout):
    # Central calls of a at 0 and 1; a superseded call of b takes no index; the sub-agent has its own group.
    a = [
        make_call("a0", [1], [2], seq=0, rollout_id="a"),
        make_call("as", [9], [2], seq=1, rollout_id="a", agent="sub"),
        make_call("a1", [1, 2], [2], seq=2, rollout_id="a"),
    ]
    b = [
        make_call("bx", [1], [3], seq=0, rollout_id="b", request_digest="x", delivered=False),
        make_call("b0", [1], [3], seq=1, rollout_id="b", request_digest="x"),
        make_call("b1", [1, 3], [3], seq=2, rollout_id="b"),
    ]
    rollouts = [
        make_rollout("a", 1.0, process_rewards={"a0": 1.0, "as": 5.0, "a1": 0.5}),
        make_rollout("b", 1.0, process_rewards={"bx": 7.0, "b0": 0.0, "b1": 0.5}),
    ]
    got = call_advantages(rollouts, [build_lineage(a), build_lineage(b)], process_weight=0.1).advantages()
    half = 0.1 * 0.5 / 0.500001
    assert got == pytest.approx({"a0": half, "as": 0, "a1": 0, "b0": -half, "b1": 0}, rel=1e-12)
    assert (got["as"], got["a1"], got["b1"]) == (0, 0, 0)


def test_supervised_calls_have_advantage_one(make_call, make_rollout):
    lineages = [
        build_lineage([make_call("a", [1], [2], rollout_id="a"), make_call("b", [1], [], rollout_id="a", seq=1)]),
        build_lineage([make_call("c", [1], [2], rollout_id="c")]),
    ]
    got = supervised_calls([make_rollout("a", 1.0), make_rollout("c", 0.0)], lineages)
    assert got.advantages() == {"a": 1.0, "c": 1.0}
    assert [credited.success for credited in got.calls] == [True, False]
    assert got.dropped == {"empty_output": Drop(calls=1, tokens=0)}


def test_success_is_an_outcome_above_zero(step):
    assert {c.call.call_id: c.success for c in step().calls} == {"a0": True, "a1": True, "a2": True, "b0": False}


def test_records_that_disagree_are_refused(make_call, make_rollout):
    lineage = build_lineage([make_call("a", [1], [2])])
    with pytest.raises(LineageError, match=r"Rollout 'r', attempt 0, was given twice"):
        call_advantages([make_rollout(), make_rollout()], [lineage], process_weight=0.0)
    with pytest.raises(LineageError, match=r"Lineage of rollout 'r', attempt 0, was given twice"):
        call_advantages([make_rollout()], [lineage, lineage], process_weight=0.0)
    with pytest.raises(LineageError, match=r"call 'a' has group 'group', its rollout has group 'other'"):
        call_advantages([make_rollout(group_id="other")], [lineage], process_weight=0.0)
    with pytest.raises(LineageError, match=r"process_rewards name 'z', which the rollout did not call.*Known calls: a"):
        call_advantages([make_rollout(process_rewards={"z": 1.0})], [lineage], process_weight=0.0)
    other = build_lineage([make_call("a", [1], [2], rollout_id="q")])
    with pytest.raises(LineageError, match=r"call_id 'a' is also used in rollout 'r'"):
        call_advantages([make_rollout()], [lineage, other], process_weight=0.0)


def test_the_estimator_is_a_function_of_the_callers(step):
    assert step(estimator=group_mean).advantages() == {"a0": 0.5, "a1": 0.5, "a2": 0.5, "b0": -0.5}
    assert step(a={"reward": 3.0}, estimator=max_rl).advantages()["a0"] == 1
    seen = []

    def own(reward, group, counted):
        seen.append((reward.tolist(), group.tolist(), counted.tolist()))
        return np.full(len(reward), 7.0)

    assert set(step(estimator=own).advantages().values()) == {7}
    assert seen == [([1, 0], [0, 0], [True, True])]


def test_rollouts_can_be_compared_with_those_of_the_same_harness(make_call, make_rollout):
    names = {"a": ("codex", 1.0), "b": ("codex", 0.0), "c": ("qwen", 9.0), "d": ("qwen", 5.0), "e": ("pi", 3.0)}
    lineages = [build_lineage([make_call(name, [1], [2], rollout_id=name)]) for name in names]
    rollouts = [make_rollout(name, reward, harness=harness) for name, (harness, reward) in names.items()]
    got = call_advantages(rollouts, lineages, process_weight=0.0, compared="harness")
    assert got.advantages() == {"a": 1, "b": -1, "c": 4, "d": -4, "e": 0}


@pytest.fixture
def agents(make_call, make_rollout):
    """Central acts in all; the sub-agent twice in a (reward 1), once in b (0), never in c (8) and lost in d (4)."""
    acts = {"a": ["central", "sub", "sub"], "b": ["central", "sub"], "c": ["central"], "d": ["central", "sub"]}
    lineages = []
    for name, who in acts.items():
        calls = [
            make_call(f"{name}{i}", [1, i], [2], seq=i, rollout_id=name, agent=agent, delivered=(name, i) != ("d", 1))
            for i, agent in enumerate(who)
        ]
        lineages.append(build_lineage(calls))
    return [make_rollout(name, reward) for name, reward in zip("abcd", [1.0, 0.0, 8.0, 4.0], strict=True)], lineages


def test_calls_can_be_compared_with_the_rollouts_in_which_the_agent_acted(agents):
    # Sub-agent: 1 against 0, each rollout once. Central: means of the others 4, 13/3, 5/3 and 3.
    got = call_advantages(*agents, process_weight=0.0, compared="agent").advantages()
    want = {"a0": -3, "a1": 1, "a2": 1, "b0": -13 / 3, "b1": -1, "c0": 19 / 3, "d0": 1}
    assert got == pytest.approx(want)


def test_masked_rollouts_stay_in_the_baseline_of_their_agents(agents, make_rollout):
    rollouts, lineages = agents
    rollouts[1] = make_rollout("b", 0.0, status="truncated")
    got = call_advantages(rollouts, lineages, process_weight=0.0, truncated="mask", compared="agent").advantages()
    assert (got["a1"], got["a2"]) == (1, 1)
    assert not {"b0", "b1"} & set(got)


def test_an_agent_of_one_rollout_has_nothing_to_be_compared_with(make_call, make_rollout):
    calls = [make_call("a0", [1], [2], seq=0), make_call("a1", [1], [2], seq=1, agent="sub")]
    other = [make_call("b0", [1], [2], rollout_id="b")]
    rollouts = [make_rollout(reward=1.0), make_rollout("b", 0.0)]
    got = call_advantages(rollouts, [build_lineage(calls), build_lineage(other)], process_weight=0.0, compared="agent")
    assert got.advantages() == {"a0": 1, "a1": 0, "b0": -1}


def test_groups_that_teach_nothing_can_be_left_out(make_call, make_rollout):
    rewards = {"a": ("flat", 0.7), "b": ("flat", 0.7), "c": ("mixed", 1.0), "d": ("mixed", 0.0), "e": ("alone", 1.0)}
    lineages = [
        build_lineage([make_call(name, [1], [2, 3], rollout_id=name, group_id=group)])
        for name, (group, _) in rewards.items()
    ]
    rollouts = [make_rollout(name, reward, group_id=group) for name, (group, reward) in rewards.items()]
    kept = call_advantages(rollouts, lineages, process_weight=0.0)
    assert kept.advantages() == {"a": 0, "b": 0, "c": 1, "d": -1, "e": 0}
    dropped = call_advantages(rollouts, lineages, process_weight=0.0, flat_groups="drop")
    assert dropped.advantages() == {"c": 1, "d": -1}
    assert dropped.dropped == {"flat_group": Drop(calls=3, tokens=6)}


def test_a_group_with_equal_outcomes_and_unequal_process_rewards_teaches_something(step):
    got = step(
        b={"reward": 1.0, "process_rewards": {"b0": 1.0}}, a={"process_rewards": {"a0": 0.0}}, flat_groups="drop"
    )
    assert set(got.advantages()) == {"a0", "a1", "a2", "b0"}
    assert got.dropped == {}


def test_a_group_of_which_only_the_worse_is_trained_teaches_something(make_call, make_rollout):
    lineage = build_lineage([make_call("b", [1], [2], rollout_id="b")])
    rollouts = [make_rollout("a", 1.0), make_rollout("b", 0.0)]
    got = call_advantages(rollouts, [lineage], process_weight=0.0, flat_groups="drop")
    assert got.advantages() == {"b": -1}


def test_the_groups_of_a_step_are_reported(make_rollout):
    rollouts = [
        make_rollout("a", 1.0, group_id="mixed"),
        make_rollout("b", 0.0, group_id="mixed"),
        make_rollout("c", None, group_id="mixed", status="infra_failure"),
        make_rollout("d", 0.7, group_id="flat"),
        make_rollout("e", 0.7, group_id="flat"),
        make_rollout("f", 0.0, group_id="alone", attempt=0),
        make_rollout("f", 1.0, group_id="alone", attempt=1),
        make_rollout("g", 0.5, group_id="empty", status="infra_failure"),
    ]
    assert group_report(rollouts) == GroupReport(given=4, counted=5, alone=1, flat=1, empty=1)
    assert group_report([]) == GroupReport(given=0, counted=0, alone=0, flat=0, empty=0)
