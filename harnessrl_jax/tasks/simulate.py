"""A task, a search tool and a player -> what a rollout gives, by the rules of the multi-hop harness, without HTTP."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from harnessrl_jax.tasks.policy import Action, Conversation, Mistakes, Turn, next_actions
from harnessrl_jax.tasks.prompts import FINAL, PROMPTS
from harnessrl_jax.tasks.questions import stable_hash
from harnessrl_jax.tasks.search import Search
from harnessrl_jax.tasks.verifier import best_exact_match, best_f1
from harnessrl_jax.trajectories.records import Task

Player = Callable[[Conversation], tuple[Action, ...]]
"""What an agent has seen -> its next tool calls; none means a turn without a tool call."""


class Played(NamedTuple):
    """One rollout.

    Attributes:
      answer: the text central submitted, or None.
      conversations: central's, then those of the researchers in the order they were opened.
    """

    answer: str | None
    conversations: tuple[Conversation, ...]


class Score(NamedTuple):
    """Means over rollouts: F1, exact match, model calls a rollout; and F1 by number of hops."""

    f1: float
    em: float
    calls: float
    f1_by_hops: Mapping[int, float]


def play(question: str, search: Search, player: Player) -> Played:
    """One rollout of the harness on a question."""
    opened: list[Conversation] = []
    answer = _converse("central", question, search, player, opened)
    return Played(answer, tuple(opened))


def _converse(agent: str, request: str, search: Search, player: Player, opened: list[Conversation]) -> str | None:
    place = len(opened)
    opened.append(Conversation(agent, request, ()))
    for _ in range(PROMPTS["agents"][agent]["max_calls"]):
        actions = player(opened[place])
        final = next((action.text for action in actions if action.tool == FINAL[agent]), None)
        results = () if final is not None else tuple(_use(agent, action, search, player, opened) for action in actions)
        turns = (*opened[place].turns, Turn(actions, results))
        opened[place] = opened[place]._replace(turns=turns)
        if final is not None:
            return final
    return None


def _use(agent: str, action: Action, search: Search, player: Player, opened: list[Conversation]) -> str:
    replies = PROMPTS["replies"]
    if action.tool not in PROMPTS["agents"][agent]["tools"]:
        return replies["bad_call"]
    if action.tool == "search":
        return "\n".join(passage.text for passage in search(action.text)) or replies["nothing_found"]
    report = _converse("researcher", action.text, search, player, opened)
    return replies["no_report"] if report is None else report


def scripted(mistakes: Mistakes, seed: int) -> Player:
    """The scripted player whose chance moves depend on the seed and on the number of moves made."""
    rng = random.Random(seed)
    return lambda conversation: next_actions(conversation, mistakes, rng)


def expected_score(
    tasks: Iterable[Task], search: Search, mistakes: Mistakes, *, rollouts: int = 1, seed: int = 0
) -> Score:
    """What the scripted player scores: the mean over `rollouts` rollouts of each task.

    Args:
      tasks: the questions, at least one.
      search: the search tool over their world.
      mistakes: how often the player errs.
      rollouts: rollouts of each task.
      seed: of all chance moves.
    """
    f1, em, calls = [], [], []
    by_hops: dict[int, list[float]] = defaultdict(list)
    for task in tasks:
        for number in range(rollouts):
            played = play(task.question, search, scripted(mistakes, stable_hash(f"{seed} {task.task_id} {number}")))
            f1.append(best_f1(played.answer, task.answers))
            em.append(best_exact_match(played.answer, task.answers))
            calls.append(sum(len(conversation.turns) for conversation in played.conversations))
            by_hops[task.hops].append(f1[-1])
    mean = lambda values: sum(values) / len(values)
    return Score(mean(f1), mean(em), mean(calls), {hops: mean(values) for hops, values in sorted(by_hops.items())})
