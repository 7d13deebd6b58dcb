"""LangGraph: a prebuilt agent with one tool, over chat completions."""

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def lookup(query: str) -> str:
    """Looks something up."""
    return f"Found {query}."


agent = create_agent(ChatOpenAI(model="policy"), [lookup], system_prompt="Use the tool once.")
result = agent.invoke({"messages": [{"role": "user", "content": "Look something up."}]})
print(result["messages"][-1].content)
