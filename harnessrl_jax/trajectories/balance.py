"""Lineages and rollouts -> whether links hold, and whether every sampled token is trained once or dropped for a reason.

The rules of the design that concern what records become; `audit` concerns the records themselves. NumPy only.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from harnessrl_jax.errors import HarnessRLError
from harnessrl_jax.trajectories.audit import Finding, call_name
from harnessrl_jax.trajectories.credit import CreditedCall, CreditedCalls, call_advantages
from harnessrl_jax.trajectories.lineage import Lineage
from harnessrl_jax.trajectories.records import Rollout
from harnessrl_jax.trajectories.targets import build_targets
from harnessrl_jax.trajectories.trees import build, path

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

    Trained tokens of a rollout must weigh 1 together, with "rollout" weights; trained and dropped tokens together
    must be all that were sampled.

    Args:
      rollouts: of one group.
      lineages: of their attempts.

    Returns:
      What does not add up, and records that cannot be credited at all.
    """
    where = f"group {rollouts[0].group_id!r}" if rollouts else "no group"
    try:
        credited = call_advantages(rollouts, lineages, process_weight=0.0)
    except HarnessRLError as error:
        return [Finding("lineage", where, str(error), "Remove the record that contradicts the others.")]
    out = _balance(where, credited, lineages)
    for credit, wrong in _targets(credited.calls):
        out.append(
            Finding("weight", call_name(credit.call), wrong, "Report this: the call was turned into wrong targets.")
        )
    return out


def _balance(where: str, credited: CreditedCalls, lineages: Iterable[Lineage]) -> list[Finding]:
    sampled = sum(len(linked.call.output_ids) for lineage in lineages for linked in lineage.calls)
    trained = sum(len(item.call.output_ids) for item in credited.calls)
    dropped = sum(drop.tokens for drop in credited.dropped.values())
    if trained + dropped == sampled:
        return []
    what = f"{sampled} tokens were sampled, but {trained} are trained and {dropped} are dropped with a reason"
    return [Finding("weight", where, what, "Report this: tokens were lost without a reason.")]


def _targets(calls: Sequence[CreditedCall]) -> Iterator[tuple[CreditedCall, str]]:
    """Calls whose targets are not their sampled tokens after their own prompts, each with what is wrong."""
    if not calls:
        return
    number_of: dict[tuple[str, str], int] = {}
    rollout = np.array(
        [number_of.setdefault((c.call.run_id, c.call.rollout_id), len(number_of)) for c in calls], np.int32
    )
    tree, leaf = build([np.concatenate([c.call.prompt_ids, c.call.output_ids]) for c in calls])
    number = np.arange(len(calls), dtype=np.int32)
    targets = build_targets(tree, leaf, calls, call_number=number, rollout_number=rollout, loss_mean="rollout")
    total = np.zeros(len(number_of), np.float64)
    np.add.at(total, targets.rollout, targets.weight.astype(np.float64))
    for place, credit in enumerate(calls):
        own = np.flatnonzero(targets.call == place)
        nodes = path(tree, int(leaf[place]))
        said = np.concatenate([credit.call.prompt_ids, credit.call.output_ids])
        first = len(credit.call.prompt_ids) - 1
        if not np.array_equal(tree.token[nodes], said):
            yield credit, "the tree does not hold its prompt and output"
        elif sorted(targets.source[own].tolist()) != nodes[first : first + len(credit.call.output_ids)].tolist():
            yield credit, f"{len(own)} targets do not stand after its own context"
        elif sorted(targets.token[own].tolist()) != sorted(credit.call.output_ids.tolist()):
            yield credit, "its targets are not the ids it sampled"
        elif abs(total[rollout[place]] - 1.0) > WEIGHT_SLACK:
            yield credit, f"the targets of its rollout weigh {total[rollout[place]]:.6f} together, not 1"
