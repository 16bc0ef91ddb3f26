"""A run whose towers stand on other machines: how it goes on when these come and go.

Before each call of the train loop the masters are kept as they are, which copies nothing. When a
worker is lost, what the call has done is thrown away, whatever it was: an update is whole or not at
all. What was kept is written as a checkpoint, and the run is built anew on the workers that are
there, as a new process would go on with it. No number depends on the number of towers, so all stay
the same. Masters that lie on workers are lost with these: such a run goes on from its last
checkpoint.
"""

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from towers import signals
from towers.devices import remote
from towers.devices.remote import DevicesChanged
from towers.errors import RunError
from towers.options.run import Options
from towers.text import count, first_line

_MOST_ERRORS = 3  # in a row at one step, of connections alone: no worker was lost
# Of connections, and of servers that know nothing of this program any more.
_OF_WORKERS = tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError


class Recovery:
    """What a run knows of its workers, from one building of it to the next."""

    def __init__(self, options: Options, say: Callable[[str], None]):
        """Have lost nothing yet."""
        self._options, self._say = options, say
        self._where, self._num_errors = "", 0

    @contextlib.contextmanager
    def reraise_worker_loss(self) -> Iterator[None]:
        """Raise DevicesChanged where the block fails since a worker is lost."""
        try:
            yield
        except tf.errors.OpError as error:
            cluster = remote.current()
            if cluster is None:
                raise
            if not cluster.lost():
                self._num_errors += 1
                if not isinstance(error, _OF_WORKERS) or self._num_errors > _MOST_ERRORS:
                    raise
                self._say(f"connection  failed: {first_line(error)}")
            raise DevicesChanged from None

    def go_on(self, step: int | None) -> bool:
        """Wait for as many workers as are needed; return whether the run is to go on.

        Args:
            step: of the state that was saved; None: there is only the last checkpoint.

        Raises:
            RunError: there are too few workers.
        """
        cluster, options = remote.current(), self._options
        where = "the last checkpoint" if step is None else f"step {step}"
        if where != self._where:
            self._where, self._num_errors = where, 0
        lost = cluster.drop()
        for worker in lost:
            self._say(f"lost        {worker}: it {worker.lost_because}")
        if lost and options.on_worker_loss == "stop":
            signals.complain(
                f"stopped by --on_worker_loss=stop: {where} is saved; the same command goes on"
            )
            return False
        before, needed = cluster.alive(), max(options.min_workers, 1)
        cluster.take_back()
        enough = cluster.wait_for(needed)
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
        cluster.look_for_the_lost()
        return True
