import itertools
import json
import re
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from harnessrl_jax.errors import MonitorError
from harnessrl_jax.monitor import MetricsWriter, read_metrics, series, totals


def events(run_dir):
    """Event files of a run in order, each a list of events."""
    for path in sorted((run_dir / "tensorboard").iterdir()):
        data, at, found = path.read_bytes(), 0, []
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            found.append(event_pb2.Event.FromString(data[at + 12 : at + 12 + size]))
            at += 12 + size + 4
        yield found


def scalars(found):
    return [(value.tag, event.step, value.simple_value) for event in found for value in event.summary.value]


def test_a_step_is_on_disk_when_write_returns(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss": 0.5, "size": 3, "by_layer": np.array([1.0, 2.0], np.float32)})
        writer.write(2, {"loss": jnp.float32(0.25), "by_layer": jnp.arange(2.0)})
        assert read_metrics(tmp_path) == [
            {"step": 1, "loss": 0.5, "size": 3.0, "by_layer": [1.0, 2.0]},
            {"step": 2, "loss": 0.25, "by_layer": [0.0, 1.0]},
        ]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_tensorboard_has_the_same_numbers(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss": 0.5, "capo/cosine_layer": [0.25, -0.5]})
    (found,) = events(tmp_path)
    assert scalars(found) == [
        ("loss", 1, 0.5),
        ("capo/cosine_layer/layer_00", 1, 0.25),
        ("capo/cosine_layer/layer_01", 1, -0.5),
    ]


def test_a_resumed_run_holds_no_step_twice(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3, 4):
            writer.write(step, {"loss": float(step)})
    # Killed in step 5, while the line was being written; the last checkpoint is of step 2.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]
    with MetricsWriter(tmp_path, after_step=2) as writer:
        writer.write(3, {"loss": 30.0})
    assert series(read_metrics(tmp_path), "loss") == ([1, 2, 3], [1.0, 2.0, 30.0])
    first, second = events(tmp_path)
    assert len(scalars(first)) == 4  # a quick restart must not write over the first file
    assert scalars(second) == [("loss", 3, 30.0)]
    # TensorBoard's sign for: forget what earlier files say from step 3 on.
    starts = [event.step for event in second if event.session_log.status == event_pb2.SessionLog.START]
    assert starts == [3]


def test_a_new_run_in_a_used_folder_keeps_nothing_of_the_old_one(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"heldout/f1": 0.5})
        writer.write(1, {"loss": 1.0})
    with MetricsWriter(tmp_path, after_step=0) as writer:
        assert [record["step"] for record in read_metrics(tmp_path)] == [0]
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"heldout/f1": 0.25})
    assert read_metrics(tmp_path) == [{"step": 0, "heldout/f1": 0.25}]
    *_, last = events(tmp_path)
    assert [event.step for event in last if event.session_log.status == event_pb2.SessionLog.START] == [0]


@pytest.mark.parametrize(
    ("bad", "shown"), [(float("nan"), "nan"), (np.float32("-inf"), "-inf"), ([1.0, float("inf")], "[1.0, inf]")]
)
def test_what_is_not_finite_stops_the_run_and_names_step_and_metric(tmp_path, bad, shown):
    with MetricsWriter(tmp_path) as writer:
        writer.write(6, {"loss": 0.5})
        message = re.escape(f"metrics of step 7: 'loss' is {shown}, a finite number is wanted; at step 6 it was 0.5.")
        with pytest.raises(MonitorError, match=message):
            writer.write(7, {"reward": 1.0, "loss": bad})
        with pytest.raises(MonitorError, match=r"'new' is nan, a finite number is wanted\. The run must not go on"):
            writer.write(7, {"new": float("nan")})
    assert [record["step"] for record in read_metrics(tmp_path)] == [6]


def test_steps_grow_and_values_are_numbers_or_vectors(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(2, {})
        with pytest.raises(MonitorError, match=r"metrics of step 2: step 2 is already written; steps must grow"):
            writer.write(2, {})
        with pytest.raises(MonitorError, match=r"'grid' has shape \(2, 2\), a number or vector is wanted"):
            writer.write(3, {"grid": np.zeros((2, 2))})


@pytest.mark.parametrize("line", ["not json", "[1]", '{"loss": 1}', '{"step": 1}'])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + "\n")
    message = re.escape(f"line 2: an object with a step larger than the last one is wanted, got {line!r}")
    with pytest.raises(MonitorError, match=message):
        read_metrics(tmp_path)
    with pytest.raises(MonitorError, match=message):
        MetricsWriter(tmp_path)
    assert path.read_text() == '{"step": 1}\n' + line + "\n"


def test_a_run_that_wrote_nothing_has_no_records(tmp_path):
    assert read_metrics(tmp_path) == []


def test_totals_add_over_steps():
    records = [{"step": 1, "drop/a": 2.0, "dropper": 9.0}, {"step": 2, "drop/b": 1.0, "drop/a": 3.0}]
    assert totals(records, "drop") == {"a": 5.0, "b": 1.0}
    assert list(itertools.chain.from_iterable(series(records, "drop/b"))) == [2, 1.0]
