"""Lineages and rollouts -> whether links hold, and whether every sampled token is trained once or dropped for a reason.

The rules of the design that concern what records become; `audit` concerns the records themselves. NumPy only.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int32

from harnessrl_jax.errors import HarnessRLError
from harnessrl_jax.trajectories.audit import Finding, call_name
from harnessrl_jax.trajectories.credit import CreditedCall, CreditedCalls, call_advantages
from harnessrl_jax.trajectories.lineage import Lineage
from harnessrl_jax.trajectories.records import Rollout
from harnessrl_jax.trajectories.targets import Targets, build_targets
from harnessrl_jax.trajectories.trees import PrefixTree, build, path

# A float32 weight per token; their sum over a rollout is 1 to this.
WEIGHT_SLACK = 1e-4


def audit_lineage(lineage: Lineage) -> list[Finding]:
    """Whether each call that extends another holds its tokens as a prefix, and never with older weights.

    Args:
      lineage: of one attempt.

    Returns:
      A finding for each link that does not hold.
    """
    known = {linked.call.call_id: linked.call for linked in lineage.calls}
    out: list[Finding] = []
    for linked in lineage.calls:
        parent = known.get(linked.parent_call_id) if linked.parent_call_id is not None else None
        if parent is None:
            continue
        call, said = linked.call, np.concatenate([parent.prompt_ids, parent.output_ids])
        if not np.array_equal(call.prompt_ids[: len(said)], said):
            what = f"its prompt does not begin with the {len(said)} ids of {parent.call_id!r}, which it extends"
            out.append(Finding("lineage", call_name(call), what, "Report this: the links were built wrongly."))
        if call.version_start < parent.version_end:
            what = f"sampled by weights {call.version_start}, after {parent.call_id!r} ended with {parent.version_end}"
            fix = "Leave the rollout out; the sampler served old weights, or two runs shared the store."
            out.append(Finding("version", call_name(call), what, fix))
    return out


def audit_weights(rollouts: Sequence[Rollout], lineages: Sequence[Lineage]) -> list[Finding]:
    """Whether every sampled token becomes one target in its own context, or has a counted reason not to.

    Args:
      rollouts: of one group.
      lineages: of their attempts.

    Returns:
      What `audit_balance` and `audit_targets` find, and records that cannot be credited at all.
    """
    try:
        credited = call_advantages(rollouts, lineages, process_weight=0.0)
    except HarnessRLError as error:
        where = f"group {rollouts[0].group_id!r}" if rollouts else "calls without a rollout"
        return [Finding("lineage", where, str(error), "Remove the record that contradicts the others.")]
    out = audit_balance(credited, lineages)
    if credited.calls:
        calls = credited.calls
        numbers: dict[tuple[str, str], int] = {}
        names = [(c.call.run_id, c.call.rollout_id) for c in calls]
        rollout = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int32)
        tree, leaf = build([np.concatenate([c.call.prompt_ids, c.call.output_ids]) for c in calls])
        number = np.arange(len(calls), dtype=np.int32)
        targets = build_targets(tree, leaf, calls, call_number=number, rollout_number=rollout, loss_mean="rollout")
        out += audit_targets(calls, tree, leaf, targets)
    return out


def audit_balance(credited: CreditedCalls, lineages: Iterable[Lineage]) -> list[Finding]:
    """Whether trained and dropped tokens together are all that were sampled.

    >>> audit_balance(CreditedCalls(calls=(), dropped={}), [])
    []
    """
    sampled = sum(len(linked.call.output_ids) for lineage in lineages for linked in lineage.calls)
    trained = sum(len(item.call.output_ids) for item in credited.calls)
    dropped = sum(drop.tokens for drop in credited.dropped.values())
    if trained + dropped == sampled:
        return []
    what = f"{sampled} tokens were sampled, but {trained} are trained and {dropped} are dropped with a reason"
    return [Finding("weight", "a group", what, "Report this: tokens were lost without a reason.")]


def audit_targets(
    calls: Sequence[CreditedCall], tree: PrefixTree, leaf: Int32[np.ndarray, " call"], targets: Targets
) -> list[Finding]:
    """Whether the targets of each call are its sampled ids, each after the context it was sampled from.

    Args:
      calls: the trained calls of some rollouts, whole.
      tree: prefix tree of their prompts and outputs.
      leaf: last node of each call.
      targets: their targets with "rollout" weights, so that those of a rollout weigh 1 together; `targets.call` counts
        through `calls`.

    Returns:
      What is wrong with each call.
    """
    total = np.zeros(int(targets.rollout.max(initial=-1)) + 1, np.float64)
    np.add.at(total, targets.rollout, targets.weight.astype(np.float64))
    out: list[Finding] = []
    for place, credit in enumerate(calls):
        own = np.flatnonzero(targets.call == place)
        nodes, call = path(tree, int(leaf[place])), credit.call
        context = nodes[len(call.prompt_ids) - 1 : -1]
        given = sorted(zip(targets.source[own].tolist(), targets.token[own].tolist(), strict=True))
        wanted = list(zip(context.tolist(), call.output_ids.tolist(), strict=False))
        weight = [float(total[number]) for number in np.unique(targets.rollout[own])]
        if not np.array_equal(tree.token[nodes], np.concatenate([call.prompt_ids, call.output_ids])):
            what = "the tree does not hold its prompt and output"
        elif given != wanted:
            what = f"its {len(own)} targets are not its {len(call.output_ids)} sampled ids, each in its own context"
        elif len(weight) != 1 or abs(weight[0] - 1.0) > WEIGHT_SLACK:
            what = f"the targets of its rollout weigh {weight} together, not 1"
        else:
            continue
        out.append(Finding("weight", call_name(call), what, "Report this: the call was turned into wrong targets."))
    return out
