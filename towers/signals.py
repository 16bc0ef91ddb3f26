"""Signal handling that works while the main thread is blocked, and one-line exit messages.

Python runs signal handlers in the main thread, between two instructions, so none runs while that
is blocked in C++, by input or a device. Therefore a thread reads signal numbers from a pipe, which
receives them at once (`signal.set_wakeup_fd`), and acts if the main thread does not.

    with signals.Listener() as listener:      # a signal raises Interrupted in the main thread,
        with listener.answering(tick):        # except here, where the caller polls for it
            while not listener.asked: ...

SIGINT (Ctrl-C), SIGTERM and SIGUSR1 (schedulers) and SIGHUP (a closed terminal) request an end. A
SIGHUP that is ignored at the start, as under nohup, stays ignored.
"""

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType

from towers.formatting import print_line

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
GRACE_SECONDS = 2.0  # without reaction, after which the main thread counts as blocked
_UNWINDING_SECONDS = 20.0  # for cleaning up after a reaction
_SAME_SECONDS = 1.0  # closer signals are one, as sent by a terminal and passed on by a parent
_TICK_SECONDS = 0.5

EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again, and it continues
_current: "Listener | None" = None


class Interrupted(KeyboardInterrupt):
    """A signal requested an end while nobody polled for it."""


class Listener:
    """Handles the signals of a process, within a `with` block in the main thread.

    Attributes:
        asked: the first signal that requested an end, or None.
        owner: whether the process may be killed if its main thread does not react.
        stopping: function from a signal's number to the (exit code, line) of such an end.
    """

    def __init__(self, owner: bool = False):
        """Handle nothing until the `with` block."""
        self.owner: bool = owner
        self.asked: signal.Signals | None = None
        self.stopping: Callable[[int], tuple[int, str]] = interrupted
        self.kept: list[object] = []
        self._tick: Callable[[], None] | None = None
        self._asked_at = self._answered_at = 0.0
        # What the command's flags are relative to.
        self._folder = os.open(".", os.O_PATH) if owner else None
        self._errors = os.dup(2) if owner else None  # also while cli.quiet_start redirects it
        self._closing = threading.Event()
        self._code: int | None = None
        if owner:
            atexit.register(self._at_exit)  # registered first, called last

    def __enter__(self) -> "Listener":
        """Install the handlers and start the thread."""
        global _current
        self._outer, _current = _current, self
        self._reading, self._writing = os.pipe()
        for end in (self._reading, self._writing):
            os.set_blocking(end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._before = {}
        for number in ENDING:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle) or signal.SIG_DFL
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers and end the thread."""
        global _current
        _current = self._outer
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._closing.set()
        os.write(self._writing, b"\0")
        self._thread.join()
        os.close(self._reading)
        os.close(self._writing)

    @contextlib.contextmanager
    def answering(self, tick: Callable[[], None]) -> Iterator[None]:
        """Enter a block that polls `asked`, in which signals raise nothing.

        The listening thread calls `tick` twice a second.
        """
        before, self._tick = self._tick, tick
        try:
            yield
        finally:
            self._tick = before

    def waited(self) -> float:
        """Return the seconds since an end was first requested, or 0."""
        return time.monotonic() - self._asked_at if self.asked else 0.0

    def keep(self, *things: object) -> None:
        """Keep objects alive, and end the process by `leave` without deleting them.

        Deleting a pipeline waits for its threads, for ever if its source is blocked.
        """
        self.kept += things

    def leave(self, code: int, line: str = "") -> None:
        """Print a line, if any, and end the process at once, without waiting for its threads.

        Args:
            code: the exit code.
            line: what is printed on standard error.
        """
        _clear_up()
        if line:
            with contextlib.suppress(OSError):
                os.write(2 if self._errors is None else self._errors, f"towers: {line}\n".encode())
        os._exit(code)

    def run_again(self, *flags: str) -> None:
        """Replace the program by its own command and these flags, without waiting for threads."""
        _clear_up()
        os.fchdir(self._folder)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *flags])

    def close(self, code: int) -> None:
        """Ignore signals and exit as Python does, but without deleting kept objects."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)
        self._code = code
        sys.exit(code)

    def _at_exit(self) -> None:
        if self.kept and self._code is not None:
            self.leave(self._code)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._note(number)
        now, first = time.monotonic(), self._answered_at
        self._answered_at = first or now
        again = first and now - first > _SAME_SECONDS
        seen = first and self.owner  # the thread ends a blocked process
        if (self._tick is None and not seen) or (again and not self.owner):
            raise Interrupted(_name(number))

    def _note(self, number: int) -> bool:
        """Record a signal that requests an end; return whether it is a second one."""
        now = time.monotonic()
        if self.asked is None:
            self.asked, self._asked_at = signal.Signals(number), now
        return now - self._asked_at > _SAME_SECONDS

    def _listen(self) -> None:
        while not self._closing.is_set():
            ready, _, _ = select.select([self._reading], [], [], _TICK_SECONDS)
            numbers = os.read(self._reading, 512) if ready else b""
            for number in numbers:
                if number and self._wakeup_before >= 0:  # an event loop, as of a notebook
                    with contextlib.suppress(OSError):
                        os.write(self._wakeup_before, bytes([number]))
                if number in ENDING and self._note(number) and self.owner:
                    code, _ = interrupted(number)
                    self.leave(code, f"ended at once by a second signal ({_name(number)})")
            if tick := self._tick:
                try:
                    tick()
                except Exception:  # keep listening
                    traceback.print_exc()
            elif self.asked and self.owner:
                allowed = _UNWINDING_SECONDS if self._answered_at else GRACE_SECONDS
                if self.waited() > allowed:
                    self.leave(*self.stopping(self.asked))


def owner() -> Listener | None:
    """Return the listener of a process that is the towers command; None in another program."""
    return _current if _current is not None and _current.owner else None


@contextlib.contextmanager
def listening() -> Iterator[Listener]:
    """Yield the process' listener or a new one, which is inactive outside the main thread."""
    if _current is not None or threading.current_thread() is not threading.main_thread():
        yield _current or Listener()
        return
    with Listener() as listener:
        yield listener


class StopRequest:
    """Called in a loop, returns whether a signal has requested an end."""

    def __enter__(self) -> "StopRequest":
        """Handle signals, if this is the main thread."""
        self._stack = contextlib.ExitStack()
        self.listener = self._stack.enter_context(listening())
        self._stack.enter_context(self.listener.answering(self._tick))
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers."""
        self._stack.close()

    def __call__(self) -> bool:
        """Return whether a stop was requested."""
        return self.listener.asked is not None

    def _tick(self) -> None:
        """Called twice a second, see `Listener.answering`."""


def interrupted(number: int) -> tuple[int, str]:
    """Return the exit code and the line of a process that a signal ended."""
    return 128 + number, f"interrupted by {_name(number)}"


def print_error(message: object) -> None:
    """Print a message to standard error, in one line."""
    print_line(f"towers: {' '.join(str(message).splitlines())}", sys.stderr)


def _clear_up() -> None:
    """Write what is printed, and end the children, of a process that is about to end."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if children := sys.modules.get("multiprocessing"):
        for child in children.active_children():
            child.terminate()


def _name(number: int) -> str:
    return signal.Signals(number).name


def _forget() -> None:
    """Restore the default handlers in a forked process, such as a data loader."""
    if _current is not None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in set(_current._before) - {signal.SIGINT}:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget)
