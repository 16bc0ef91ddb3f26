"""A stop that is asked for by a signal, and answered where it loses nothing."""

import contextlib

from towers import signals


class StopRequest:
    """Turns the signals that ask for an end into a question that a loop asks."""

    def __enter__(self) -> "StopRequest":
        """Take over the signals, where Python lets us: in the main thread."""
        self._stack = contextlib.ExitStack()
        self.listener = self._stack.enter_context(signals.listening())
        self._stack.enter_context(self.listener.answering(self._tick))
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        self._stack.close()

    def __call__(self) -> bool:
        """Tell whether a stop was asked for."""
        return self.listener.asked is not None

    def _tick(self) -> None:
        """See `Listener.answering`."""
