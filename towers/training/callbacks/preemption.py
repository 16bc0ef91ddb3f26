"""Handles signals and stalls of a run without losing a step, even while it is blocked.

Between two calls of the train loop, or two batches of an evaluation, the loop itself checks for
requests to stop. While it is blocked in C++, the signal listener's thread handles them: if
no step is in progress (`TrainLoop.position`), it saves the master variables.
"""

import contextlib
import dataclasses
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator

from towers import signals
from towers.devices import remote
from towers.errors import RunError
from towers.training.run.checkpoint_manager import CheckpointManager, Snapshot
from towers.training.step.train_loop import TrainLoop
from towers.training.step.train_state import not_finite

EXIT_STALLED = 76
BATCH, STEP, EVALUATION, SAVE = "a batch", "a step", "an evaluation", "a save"
CHECK = "a comparison of towers with one device"
State = tuple[int, Snapshot]
NOTHING: State = (0, {})  # needs no saving
_SILENT_SECONDS = 2.0  # the longest check of which nothing is said
_CALL_SECONDS = 2.0  # the longest call of the train loop: a stop waits for its end


@dataclasses.dataclass(frozen=True)
class _Waiting:
    what: str  # the main thread waits for
    step: int  # steps done
    first: bool  # of its kind: it may be compiling
    state: Callable[[], State | None]  # None if the variables are not those of a finished step


@dataclasses.dataclass
class PreemptionHandler(signals.StopRequest):
    """The stop request of a run, which is also answered while the main thread is blocked."""

    checkpoints: CheckpointManager
    say: Callable[[str], None]  # prints a line
    stall_seconds: float = 0.0  # without progress, which count as a stall; 0: never
    on_stall: str = "wait"  # "stop" ends the process then; "wait" only reports it

    consistent: bool = True  # whether the master variables are the state after a step
    backup: State | None = None  # on this machine, if a lost machine could take the state with it

    def __post_init__(self) -> None:
        """Wait for nothing yet."""
        self._train_loop: TrainLoop | None = None
        self._waiting: _Waiting | None = None
        self._seen = {SAVE}  # activities whose next one compiles nothing
        self._announced: _Waiting | None = None  # the check of which something was said
        self._beats, self._seconds_of_step = 0, 0.0
        self._progress, self._since, self._reported = None, time.monotonic(), False

    def __call__(self) -> bool:
        """Return whether a stop was requested. The call counts as progress."""
        self._beats += 1
        return super().__call__()

    def most_steps(self) -> int:
        """Return how many steps a call may make, so that a stop need not wait long for it."""
        return max(1, int(_CALL_SECONDS / max(self._seconds_of_step, 1e-9)))

    @contextlib.contextmanager
    def first_batch(self) -> Iterator[None]:
        """Watch the reading of the first batch, before there is anything to save."""
        with self._watching(BATCH, 0, lambda: NOTHING):
            yield
        if self():
            raise signals.Interrupted

    @contextlib.contextmanager
    def steps(self, train_loop: TrainLoop, step: int, number: int) -> Iterator[None]:
        """Watch a call of the train loop.

        Args:
            train_loop: the loop that the block calls.
            step: number of steps done before the call.
            number: number of steps that the call makes.
        """
        self._train_loop = train_loop
        self._back_up(step)
        start = time.monotonic()

        def state() -> State | None:
            if self.backup:
                return self.backup
            requested, received = train_loop.position()
            if requested == received:
                return None
            snapshot = self.checkpoints.snapshot()
            same = train_loop.position() == (requested, received)
            return (int(snapshot["step"]), snapshot) if same else None

        with self._watching(STEP, step, state) as first:
            self.consistent = False
            try:
                yield
                self.consistent = True
            except Exception:  # if the data set raised it, its step has changed nothing
                self.consistent = train_loop.between_steps()
                raise
        if not first:
            self._seconds_of_step = (time.monotonic() - start) / number

    @contextlib.contextmanager
    def evaluation(self, step: int) -> Iterator[None]:
        """Watch an evaluation after `step` steps, in which weights may be those of the averages."""
        snapshot = self.checkpoints.snapshot()
        self._back_up(step, snapshot)
        with self._watching(EVALUATION, step, lambda: (step, snapshot)):
            yield

    def _back_up(self, step: int, snapshot: Snapshot | None = None) -> None:
        """Keep the state here if losing a machine could spoil it."""
        if remote.current_cluster() and not self.checkpoints.is_remote:
            self.backup = step, snapshot or self.checkpoints.snapshot()

    def save_backup(self) -> str:
        """Write `backup` as a checkpoint; return what the run resumes from, "" if nothing."""
        if not self.checkpoints.begun:
            return ""
        if self.backup is None:
            return "the last checkpoint"
        try:
            self.save_snapshot(*self.backup)
        except RunError as error:
            self.say(f"not saved   {error}")
            return "the last checkpoint"
        return f"step {self.backup[0]}"

    @contextlib.contextmanager
    def check(self, step: int | None = None) -> Iterator[None]:
        """Watch a check of towers, which changes no variable; say so if it takes long.

        Args:
            step: number of steps done; None: none in this process, so there is nothing to save.
        """

        def state() -> State:
            return NOTHING if step is None else self.backup or (step, self.checkpoints.snapshot())

        with self._watching(CHECK, step or 0, state):
            yield
        if step is None and self():
            raise signals.Interrupted

    @contextlib.contextmanager
    def save(self, step: int) -> Iterator[None]:
        """Watch a checkpoint being written; no other thread writes one meanwhile."""
        with self._watching(SAVE, step, lambda: None):
            yield

    @contextlib.contextmanager
    def _watching(self, activity: str, step: int, state: Callable) -> Iterator[bool]:
        before, first = self._waiting, activity not in self._seen
        self._beats += 1
        self._waiting = _Waiting(activity, step, first, state)
        self._began = time.monotonic()
        try:
            yield first
            if activity != CHECK:  # of which each one compiles
                self._seen.add(activity)
        finally:
            self._waiting = before
            self._beats += 1

    def _tick(self) -> None:
        """Handle signals and stalls for a blocked main thread; called twice a second."""
        waiting = self._waiting
        if waiting is None:
            return
        seconds = time.monotonic() - self._began
        if waiting.what == CHECK and seconds > _SILENT_SECONDS and waiting is not self._announced:
            self._announced = waiting
            self.say("checking    that towers compute the same as one device")
        if self.listener.waited() > signals.GRACE_SECONDS:
            name = self.listener.asked.name
            self._save_and_leave(waiting, signals.EXIT_STOPPED, f"stopped by {name}")
        if self.stall_seconds:
            self._check_for_stall(waiting)

    def _check_for_stall(self, waiting: _Waiting) -> None:
        steps, now = waiting.what == STEP, time.monotonic()
        progress = self._beats, steps and self._train_loop.position()
        if progress != self._progress:
            if self._reported:
                self.say(f"recovered   after {now - self._since:.0f} s without {waiting.what}")
            self._progress, self._since, self._reported = progress, now, False
            return
        of_input = self._train_loop.between_steps() if steps else _reads_input()
        if waiting.first and not of_input:  # it may be compiling
            self._since = now
        if self._reported or now - self._since < self.stall_seconds:
            return
        self._reported = True
        where = "the disk" if waiting.what == SAVE else "the devices"
        where = "input: the data set yields no batch" if of_input else where
        self.say(
            f"stalled     {now - self._since:.0f} s without progress in {waiting.what} after step "
            f"{waiting.step}: it waits for {where}"
        )
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
        if self.on_stall == "stop":
            self._save_and_leave(waiting, EXIT_STALLED, "stopped by --on_stall=stop", always=True)

    def save_snapshot(self, step: int, snapshot: Snapshot) -> None:
        """Save a snapshot unless that of its step is saved already.

        Args:
            step: of the checkpoint.
            snapshot: the values after that step.

        Raises:
            RunError: it cannot be written, or a weight is infinite or NaN.
        """
        if self.checkpoints.has(step):
            return
        if not_finite(snapshot):
            raise RunError("a weight is infinite or NaN: not saved; the newest checkpoint is kept")
        self.checkpoints.save_now(step, snapshot)

    def _save_and_leave(self, waiting: _Waiting, code: int, why: str, always: bool = False) -> None:
        """Save the state of a finished step, and end the process with `code`.

        `always` also ends it in the middle of a step. A process of another program, such as a
        notebook, is not ended.
        """
        state = waiting.state()
        if not self.listener.owner or not (state or always):
            return
        if state is NOTHING:
            line = f"{why}: nothing is lost; the same command resumes the run"
        elif state is None:
            line = f"{why} in the middle of {waiting.what}: the newest checkpoint is kept"
        else:
            line = f"{why}: step {state[0]} is saved; the same command resumes the run"
            try:
                self.save_snapshot(*state)
            except RunError as error:
                code, line = 1, f"{why}: {error}"
        self.listener.leave(code, line)


def _reads_input() -> bool:
    """Return whether the main thread is blocked in the iterator of a data set."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None:
        if "/tensorflow/python/data/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
