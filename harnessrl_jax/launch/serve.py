"""`serve`: gateway and sampler alone, for a harness of the user's own."""

import contextlib
import signal
import threading
from pathlib import Path

from rich.console import Console
from rich.text import Text

from harnessrl_jax.config import Config
from harnessrl_jax.gateway import Endpoint, Limits
from harnessrl_jax.launch.model import first_params, model_folder
from harnessrl_jax.launch.policy import make_sampler
from harnessrl_jax.launch.run_folder import open_run
from harnessrl_jax.launch.services import open_services
from harnessrl_jax.launch.text import text_codec

ROLLOUT = "served"


def serve(config: Config, run_dir: Path, port: int) -> int:
    """Serves until it is interrupted; every call is in the run folder's store."""
    with open_run(run_dir, config) as folder:
        model, params = first_params(config, model_folder(config))
        sampler = make_sampler(config, model)
        sampler.load_weights(params, 0)
        with open_services(config, folder, sampler, text_codec(config), port=port) as services:
            endpoint = services.registry.open(
                run_id=config.name,
                task_id=ROLLOUT,
                group_id=ROLLOUT,
                rollout_id=ROLLOUT,
                attempt=0,
                harness="external",
                trainable_agents=config.harness.trainable_agents,
                limits=Limits(max_calls=1_000_000_000, max_new_tokens=config.behaviour.max_new_tokens),
            )
            Console(highlight=False).print(Text(instructions(endpoint, run_dir)), soft_wrap=True)
            _wait()
            services.registry.close(config.name, ROLLOUT, 0)
    return 0


def instructions(endpoint: Endpoint, run_dir: Path) -> str:
    """How to point a harness at the endpoint."""
    return (
        "Point any harness here (add /AGENT to the address, before /v1, to name its agents):\n"
        f"  OPENAI_BASE_URL={endpoint.base_url}/v1\n"
        f"  OPENAI_API_KEY={endpoint.api_key}\n"
        f"  ANTHROPIC_BASE_URL={endpoint.base_url}\n"
        f"  ANTHROPIC_API_KEY={endpoint.api_key}\n"
        f"Every call is kept in {run_dir}. Stop with Ctrl-C, then look at them:\n"
        f"  python -m harnessrl_jax.launch inspect {run_dir} --rollout {ROLLOUT}"
    )


def _wait() -> None:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with contextlib.suppress(KeyboardInterrupt):
        stop.wait()
