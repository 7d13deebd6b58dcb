"""The guide's blocks run in the order of the page, tunix's among them."""

import pathlib
import re

import jax

GUIDE = pathlib.Path(__file__).parents[2] / "docs/guides/compose.md"
BLOCK = re.compile(r"^```python(?: tunix)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_tunix_block_runs():
    text = GUIDE.read_text(encoding="utf-8")
    matches = list(BLOCK.finditer(text))
    assert sum(match[0].startswith("```python tunix") for match in matches) == 1
    namespace = {"__name__": "compose"}
    for match in matches:
        code = "\n" * text[: match.start(1)].count("\n") + match[1]
        exec(compile(code, str(GUIDE), "exec"), namespace)
    trained = namespace["trainer"].optimizer.opt_state.factors
    partition = namespace["trainer"].partition
    assert jax.numpy.array_equal(trained.units[...], partition.units.any(axis=0))
