"""`eval`: a model's score on held-out questions."""

import asyncio
from pathlib import Path

from rich.console import Console
from rich.text import Text

from harnessrl_jax.config import Config
from harnessrl_jax.launch.examine import Examination, examine
from harnessrl_jax.launch.model import model_folder
from harnessrl_jax.launch.policy import policy_sampler
from harnessrl_jax.launch.problems import heldout_side
from harnessrl_jax.launch.run_folder import open_run
from harnessrl_jax.launch.services import open_services
from harnessrl_jax.launch.text import text_codec
from harnessrl_jax.tasks import ExpertSampler

LABEL = "eval"


def evaluate(config: Config, run_dir: Path) -> int:
    """Asks the held-out questions of the configuration's model, or of its expert, and prints the score."""
    console = Console(highlight=False)
    with open_run(run_dir, config) as folder:
        expert = config.behaviour.kind == "expert"
        sampler = ExpertSampler(model_folder(config)) if expert else policy_sampler(config, folder)
        side = heldout_side(config, folder.path)
        console.print(Text(f"Asking {len(side.tasks)} held-out questions of {config.model.path} ..."), soft_wrap=True)
        with open_services(config, folder, sampler, text_codec(config)) as services:
            result = asyncio.run(examine(services, folder, side, LABEL, 0))
    console.print(Text(summary(result)), soft_wrap=True)
    console.print(Text(f"Look at the rollouts:\n  python -m harnessrl_jax.launch inspect {run_dir}"), soft_wrap=True)
    return 0


def summary(result: Examination) -> str:
    """The scores in lines of text."""
    hops = ", ".join(f"{hops} hops {f1:.3f}" for hops, f1 in result.f1_by_hops.items())
    failed = f"\n{result.failed} questions have no score because the machine failed" if result.failed else ""
    return f"F1 {result.f1:.3f}   exact match {result.em:.3f}   ({result.questions} questions; F1 by {hops}){failed}"
