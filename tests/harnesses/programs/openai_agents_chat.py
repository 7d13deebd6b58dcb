"""openai-agents: an agent with one function tool, over chat completions."""

import asyncio

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def lookup(query: str) -> str:
    """Looks something up."""
    return f"Found {query}."


async def main():
    model = OpenAIChatCompletionsModel(model="policy", openai_client=AsyncOpenAI())
    agent = Agent(name="one", instructions="Use the tool once.", tools=[lookup], model=model)
    print((await Runner.run(agent, "Look something up.")).final_output)


asyncio.run(main())
