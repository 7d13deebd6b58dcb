"""Packed batches, a critic's values -> the batches with GAE's advantages and the critic's returns. NumPy only."""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Float32, Int

from harnessrl_jax.errors import PackingError
from harnessrl_jax.trajectories.credit import CreditedCall, tree_gae
from harnessrl_jax.trajectories.lineage import Lineage
from harnessrl_jax.trajectories.records import Call
from harnessrl_jax.trajectories.rows import PackedBatch
from harnessrl_jax.trajectories.trees import ROOT


def call_parents(calls: Sequence[CreditedCall], lineages: Iterable[Lineage]) -> Int[np.ndarray, " call"]:
    """The trained call that each call goes on from: its nearest ancestor among `calls`, -1 where there is none.

    Args:
      calls: the calls of a step, such as `PackedStep.calls`.
      lineages: of their attempts.
    """
    number = {_name(item.call): place for place, item in enumerate(calls)}
    above = {
        _name(linked.call): (*_name(linked.call)[:3], linked.parent_call_id)
        for lineage in lineages
        for linked in lineage.calls
        if linked.parent_call_id is not None
    }
    out = np.full(len(calls), ROOT, np.int64)
    for place, item in enumerate(calls):
        name = above.get(_name(item.call))
        while name is not None and name not in number:
            name = above.get(name)
        out[place] = ROOT if name is None else number[name]
    return out


def with_values(
    batches: Sequence[PackedBatch],
    values: Sequence[Float[np.ndarray, "row target"]],
    *,
    parent: Int[np.ndarray, " call"],
    outcome: Float[np.ndarray, " call"],
    process: Float[np.ndarray, " call"],
    gamma: float,
    lam: float,
    children: Literal["equal", "by_leaves"],
) -> tuple[PackedBatch, ...]:
    """Credit from a critic: `tree_gae` over the sampled tokens of a step, however they lie in rows.

    A step is one token. After the last token of a call come the first tokens of the calls that go on from it: what
    others wrote in between is no step. The outcome arrives after the last token of a call from which none goes on.
    The first returns of a critic that knows nothing (values 0, γ = λ = 1) are Monte-Carlo returns: its warm start.

    Args:
      batches: all batches of the step; a call's targets may lie in several.
      values: the critic's value of what each target follows (`training.make_values`); not read on padding.
      parent: the call that each call goes on from, -1 for none (`call_parents`); calls that are in no batch are passed
        over.
      outcome: reward of the rollout of each call.
      process: reward of each call itself; it arrives after the call's last token.
      gamma: discount of the next token, in 0..1.
      lam: decay of later errors, in 0..1.
      children: where several calls go on from one, whether they weigh the same or by the leaves below them.

    Returns:
      The batches with new `advantage`, and with `value_behaviour` and `target_return`; 0 on padding.

    Raises:
      PackingError: the arrays do not fit the batches, a target of a call is missing, or calls go on in a circle.
      RecordError: a value or reward is not finite, or gamma or lam is out of range.
    """
    _check(batches, values, parent=parent, outcome=outcome, process=process)
    used = [batch.weight > 0 for batch in batches]
    call = _flat([batch.call for batch in batches], used)
    depth = _flat([np.take_along_axis(batch.position, batch.source, axis=1) for batch in batches], used)
    order, above = _forest(call, depth, parent)
    call = call[order]
    ends = np.append(call[1:] != call[:-1], np.ones(min(len(call), 1), np.bool_))
    leaf = ends & ~np.isin(np.arange(len(call)), above)
    reward = np.where(ends, process[call], 0.0) + np.where(leaf, outcome[call], 0.0)
    found = tree_gae(above, _flat(values, used)[order], reward, gamma=gamma, lam=lam, children=children)
    back, borders = np.argsort(order), np.cumsum([own.sum() for own in used])[:-1]
    credit = [np.split(each[back], borders) for each in found]
    return tuple(
        batch._replace(
            advantage=_spread(own, advantage),
            value_behaviour=_spread(own, np.asarray(value)[own]),
            target_return=_spread(own, target),
        )
        for batch, value, own, advantage, target in zip(batches, values, used, *credit, strict=True)
    )


def _name(call: Call) -> tuple[str, str, int, str]:
    return call.run_id, call.rollout_id, call.attempt, call.call_id


def _flat(arrays: Sequence[np.ndarray], used: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(array)[own] for array, own in zip(arrays, used, strict=True)])


def _spread(
    used: Bool[np.ndarray, "row target"], values: Float[np.ndarray, " used"]
) -> Float32[np.ndarray, "row target"]:
    out = np.zeros(used.shape, np.float32)
    out[used] = values
    return out


def _forest(
    call: Int[np.ndarray, " target"], depth: Int[np.ndarray, " target"], parent: Int[np.ndarray, " call"]
) -> tuple[Int[np.ndarray, " target"], Int[np.ndarray, " target"]]:
    """An order in which every target stands after the one before it, and in that order, which one that is."""
    order = np.lexsort((depth, call, _generation(parent)[call]))
    call, depth = call[order], depth[order]
    begins = np.append(np.ones(min(len(call), 1), np.bool_), call[1:] != call[:-1])
    gap = np.flatnonzero(~begins & (np.diff(depth, prepend=-1) != 1))
    if len(gap):
        raise PackingError(
            f"with_values: call {call[gap[0]]} has no target, or more than one, between depths {depth[gap[0] - 1]} and "
            f"{depth[gap[0]]}. Give all batches of the step, as they were packed."
        )
    starts = np.flatnonzero(begins)
    last = dict(zip(call[starts].tolist(), (np.append(starts[1:], len(call)) - 1).tolist(), strict=True))
    above = np.arange(len(call)) - 1
    for place in starts.tolist():
        before = int(parent[call[place]])
        while before != ROOT and before not in last:
            before = int(parent[before])
        above[place] = last.get(before, ROOT)
    return order, above


def _generation(parent: Int[np.ndarray, " call"]) -> Int[np.ndarray, " call"]:
    """How many calls stand above each."""
    rank, now = np.zeros(len(parent), np.int64), np.array(parent, np.int64)
    while (now != ROOT).any():
        rank += now != ROOT
        now = np.where(now == ROOT, ROOT, parent[now])
        if rank.max() > len(parent):
            raise PackingError("with_values: calls go on from each other in a circle. Correct `parent`.")
    return rank


def _check(batches: Sequence[PackedBatch], values: Sequence[np.ndarray], **of_calls: np.ndarray) -> None:
    shapes = [batch.weight.shape for batch in batches], [np.shape(value) for value in values]
    if not batches or shapes[0] != shapes[1]:
        raise PackingError(f"with_values: values is {shapes[1]}, wanted one array for each batch: {shapes[0]}.")
    calls = len(of_calls["parent"])
    for name, array in of_calls.items():
        if array.shape != (calls,):
            raise PackingError(
                f"with_values: {name} is {list(array.shape)}, wanted one entry a call as parent: [{calls}]."
            )
    most = max(int(batch.call.max(initial=-1)) for batch in batches)
    if most >= calls:
        raise PackingError(
            f"with_values: a target is of call {most}, but parent names {calls}; give one for each call."
        )
    parent = of_calls["parent"]
    if ((parent < ROOT) | (parent >= calls)).any():
        raise PackingError(
            f"with_values: parent must be -1 or a call below {calls}, got {parent.min()} to {parent.max()}."
        )
