"""How fast calls become packed rows, against a plain dictionary trie that does the same job in the same run.

    python tests/benchmarks/packing_speed.py

Both sides turn the same credited calls into the same rows: every token inserted once for each call, one target for
each sampled token, depth-first order, rows of one shape. The dictionary trie is the usual form in plain Python, one
dictionary for each node, as fast as it can be written without arrays; "insertion" is its first stage alone. All figures
are medians of CPU seconds of this process, the sides taking turns. Shapes are those of agents: a system prompt that a
group of rollouts shares, turns that are appended, reasoning that later prompts leave out, sub-agents.
"""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from agent_shapes import made_call

from harnessrl_jax.trajectories import CreditedCall, CreditedCalls, PackedBatch, group_trees, pack


class Shape(NamedTuple):
    """Lengths in tokens. Each turn samples `output`, of which later prompts leave out the first `thought`."""

    system: int
    turns: int
    output: int
    result: int
    thought: int = 0
    subagents: int = 0
    rollouts: int = 8


CHAT = Shape(system=460, turns=8, output=60, result=90)
SHAPES = {
    "chat with tools": (CHAT, 15),
    "coding agent": (Shape(system=3000, turns=20, output=100, result=300), 1),
    "coding agent, thoughts left out": (Shape(system=3000, turns=20, output=200, result=300, thought=150), 1),
    "coding agent with sub-agents": (Shape(system=3000, turns=20, output=100, result=300, subagents=4), 1),
}
SUBAGENT = Shape(system=900, turns=4, output=80, result=200)


def credited_calls(shape: Shape, groups: int) -> CreditedCalls:
    """The calls of some groups of rollouts, in the order in which they would be stored."""
    rng = np.random.default_rng(0)
    calls: list[CreditedCall] = []
    starts = [_words(rng, SUBAGENT.system - 100), *(_words(rng, shape.system) for _ in range(groups))]
    for group, start in enumerate(starts[1:]):
        for rollout in range(shape.rollouts):
            name = f"{group}/{rollout}"
            opened = np.linspace(0, shape.turns, shape.subagents, endpoint=False).astype(int).tolist()
            for turn, context in enumerate(_conversation(rng, shape, start)):
                calls.append(_credited(name, group, f"main/{turn}", *context))
                for number in range(opened.count(turn)):
                    inner = _conversation(rng, SUBAGENT, np.concatenate([starts[0], _words(rng, 100)]))
                    calls += [
                        _credited(name, group, f"sub{turn}.{number}/{i}", *context) for i, context in enumerate(inner)
                    ]
    return CreditedCalls(calls=tuple(calls), dropped={})


def _words(rng, size):
    return rng.integers(7, 150_000, size).astype(np.int32)


def _conversation(rng, shape, context):
    for _ in range(shape.turns):
        output = _words(rng, shape.output)
        yield context, output
        context = np.concatenate([context, output[shape.thought :], _words(rng, shape.result)])


def _credited(rollout, group, name, prompt, output):
    session, turn = name.split("/")
    call = made_call(str(group), rollout, session, int(turn), prompt, output)
    return CreditedCall(call=call, advantage=1.0, success=True)


# ---- the dictionary trie. A node is {token: node}; under None it holds the targets that it predicts. ----------------


def insert(credited: CreditedCalls) -> dict[str, dict]:
    """One trie for each group, with the targets: each token of each call is one step."""
    roots: dict[str, dict] = {}
    sampled: dict[str, int] = {}
    for item in credited.calls:
        sampled[item.call.rollout_id] = sampled.get(item.call.rollout_id, 0) + len(item.call.output_ids)
    for number, (call, advantage, success) in enumerate(credited.calls):
        node = roots.setdefault(call.group_id, {})
        for token in call.prompt_ids.tolist():
            after = node.get(token)
            if after is None:
                after = node[token] = {}
            node = after
        weight = 1.0 / sampled[call.rollout_id]
        last = len(call.output_ids) - 1
        for place, (token, logp) in enumerate(
            zip(call.output_ids.tolist(), np.asarray(call.logps).tolist(), strict=True)
        ):
            targets = node.get(None)
            if targets is None:
                targets = node[None] = []
            targets.append((token, logp, True, advantage, 3, weight, success, number, number))
            if place < last:  # nobody needs the last token of a call in a row
                after = node.get(token)
                if after is None:
                    after = node[token] = {}
                node = after
    return roots


def flatten(root: dict) -> tuple[list, list, list, list]:
    """Token, depth and subtree end of each node in depth-first order, and the targets with their source."""
    token, depth, end, targets = [], [], [], []
    path: list[int] = []
    stack = [(word, child, 0) for word, child in root.items()]
    stack.sort(key=lambda entry: -entry[0])
    while stack:
        word, node, deep = stack.pop()
        here = len(token)
        while len(path) > deep:
            end[path.pop()] = here
        path.append(here)
        token.append(word)
        depth.append(deep)
        end.append(0)
        children = []
        for key, child in node.items():
            if key is None:
                targets.extend([(here, *target) for target in child])
            else:
                children.append((key, child, deep + 1))
        if len(children) > 1:
            children.sort(key=lambda entry: -entry[0])
        stack.extend(children)
    for node in path:
        end[node] = len(token)
    return token, depth, end, targets


def cut(tree: tuple[list, list, list, list], row_slots: int, row_targets: int) -> list[tuple]:
    """Fills parts in depth-first order; each begins with the path to its first source."""
    token, depth, end, targets = tree
    parts, begin = [], 0
    while begin < len(targets):
        low = targets[begin][0]
        above: list[int] = []
        node = 0
        while node < low:  # down the path: a node that does not hold `low` is passed with all that is below it
            if end[node] > low:
                above.append(node)
                node += 1
            else:
                node = end[node]
        room = low + row_slots - len(above)
        stop = begin
        while stop < len(targets) and targets[stop][0] < room and stop - begin < row_targets:
            stop += 1
        high = targets[stop - 1][0] + 1
        nodes = [*above, *range(low, high)]
        shift = len(above) - low
        parts.append(
            (
                [token[node] for node in nodes],
                [depth[node] for node in nodes],
                [min(end[node], high) + shift for node in nodes],
                [(target[0] + shift, *target[1:]) for target in targets[begin:stop]],
            )
        )
        begin = stop
    return parts


def fill(parts: list[tuple], row_slots: int, row_targets: int, max_rows: int) -> PackedBatch:
    """First-fit-decreasing, then one list for each field of each row."""
    rows: list[list[tuple]] = []
    free: list[list[int]] = []
    for part in sorted(parts, key=lambda part: -len(part[0])):
        slots, targets = len(part[0]), len(part[3])
        number = next((n for n, room in enumerate(free) if room[0] >= slots and room[1] >= targets), len(rows))
        if number == len(rows):
            rows.append([])
            free.append([row_slots, row_targets])
        rows[number].append(part)
        free[number][0] -= slots
        free[number][1] -= targets
    slot_fields, target_fields = [[], [], []], [[] for _ in range(10)]
    for number in range(max_rows):
        token, position, end, found = [], [], [], []
        for part in rows[number] if number < len(rows) else []:
            first = len(token)
            token.extend(part[0])
            position.extend(part[1])
            end.extend([first + stop for stop in part[2]])
            found.extend([(first + target[0], *target[1:]) for target in part[3]])
        pad = row_slots - len(token)
        end.extend(range(len(token) + 1, row_slots + 1))
        for field, values in zip(slot_fields, (token + [0] * pad, position + [0] * pad, end), strict=True):
            field.append(values)
        found.extend([(0, 0, 0.0, False, 0.0, 0, 0.0, False, -1, -1)] * (row_targets - len(found)))
        for field, values in zip(target_fields, zip(*found, strict=True), strict=True):
            field.append(values)
    ints = [np.array(field, np.int32) for field in (*slot_fields, *target_fields[:2])]
    kinds = (np.float32, np.bool_, np.float32, np.int8, np.float32, np.bool_, np.int32, np.int32)
    return PackedBatch(*ints, *(np.array(field, kind) for field, kind in zip(target_fields[2:], kinds, strict=True)))


# ---- measuring ------------------------------------------------------------------------------------------------------


def cpu_seconds(sides: dict[str, Callable[[], Any]], times: int) -> dict[str, float]:
    """Median CPU seconds of each side, after one run of each; the sides take turns."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    gc.disable()  # collecting the many dictionaries again and again would slow that side down
    for turn in range(times + 1):
        for name, work in sides.items():
            start = time.process_time()
            work()
            if turn:
                found[name].append(time.process_time() - start)
    gc.enable()
    return {name: statistics.median(values) for name, values in found.items()}


def trained(batch: PackedBatch) -> list[tuple[int, int, float]]:
    """Position, id and weight of every target, in an order of its own."""
    used = batch.weight > 0
    position = np.take_along_axis(batch.position, batch.source, axis=1)
    return sorted(zip(*(field[used].tolist() for field in (position, batch.target, batch.weight)), strict=True))


def measure(name: str, shape: Shape, groups: int, times: int) -> None:
    """Prints one line: milliseconds of ours, and how many times as long the dictionaries take."""
    credited = credited_calls(shape, groups)
    tokens = sum(len(item.call.prompt_ids) + len(item.call.output_ids) for item in credited.calls)
    row = {"row_slots": 32768, "row_targets": 16384}
    trees = group_trees(credited, loss_mean="rollout", row_slots=row["row_slots"])
    batch, report = pack(trees.items, **row, max_rows=16 * groups)
    row["max_rows"] = report.rows_used + 1  # the parts of the dictionaries may need one row more
    tries = [flatten(root) for root in insert(credited).values()]
    rows = lambda: fill([part for trie in tries for part in cut(trie, row["row_slots"], row["row_targets"])], **row)
    assert trained(batch) == trained(rows()), "the two sides train different tokens"
    seconds = cpu_seconds(
        {
            "trees": lambda: group_trees(credited, loss_mean="rollout", row_slots=row["row_slots"]),
            "insertion": lambda: insert(credited),
            "tries": lambda: [flatten(root) for root in insert(credited).values()],
            "rows": lambda: pack(trees.items, **row),
            "trie rows": rows,
        },
        times,
    )
    build, insertion, tries_s, fill_s, trie_rows = (1e3 * second for second in seconds.values())
    ours, theirs = build + fill_s, tries_s + trie_rows
    print(
        f"{name:32s} {tokens:8d} {len(credited.calls):6d} {report.reuse:6.1f} {report.fill:5.2f} |"
        f" {build:7.1f} {fill_s:7.1f} {1e6 * ours / tokens:7.1f} |"
        f" {tries_s / build:6.1f} {trie_rows / fill_s:6.1f} {theirs / ours:6.1f} {insertion / ours:6.1f}"
    )


def main() -> None:
    """Measures the shapes at about a million call tokens, and one shape at growing sizes."""
    print(" " * 33 + "          call                  |      ours: milliseconds | dictionary trie, times as long")
    print(f"{'':32s}   tokens  calls  reuse  fill |   trees    rows ns/token |  trees   rows    all  insertion alone")
    for name, (shape, groups) in SHAPES.items():
        measure(name, shape, groups, times=5)
    for groups, times in ((1, 15), (4, 9), (16, 5), (60, 3)):
        measure(f"chat with tools, {groups} groups", CHAT, groups, times)


if __name__ == "__main__":
    main()
