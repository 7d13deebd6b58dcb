"""What rollouts and store count, in the text format of Prometheus, read where it is kept when it is asked for."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from harnessrl_jax.gateway.registry import Rollouts
from harnessrl_jax.gateway.service import Gateway


class ServiceCollector(Collector):
    """Reads the state of a service for a registry of Prometheus.

    Args:
      rollouts: what happened in every rollout.
      gateway: how its calls got on disk.
    """

    def __init__(self, rollouts: Rollouts, gateway: Gateway) -> None:
        self._rollouts = rollouts
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        text = "What happened in all rollouts, by the names that closing a rollout gives."
        events = CounterMetricFamily("harnessrl_rollout_events", text, labels=["event"])
        for event, number in sorted(self._rollouts.counts().items()):
            events.add_metric([event], number)
        yield events
        writes = self._gateway.writes
        for name, text, value in (
            ("sampled_tokens", "Tokens that were sampled.", self._rollouts.sampled_tokens()),
            ("store_transactions", "Durable transactions of the call store.", writes.transactions),
            ("store_operations", "Operations that they held.", writes.operations),
        ):
            yield CounterMetricFamily(f"harnessrl_{name}", text, value=value)
        for name, text, value in (
            ("rollouts_open", "Rollouts that may call the model.", self._rollouts.open_count()),
            ("store_failed", "1 once the call store cannot be written.", writes.failed),
        ):
            yield GaugeMetricFamily(f"harnessrl_{name}", text, value=value)
