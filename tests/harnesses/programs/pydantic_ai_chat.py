"""pydantic-ai: an agent with one tool, over chat completions."""

import os

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = Agent(OpenAIChatModel("policy", provider=provider), instructions="Use the tool once.")


@agent.tool_plain
def lookup(query: str) -> str:
    """Looks something up."""
    return f"Found {query}."


print(agent.run_sync("Look something up.").output)
