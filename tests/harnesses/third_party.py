"""Real agent programs against `launch serve`: each completes a tool round trip, and `doctor` finds the store clean.

    python tests/harnesses/third_party.py install FOLDER [NAME ...]     npm and uv, into FOLDER; needs the network
    python tests/harnesses/third_party.py run FOLDER [NAME ...] [--table docs/results/harnesses.md]

`run` needs no network: where `unshare` may be used, everything happens in a network of its own that has only loopback.
The model is scripted (tool_caller.py): it calls one of the tools that it is offered, and answers once a result is in
the prompt. A harness passes if it shows that answer, and if the turn with the tool call came back in a later prompt as
the sampled ids; where the harness wrote that turn anew, this must have been noticed and counted.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import recipes
from tool_caller import FINAL

from harnessrl_jax.gateway import Store, StoredCall, TextCodec
from harnessrl_jax.launch.doctor import audit
from harnessrl_jax.trajectories import LinkedCall, build_lineage

HERE = pathlib.Path(__file__).parent
TIMEOUT_S = 420.0
INSIDE = "HARNESSRL_ONLY_LOOPBACK"


class Outcome(NamedTuple):
    """What became of one harness; `wrong` is "" if it passed."""

    version: str
    dialect: str
    streamed: bool
    calls: int
    sessions: int
    subagents: int
    compactions: int
    echo: str
    seconds: float
    wrong: str


def main() -> int:
    """Runs the command; 1 if a harness failed."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("command", choices=("install", "run"))
    top.add_argument("folder", type=pathlib.Path)
    top.add_argument("names", nargs="*", help=f"default: all of {', '.join(recipes.ALL)}")
    top.add_argument("--table", type=pathlib.Path, help="write the results here, in Markdown")
    given = top.parse_args()
    folder = given.folder.resolve()
    if unknown := set(given.names) - set(recipes.ALL):
        top.error(f"no such harness: {', '.join(sorted(unknown))}")
    names = given.names or list(recipes.ALL)
    if given.command == "install":
        failed = [name for name in names if not recipes.ALL[name].install(folder)]
        print("\n".join(f"{name}: not installed" for name in failed) or "all installed")
        return 1 if failed else 0
    _only_loopback()
    outcomes, findings = run_all(folder, names)
    before = given.table.read_text() if given.table is not None and given.table.exists() else ""
    lines = table(outcomes, findings, before)
    print(lines)
    if given.table is not None:
        given.table.parent.mkdir(parents=True, exist_ok=True)
        given.table.write_text(lines)
    return 1 if findings or any(outcome.wrong for outcome in outcomes.values()) else 0


def _only_loopback() -> None:
    """Goes on in a network without any way out, where the system allows it."""
    if os.environ.get(INSIDE) or shutil.which("unshare") is None:
        return
    # With processes of its own as well, so that daemons which a harness leaves behind end with the command.
    apart = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc"]
    inside = [*apart, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        print("No network namespace of its own can be made here; going on in this one.", file=sys.stderr)
        return
    os.execvpe(inside[0], [*inside, sys.executable, *sys.argv], os.environ | {INSIDE: "1"})


def run_all(folder: pathlib.Path, names: list[str]) -> tuple[dict[str, Outcome], list[str]]:
    """The outcome of each harness, and what `doctor` found in the store that holds the calls of all."""
    with tempfile.TemporaryDirectory() as scratch:
        run = pathlib.Path(scratch) / "run"
        outcomes = {}
        with serving(pathlib.Path(scratch), run) as (url, key):
            for name in names:
                outcomes[name] = run_one(recipes.ALL[name], folder, pathlib.Path(scratch) / name, f"{url}/{name}", key)
                print(f"{name}: {outcomes[name].wrong or 'passed'}", file=sys.stderr, flush=True)
        with Store(run / "calls.sqlite", read_only=True) as store:
            stored = store.calls("served", 0)
        decode = TextCodec(pathlib.Path(scratch) / "model").decode
        for name in names:
            kept = [one for one in stored if one.call.agent == name]
            # All harnesses get the same answers: what one was told must not look like something another quotes.
            linked = build_lineage([one.call for one in kept], decode).calls if kept else ()
            outcomes[name] = judge(recipes.ALL[name], outcomes[name], kept, linked)
        return outcomes, [f"{finding.rule}: {finding.where}: {finding.what}" for finding in audit(run).findings]


@contextlib.contextmanager
def serving(scratch: pathlib.Path, run: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Starts `serve` with the scripted model; gives the base URL and the key."""
    model = scratch / "model"
    shutil.copytree(HERE.parents[1] / "harnessrl_jax/assets/quickstart", model)
    shutil.copy(HERE.parent / "data/chatml.jinja", model / "chat_template.jinja")
    command = [sys.executable, str(HERE / "tool_caller.py"), str(model), str(run)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if "inspect" in line:
                break
        values = dict(re.findall(r"ANTHROPIC_(BASE_URL|API_KEY)=(\S+)", said))
        try:
            yield values["BASE_URL"], values["API_KEY"]
        finally:
            process.send_signal(signal.SIGTERM)


def run_one(recipe: recipes.Recipe, folder: pathlib.Path, home: pathlib.Path, url: str, key: str) -> Outcome:
    """Runs one harness in an empty home folder, with no environment but what its recipe names."""
    version = recipe.version(folder)
    if version is None:
        return Outcome("", "", False, 0, 0, 0, 0, "", 0.0, "not installed")
    work = home / "work"
    work.mkdir(parents=True)
    place = recipes.Place(folder, home, work, url, key)
    for path, text in recipe.files(place).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = recipes.quiet(place) | recipe.environment(place)
    started, said, wrong = time.monotonic(), "", ""
    for command in recipe.commands(place):
        try:
            done = subprocess.run(
                command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=TIMEOUT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            wrong = f"did not end within {TIMEOUT_S:g} s"
            break
        said += done.stdout
        if done.returncode:
            wrong = f"status {done.returncode}: {(done.stderr or done.stdout).strip()[-400:]}"
            break
    if not wrong and FINAL not in said:
        wrong = f"did not show the answer; it said {said[-200:]!r}"
    return Outcome(version, "", False, 0, 0, 0, 0, "", time.monotonic() - started, wrong)


def judge(recipe: recipes.Recipe, outcome: Outcome, kept: list[StoredCall], linked: Sequence[LinkedCall]) -> Outcome:
    """Adds what the store says of the harness's calls, and what the lineage says of its conversations."""
    calls = [one.call for one in kept]
    asked = {call.call_id for call in calls if call.tool_calls and call.delivered}
    found = asked & {name for one in kept for name in one.notes["spliced"]}
    rewrites = sorted({reason for one in kept for reason in one.notes["rewrites"]})
    echo = "sampled ids" if found else f"text, counted as {', '.join(rewrites)}" if rewrites else ""
    wrong = outcome.wrong or ("" if echo else "the turn with the tool call did not come back")
    goes_on = [one for one in linked if one.link == "continues"]
    # A summary may quote the last call of the history without being what that call asked for.
    summaries = {evidence.call_id for one in goes_on for evidence in one.evidence if evidence.kind == "quoted_answer"}
    subagents = sum(
        one.link == "opens" and one.opened_by is not None and one.call.call_id not in summaries for one in linked
    )
    if not wrong and recipe.delegates and not subagents:
        wrong = "no conversation was seen to be opened by a tool call of another"
    if not wrong and recipe.compacts and not goes_on:
        wrong = "no prompt was seen to go on from the summary"
    streamed = any(json.loads(call.request).get("stream") for call in calls)
    return outcome._replace(
        dialect=", ".join(sorted({call.dialect for call in calls})),
        streamed=streamed,
        calls=len(calls),
        sessions=len({one.session for one in linked if one.state == "live"}),
        subagents=subagents,
        compactions=len(goes_on),
        echo=echo,
        wrong=wrong,
    )


def table(outcomes: dict[str, Outcome], findings: list[str], before: str) -> str:
    """The results in Markdown; rows of harnesses that were not run now stay as they were."""
    rows = dict(re.findall(r"^(?=\| (\S+) \|)(.*)$", before, re.MULTILINE))
    for name, one in outcomes.items():
        streams = "yes" if one.streamed else "no"
        result = "passed" if not one.wrong else f"failed: {' '.join(one.wrong.split())[:120].replace('|', '/')}"
        counted = (one.calls, one.sessions, one.subagents, one.compactions)
        cells = (name, one.version, one.dialect, streams, *counted, one.echo, result)
        rows[name] = f"| {' | '.join(map(str, cells))} |"
    verdict = "; ".join(findings) if findings else "nothing is wrong"
    lines = [
        "# Third-party harnesses against `launch serve`",
        "",
        "Written by `python tests/harnesses/third_party.py run FOLDER --table docs/results/harnesses.md`. The model is",
        "scripted: it calls one of the tools it is offered, then answers. *Passed* means that the harness ran the tool",
        "and showed the answer. *Echo* says how the turn with the tool call stood in the prompt of the next call: as",
        "the ids that were sampled, or as text that the harness wrote anew, which is counted and begins a branch.",
        "*Sessions*: conversations whose calls are trained, as the lineage finds them; a summary that is asked for",
        "with instructions of its own counts as one, a request for a title does not. *Sub-agents*: those of them that",
        "a tool call of another opened. *Compactions*: prompts in which a summary that was asked for before stands for",
        "the history.",
        "",
        "| harness | version | dialect | streams | calls | sessions | sub-agents | compactions | echo | result |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(rows[name] for name in recipes.ALL if name in rows),
    ]
    return "\n".join([*lines, "", f"`doctor` on the store that holds the calls of the last run: {verdict}.", ""])


if __name__ == "__main__":
    sys.exit(main())
