"""Curves of speed and of each tower, for `towers train` and `fit` over towers."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from towers.devices import memory

RATE = "speed/examples_per_second"


class Speed:
    """Measures the speed of training between points.

    Attributes:
        num_steps: steps between the last two points.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        """Measure from the first point on; what comes before it is warm-up."""
        self._clock, self._last, self._paused_seconds = clock, None, 0.0
        self.num_steps = 0

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count the time of the block; blocks may be nested."""
        start, before = self._clock(), self._paused_seconds
        yield
        self._paused_seconds = before + self._clock() - start

    def at(self, step: int, examples: int) -> dict[str, float]:
        """Return {tag: value} of the speed since the last point, {} for the first.

        Args:
            step: number of steps made.
            examples: number of examples in them.
        """
        now, scalars = self._clock(), {}
        if self._last is not None and step > self._last[1]:
            then, step_then, examples_then = self._last
            seconds = max(now - then - self._paused_seconds, 1e-9)  # clocks have a resolution
            self.num_steps, rate = step - step_then, (examples - examples_then) / seconds
            scalars = {RATE: rate, "speed/seconds_per_step": seconds / self.num_steps}
        self._last, self._paused_seconds = (now, step, examples), 0.0
        return scalars


def by_tower(
    devices: Sequence[str],
    values: Mapping[str, Sequence[float | None]],
    num_examples: Sequence[float],
) -> dict[str, float]:
    """Return {"tower_0/NAME": value} of values and memory, in MiB, for each tower with examples.

    Args:
        devices: device of each tower.
        values: {NAME: value for each tower}; None and NaN are left out, and empty lists.
        num_examples: number of examples of each tower.
    """
    held = [memory.of_device(device) or (None, None) for device in devices]
    in_mib = zip(("memory_mib", "peak_memory_mib"), zip(*held, strict=True), strict=True)
    occupied = [i for i, number in enumerate(num_examples) if number > 0]
    named = (values | dict(in_mib)).items()
    pairs = {f"tower_{i}/{name}": row[i] for name, row in named if row for i in occupied}
    return {tag: v for tag, v in pairs.items() if v is not None and not math.isnan(v)}
