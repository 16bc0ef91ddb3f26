"""A run whose towers stand on other machines: how it goes on when these come and go.

Before each call of the train loop the masters are kept as they are, which copies nothing
(`Watch.kept`). When a worker is lost, what the call has done is thrown away, whatever it was: an
update is whole or not at all. What was kept is written as a checkpoint, and the run is built anew
on the workers that are there, as a new process would go on with it. No number depends on the number
of towers, so all stay the same. Masters that lie on workers are lost with these: such a run goes on
from its last checkpoint.
"""

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from towers import signals
from towers.devices import cluster
from towers.errors import RunError
from towers.options.run import Options
from towers.text import count, first_line
from towers.training.saving import Checkpoints
from towers.training.watch import Watch, WorkersChanged

_MOST_ERRORS = 3  # in a row at one step, of connections alone: no worker was lost
# Of connections, and of servers that know nothing of this program any more.
_OF_WORKERS = tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError


class Elastic:
    """What a run knows of its workers, from one building of it to the next."""

    def __init__(self, options: Options, say: Callable[[str], None]):
        """Have lost nothing yet."""
        self._options, self._say = options, say
        self._where, self._num_errors = "", 0

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Raise WorkersChanged where the block fails since a worker is lost."""
        try:
            yield
        except tf.errors.OpError as error:
            workers = cluster.current()
            if workers is None:
                raise
            if not workers.lost():
                self._num_errors += 1
                if not isinstance(error, _OF_WORKERS) or self._num_errors > _MOST_ERRORS:
                    raise
                self._say(f"connection  failed: {first_line(error)}")
            raise WorkersChanged from None

    def go_on(self, checkpoints: Checkpoints, watch: Watch) -> bool:
        """Save the last whole state, and wait for as many workers as are needed.

        Returned is whether the run is to go on.

        Raises:
            RunError: there are too few workers, or the run cannot be saved.
        """
        workers, options = cluster.current(), self._options
        checkpoints.close()
        where = "the last checkpoint"
        if watch.kept is not None:
            step, snapshot = watch.kept
            if not checkpoints.has(step):
                checkpoints.save_now(step, snapshot)
            where = f"step {step}"
        if where != self._where:
            self._where, self._num_errors = where, 0
        lost = workers.drop()
        for worker in lost:
            self._say(f"lost        {worker}: it {worker.lost_because}")
        if lost and options.on_worker_loss == "stop":
            signals.complain(
                f"stopped by --on_worker_loss=stop: {where} is saved; the same command goes on"
            )
            return False
        before, needed = workers.alive(), max(options.min_workers, 1)
        workers.take_back()
        enough = workers.wait_for(needed)
        for worker in workers.alive():
            if worker not in before:
                self._say(f"back        {worker}")
        if not enough:
            raise RunError(
                f"{count(len(workers.alive()), 'worker')} of {len(workers.workers)} left, and "
                f"--min_workers={needed}: {where} is saved; the same command goes on"
            )
        there = count(len(workers.alive()), "worker")
        self._say(f"going on    from {where} with {there}: {count(len(workers.devices), 'tower')}")
        workers.look_for_the_lost()
        return True
