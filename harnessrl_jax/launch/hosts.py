"""Several processes of one run: the first does everything, the others lend their devices to what it orders.

Every collective of a run follows an order. The first process gives it, the others carry it out, so that all of them
enter the same collectives in the same sequence, and none decides anything for itself.
"""

import argparse
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Literal, NamedTuple, get_args

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.experimental.multihost_utils import process_allgather
from orbax.checkpoint import multihost

from harnessrl_jax.checkpoints import Checkpoints
from harnessrl_jax.config import Config, Packing
from harnessrl_jax.errors import ConfigError, HostError
from harnessrl_jax.launch.model import first_params, model_folder
from harnessrl_jax.launch.run_folder import RunFolder
from harnessrl_jax.launch.trainer import Trainer, make_trainer
from harnessrl_jax.training import TrainState
from harnessrl_jax.trajectories.rows import empty_batch

Kind = Literal["open", "restore", "train", "gather", "save", "stop"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PATIENCE_MS = 7 * 24 * 3600 * 1000
"""How long a process waits for an order: as long as rollouts take. If another process dies, waiting ends too."""
LAST_WORD_MS = 60_000
"""How long a failing process waits for the others to hear why."""
HEARTBEAT_S, SHUTDOWN_S = 60, 20
REASON_BYTES = 1000


class Order(NamedTuple):
    """What all processes do next."""

    kind: Kind
    step: int = 0
    reason: str = ""
    """Of a stop: which process failed and why, or empty."""
    replayed: tuple[int, int] = (0, 0)
    """Of a batch: layers and active experts of what it replays, or zeros."""


class Hosts:
    """The processes of a run, as one of them sees them. With a single process an order costs nothing."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def tell(self, order: Order) -> None:
        """The first process: returns when all others know the order and are about to carry it out.

        Raises:
          HostError: another process failed or has ended.
        """
        if jax.process_count() > 1:
            heard = self._exchange(order, PATIENCE_MS)
            if heard.reason:
                raise HostError(heard.reason)

    def hear(self) -> Order:
        """The other processes: waits for the next order. Raises HostError if another process has ended."""
        return self._exchange(Order("stop"), PATIENCE_MS)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Around all orders: if this process fails, it says why to the others, who are or will be at the next order."""
        try:
            yield
        except HostError:
            raise
        except BaseException as error:
            if jax.process_count() > 1:
                reason = f"Process {jax.process_index()} stopped. {type(error).__name__}: {error}"
                with suppress(HostError):
                    self._exchange(Order("stop", reason=reason), LAST_WORD_MS)
            raise

    def _exchange(self, order: Order, patience_ms: int) -> Order:
        """Brings all processes here. Returns the order of the first, or the stop of one that failed."""
        text = np.frombuffer(order.reason.encode()[:REASON_BYTES].ljust(REASON_BYTES), np.uint8)
        head = np.array([KINDS.index(order.kind), order.step, *order.replayed], np.int32)
        # The barrier may wait for hours; a collective that waits for a process may give up within minutes.
        number = next(self._numbers)
        try:
            multihost.get_barrier_sync_fn()(key=f"harnessrl_jax: order {number}", timeout_ms=patience_ms)
            heads, texts = process_allgather((head, text))
        except JaxRuntimeError as error:
            raise HostError(
                f"Process {jax.process_index()} of {jax.process_count()}: another process has ended, or did not come "
                "to the next order. Look at what the others said; the same commands go on from the last checkpoint."
            ) from error
        reasons = [bytes(text).decode(errors="ignore").rstrip() for text in texts]
        failed = next(filter(None, reasons), "")
        kind, step, layers, active = heads[0].tolist()
        return Order("stop", reason=failed) if failed else Order(KINDS[kind], step, replayed=(layers, active))


def join(options: argparse.Namespace) -> None:
    """Connects to the other processes, if there are any. Must come before anything that uses a device.

    Raises:
      ConfigError: options that do not belong together.
    """
    numbers = (options.processes, options.process)
    # Without the service for preemption SIGTERM ends a process, as it does when there is only one.
    jax.config.update("jax_enable_preemption_service", False)
    connect = partial(
        jax.distributed.initialize, heartbeat_timeout_seconds=HEARTBEAT_S, shutdown_timeout_seconds=SHUTDOWN_S
    )
    if options.coordinator in (None, "auto"):
        if numbers != (None, None):
            raise ConfigError(
                f"--processes {options.processes} --process {options.process}: both need --coordinator HOST:PORT, the "
                "address of process 0. Leave them out with one process, or with --coordinator auto."
            )
        if options.coordinator == "auto":
            connect()
    elif None in numbers or not 0 <= options.process < options.processes:
        raise ConfigError(
            f"--coordinator {options.coordinator}: give --processes N and --process I with 0 <= I < N too, "
            f"got {options.processes} and {options.process}."
        )
    else:
        connect(options.coordinator, options.processes, options.process)


def follow(config: Config, folder: RunFolder) -> int:
    """What every process but the first does, until that one says stop. Returns the exit status.

    Raises:
      HostError: another process failed; the message says why.
    """
    hosts = Hosts()
    with hosts.failing_together():
        trainer, state = make_trainer(config, *first_params(config, model_folder(config)))
        order = hosts.hear()
        if order.kind == "open":
            with Checkpoints(folder.checkpoints, config.checkpoint.keep) as checkpoints:
                order = _carry_out(hosts, config.packing, trainer, state, checkpoints)
    if order.reason:
        raise HostError(order.reason)
    return 0


def _carry_out(hosts: Hosts, packing: Packing, trainer: Trainer, state: TrainState, checkpoints: Checkpoints) -> Order:
    """Does as told, and returns the order to stop."""
    shape = packing.row_slots, packing.row_targets, packing.max_rows
    while (order := hosts.hear()).kind != "stop":
        match order.kind:
            case "restore":
                state, _ = checkpoints.restore(order.step, state)
            case "train":
                state, _ = trainer.run(state, empty_batch(*shape, replayed=order.replayed), 0)
            case "gather":
                trainer.weights(state)
            case "save":
                checkpoints.save(order.step, state, {})
    return order
