"""openai-agents: an agent with one function tool, over Responses, streamed."""

import asyncio

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def lookup(query: str) -> str:
    """Looks something up."""
    return f"Found {query}."


async def main():
    model = OpenAIResponsesModel(model="policy", openai_client=AsyncOpenAI())
    agent = Agent(name="one", instructions="Use the tool once.", tools=[lookup], model=model)
    run = Runner.run_streamed(agent, "Look something up.")
    async for _ in run.stream_events():
        pass
    print(run.final_output)


asyncio.run(main())
