"""smolagents: a tool-calling agent, over chat completions."""

import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def lookup(query: str) -> str:
    """Looks something up.

    Args:
        query: what to look up.
    """
    return f"Found {query}."


model = OpenAIServerModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
print(ToolCallingAgent(tools=[lookup], model=model, max_steps=4).run("Look something up."))
