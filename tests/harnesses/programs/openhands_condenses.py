"""OpenHands SDK: its agent with the summarising condenser, told to condense between two messages."""

import os
import sys

from openhands.sdk import LLM, Agent, Conversation, LLMSummarizingCondenser, Tool
from openhands.tools.terminal import TerminalTool
from pydantic import SecretStr

llm = LLM(
    model="openai/policy",
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=SecretStr(os.environ["OPENAI_API_KEY"]),
    usage_id="agent",
)
condenser = LLMSummarizingCondenser(llm=llm, max_size=120, keep_first=2)
agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name)], condenser=condenser)
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message("Run one command.")
conversation.run()
conversation.condense()
conversation.send_message(sys.argv[1])
conversation.run()
