"""Continues a run when workers are lost or come back.

Before each call of the train loop the values of the variables are kept, without a copy. When a
worker is lost, the call's updates are dropped, so that an update is complete or not made at all.
The kept values become a checkpoint, and the run is rebuilt on the remaining workers, as a new
process would resume it. Results do not depend on the number of towers. Variables on workers are
lost with these: such a run continues from its last checkpoint.
"""

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from towers import signals
from towers.devices import remote
from towers.errors import RunError
from towers.formatting import count, first_line
from towers.options.parts import DeviceOptions

_MAX_ERRORS = 3  # failed connections in a row at one step, without a lost worker
# Failed connections, and servers that were restarted.
_CONNECTION_ERRORS = tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError


class Recovery:
    """Recovers a run from the loss of workers; one object serves all its rebuilds."""

    def __init__(self, options: DeviceOptions, say: Callable[[str], None]):
        """Start without a lost worker.

        Args:
            options: of the run.
            say: prints a line.
        """
        self._options, self._say = options, say
        self._where, self._num_errors = "", 0

    @contextlib.contextmanager
    def reraise_device_loss(self) -> Iterator[None]:
        """Raise DevicesChanged if the block fails because a worker is lost."""
        try:
            yield
        except tf.errors.OpError as error:
            cluster = remote.current_cluster()
            if cluster is None:
                raise
            if not cluster.find_lost():
                self._num_errors += 1
                if not isinstance(error, _CONNECTION_ERRORS) or self._num_errors > _MAX_ERRORS:
                    raise
                self._say(f"connection  failed: {first_line(error)}")
            raise remote.DevicesChanged from None

    def go_on(self, step: int | None) -> bool:
        """Wait until there are enough workers; return whether the run is to go on.

        Args:
            step: of the saved state; None: there is only the last checkpoint.

        Raises:
            RunError: there are too few workers.
        """
        cluster, options = remote.current_cluster(), self._options
        where = "the last checkpoint" if step is None else f"step {step}"
        if where != self._where:
            self._where, self._num_errors = where, 0
        lost = cluster.drop_lost()
        for worker in lost:
            self._say(f"lost        {worker}: it {worker.problem}")
        if lost and options.on_worker_loss == "stop":
            signals.print_error(
                f"stopped by --on_worker_loss=stop: {where} is saved; the same command goes on"
            )
            return False
        before, needed = cluster.alive(), max(options.min_workers, 1)
        enough = cluster.take_back(needed)
        for worker in cluster.alive():
            if worker not in before:
                self._say(f"back        {worker}")
        there = count(len(cluster.alive()), "worker")
        if not enough:
            raise RunError(
                f"{there} of {len(cluster.workers)} left, and --min_workers={needed}: {where} is "
                "saved; the same command goes on"
            )
        self._say(f"going on    from {where} with {there}: {count(len(cluster.devices), 'tower')}")
        cluster.watch_for_returns()
        return True
