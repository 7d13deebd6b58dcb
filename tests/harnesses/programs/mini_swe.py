"""mini-swe-agent: its default agent with its shell tool, over chat completions through LiteLLM."""

import os
import pathlib

import minisweagent
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

settings = yaml.safe_load((pathlib.Path(minisweagent.__file__).parent / "config" / "mini.yaml").read_text())
where = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
kept = {name: settings["agent"][name] for name in ("system_template", "instance_template")}
model = settings.get("model") or {}
model = {name: model[name] for name in ("observation_template", "format_error_template") if name in model}
agent = DefaultAgent(
    LitellmModel(model_name="openai/policy", model_kwargs=where, **model), LocalEnvironment(), **kept, step_limit=5
)
print(agent.run("Run one command."))
