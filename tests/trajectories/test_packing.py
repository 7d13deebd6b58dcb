import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from harnessrl_jax.errors import PackingError
from harnessrl_jax.trajectories import (
    Bucket,
    CreditedCall,
    CreditedCalls,
    Drop,
    RowReport,
    build,
    build_targets,
    group_trees,
    pack,
    pack_buckets,
    pack_groups,
    target_context,
)
from harnessrl_jax.trajectories.cutting import parts, prune


def credited_of(calls, dropped=None):
    return CreditedCalls(
        calls=tuple(CreditedCall(call=call, advantage=1.0, success=True) for call in calls), dropped=dropped or {}
    )


def item_of(calls, first=0):
    tree, leaf = build([np.concatenate([call.prompt_ids, call.output_ids]) for call in calls])
    numbers = np.arange(len(calls)) + first
    credited = credited_of(calls).calls
    return tree, build_targets(tree, leaf, credited, call_number=numbers, rollout_number=numbers, loss_mean="token")


def test_padding_is_seen_by_nobody_and_weighs_nothing(make_call):
    batch, report = pack([item_of([make_call("a", [5, 6], [7])])], row_slots=4, row_targets=3, max_rows=2)
    assert batch.token.tolist() == [[5, 6, 0, 0], [0] * 4]
    assert batch.position.tolist() == [[0, 1, 0, 0], [0] * 4]
    assert batch.subtree_end.tolist() == [[2, 2, 3, 4], [1, 2, 3, 4]]
    assert batch.source.tolist() == [[1, 0, 0], [0] * 3]
    assert batch.target.tolist() == [[7, 0, 0], [0] * 3]
    assert batch.weight.tolist() == [[1, 0, 0], [0] * 3]
    assert batch.call.tolist() == batch.rollout.tolist() == [[0, -1, -1], [-1] * 3]
    assert batch.role.tolist() == [[3, 0, 0], [0] * 3]
    assert batch.has_logp.tolist() == batch.success.tolist() == [[True, False, False], [False] * 3]
    assert (report.rows_used, report.rows_wanted, report.fill, report.reuse) == (1, 1, 0.5, 1.0)
    dtypes = [np.int32] * 5 + [np.float32, np.bool_, np.float32, np.int8, np.float32, np.bool_, np.int32, np.int32]
    assert [field.dtype for field in batch if not isinstance(field, tuple)] == dtypes
    assert batch.value_behaviour == batch.target_return == ()  # of a critic, which packing knows nothing of


def test_an_empty_batch_is_all_padding():
    batch, report = pack([], row_slots=2, row_targets=2, max_rows=1)
    assert (report.rows_used, report.fill, report.reuse, report.dropped) == (0, 0, 0, {})
    assert not batch.weight.any()


def test_largest_trees_first_each_in_the_first_row_with_room(make_call):
    sizes = [3, 5, 2, 6, 4]  # slots; into rows of 8: 6+2, 5+3, 4
    items = [item_of([make_call(f"{n}", [n] * n, [9])], first=n) for n in sizes]
    batch, report = pack(items, row_slots=8, row_targets=8, max_rows=4)
    rows = [[t for t, _ in itertools.groupby(row)] for row in batch.token.tolist()]
    assert rows == [[6, 2], [5, 3], [4, 0], [0]]
    assert (report.rows_used, report.slots_used, report.targets_used) == (3, 20, 5)
    assert batch.subtree_end[0].tolist() == [6] * 6 + [8] * 2
    assert batch.source[0, :2].tolist() == [5, 7]


def test_rows_are_limited_in_targets_too(make_call):
    items = [item_of([make_call(f"{n}", [n], [9, 9])], first=n) for n in range(1, 4)]
    batch, report = pack(items, row_slots=100, row_targets=5, max_rows=3)
    assert [(row > 0).sum() for row in batch.weight] == [4, 2, 0]
    assert report.rows_used == 2


def test_nodes_that_no_target_needs_take_no_slot(make_call):
    long, short = make_call("a", [1, 2, 3], [4, 5]), make_call("b", [1, 2, 3, 4, 5, 6, 7], [8])
    tree, targets = item_of([long, short])
    pruned, kept = prune(tree, targets)
    assert pruned.token.tolist() == [1, 2, 3, 4, 5, 6, 7]
    # The last token of a branch and an observation that nobody answered are not needed.
    tree, targets = build([np.array([1, 2, 3, 4, 9, 9]), np.array([1, 2, 7, 7])])[0], item_of([long])[1]
    pruned, kept = prune(tree, targets)
    assert pruned.token.tolist() == [1, 2, 3, 4]
    assert pruned.parent.tolist() == [-1, 0, 1, 2]
    assert pruned.subtree_end.tolist() == [4] * 4
    assert kept.source.tolist() == [2, 3]


def test_a_tree_longer_than_a_row_is_cut_where_little_repeats(make_call):
    # A trunk of 3 and two branches of 4 and 4 slots: 11 slots do not fit 8, cut between the branches repeats 3.
    calls = [make_call("a", [1, 2, 3, 4, 5, 6], [7, 0], seq=0), make_call("b", [1, 2, 3, 8, 8, 8], [8, 0], seq=1)]
    batch, report = pack([item_of(calls)], row_slots=8, row_targets=8, max_rows=2)
    assert batch.token.tolist() == [[1, 2, 3, 4, 5, 6, 7, 0], [1, 2, 3, 8, 8, 8, 8, 0]]
    assert batch.subtree_end[0].tolist() == [7] * 7 + [8]
    assert (report.repeated, report.tree_slots, report.slots_used) == (3, 11, 14)
    assert report.reuse == 1.0


def test_branches_that_begin_with_a_sampled_token_are_cut_apart(make_call):
    calls = [make_call("a", [1, 2, 3], [4, 5, 6, 7, 0], seq=0), make_call("b", [1, 2, 3], [8, 8, 8, 8, 0], seq=1)]
    batch, report = pack([item_of(calls)], row_slots=8, row_targets=64, max_rows=2)
    assert batch.token.tolist() == [[1, 2, 3, 4, 5, 6, 7, 0], [1, 2, 3, 8, 8, 8, 8, 0]]
    assert [(row >= 0).sum() for row in batch.call] == [6, 4]  # both first tokens stand where their source is first
    assert report.repeated == 3


def test_roots_separate_for_free(make_call):
    calls = [make_call("a", [1] * 5, [9], seq=0), make_call("b", [2] * 5, [9], seq=1)]
    _, report = pack([item_of(calls)], row_slots=6, row_targets=8, max_rows=2)
    assert (report.rows_used, report.repeated) == (2, 0)


def test_more_targets_on_one_source_than_a_row_holds(make_call):
    calls = [make_call(f"{i}", [1, 2], [3, 4], seq=i) for i in range(5)]
    batch, report = pack([item_of(calls)], row_slots=8, row_targets=4, max_rows=4)
    assert report.targets_used == 10
    seen = [
        (batch.call[r, e], len(target_context(batch, r, e))) for r, e in zip(*np.nonzero(batch.weight), strict=True)
    ]
    assert sorted(seen) == [(call, depth) for call in range(5) for depth in (2, 3)]


def test_a_single_path_longer_than_a_row_is_an_error_of_pack(make_call):
    with pytest.raises(PackingError, match=r"A path of 6 tokens does not fit a row of 5 slots.*too_long"):
        pack([item_of([make_call("a", [1] * 6, [2])])], row_slots=5, row_targets=4, max_rows=1)


@pytest.mark.parametrize("name", ["row_slots", "row_targets", "max_rows"])
def test_a_shape_below_one_is_refused(name):
    with pytest.raises(PackingError, match=f"{name} must be at least 1, got 0"):
        pack([], **({"row_slots": 1, "row_targets": 1, "max_rows": 1} | {name: 0}))


def test_a_target_without_weight_is_refused(make_call):
    tree, targets = item_of([make_call("a", [1], [2])])
    with pytest.raises(PackingError, match=r"weight 0 or less, which means padding"):
        pack([(tree, targets._replace(weight=targets.weight * 0))], row_slots=4, row_targets=4, max_rows=1)


def test_targets_out_of_order_are_refused(make_call):
    tree, targets = item_of([make_call("a", [1], [2, 3])])
    turned = targets._replace(source=targets.source[::-1])
    with pytest.raises(PackingError, match=r"must be sorted by source"):
        pack([(tree, turned)], row_slots=4, row_targets=4, max_rows=1)


def test_what_finds_no_room_is_left_out_whole_and_counted(make_call):
    groups = [[make_call(f"{g}{i}", [g, i, i], [5, 6], seq=i) for i in range(2)] for g in range(1, 4)]
    items = [item_of(calls, first=2 * place) for place, calls in enumerate(groups)]  # 7 slots each
    batch, report = pack(items, row_slots=7, row_targets=8, max_rows=2)
    assert (report.rows_used, report.rows_wanted) == (2, 3)
    assert set(batch.call[batch.weight > 0].tolist()) == {0, 1, 2, 3}
    assert report.dropped == {"no_room": Drop(calls=2, tokens=4)}


def test_a_group_that_needs_several_rows_is_never_packed_in_part(make_call):
    cut = item_of([make_call("a", [1] * 6, [2], seq=0), make_call("b", [3] * 6, [2], seq=1)])
    small = item_of([make_call("c", [4], [2])], first=2)
    batch, report = pack([small, cut], row_slots=6, row_targets=4, max_rows=1)
    assert set(batch.call[batch.weight > 0].tolist()) == {2}
    assert report.dropped == {"no_room": Drop(calls=2, tokens=2)}


def test_groups_share_prefixes_inside_and_not_across(make_call):
    calls = [
        make_call(f"{g}{r}", [1, 2, 3, 4], [5, r], group_id=g, rollout_id=f"{g}{r}") for g in "ab" for r in range(2)
    ]
    step = pack_groups(credited_of(calls), loss_mean="rollout", row_slots=16, row_targets=16, max_rows=2)
    assert step.report.slots_used == 2 * 5
    assert step.report.reuse == 2.0
    assert step.rollouts == ("a0", "a1", "b0", "b1")
    assert step.batch.weight.sum() == 4


def test_a_call_longer_than_a_row_is_dropped_with_its_reason_before_weights_are_taken(make_call):
    calls = [make_call("a", [1] * 9, [2, 3], seq=0), make_call("b", [1], [2, 3], seq=1)]
    given = credited_of(calls, {"undelivered": Drop(calls=1, tokens=7)})
    step = pack_groups(given, loss_mean="rollout", row_slots=9, row_targets=16, max_rows=2)
    assert step.report.dropped == {"too_long": Drop(calls=1, tokens=2), "undelivered": Drop(calls=1, tokens=7)}
    assert step.batch.weight[step.batch.weight > 0].tolist() == [0.5, 0.5]
    fits = pack_groups(given, loss_mean="rollout", row_slots=10, row_targets=16, max_rows=2)
    assert "too_long" not in fits.report.dropped


def test_a_call_whose_prompt_alone_exceeds_every_row_leaves_an_empty_batch_and_a_count(make_call):
    given = credited_of([make_call("a", [1] * 9, [2])])
    step = pack_groups(given, loss_mean="rollout", row_slots=8, row_targets=4, max_rows=1)
    assert step.report.dropped == {"too_long": Drop(calls=1, tokens=1)}
    assert (step.report.rows_used, step.report.tree_slots, step.batch.weight.sum()) == (0, 0, 0)
    assert [item.call.call_id for item in step.calls] == ["a"]


def test_too_long_calls_take_no_slot_of_the_tree_they_share(make_call):
    calls = [make_call("a", [1, 2], [3, 4], seq=0), make_call("b", [1, 2, 3, 4, 5], [6], seq=1)]
    step = pack_groups(credited_of(calls), loss_mean="token", row_slots=4, row_targets=4, max_rows=1)
    assert step.batch.token.tolist() == [[1, 2, 3, 0]]
    assert step.report.dropped == {"too_long": Drop(calls=1, tokens=1)}


def test_an_empty_output_has_no_target_and_takes_no_slot(make_call):
    calls = [make_call("a", [1, 2], [], seq=0), make_call("b", [3], [4], seq=1)]
    step = pack_groups(credited_of(calls), loss_mean="rollout", row_slots=4, row_targets=4, max_rows=1)
    assert step.batch.token.tolist() == [[3, 0, 0, 0]]
    assert step.batch.weight.tolist() == [[1, 0, 0, 0]]
    assert step.report.dropped == {}


def test_a_sampled_token_with_the_id_of_the_padding_is_trained(make_call):
    batch, report = pack([item_of([make_call("a", [0, 0], [0, 0])])], row_slots=5, row_targets=4, max_rows=1)
    assert batch.source.tolist() == [[1, 2, 0, 0]]
    assert batch.weight.tolist() == [[1, 1, 0, 0]]
    assert batch.subtree_end.tolist() == [[3, 3, 3, 4, 5]]
    assert (report.slots_used, report.targets_used) == (3, 2)


def test_a_rollout_weighs_one_in_however_many_rows_it_is(make_call):
    # Three branches of 4 slots and 3 targets on a trunk of 3: 15 slots fit one row, and two or three shorter ones.
    calls = [make_call(f"{i}", [1, 2, 3, i, i], [5, 6, 7], seq=i) for i in range(3)]
    rows = {}
    for row_slots in (15, 11, 7):
        step = pack_groups(credited_of(calls), loss_mean="rollout", row_slots=row_slots, row_targets=16, max_rows=3)
        rows[step.report.rows_used] = sorted(step.batch.weight[step.batch.weight > 0].tolist())
    assert rows == {n: [np.float32(1 / 9)] * 9 for n in (1, 2, 3)}


def test_each_row_says_how_full_it_is_and_how_often_its_slots_serve(make_call):
    calls = [make_call("a", [1, 2, 3], [4, 5], seq=0), make_call("b", [1, 2, 3], [6], seq=1)]
    items = [item_of(calls), item_of([make_call("c", [7] * 5, [8])], first=2)]
    _, report = pack(items, row_slots=6, row_targets=4, max_rows=2)
    # Five slots for one call of five; four for the two calls of four and three.
    assert report.rows == (RowReport(0, 5, 1, 5, 6), RowReport(0, 4, 3, 7, 6))
    assert [row.fill for row in report.rows] == [5 / 6, 4 / 6]
    assert [row.reuse for row in report.rows] == [1, 7 / 4]
    assert (report.fill, report.reuse) == (9 / 12, 12 / 9)


def test_rows_of_several_shapes(make_call):
    items = [item_of([make_call(f"{n}", [n] * n, [9])], first=n) for n in (7, 3, 2, 4)]
    buckets = [Bucket(4, 2, 1), Bucket(8, 4, 2)]
    batches, report = pack_buckets(items, buckets)
    assert [batch.token.shape for batch in batches] == [(1, 4), (2, 8)]
    assert [batch.weight.shape for batch in batches] == [(1, 2), (2, 4)]
    assert batches[1].token.tolist() == [[7] * 7 + [0], [4] * 4 + [3] * 3 + [0]]
    assert batches[0].token.tolist() == [[2, 2, 0, 0]]
    assert [row.bucket for row in report.rows] == [0, 1, 1]
    assert (report.rows_used, report.rows_wanted, report.fill) == (3, 3, 16 / 20)


def test_no_room_in_any_shape_is_counted(make_call):
    items = [item_of([make_call(f"{n}", [n] * 4, [9])], first=n) for n in range(1, 5)]
    batches, report = pack_buckets(items, [Bucket(4, 2, 1), Bucket(9, 4, 1)])
    assert report.dropped == {"no_room": Drop(calls=1, tokens=1)}
    assert (report.rows_used, report.rows_wanted) == (2, 3)
    assert sorted(np.concatenate([batch.call[batch.weight > 0] for batch in batches]).tolist()) == [1, 2, 3]


def test_groups_are_numbered_through_the_whole_step(make_call):
    calls = [make_call(f"{g}{r}", [1, 2], [3, 4], group_id=g, rollout_id=f"{g}{r}") for g in "ba" for r in range(2)]
    trees = group_trees(credited_of(calls), loss_mean="rollout", row_slots=8)
    assert [item.call.call_id for item in trees.calls] == ["a0", "a1", "b0", "b1"]
    assert [targets.call.tolist() for _, targets in trees.items] == [[0, 1, 0, 1], [2, 3, 2, 3]]
    assert [targets.source.tolist() for _, targets in trees.items] == [[1, 1, 2, 2]] * 2
    assert [tree.parent.tolist() for tree, _ in trees.items] == [[-1, 0, 1]] * 2
    assert [tree.subtree_end.tolist() for tree, _ in trees.items] == [[3, 3, 3]] * 2


def test_which_of_two_siblings_was_asked_first_does_not_matter(make_call):
    first = [make_call("a", [1, 2], [3, 9], seq=0), make_call("b", [1, 2], [3, 8], seq=1)]
    second = [make_call("a", [1, 2], [3, 9], seq=1), make_call("b", [1, 2], [3, 8], seq=0)]
    shape = {"loss_mean": "rollout", "row_slots": 4, "row_targets": 4, "max_rows": 1}
    steps = [pack_groups(credited_of(calls), **shape) for calls in (first, second)]
    assert [[item.call.call_id for item in step.calls] for step in steps] == [["b", "a"]] * 2
    assert [step.batch.target.tolist() for step in steps] == [[[3, 3, 8, 9]]] * 2


def least_slots(depth, source, row_slots, row_targets):
    """Fewest slots over every way to cut the targets into consecutive parts, by trying them all."""
    count, best = len(source), None
    for cuts in itertools.product([False, True], repeat=count - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), count]
        need = [depth[source[a]] + 1 + source[b - 1] - source[a] for a, b in itertools.pairwise(edges)]
        if max(need) <= row_slots and max(np.diff(edges)) <= row_targets:
            best = min(best or sum(need), sum(need))
    return best


@hypothesis.given(
    st.lists(st.lists(st.integers(1, 2), min_size=2, max_size=9), min_size=5, max_size=9),
    st.integers(9, 14),
    st.integers(3, 12),
)
def test_cuts_are_the_best_there_are(make_call, sequences, row_slots, row_targets):
    # With row_targets below 32 every border is tried, so the result must be the optimum.
    calls = [make_call(f"{i}", [1, *s[:-1]], s[-1:], seq=i) for i, s in enumerate(sequences)]
    pruned = prune(*item_of(calls))
    cut = list(parts(*pruned, row_slots=row_slots, row_targets=row_targets))
    assert sum(len(part.token) for part in cut) == least_slots(
        pruned[0].depth, pruned[1].source, row_slots, row_targets
    )
