"""OpenHands SDK: its agent with the task tool, which gives a task to a sub-agent of one of the built-in types."""

import os
import sys

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.preset import register_builtins_agents
from openhands.tools.task import TaskToolSet
from openhands.tools.terminal import TerminalTool
from pydantic import SecretStr

llm = LLM(
    model="openai/policy",
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=SecretStr(os.environ["OPENAI_API_KEY"]),
    usage_id="agent",
)
register_builtins_agents(enable_browser=False)
agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name), Tool(name=TaskToolSet.name)])
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message(sys.argv[1])
conversation.run()
