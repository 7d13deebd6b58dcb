"""Numbers and trajectories -> console progress, metrics.jsonl, TensorBoard events, report.html, `inspect`."""
