"""The calls of a step -> one prefix tree for each group of rollouts, and from there one packed batch. NumPy only."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int32, UInt8

from harnessrl_jax.errors import PackingError
from harnessrl_jax.trajectories.accounting import Drop, merge_drops
from harnessrl_jax.trajectories.credit import CreditedCall, CreditedCalls, LossMean
from harnessrl_jax.trajectories.packing import Item, PackingReport, pack
from harnessrl_jax.trajectories.records import Call
from harnessrl_jax.trajectories.rows import PackedBatch
from harnessrl_jax.trajectories.targets import Targets, build_targets
from harnessrl_jax.trajectories.trees import BIG_ENDIAN, ROOT, PrefixTree, ancestor, build_forest


class PackedStep(NamedTuple):
    """One training step's data.

    Attributes:
      batch: the rows.
      report: fill, reuse, and every sampled token that is not in the batch, by reason.
      calls: the credited calls; `batch.call` counts through them.
      rollouts: rollout ids; `batch.rollout` counts through them.
    """

    batch: PackedBatch
    report: PackingReport
    calls: tuple[CreditedCall, ...]
    rollouts: tuple[str, ...]


class GroupTrees(NamedTuple):
    """A step's calls as trees, before they have places in rows.

    Attributes:
      items: the tree of each group of rollouts, and its targets.
      calls: the credited calls; `Targets.call` counts through them.
      rollouts: rollout ids; `Targets.rollout` counts through them.
      dropped: calls and sampled tokens that have no target, by reason.
    """

    items: tuple[Item, ...]
    calls: tuple[CreditedCall, ...]
    rollouts: tuple[str, ...]
    dropped: Mapping[str, Drop]


def pack_groups(
    credited: CreditedCalls, *, loss_mean: LossMean, row_slots: int, row_targets: int, max_rows: int
) -> PackedStep:
    """Builds one tree for each group of rollouts and packs them into rows of one shape.

    Args:
      credited: the calls of a step.
      loss_mean: how targets are weighted, see `loss_weights`.
      row_slots: slots of a row.
      row_targets: targets of a row.
      max_rows: rows of the batch.

    Returns:
      The batch, its report, and what the call and rollout numbers mean. The same for every order of the calls.

    Raises:
      PackingError: a shape below 1, or some calls record experts and others do not.
    """
    trees = group_trees(credited, loss_mean=loss_mean, row_slots=row_slots)
    batch, report = pack(trees.items, row_slots=row_slots, row_targets=row_targets, max_rows=max_rows)
    report = report._replace(dropped=merge_drops(trees.dropped, report.dropped))
    return PackedStep(batch=batch, report=report, calls=trees.calls, rollouts=trees.rollouts)


def group_trees(credited: CreditedCalls, *, loss_mean: LossMean, row_slots: int) -> GroupTrees:
    """Builds one tree for each group of rollouts, and the targets of its calls.

    The rollouts of a group share system prompt and question, so their calls share one tree and each shared token is
    computed once. A call whose tokens exceed a row is dropped as "too_long" before the loss weights are taken.

    Args:
      credited: the calls of a step.
      loss_mean: how targets are weighted, see `loss_weights`.
      row_slots: slots of the longest row there is.

    Returns:
      The trees. The same for every order of the calls.

    Raises:
      PackingError: some calls record experts and others do not.
    """
    tree, leaf, edges, calls = _ordered_forest(credited.calls)
    rollouts: dict[tuple[str, str], int] = {}
    rollout = [rollouts.setdefault((item.call.run_id, item.call.rollout_id), len(rollouts)) for item in calls]
    fits = tree.depth[leaf] < row_slots
    kept, long = np.flatnonzero(fits), [len(calls[place].call.output_ids) for place in np.flatnonzero(~fits).tolist()]
    targets = build_targets(
        tree,
        leaf[kept],
        [calls[place] for place in kept.tolist()],
        call_number=kept,
        rollout_number=np.array(rollout, np.int32)[kept],
        loss_mean=loss_mean,
    )
    too_long = {"too_long": Drop(calls=len(long), tokens=sum(long))} if long else {}
    return GroupTrees(
        items=tuple(_split(tree, targets, edges)),
        calls=tuple(calls),
        rollouts=tuple(rollout for _, rollout in rollouts),
        dropped=merge_drops(credited.dropped, too_long),
    )


def _ordered_forest(
    credited: Sequence[CreditedCall],
) -> tuple[PrefixTree, Int32[np.ndarray, " call"], Int32[np.ndarray, " edge"], list[CreditedCall]]:
    """The trees of what the calls of each group condition on, as `build_forest` gives them, and the sorted calls.

    Sorted by group, rollout, session, prompt, output and place in the traffic. Nodes in depth-first order sort like
    the ids that lead to them, so the last node of a prompt stands for the prompt.
    """
    session = [(c.run_id, c.group_id, c.rollout_id, c.attempt, c.session_id) for c, _, _ in credited]
    rank = {name: place for place, name in enumerate(sorted(set(session)))}
    ranks = [rank[name] for name in session]
    given = sorted(range(len(credited)), key=ranks.__getitem__)
    groups = [list(group) for _, group in itertools.groupby(given, key=lambda place: session[place][:2])]
    tree, leaf, edges = _forest([[credited[place].call for place in group] for group in groups])
    prompt_end = ancestor(tree, leaf, np.array([len(credited[place].call.prompt_ids) - 1 for place in given])).tolist()
    nodes = len(tree.token)

    def content(index: int) -> tuple[int, bytes, int, int, str]:
        place = given[index]
        c = credited[place].call
        output = c.output_ids.astype(BIG_ENDIAN).tobytes()
        return ranks[place] * nodes + prompt_end[index], output, c.seq, c.choice, c.call_id

    order = sorted(range(len(given)), key=content)
    return tree, leaf[order], edges, [credited[given[index]] for index in order]


def _context(call: Call) -> Int[np.ndarray, " token"]:
    """What the call's targets condition on: all but its last token."""
    return np.concatenate((call.prompt_ids, call.output_ids[:-1]), dtype=BIG_ENDIAN)


def _forest(
    groups: Sequence[Sequence[Call]],
) -> tuple[PrefixTree, Int32[np.ndarray, " call"], Int32[np.ndarray, " edge"]]:
    """The trees of the contexts of each group, as `build_forest` gives them; with the experts that calls record.

    A token that went to other experts is computed otherwise, so it is another node: calls share what was sampled alike.
    The trees are built over numbers of the pairs (token, experts), which sort like them.
    """
    calls = [call for group in groups for call in group]
    if not any(call.experts is not None for call in calls):
        return build_forest((_context(call) for call in group) for group in groups)
    routes = np.concatenate([_routes(call, calls[0]) for call in calls])
    contexts = [_context(call) for call in calls]
    token = np.concatenate(contexts, dtype=BIG_ENDIAN)  # without the type it would be that of this machine
    pairs = np.concatenate([token[:, None].view(np.uint8), routes.reshape(len(routes), -1)], axis=1)
    rows = np.ascontiguousarray(pairs).view(np.dtype((np.void, pairs.shape[1])))[:, 0]
    _, first, number = np.unique(rows, return_index=True, return_inverse=True)
    numbers = iter(np.split(number, np.cumsum([len(context) for context in contexts])[:-1]))
    tree, leaf, edges = build_forest([next(numbers) for _ in group] for group in groups)
    found = first[tree.token]
    return tree._replace(token=token[found].astype(np.int32), experts=routes[found]), leaf, edges


def _routes(call: Call, other: Call) -> UInt8[np.ndarray, "token layer active"]:
    """The experts of a call, which must be there as those of the other call are."""
    if call.experts is None or other.experts is None or call.experts.shape[1:] != other.experts.shape[1:]:
        shapes = ["none" if one.experts is None else f"{list(one.experts.shape[1:])}" for one in (call, other)]
        raise PackingError(
            f"Calls {call.call_id!r} and {other.call_id!r} record experts of different shapes [layer, active]: "
            f"{shapes[0]} and {shapes[1]}. Train on what one sampler recorded, with experts in all calls or in none."
        )
    return call.experts


def _split(tree: PrefixTree, targets: Targets, edges: Int32[np.ndarray, " edge"]) -> Iterator[Item]:
    """The nodes between any two edges as a tree of their own, and the targets that begin there."""
    borders = np.searchsorted(targets.source, edges).tolist()
    for (low, high), (begin, end) in zip(itertools.pairwise(edges.tolist()), itertools.pairwise(borders), strict=True):
        fields: tuple[Any, ...] = tuple(field[low:high] for field in tree)
        own = PrefixTree(*fields)
        here = Targets(*(field[begin:end] for field in targets))
        parent = np.maximum(own.parent - np.int32(low), np.int32(ROOT))
        own = own._replace(parent=parent, subtree_end=own.subtree_end - np.int32(low))
        yield own, here._replace(source=here.source - np.int32(low))
