"""One of several processes that run the job of `decoder_job.py`: `one_host.py PROCESS PROCESSES PORT FOLDER`."""

import sys
from pathlib import Path

import jax

process, processes, port = map(int, sys.argv[1:4])
folder = Path(sys.argv[4])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8 // processes)
jax.distributed.initialize(f"localhost:{port}", processes, process)

import decoder_job  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental.multihost_utils import process_allgather  # noqa: E402

from harnessrl_jax.capo import assert_same_partition  # noqa: E402
from harnessrl_jax.checkpoints import Checkpoints  # noqa: E402
from harnessrl_jax.errors import PartitionError  # noqa: E402

job = decoder_job.job((2, 2, 2, 1))
metrics = job.run([0, 1])
with Checkpoints(folder / "checkpoints", keep=2) as checkpoints:
    checkpoints.save(2, job.state, {"process": process})
later = job.run([2])
state = decoder_job.whole(job.state)
if process == 0:
    np.savez(folder / "metrics.npz", **metrics)
    np.savez(folder / "later.npz", **later)
    np.savez(folder / "state.npz", *jax.tree.leaves(state))

units = job.state.capo.units
checksum = assert_same_partition(units, process_allgather)
flipped = np.asarray(units.addressable_data(0)) ^ (process == 1)
parts = [jax.device_put(flipped, device) for device in jax.local_devices()]
try:
    assert_same_partition(
        jax.make_array_from_single_device_arrays(units.shape, units.sharding, parts), process_allgather
    )
    said = ""
except PartitionError as error:
    said = str(error)
(folder / f"agreement-{process}.txt").write_text(f"{checksum:08x}\n{said}")
