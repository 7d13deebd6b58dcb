"""Partitions of several devices and hosts: the same bits, or an error."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from harnessrl_jax.capo import assert_same_partition
from harnessrl_jax.errors import PartitionError

UNITS = np.random.default_rng(0).random((2, 3, 9)) < 0.3


def repeated(copies):
    """One array that claims to be repeated over the devices, from a copy for each."""
    mesh = jax.make_mesh((len(copies),), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    parts = [jax.device_put(copy, device) for copy, device in zip(copies, mesh.devices, strict=True)]
    return jax.make_array_from_single_device_arrays(UNITS.shape, NamedSharding(mesh, PartitionSpec()), parts)


def test_equal_partitions_have_one_checksum():
    checksum = assert_same_partition(repeated([UNITS] * 4), lambda mine: np.stack([mine, mine]))
    assert checksum == assert_same_partition(jax.device_put(UNITS), lambda mine: mine)
    assert checksum != assert_same_partition(jax.device_put(~UNITS), lambda mine: mine)


def test_another_device_or_host_that_differs_is_an_error():
    other = UNITS.copy()
    other[1, 2, 8] ^= True
    with pytest.raises(PartitionError, match=r"4 devices hold different partitions \(checksums \w{8} on [13], "):
        assert_same_partition(repeated([UNITS, UNITS, other, UNITS]), lambda mine: mine)
    with pytest.raises(PartitionError, match="2 devices hold different partitions"):
        assert_same_partition(jax.device_put(UNITS), lambda mine: np.stack([mine, mine + 1]))
