"""A harness program whose questions say how it behaves. It calls no model. Standard library only: it starts at once."""

import fcntl
import json
import os
import subprocess
import sys


def reply(job, status="completed", answer=None):
    print(json.dumps({"job": job, "status": status, "answer": answer, "detail": str(os.getpid())}), flush=True)


def say(text):
    print(text, file=sys.stderr, flush=True)


def sleeper(seconds, **how):
    subprocess.Popen([sys.executable, "-I", "-S", "-c", f"import time; time.sleep({seconds})"], **how)


def behave(job, verb, rest, waiting):
    match verb:
        case "echo":
            reply(job, answer=rest)
        case "give-up":
            reply(job, "gave_up")
        case "meet":  # answers only when as many jobs wait here
            waiting.append(job)
            if len(waiting) == int(rest):
                for other in reversed(waiting):
                    reply(other, answer="met")
                waiting.clear()
        case "environment":
            reply(job, answer=" ".join(sorted(os.environ)))
        case "say":
            say(rest * 1000)
            reply(job, answer="said")
        case "crash":
            say("the disk is on fire")
            os._exit(3)
        case "print":
            print(rest, flush=True)
        case "hold":  # holds a lock, in itself and in a child that keeps its pipes, and says nothing more
            lock = os.open(rest, os.O_WRONLY | os.O_CREAT)
            fcntl.flock(lock, fcntl.LOCK_EX)
            sleeper(600, pass_fds=[lock])
        case "leave-child":  # ends, but its child, in another group, keeps the pipes for a while
            sleeper(5, start_new_session=True)
            os._exit(4)


def main():
    if "--die" in sys.argv:
        sys.exit("no such model")
    waiting = []
    for line in sys.stdin:
        data = json.loads(line)
        verb, _, rest = data["question"].partition(" ")
        behave(data["job"], verb, rest, waiting)


if __name__ == "__main__":
    main()
