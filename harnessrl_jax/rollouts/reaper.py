"""Process groups, one change a line on stdin -> at the end of stdin, those still listed are killed.

Standard library only. The end comes when the process that holds the other end of the pipe is gone, however it died. So
no harness, and nothing a harness started, outlives a trainer that was killed. One such process serves a whole pool.
"""

import contextlib
import os
import signal
import subprocess
import sys


class Reaper:
    """A running reaper. Hand it the groups as they start and end."""

    def __init__(self) -> None:
        # -I -S: this file alone, nothing of the environment. A session of its own, so that Ctrl-C does not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, group: int) -> None:
        """Kill this process group when we are gone. Raises BrokenPipeError if the reaper is."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """This process group has ended; its number may be given to somebody else."""
        with contextlib.suppress(BrokenPipeError, ValueError):  # without a reaper, or after `close`, nothing is listed
            self._tell(f"-{group}\n")

    def close(self) -> None:
        """Ends the reaper, which kills what is still listed."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, change: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(change.encode())
        self._process.stdin.flush()


def main() -> None:
    """Follows the changes on stdin; at its end, kills."""
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
