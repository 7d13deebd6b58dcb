"""Agent libraries against `launch serve`, in this environment: those that the extra `[clients]` has installed.

`third_party.py` runs the same programs, each in an environment of its own, and the command-line agents too.
"""

import importlib.metadata
import importlib.util
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).parent
PACKAGES = {
    "openai-agents": "openai-agents",
    "openai-agents-responses": "openai-agents",
    "pydantic-ai": "pydantic-ai-slim",
    "pydantic-ai-messages": "pydantic-ai-slim",
    "langgraph": "langchain-openai",
    "smolagents": "smolagents",
    "claude-agent-sdk": "claude-agent-sdk",
}


def installed(name):
    """The version of a client here, or None."""
    try:
        return importlib.metadata.version(PACKAGES[name])
    except importlib.metadata.PackageNotFoundError:
        return None


def here(name, recipe):
    """The recipe, run by this interpreter."""
    commands = lambda place: [[sys.executable, *command[1:]] for command in recipe.commands(place)]
    return recipe._replace(version=lambda folder: installed(name), commands=commands)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(the outcome of each client that is installed, what `doctor` found in the store)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        spec = importlib.util.spec_from_file_location("third_party", HERE / "third_party.py")
        third_party = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(third_party)
        names = [name for name in PACKAGES if installed(name)]
        every = third_party.recipes.ALL
        patch.setattr(third_party.recipes, "ALL", {name: here(name, every[name]) for name in names})
        return third_party.run_all(tmp_path_factory.mktemp("clients"), names)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_tool_is_called_and_its_turn_comes_back(request, name):
    """The program ran the tool and showed the answer; the turn with the call came back as its ids, or was counted."""
    if installed(name) is None:
        pytest.skip("pip install -e '.[clients]'")
    outcomes, findings = request.getfixturevalue("run")
    assert outcomes[name].wrong == ""
    assert outcomes[name].calls >= 2
    assert outcomes[name].echo == ("text, counted as unknown" if name == "smolagents" else "sampled ids")
    assert findings == []
