"""A partition on every device of every host -> an error if they differ."""

import zlib
from collections.abc import Callable

import jax
import numpy as np

from harnessrl_jax.errors import PartitionError


def assert_same_partition(units: jax.Array, all_hosts: Callable[[np.ndarray], np.ndarray]) -> int:
    """Compares the partition's checksums on all devices: hosts that route differently train different models.

    Args:
      units: the partition, repeated on every device.
      all_hosts: gathers a host's array from all hosts, such as `jax.experimental.multihost_utils.process_allgather`.

    Returns:
      The checksum (CRC-32 of the packed bits).

    Raises:
      PartitionError: two devices, of one host or of two, hold different partitions.
    """
    mine = [zlib.crc32(np.packbits(np.asarray(shard.data)).tobytes()) for shard in units.addressable_shards]
    found = np.asarray(all_hosts(np.asarray(mine, np.uint32))).ravel()
    if (found != found[0]).any():
        shown = ", ".join(f"{value:08x} on {(found == value).sum()}" for value in np.unique(found))
        raise PartitionError(
            f"CAPO: {len(found)} devices hold different partitions (checksums {shown}); all must train with the same. "
            "Did the hosts see different batches, or resume from different checkpoints? Restart them from one"
        )
    return int(found[0])
