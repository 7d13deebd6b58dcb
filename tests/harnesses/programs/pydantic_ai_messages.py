"""pydantic-ai: an agent with one tool, over Anthropic Messages."""

import os

from anthropic import AsyncAnthropic
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider

client = AsyncAnthropic(base_url=os.environ["ANTHROPIC_BASE_URL"], api_key=os.environ["ANTHROPIC_API_KEY"])
model = AnthropicModel("policy", provider=AnthropicProvider(anthropic_client=client))
agent = Agent(model, instructions="Use the tool once.")


@agent.tool_plain
def lookup(query: str) -> str:
    """Looks something up."""
    return f"Found {query}."


print(agent.run_sync("Look something up.").output)
