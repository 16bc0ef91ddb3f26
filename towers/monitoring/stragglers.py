"""Which tower the others wait for.

Where towers meet within a step, as with BatchNorm over all of them, each waits for the slowest
there: their times are alike, and none is named.
"""

import statistics
from collections.abc import Sequence

_SLOWER = 1.25  # times what is usual
_POINTS = 2  # in a row: one slow point may be anything


class Stragglers:
    """Watches the towers' times, point after point, and names one that stays behind."""

    def __init__(self, devices: Sequence[str]):
        """Watch the towers on these devices."""
        self._devices, self._slowest, self._points_in_a_row = list(devices), None, 0

    def line(self, seconds: Sequence[float]) -> str | None:
        """Return a line when a tower has become the straggler; 0 seconds: it had no example."""
        known = [value for value in seconds if value > 0] or [0.0]
        # The median of all, not of the others: on devices that share cores it is one tower that
        # ends before the rest. Of two the smaller one.
        usual = min(known) if len(known) == 2 else statistics.median(known)
        slowest = seconds.index(max(known)) if max(known) > _SLOWER * usual else None
        self._points_in_a_row = self._points_in_a_row + 1 if slowest == self._slowest else 1
        self._slowest = slowest
        if slowest is None or self._points_in_a_row != _POINTS:
            return None
        return (
            f"straggler   tower {slowest} on {self._devices[slowest]} takes {seconds[slowest]:.3f} "
            f"s a step, {usual:.3f} s is usual: all wait for it"
        )
