"""Questions as JSON lines on stdin -> answers as JSON lines on stdout, worked out by a small team of agents.

    cat jobs.jsonl | python agents.py --index facts.sqlite

A job is `{"job": id, "question": text, "base_url": url, "api_key": key}`. A `central` agent asks `researcher` agents,
searches and answers; agent NAME talks to `{base_url}/NAME/v1`. A result is `{"job", "status", "answer", "detail"}`; its
status is `completed`, `gave_up` (no answer within the calls allowed), `truncated` (the conversation outgrew the model),
or `error` (the model could not be reached). The program needs the standard library and the OpenAI client, nothing else.
"""

import argparse
import asyncio
import json
import re
import sqlite3
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from openai import AsyncOpenAI

MODEL = "policy"
FINAL = {"central": "answer", "researcher": "report"}
COMMON_WORDS = frozenset(["what", "which", "is", "are", "the", "of", "with", "whose", "country", "and", "a"])
MAX_TERMS = 24
MAX_LINE_BYTES = 1 << 20

Messages = list[Any]
Json = dict[str, Any]


@dataclass(frozen=True)
class ToolUse:
    """A tool call as the model wrote it. `argument` is None where it breaks the tool's schema."""

    call_id: str
    name: str
    argument: str | None


@dataclass(frozen=True)
class Team:
    """What all jobs share: prompts and tools, one client with one connection pool, the passages."""

    prompts: Json
    client: AsyncOpenAI
    passages: sqlite3.Connection

    async def solve(self, job: Json) -> Json:
        """One job from question to result."""
        failure: BaseException | None = None
        answer = None
        try:
            answer = await self.converse(job, "central", "central", job["question"])
        except* openai.APIError as group:
            failure = first_leaf(group)
        if failure is not None:
            cut = getattr(failure, "code", None) == "context_length_exceeded"
            detail = f"{type(failure).__name__}: {failure}"
            return result(job, "truncated" if cut else "error", None, detail)
        if answer is None:
            return result(job, "gave_up", None, "the central agent used all its calls without an answer")
        return result(job, "completed", answer, "")

    async def converse(self, job: Json, agent: str, session: str, request: str) -> str | None:
        """One conversation of one agent: its final text, or None when its calls are used up."""
        role = self.prompts["agents"][agent]
        tools = [self.prompts["tools"][name] for name in role["tools"]]
        # A copy of the client costs little: it shares the connection pool.
        client = self.client.with_options(
            base_url=f"{job['base_url']}/{agent}/v1", api_key=job["api_key"], default_headers={"x-session-id": session}
        )
        messages: Messages = [{"role": "system", "content": role["system"]}, {"role": "user", "content": request}]
        for turn in range(role["max_calls"]):
            message = await complete(client, messages, tools)
            messages.append(message)
            uses = [self.read(call, role["tools"]) for call in message.get("tool_calls", ())]
            for use in uses:
                if use.name == FINAL[agent] and use.argument is not None:
                    return use.argument
            messages += await self.act(job, turn, uses)
        return None

    async def act(self, job: Json, turn: int, uses: Sequence[ToolUse]) -> Messages:
        """Runs the tools of one turn side by side; the replies keep the order of the calls."""
        if not uses:
            return [{"role": "user", "content": self.prompts["replies"]["bad_call"]}]
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self.use(job, f"{turn}-{index}", use)) for index, use in enumerate(uses)]
        return [
            {"role": "tool", "tool_call_id": use.call_id, "content": task.result()} for use, task in zip(uses, running)
        ]

    async def use(self, job: Json, place: str, use: ToolUse) -> str:
        """The text that one tool call gives back to the model."""
        replies = self.prompts["replies"]
        if use.argument is None:
            return replies["bad_call"]
        if use.name == "search":
            found = search(self.passages, use.argument, self.prompts["search_results"])
            return "\n".join(found) if found else replies["nothing_found"]
        report = await self.converse(job, "researcher", f"researcher-{place}", use.argument)
        return replies["no_report"] if report is None else report

    def read(self, call: Json, allowed: Sequence[str]) -> ToolUse:
        """Checks one tool call against the agent's tools; each takes exactly one text."""
        name, text = call["function"]["name"], call["function"]["arguments"]
        if name not in allowed:
            return ToolUse(call["id"], name, None)
        parameter = self.prompts["tools"][name]["function"]["parameters"]["required"][0]
        try:
            arguments = json.loads(text)
        except ValueError:
            return ToolUse(call["id"], name, None)
        fits = isinstance(arguments, dict) and set(arguments) == {parameter} and isinstance(arguments[parameter], str)
        return ToolUse(call["id"], name, arguments[parameter] if fits else None)


async def complete(client: AsyncOpenAI, messages: Messages, tools: Sequence[Json]) -> Json:
    """The model's next message, in the form that goes back to it with the next request."""
    body = {"model": MODEL, "messages": messages, "tools": tools}
    # `client.chat.completions.create` sends the same request, but checks and converts each message and tool on the way:
    # 4.5 ms of processor time a call against 1.5.
    reply: Any = await client.post("/chat/completions", body=body, cast_to=object)
    message = reply["choices"][0]["message"]
    echo = {"role": "assistant", "content": message.get("content") or ""}
    return {**echo, "tool_calls": message["tool_calls"]} if message.get("tool_calls") else echo


def search(passages: sqlite3.Connection, query: str, limit: int) -> list[str]:
    """The passages that share a word with the query, best first; common words count only if there are no others."""
    words = list(dict.fromkeys(re.findall(r"[^\W_]+", query.lower())))
    terms = ([word for word in words if word not in COMMON_WORDS] or words)[:MAX_TERMS]
    if not terms:
        return []
    # Quoted words are plain text to FTS5: nothing in a query can be an operator.
    match = " OR ".join(f'"{term}"' for term in terms)
    order = "SELECT text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages), rowid LIMIT ?"
    return [text for (text,) in passages.execute(order, (match, limit))]


def first_leaf(error: BaseException) -> BaseException:
    """The first error inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def result(job: Json, status: str, answer: str | None, detail: str) -> Json:
    """One line for stdout."""
    return {"job": job["job"], "status": status, "answer": answer, "detail": detail}


async def work(team: Team, line: bytes, slots: asyncio.Semaphore) -> None:
    """Solves the job of one input line and prints its result."""
    try:
        print(json.dumps(await team.solve(json.loads(line))), flush=True)
    finally:
        slots.release()


async def serve(prompts: Json, passages: sqlite3.Connection, concurrency: int) -> None:
    """Works on up to `concurrency` jobs at a time until stdin ends, then finishes those under way."""
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    slots = asyncio.Semaphore(concurrency)
    client = AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="each job brings its own")
    team = Team(prompts, client, passages)
    async with client, asyncio.TaskGroup() as jobs:
        while line := await reader.readline():
            await slots.acquire()
            jobs.create_task(work(team, line, slots))


def main() -> int:
    """Reads the options and serves."""
    parser = argparse.ArgumentParser(description="Answers questions with a team of model-driven agents.")
    parser.add_argument("--index", type=Path, required=True, help="SQLite file with an FTS5 table passages(id, text)")
    parser.add_argument("--concurrency", type=int, default=32, help="jobs at a time (default: 32)")
    options = parser.parse_args()
    if not options.index.is_file():
        parser.error(f"--index {options.index}: no such file")
    prompts = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))
    passages = sqlite3.connect(f"{options.index.resolve().as_uri()}?mode=ro", uri=True)
    asyncio.run(serve(prompts, passages, options.concurrency))
    return 0


if __name__ == "__main__":
    sys.exit(main())
