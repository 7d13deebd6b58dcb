"""The real decoder on eight devices: loss, gradients and parameters of one device, whatever the shape of the mesh."""

import jax
import numpy as np
import pytest

from harnessrl_jax.errors import ShardingError
from harnessrl_jax.training import context_row_fn, make_mesh
from harnessrl_jax.training.rows import Row

STEPS = (0, 1)
SHAPES = [(2, 1, 4, 1), (1, 2, 2, 2)]  # the first has more devices along `tensor` than key-value heads


@pytest.fixture(scope="module")
def one_device(decoder_job):
    """The state and metrics of one device, with smaller micro-batches."""
    job = decoder_job.Job(None, "vjp", 2)
    metrics = job.run(STEPS)
    return jax.tree.map(np.asarray, job.state), metrics


def check(job, want, wanted):
    metrics = job.run(STEPS)
    assert job.step._cache_size() == 1
    assert wanted["applied"] == 1
    for (path, got), expected in zip(
        jax.tree_util.tree_leaves_with_path(job.state), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6, err_msg=jax.tree_util.keystr(path))
    for name in wanted:
        np.testing.assert_allclose(metrics[name], wanted[name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("sizes", SHAPES)
def test_every_mesh_equals_one_device(decoder_job, one_device, sizes):
    check(decoder_job.job(sizes, "vjp", 8), *one_device)


def test_the_fused_form_on_a_mesh_equals_one_device(decoder_job, one_device):
    state, metrics = one_device
    found = {n: v for n, v in metrics.items() if not n.startswith("capo/")}  # it keeps no role gradients apart
    check(decoder_job.job((2, 1, 1, 4), "fused", 4), state, found)


def test_what_a_context_axis_cannot_spread_is_refused(decoder_job):
    mesh = make_mesh(data=2, fsdp=1, tensor=1, context=4)
    how = {"temperature": 1.0, "implementation": "blockwise", "remat": "none", "collect": None}
    row_fn = context_row_fn(decoder_job.MODEL, mesh, **how)
    row = Row(*jax.tree.map(lambda leaf: leaf[0][:30], decoder_job.batch(0)))
    with pytest.raises(ShardingError, match=r"30 targets of a row cannot be spread evenly over 4 devices"):
        row_fn(decoder_job.params(), row)
