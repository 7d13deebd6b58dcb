"""Two agents that translate a sequence: a small task on which action labels and their arguments share one policy.

The central agent reads a cue, a modifier and a sequence of symbols. It names one of several tools (the action; a table
over cue and modifier says which) and writes the sequence in that tool's alphabet (the arguments; a permutation of the
symbols for each tool). The worker reads the call, names the tool that follows, and writes the sequence once more. The
reward is the share of the final symbols that are right, and 0 if the central agent's tool is wrong: one number for both
roles of both agents.

    central:  CENTRAL  filler...  cue  modifier  x_1 ... x_n  ASK  ->  action  COLON  y_1 ... y_n  END
    worker:   WORKER   action  y_1 ... y_n  ASK                    ->  action  COLON  z_1 ... z_n  END

An expert that is often wrong, and wrong in a systematic way, gives the text of the warm start.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from harnessrl_jax.models import DecoderConfig

CENTRAL, WORKER, ASK, COLON, END = range(5)
FIRST_SYMBOL = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Sizes of the task, of the model and of a step."""

    actions: int = 6
    args: int = 5
    symbols: int = 8
    cues: int = 6
    modifiers: int = 4
    filler: int = 0
    """Tokens without meaning in front of the cue: the depth of the shared prefix."""
    shared: bool = False
    """Actions are named by the tokens of the symbols, so that only its place tells what a token means."""
    width: int = 32
    mlp: int = 64
    layers: int = 2

    @property
    def first_cue(self) -> int:
        """Token of cue 0; the modifiers and then the actions follow the cues."""
        return FIRST_SYMBOL + self.symbols

    @property
    def first_modifier(self) -> int:
        return self.first_cue + self.cues

    @property
    def first_action(self) -> int:
        return FIRST_SYMBOL if self.shared else self.first_modifier + self.modifiers

    @property
    def output(self) -> int:
        """Tokens of every output."""
        return self.args + 3

    @property
    def model(self) -> DecoderConfig:
        """The policy."""
        return DecoderConfig(
            vocab_size=self.first_modifier + self.modifiers + (0 if self.shared else self.actions),
            hidden_size=self.width,
            layers=self.layers,
            heads=2,
            kv_heads=2,
            head_dim=self.width // 2,
            mlp_size=self.mlp,
        )


class Tables(NamedTuple):
    """What is right, and what the expert mistakes it for; drawn anew for each seed."""

    action: np.ndarray  # [cue, modifier]
    decoy: np.ndarray  # [cue, modifier]: the other tool that the expert names
    action_right: np.ndarray  # [cue, modifier]: how often the expert names the right one
    written: np.ndarray  # [action, symbol]: the central agent's alphabets
    worker_action: np.ndarray  # [action]: the worker's tool
    worker_written: np.ndarray  # [worker's action, symbol]
    symbol_right: np.ndarray  # [action]: how often the expert writes the right symbol


def tables(task: Task, rng: np.random.Generator) -> Tables:
    """A task's rules."""
    shape = (task.cues, task.modifiers)
    action = rng.integers(0, task.actions, shape)
    alphabets = lambda: np.stack([rng.permutation(task.symbols) for _ in range(task.actions)])
    return Tables(
        action=action,
        decoy=(action + rng.integers(1, task.actions, shape)) % task.actions,
        action_right=rng.choice([0.35, 0.8], shape),
        written=alphabets(),
        worker_action=rng.permutation(task.actions),
        worker_written=alphabets(),
        symbol_right=rng.choice([0.6, 0.95], task.actions),
    )


class Problems(NamedTuple):
    """Prompts of the central agent and what they ask for."""

    prompt: np.ndarray  # [problem, slot]
    symbols: np.ndarray  # [problem, args]
    cue: np.ndarray
    modifier: np.ndarray


def problems(task: Task, rng: np.random.Generator, count: int) -> Problems:
    """Random problems."""
    cue, modifier = rng.integers(0, task.cues, count), rng.integers(0, task.modifiers, count)
    symbols = rng.integers(0, task.symbols, (count, task.args))
    filler = rng.integers(0, task.symbols, (count, task.filler)) + FIRST_SYMBOL
    column = lambda x: np.broadcast_to(x, (count,))[:, None]
    parts = [column(CENTRAL), filler, column(cue + task.first_cue), column(modifier + task.first_modifier)]
    prompt = np.concatenate([*parts, symbols + FIRST_SYMBOL, column(ASK)], axis=1).astype(np.int32)
    return Problems(prompt, symbols, cue, modifier)


def worker_prompt(task: Task, output: np.ndarray) -> np.ndarray:
    """What the worker reads: the central agent's call, whatever it holds."""
    column = lambda token: np.full((len(output), 1), token, np.int32)
    return np.concatenate([column(WORKER), output[:, :1], output[:, 2:-1], column(ASK)], axis=1)


def said(task: Task, action: np.ndarray, symbols: np.ndarray) -> np.ndarray:
    """An output."""
    column = lambda token: np.full((len(action), 1), token)
    parts = [action[:, None] + task.first_action, column(COLON), symbols + FIRST_SYMBOL, column(END)]
    return np.concatenate(parts, axis=1).astype(np.int32)


def expert(task: Task, rules: Tables, asked: Problems, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The expert's outputs for both agents; the worker's are for the central outputs that the expert gave."""
    count = len(asked.cue)
    right = rng.random(count) < rules.action_right[asked.cue, asked.modifier]
    action = np.where(right, rules.action[asked.cue, asked.modifier], rules.decoy[asked.cue, asked.modifier])
    symbols = _written(rules.written, rules, action, asked.symbols, rng)
    next_action = rules.worker_action[action]
    next_action = np.where(rng.random(count) < 0.8, next_action, (next_action + 1) % task.actions)
    again = _written(rules.worker_written, rules, next_action, symbols, rng)
    return said(task, action, symbols), said(task, next_action, again)


def _written(alphabet: np.ndarray, rules: Tables, action: np.ndarray, x: np.ndarray, rng: np.random.Generator):
    """The sequence in the action's alphabet; where the expert errs, in that of the next action."""
    right = rng.random(x.shape) < rules.symbol_right[action][:, None]
    other = (action + 1) % len(alphabet)
    return np.where(right, alphabet[action[:, None], x], alphabet[other[:, None], x])


class Outcome(NamedTuple):
    """What became of the rollouts, one number each."""

    reward: np.ndarray
    action: np.ndarray  # the central agent named the right tool
    args: np.ndarray  # share of its symbols that are right for the tool it named
    worker_action: np.ndarray
    worker_args: np.ndarray


def outcome(task: Task, rules: Tables, asked: Problems, central: np.ndarray, worker: np.ndarray) -> Outcome:
    """Verifies outputs of the two agents."""
    wanted = rules.action[asked.cue, asked.modifier]
    written = np.take_along_axis(rules.written[wanted], asked.symbols, axis=1)
    final = said(task, rules.worker_action[wanted], _lookup(rules.worker_written, rules.worker_action[wanted], written))
    action, symbols = _read(task, central)
    next_action, again = _read(task, worker)
    right = action == wanted
    return Outcome(
        reward=right * (worker[:, 2:-1] == final[:, 2:-1]).mean(axis=1),
        action=right.astype(float),
        args=(symbols == _lookup(rules.written, action, asked.symbols)).mean(axis=1),
        worker_action=(next_action == rules.worker_action[action]).astype(float),
        worker_args=(again == _lookup(rules.worker_written, next_action, symbols)).mean(axis=1),
    )


def _read(task: Task, output: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Action and symbols of an output; what is not one of them counts as number -1."""
    inside = lambda x, size: np.where((x >= 0) & (x < size), x, -1)
    return inside(output[:, 0] - task.first_action, task.actions), inside(output[:, 2:-1] - FIRST_SYMBOL, task.symbols)


def _lookup(alphabet: np.ndarray, action: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The sequence in the action's alphabet; -2, which equals nothing, where there is no action or symbol."""
    found = alphabet[np.maximum(action, 0)[:, None], np.maximum(x, 0)]
    return np.where((action[:, None] >= 0) & (x >= 0), found, -2)
