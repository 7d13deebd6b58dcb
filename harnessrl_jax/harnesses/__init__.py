"""Agent programs: each runs as separate processes and knows the model only as a URL and a key."""

import sys
from pathlib import Path

__all__ = ["multihop_command"]


def multihop_command(index: Path, concurrency: int) -> tuple[str, ...]:
    """The command line of the bundled multi-hop harness.

    Args:
      index: SQLite file with an FTS5 table `passages(id, text)`.
      concurrency: jobs that one process works on at a time.
    """
    program = Path(__file__).parent / "multihop" / "agents.py"
    return (sys.executable, str(program), "--index", str(index), "--concurrency", str(concurrency))
