"""Numbers and trajectories -> console progress, metrics.jsonl, TensorBoard events, report.html, `inspect`."""

from harnessrl_jax.monitor.closing import print_stopped, print_summary
from harnessrl_jax.monitor.console import POLICY_COLUMNS, SUPERVISED_COLUMNS, Column, Plan, Progress
from harnessrl_jax.monitor.metrics import MetricsWriter, read_metrics, series, totals
from harnessrl_jax.monitor.page import html_page
from harnessrl_jax.monitor.report import Report, render, write_report
from harnessrl_jax.monitor.rollout_page import forests_html
from harnessrl_jax.monitor.summary import Summary
from harnessrl_jax.monitor.terminal import print_rollout, print_rollouts
from harnessrl_jax.monitor.trajectory import view
from harnessrl_jax.monitor.views import CallView, ForkView, RolloutView, SessionView, TokenView

__all__ = [
    "POLICY_COLUMNS",
    "SUPERVISED_COLUMNS",
    "CallView",
    "Column",
    "ForkView",
    "MetricsWriter",
    "Plan",
    "Progress",
    "Report",
    "RolloutView",
    "SessionView",
    "Summary",
    "TokenView",
    "forests_html",
    "html_page",
    "print_rollout",
    "print_rollouts",
    "print_stopped",
    "print_summary",
    "read_metrics",
    "render",
    "series",
    "totals",
    "view",
    "write_report",
]
