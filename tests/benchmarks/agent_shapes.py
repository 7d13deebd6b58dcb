"""Shapes of agent traffic, as calls with made-up tokens: what the benchmarks of packing and training run on."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from harnessrl_jax.trajectories import Call, CreditedCall, CreditedCalls, LogpKind

RAW = LogpKind(mode="raw", temperature=1.0, top_p=1.0, top_k=0)
Context = tuple[np.ndarray, np.ndarray]
"""Prompt and output of one call."""


class Shape(NamedTuple):
    """Lengths in tokens of one group of rollouts that share a system prompt."""

    system: int
    turns: int
    output: int
    """Sampled in a turn."""
    result: int
    """What comes back from the tool."""
    thought: int = 0
    """The first tokens of each output, which later prompts leave out."""
    subagents: int = 0
    """Opened after every second turn; each is a conversation of `SUBAGENT`'s lengths."""
    compact_after: int = 0
    """After this turn the model writes a summary, and the conversation restarts with it; 0: never."""
    rollouts: int = 8
    shrink: int = 1
    """What `TASK`, `SUMMARY` and the lengths of `SUBAGENT` are divided by."""


SUBAGENT = Shape(system=300, turns=3, output=100, result=150)
TASK, SUMMARY = 100, 200
SHAPES = {
    "appended turns": Shape(system=600, turns=6, output=150, result=200),
    "thoughts left out": Shape(system=600, turns=6, output=150, result=200, thought=100),
    "sub-agents": Shape(system=600, turns=6, output=150, result=200, subagents=2),
    "compaction": Shape(system=600, turns=6, output=150, result=200, compact_after=3),
    "long system prompt": Shape(system=3000, turns=6, output=150, result=200),
}


def shrunk(shape: Shape, by: int) -> Shape:
    """The same traffic with every length divided by `by`, rounded down."""
    lengths = {name: getattr(shape, name) // by for name in ("system", "output", "result", "thought")}
    return shape._replace(shrink=shape.shrink * by, **lengths)


def group(shape: Shape, vocabulary: int) -> CreditedCalls:
    """The calls of one group of rollouts, in the order in which they would be stored; each rollout has an advantage."""
    rng = np.random.default_rng(0)
    words = lambda size: rng.integers(7, vocabulary, size).astype(np.int32)
    below = shrunk(SUBAGENT, shape.shrink)
    system, sub_system, calls = words(shape.system), words(below.system), []
    for rollout in range(shape.rollouts):
        advantage = float(rng.normal())
        add = lambda session, turn, context, r=rollout, a=advantage: calls.append(
            CreditedCall(call=made_call("0", str(r), session, turn, *context), advantage=a, success=a > 0)
        )
        for turn, context in enumerate(_conversation(words, shape, system)):
            add("main", turn, context)
            for number in range(shape.subagents * (turn % 2)):
                start = np.concatenate([sub_system, words(TASK // shape.shrink)])
                for inner, inner_context in enumerate(_conversation(words, below, start)):
                    add(f"sub{turn}.{number}", inner, inner_context)
    return CreditedCalls(calls=tuple(calls), dropped={})


def _conversation(words, shape: Shape, start: np.ndarray) -> Iterator[Context]:
    context = start
    for turn in range(shape.turns):
        output = words(shape.output)
        yield context, output
        context = np.concatenate([context, output[shape.thought :], words(shape.result)])
        if turn + 1 == shape.compact_after:
            summary = words(SUMMARY // shape.shrink)
            yield context, summary
            context = np.concatenate([start, summary])


def made_call(group_id: str, rollout: str, session: str, turn: int, prompt: np.ndarray, output: np.ndarray) -> Call:
    """A stored call with the given tokens, of which a sampler said log-probability -7.6 each."""
    return Call(
        run_id="run", task_id="t", group_id=group_id, rollout_id=rollout, attempt=0, session_id=session, agent="a",
        trainable=True, parent_call_id=None, call_id=f"{rollout}/{session}/{turn}", seq=turn, choice=0, harness="h",
        dialect="d", prompt_ids=prompt, output_ids=output, logps=np.full(len(output), -7.6), logp_kind=RAW,
        version_start=0, version_end=0, finish="stop", parse_status="none", tool_calls=(), spans=(), delivered=True,
        request_digest="", retry=False, request="", started_s=0.0, finished_s=1.0,
    )  # fmt: skip


def each_alone(credited: CreditedCalls) -> CreditedCalls:
    """The same calls, each a group of its own: nothing is shared."""
    return _regrouped(credited, [str(number) for number in range(len(credited.calls))])


def chains(credited: CreditedCalls) -> CreditedCalls:
    """The same calls, grouped where one's prompt continues another's whole prompt and output: linear chains."""
    tips: dict[tuple[str, str], tuple[str, np.ndarray]] = {}
    names = []
    for number, item in enumerate(credited.calls):
        call, session = item.call, (item.call.rollout_id, item.call.session_id)
        name, tip = tips.get(session, ("", np.zeros(0, np.int32)))
        continues = name and np.array_equal(call.prompt_ids[: len(tip)], tip)
        names.append(name if continues else str(number))
        tips[session] = (names[-1], np.concatenate([call.prompt_ids, call.output_ids]))
    return _regrouped(credited, names)


def _regrouped(credited: CreditedCalls, names: list[str]) -> CreditedCalls:
    calls = zip(credited.calls, names, strict=True)
    return credited._replace(
        calls=tuple(item._replace(call=dataclasses.replace(item.call, group_id=name)) for item, name in calls)
    )
