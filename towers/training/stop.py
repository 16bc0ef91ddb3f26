"""A stop that is asked for by a signal, and answered where it loses nothing."""

import signal
import threading
from types import FrameType


class StopRequest:
    """Turns Ctrl-C and SIGTERM into a question that the loop asks; a second one ends at once."""

    def __enter__(self) -> "StopRequest":
        """Take over the two signals, where Python lets us: in the main thread."""
        self._asked = False
        here = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if here else ()
        self._before = {number: signal.signal(number, self._ask) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        """Tell whether a stop was asked for."""
        return self._asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        self.__exit__()
