"""How the GPUs are doing while a run goes on: a thread asks the driver once a second.

    with contextlib.closing(GpuHealth()) as health:
        ...
        health.read()    # {"gpu_0/utilisation_percent": 97.5, ...}: means since the last call

The train loop never waits for the driver: `read` only takes what is there. Without a driver, or
without a GPU that this process sees, there is no thread and nothing to read.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence

from towers.devices import nvml
from towers.devices.gpus import visible_gpus

PERIOD_SECONDS = 1.0
_PEAKS = (
    "memory_used_mib",
    "temperature_celsius",
)  # a mean would hide how near the limit they came
_CLOSE_SECONDS = 1.0  # a driver that hangs must not hold up the end of a run


class GpuHealth:
    """Samples utilisation, memory, power, temperature and clocks of GPUs in the background."""

    def __init__(
        self,
        indices: Sequence[int] | None = None,
        *,
        wait: Callable[[float], bool] | None = None,
    ):
        """Start the thread, if there is a GPU to ask for.

        Args:
            indices: of the driver's GPUs; by default all that this process sees, whether a tower
                uses them or not.
            wait: waits so many seconds between two samples, and returns whether to end.
        """
        if indices is None:
            indices = [gpu.index for gpu in visible_gpus(nvml.gpus())]
        self._indices = list(indices)
        self._closed = threading.Event()
        self._wait = wait or self._closed.wait
        self._lock = threading.Lock()
        self._window: dict[str, list[float]] = {}  # tag: [sum, number, peak]
        self._thread: threading.Thread | None = None
        if self._indices:
            self._thread = threading.Thread(target=self._watch, name="gpu_health", daemon=True)
            self._thread.start()

    def read(self) -> dict[str, float]:
        """Return {"gpu_I/NAME": value} since the last call, I being the driver's index.

        A value is the mean of the samples, of memory and temperature the peak. What a GPU did not
        tell is left out, and so is everything if there was no sample.
        """
        with self._lock:
            window, self._window = self._window, {}
        return {
            tag: peak if tag.endswith(_PEAKS) else total / number
            for tag, (total, number, peak) in window.items()
        }

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _watch(self) -> None:
        # Whatever a driver does, a run goes on without these curves.
        with contextlib.suppress(Exception), nvml.opened() as there:
            while there:
                for index in self._indices:
                    self._add(index, nvml.sample(index))
                if self._wait(PERIOD_SECONDS):
                    return

    def _add(self, index: int, values: dict[str, float]) -> None:
        """Add a GPU's sample to the window."""
        with self._lock:
            for name, value in values.items():
                tag = f"gpu_{index}/{name}"
                total, number, peak = self._window.get(tag, (0.0, 0, value))
                self._window[tag] = [total + value, number + 1, max(peak, value)]
