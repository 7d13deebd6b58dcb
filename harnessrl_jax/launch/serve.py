"""`serve`: gateway and sampler alone, for a harness of the user's own."""

import ipaddress
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from harnessrl_jax.config import Config
from harnessrl_jax.errors import ConfigError
from harnessrl_jax.gateway import Endpoint, Limits
from harnessrl_jax.gateway.registry import random_key
from harnessrl_jax.launch.policy import policy_sampler
from harnessrl_jax.launch.run_folder import open_run
from harnessrl_jax.launch.services import Address, Services, open_services
from harnessrl_jax.launch.text import text_codec
from harnessrl_jax.sampler import Sampler

ROLLOUT = "served"
KEY_VARIABLE = "HARNESSRL_API_KEY"
_KEY_CHARACTERS = 24
_UNLIMITED = 1_000_000_000


class Serving(NamedTuple):
    """How to serve.

    Attributes:
      address: where.
      grace_s: how long calls under way may take to finish once the process is told to stop.
    """

    address: Address
    grace_s: float = 30.0


def serve(
    config: Config, run_dir: Path, serving: Serving, sampler_of: Callable[[Config], Sampler] | None = None
) -> int:
    """Serves until SIGINT or SIGTERM, then finishes the calls under way; every call is in the run folder's store.

    Args:
      config: the model and how it samples.
      run_dir: the run folder; what an earlier process served from it stays.
      serving: where and how.
      sampler_of: makes the sampler; None: the policy of the configuration.

    Returns:
      0, or 1 if calls had to be cut off.
    """
    with open_run(run_dir, config) as folder:
        sampler = policy_sampler(config, folder) if sampler_of is None else sampler_of(config)
        stop = _stop_signals()
        with open_services(config, folder, sampler, text_codec(config), address=serving.address) as services:
            attempt = services.store.next_attempt(ROLLOUT)
            endpoint = services.registry.open(
                run_id=config.name,
                task_id=ROLLOUT,
                group_id=ROLLOUT,
                rollout_id=ROLLOUT,
                attempt=attempt,
                harness="external",
                trainable_agents=config.harness.trainable_agents,
                limits=Limits(
                    max_calls=_UNLIMITED,
                    max_new_tokens=config.behaviour.max_new_tokens,
                    max_concurrent=config.harness.max_concurrent_calls,
                ),
            )
            _say(instructions(endpoint, run_dir))
            stop.wait()
            left = _drain(services, serving.grace_s, stop)
    return 1 if left else 0


def address_of(host: str, port: int, public_url: str | None, environment: Mapping[str, str] = os.environ) -> Address:
    """Where to listen and with which key; a place that other machines reach must be safe.

    Args:
      host: an address of this machine.
      port: 0 takes any free one.
      public_url: address that harnesses use.
      environment: may hold the key, as `HARNESSRL_API_KEY`; without it each start draws a new one.

    Raises:
      ConfigError: the key is too weak; or the host is public, and there is no key or no https address for it.
    """
    key = environment.get(KEY_VARIABLE)
    if key is not None and (len(key) < _KEY_CHARACTERS or len(set(key)) < _KEY_CHARACTERS // 2):
        raise ConfigError(
            f"{KEY_VARIABLE} is too easy to guess: {len(key)} characters, {len(set(key))} of them different. Give at "
            f'least {_KEY_CHARACTERS} random ones, such as from `python -c "import secrets; '
            'print(secrets.token_urlsafe(24))"`.'
        )
    if not _loopback(host):
        if key is None:
            raise ConfigError(
                f"--host {host} can be reached from other machines, and no key was given. Set {KEY_VARIABLE} to at "
                f"least {_KEY_CHARACTERS} random characters, or listen on 127.0.0.1."
            )
        if public_url is None or not public_url.startswith("https://"):
            raise ConfigError(
                f"--host {host} can be reached from other machines, and keys and conversations would travel "
                "unencrypted. Put a proxy that terminates TLS (Caddy, nginx, a load balancer) in front, let only it "
                "reach this port, and give the proxy's address as --public-url https://NAME."
            )
    return Address(host, port, public_url, random_key if key is None else lambda: key)


def instructions(endpoint: Endpoint, run_dir: Path) -> str:
    """How to point a harness at the endpoint."""
    return (
        "Point any harness here (add /AGENT to the address, before /v1, to name its agents):\n"
        f"  OPENAI_BASE_URL={endpoint.base_url}/v1\n"
        f"  OPENAI_API_KEY={endpoint.api_key}\n"
        f"  ANTHROPIC_BASE_URL={endpoint.base_url}\n"
        f"  ANTHROPIC_API_KEY={endpoint.api_key}\n"
        "State of the service: /health, /ready, and /metrics for Prometheus.\n"
        f"Every call is kept in {run_dir}. Stop with Ctrl-C, then look at them:\n"
        f"  python -m harnessrl_jax.launch inspect {run_dir} --rollout {ROLLOUT}"
    )


def _drain(services: Services, grace_s: float, stop: threading.Event) -> int:
    """Finishes what is under way; a second signal ends the waiting. Returns how many calls were cut off."""
    stop.clear()
    ended = threading.Event()
    left = 0

    def wait() -> None:
        nonlocal left
        left = services.traffic.drain(grace_s)
        ended.set()
        stop.set()

    if under_way := services.traffic.under_way:
        _say(f"Finishing {under_way} calls under way, for at most {grace_s:g} s; stop again to cut them off.")
    threading.Thread(target=wait, daemon=True).start()
    stop.wait()
    return left if ended.is_set() else services.traffic.under_way


def _stop_signals() -> threading.Event:
    """Set at SIGINT and SIGTERM, from now on."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _say(text: str) -> None:
    Console(highlight=False).print(Text(text), soft_wrap=True)
