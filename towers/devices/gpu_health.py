"""Samples utilisation, memory, power, temperature and clocks of the GPUs during a run.

    with contextlib.closing(GpuHealth()) as health:
        ...
        health.read()    # {"gpu_0/utilisation_percent": 97.5, ...}: means since the last call

A thread asks the driver once a second, so the train loop never waits for it. Without a driver or a
visible GPU there is no thread.
"""

import contextlib
import statistics
import threading
from collections.abc import Callable

from towers.devices import nvml
from towers.devices.gpus import visible_gpus

PERIOD_SECONDS = 1.0
_PEAKS = ("memory_used_mib", "temperature_celsius")  # a mean would hide values near the limit
_CLOSE_SECONDS = 1.0  # a driver that hangs must not hold up the end of a run


class GpuHealth:
    """Samples the GPUs that this process sees, in the background."""

    def __init__(self, wait: Callable[[float], bool] | None = None):
        """Start the thread; `wait(seconds)` returns whether to end."""
        self._gpus = visible_gpus(nvml.gpus())
        self._closed = threading.Event()
        self._wait = wait or self._closed.wait
        self._samples: list[tuple[str, float]] = []
        self._thread = threading.Thread(target=self._watch, name="gpu_health", daemon=True)
        if self._gpus:
            self._thread.start()

    def read(self) -> dict[str, float]:
        """Return {"gpu_I/NAME": value} since the last call; I is the driver's index.

        A value is the mean of the samples, for memory and temperature the peak. Values that a GPU
        does not report are left out.
        """
        samples, self._samples = self._samples, []
        window: dict[str, list[float]] = {}
        for tag, value in samples:
            window.setdefault(tag, []).append(value)
        return {
            tag: max(values) if tag.endswith(_PEAKS) else statistics.fmean(values)
            for tag, values in window.items()
        }

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _watch(self) -> None:
        # An error of the driver must not end the run.
        with contextlib.suppress(Exception), nvml.opened() as there:
            while there:
                for gpu in self._gpus:
                    for name, value in nvml.sample(gpu).items():
                        self._samples.append((f"gpu_{gpu.index}/{name}", value))
                if self._wait(PERIOD_SECONDS):
                    return
