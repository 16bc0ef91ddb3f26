"""How a run over workers goes on when these are lost or come back.

Before each call of the train loop the masters are kept as they are, which copies nothing. When a
worker is lost, whatever the call has done is thrown away: an update is whole or not at all. What
was kept becomes a checkpoint, and the run is built anew on the workers that are there, as a new
process would resume it. No number depends on the number of towers, so all stay the same. Masters
that lie on workers are lost with these: such a run goes on from its last checkpoint.
"""

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from towers import signals
from towers.devices import remote
from towers.errors import RunError
from towers.formatting import count, first_line
from towers.options.run import Options

_MAX_ERRORS = 3  # in a row at one step, of connections alone: no worker was lost
# Of connections, and of servers that know nothing of this program any more.
_CONNECTION_ERRORS = tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError


class Recovery:
    """Recovers a run from the loss of workers; one object serves all its rebuilds."""

    def __init__(self, options: Options, say: Callable[[str], None]):
        """Take the run's options, and what prints a line."""
        self._options, self._say = options, say
        self._where, self._num_errors = "", 0

    @contextlib.contextmanager
    def reraise_device_loss(self) -> Iterator[None]:
        """Raise DevicesChanged where the block fails because a worker is lost."""
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
        """Wait for as many workers as are needed; return whether the run is to go on.

        Args:
            step: of the state that was saved; None: there is only the last checkpoint.

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
