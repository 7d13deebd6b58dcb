"""A harness as a user would write it, with the standard library alone: asks the model twice, answers with one word.

The word follows from what the model said, so that rewards differ between rollouts of any policy. The word "crash" in
the question ends the process once, "hang" makes it wait for ever once; a file in the folder given remembers that.
"""

import hashlib
import json
import pathlib
import sys
import time
import urllib.request


def ask(job, session, messages):
    request = urllib.request.Request(
        f"{job['base_url']}/player/v1/chat/completions",
        json.dumps({"model": "policy", "messages": messages, "max_tokens": 12}).encode(),
        {"Authorization": f"Bearer {job['api_key']}", "Content-Type": "application/json", "x-session-id": session},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


def play(job):
    first = [{"role": "user", "content": job["question"]}]
    said = ask(job, "one", first)
    again = ask(job, "one", [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "Sure?"}])
    return ("red", "blue")[hashlib.sha256((said + again).encode()).digest()[0] % 2]


def misbehave(job, folder):
    for word in ("crash", "hang"):
        done = folder / word
        if word in job["question"] and not done.exists():
            done.touch()
            if word == "crash":
                sys.exit("crashing, as the question asks")
            time.sleep(3600)


if __name__ == "__main__":
    for line in sys.stdin:
        job = json.loads(line)
        misbehave(job, pathlib.Path(sys.argv[1]))
        result = {"job": job["job"], "status": "completed", "answer": play(job), "detail": ""}
        print(json.dumps(result), flush=True)
