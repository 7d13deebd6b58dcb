"""Prompt ids -> the scripted player's next turn as token ids: the imperfect expert, standing where a model would.

It implements the sampler protocol, so its rollouts go through the same gateway, store, trees and training step as a
model's. It reports no log-probabilities, because it has none.
"""

import json
import os
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from harnessrl_jax.errors import SamplerError, TextError
from harnessrl_jax.sampler.protocol import Sample, SampleRequest
from harnessrl_jax.tasks.policy import Action, Conversation, Mistakes, Turn, next_actions
from harnessrl_jax.tasks.prompts import FINAL, parameter_of
from harnessrl_jax.trajectories.formats import HERMES
from harnessrl_jax.trajectories.parsing import parse_tool_calls

START, END = "<|im_start|>", "<|im_end|>"
OPEN, CLOSE = HERMES.open, HERMES.close
REPLY_OPEN, REPLY_CLOSE = "<tool_response>", "</tool_response>"


class ExpertText:
    """Token ids of a conversation -> what an agent has seen; tool calls -> token ids.

    Args:
      folder: a model folder; its `tokenizer.json` must have the control tokens of the chat format.

    Raises:
      TextError: the file is missing, or a control token is.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise TextError(f"{path}: no such file; the expert needs the tokenizer of the model it teaches.")
        self._tokenizer = Tokenizer.from_file(str(path))
        self._ids = {mark: self._control(path, mark) for mark in (START, END, OPEN, CLOSE, REPLY_OPEN, REPLY_CLOSE)}

    def _control(self, path: Path, mark: str) -> int:
        token = self._tokenizer.token_to_id(mark)
        if token is None:
            raise TextError(f"{path}: the vocabulary has no token {mark!r}, which the chat format needs.")
        return token

    def read(self, prompt_ids: Sequence[int]) -> Conversation:
        """What the agent has seen. Only control *tokens* separate turns; text that looks like one does not.

        Raises:
          SamplerError: the prompt is not a conversation of an agent this expert plays.
        """
        messages = [self._message(part) for part in self._split(prompt_ids)]
        system, *rest = messages or [("", "")]
        agent = next((name for name, tool in FINAL.items() if re.search(rf"(\n|>){tool}\(", system[1])), None)
        if agent is None or not rest or rest[0][0] != "user" or rest[-1] != ("assistant", ""):
            raise SamplerError(
                "the expert plays the multi-hop harness: it wants a system message with the tool `answer` or "
                "`report`, a user message and an open assistant turn, but the prompt has the roles "
                f"{[role for role, _ in messages]}."
            )
        turns = [
            Turn(_actions(said), _replies(heard))
            for (_, said), (_, heard) in zip(rest[1:-1:2], rest[2:-1:2], strict=True)
        ]
        return Conversation(agent, rest[0][1], tuple(turns))

    def _split(self, prompt_ids: Sequence[int]) -> list[list[int]]:
        parts: list[list[int]] = []
        for token in prompt_ids:
            if token == self._ids[START]:
                parts.append([])
            elif parts:
                parts[-1].append(token)
        return parts

    def _message(self, ids: list[int]) -> tuple[str, str]:
        body = ids[: ids.index(self._ids[END])] if self._ids[END] in ids else ids
        role, _, text = self._tokenizer.decode(body, skip_special_tokens=False).partition("\n")
        return role, text

    def write(self, actions: Sequence[Action]) -> list[int]:
        """The turn's token ids: control tokens by id, everything else as text, the end of turn last."""
        ids: list[int] = []
        for place, action in enumerate(actions):
            arguments = json.dumps({parameter_of(action.tool): action.text}, ensure_ascii=False)
            text = f'{{"name": "{action.tool}", "arguments": {arguments}}}'
            between = self._text("\n") if place else []
            ids += [*between, self._ids[OPEN], *self._text(text), self._ids[CLOSE]]
        return [*ids, self._ids[END]]

    def _text(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _actions(said: str) -> tuple[Action, ...]:
    calls = [(call.name, list(json.loads(call.arguments).values())) for call in parse_tool_calls(said, HERMES).calls]
    return tuple(Action(name, values[0]) for name, values in calls if len(values) == 1 and isinstance(values[0], str))


def _replies(heard: str) -> tuple[str, ...]:
    return tuple(re.findall(f"{REPLY_OPEN}(.*?){REPLY_CLOSE}", heard, re.DOTALL))


class ExpertSampler:
    """The scripted player as a `Sampler`: the same request always gets the same tokens.

    Args:
      folder: a model folder, for its tokenizer.
      mistakes: how often the player errs.
    """

    def __init__(self, folder: str | os.PathLike[str], mistakes: Mistakes | None = None):
        self._text = ExpertText(folder)
        self._mistakes = Mistakes() if mistakes is None else mistakes
        self._version = 0

    async def start(self) -> None:
        """Nothing is needed."""

    async def complete(self, request: SampleRequest) -> Sample:
        """The next turn; chance comes from the request's seed alone.

        Raises:
          SamplerError: the prompt is not a conversation of the multi-hop harness.
        """
        conversation = self._text.read(request.prompt_ids)
        ids = self._text.write(next_actions(conversation, self._mistakes, random.Random(request.seed)))
        cut = ids[: request.max_new_tokens]
        return Sample(
            output_ids=np.asarray(cut, np.int32),
            logps=None,
            logp_kind=None,
            versions=np.full(len(cut), self._version, np.int32),
            finish="stop" if len(cut) == len(ids) else "length",
        )

    def load_weights(self, params: Any, version: int) -> None:
        """Keeps the version number; the player has no weights."""
        self._version = version

    async def close(self) -> None:
        """Nothing is held."""
