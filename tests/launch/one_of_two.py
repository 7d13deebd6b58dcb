"""One of two processes that carry out two orders; the second fails in between: `one_of_two.py PROCESS ADDRESS`."""

import sys

import jax

jax.config.update("jax_num_cpu_devices", 1)

from harnessrl_jax.errors import HostError, TaskError  # noqa: E402
from harnessrl_jax.launch.__main__ import parser  # noqa: E402
from harnessrl_jax.launch.hosts import Hosts, Order, join  # noqa: E402

process, address = sys.argv[1:]
join(parser().parse_args(["train", "--coordinator", address, "--processes", "2", "--process", process]))
hosts = Hosts()
try:
    with hosts.failing_together():
        if process == "0":
            hosts.tell(Order("save", 7))
            hosts.tell(Order("train", 8))
        else:
            print(*hosts.hear()[:2])
            raise TaskError("no such file on this host")
except (HostError, TaskError) as error:
    print(f"{type(error).__name__}: {error}")
