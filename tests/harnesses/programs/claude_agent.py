"""claude-agent-sdk: one query with a tool of its own, over Anthropic Messages."""

import asyncio

from claude_agent_sdk import ClaudeAgentOptions, create_sdk_mcp_server, query, tool


@tool("lookup", "Looks something up.", {"query": str})
async def lookup(given):
    return {"content": [{"type": "text", "text": f"Found {given['query']}."}]}


async def prompt():
    yield {"type": "user", "message": {"role": "user", "content": "Look something up."}}


async def main():
    server = create_sdk_mcp_server("own", tools=[lookup])
    options = ClaudeAgentOptions(
        tools=[], mcp_servers={"own": server}, allowed_tools=["mcp__own__lookup"], setting_sources=[], model="policy"
    )
    async for message in query(prompt=prompt(), options=options):
        if hasattr(message, "result"):
            print(message.result)


asyncio.run(main())
