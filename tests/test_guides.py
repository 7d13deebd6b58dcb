"""Every Python block of every guide runs, in order, in one namespace; what it asserts holds."""

import pathlib
import re
import subprocess
import sys

import pytest

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOLDER = pathlib.Path(__file__).parents[1] / "docs/guides"
GUIDES = [path for path in sorted(FOLDER.glob("*.md")) if BLOCK.search(path.read_text(encoding="utf-8"))]


def blocks(path):
    """Code and line number of each block; the number makes an error point into the guide."""
    text = path.read_text(encoding="utf-8")
    return [(match[1], text[: match.start(1)].count("\n")) for match in BLOCK.finditer(text)]


def run(path):
    namespace = {"__name__": path.stem}
    for code, line in blocks(path):
        exec(compile("\n" * line + code, str(path), "exec"), namespace)
    return namespace


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_the_code_of_a_guide_runs(path, capsys):
    run(path)


def test_a_wrong_block_is_seen(tmp_path):
    guide = tmp_path / "guide.md"
    guide.write_text("# A\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as failure:
        run(guide)
    assert failure.traceback[-1].lineno + 1 == 8


def test_the_guide_on_trajectories_needs_no_jax():
    guide = pathlib.Path(__file__).parents[1] / "docs/guides/trajectories.md"
    code = "\n".join(code for code, _ in blocks(guide)) + "\nimport sys\nassert 'jax' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
