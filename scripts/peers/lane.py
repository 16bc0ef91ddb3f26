"""The lane protocol, which each peer program speaks; plain Python and NumPy.

A lane is one process that trains one configuration. It builds, warms up, and prints that it is
ready. Then it sleeps until a line on standard input gives it a number of seconds to train for. So
programs that are compared run in turn. A peer is a loop around `Lane.more`:

    def program(config):
        ...
        with lane.Lane(config, {"torch": torch.__version__}) as turns:
            loss = None
            while turns.more(loss):
                loss = steps_per_loop_steps()

    if __name__ == "__main__":
        lane.run(program)

Standard output has one JSON object a line ("ready" or "skipped", a window's "steps", "seconds" and
"loss", at the end "peak_memory_mib"); all that frameworks print goes to standard error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

WARM_UP_LOOPS = 2
_START = time.perf_counter()  # of the program, set again when its imports are done


class Skipped(Exception):
    """This program cannot run the configuration here; the message is a sentence that says why."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What to train; `batch_size` is global, `image_shape` is that of the model's input."""

    model: str = "models.cnn:cnn"
    model_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    image_shape: tuple[int, int, int] = (24, 24, 3)
    num_classes: int = 10
    batch_size: int = 128
    num_devices: int = 1
    gpus: bool = False
    dtype: str = "float32"
    optimizer: str = "sgd"
    learning_rate: float = 0.001
    momentum: float = 0.9
    weight_decay: float = 0.0
    ema_decay: float = 0.0
    data: str = ""  # path of an .npz; empty for one synthetic batch
    augment: str = "off"
    steps_per_loop: int = 10
    seed: int = 0
    own_layers: bool = False  # mirrored.py: keep models.cnn's own local response normalization

    def slice_size(self) -> int:
        """Return the number of examples of one device.

        Raises:
            Skipped: the devices cannot have the same number.
        """
        if self.batch_size % self.num_devices:
            raise Skipped(
                f"this program needs slices of one size, and batch_size={self.batch_size} is not "
                f"a multiple of num_devices={self.num_devices}"
            )
        return self.batch_size // self.num_devices

    def require(self, **allowed: tuple) -> None:
        """Raise Skipped if a field's value is not among those that a program has."""
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise Skipped(
                    f"this program has no {name}={getattr(self, name)}, "
                    f"only {', '.join(map(str, values))}"
                )


def run(program: Callable[[Config], None]) -> None:
    """Read the configuration from the command line and run a peer program with it."""
    global _START
    _output()
    _START = time.perf_counter()
    values = json.loads(sys.argv[1])
    values["image_shape"] = tuple(values["image_shape"])
    try:
        program(Config(**values))
    except Skipped as why:
        emit(skipped=str(why))


@contextlib.contextmanager
def package(name: str) -> Iterator[None]:
    """Import a framework in this block: where it is not installed, the program is skipped."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        emit(skipped=f"{name} is not installed: pip install -e '.[peers]'")
        sys.exit(0)


def emit(**values: Any) -> None:
    """Print one JSON object as a line of standard output."""
    print(json.dumps(values), file=_output(), flush=True)


def synthetic_batch(config: Config, size: int | None = None) -> tuple[Any, Any]:
    """Return the one batch of random images, float32 `[B, H, W, C]`, and labels, int32 `[B]`."""
    import numpy as np

    generator = np.random.default_rng(config.seed)
    size = size or config.batch_size
    images = generator.standard_normal((size, *config.image_shape), np.float32)
    return images, generator.integers(config.num_classes, size=size).astype(np.int32)


def stored_images(config: Config) -> tuple[Any, Any]:
    """Return the file's images, uint8 `[N, H, W, C]`, and labels, int32 `[N]`."""
    import numpy as np

    with np.load(config.data) as arrays:
        return arrays["images"], arrays["labels"].astype(np.int32)


def peak_memory_mib() -> float:
    """Return the peak resident memory of this process.

    Linux starts a new program's `ru_maxrss` at the memory of the process that started it, here
    perhaps that of a whole framework; VmHWM is the program's own.
    """
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


class Lane:
    """The turns of a program that is being measured; see the module's example.

    As a context manager it prints the peak memory at the end, with that of other processes, in
    MiB, if they have been added to `memory_of_others_mib`.
    """

    def __init__(self, config: Config, versions: dict[str, str], note: str = ""):
        """Start with the loops that warm up.

        Args:
            config: what is trained.
            versions: of the frameworks.
            note: what a reader of the result has to know.
        """
        self._steps_per_loop = config.steps_per_loop
        self._ready = {"ready": True, "versions": versions} | ({"note": note} if note else {})
        self._loops_to_warm_up = WARM_UP_LOOPS
        self._seconds = 0.0
        self._start = 0.0
        self._loss: Any = None
        self.steps = 0
        self.memory_of_others_mib = 0.0

    def __enter__(self) -> Lane:
        """Return this lane."""
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Print the peak memory, unless an exception ends the program."""
        if kind is None:
            emit(peak_memory_mib=round(peak_memory_mib() + self.memory_of_others_mib, 1))

    def more(self, loss: Any = None) -> bool:
        """Return whether to make another loop of steps; sleeps between windows.

        Args:
            loss: of the last step of the loop that has just been made, or None before the first.
                It may be on a device: it is read one loop later, so that the device always has
                work, and at the end of a window.
        """
        previous, self._loss = self._loss, loss
        if previous is not None:
            float(previous)
        if self._ready and loss is not None and "seconds_to_first_call" not in self._ready:
            float(loss)
            self._ready["seconds_to_first_call"] = time.perf_counter() - _START
        if self._loops_to_warm_up:
            self._loops_to_warm_up -= 1
            return True
        if self._ready:
            float(loss)
            emit(**self._ready)
            self._ready = {}
            return self._next_window()
        self.steps += self._steps_per_loop
        if time.perf_counter() - self._start < self._seconds:
            return True
        last_loss = float(loss)
        seconds = time.perf_counter() - self._start
        emit(steps=self.steps, seconds=seconds, loss=last_loss)
        return self._next_window()

    def _next_window(self) -> bool:
        """Sleep until the next window is asked for; return False at the end of standard input."""
        line = sys.stdin.readline()
        if not line.strip():
            return False
        self._loss, self.steps = None, 0
        self._seconds, self._start = float(line), time.perf_counter()
        return True


@functools.cache
def _output() -> TextIO:
    """Return the real standard output, and send what others write there to standard error."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return output
