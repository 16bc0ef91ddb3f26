"""What a step takes on GPUs in one setting, what it copies, and ring against NCCL.

    for found in measure(Setting("resnet20", towers=1, variables="replicated"), gpus):
        ...  # {"seconds_per_step": 0.01}, then {"copies": {"host to GPU": {"number": 2.0, ...}}}

Copies are counted in a profile; what they should be `scripts/gpu_table.py` counts in the graph, on
any machine. `scripts/gpu_check.py` runs all this, each setting in a process of its own.
"""

import dataclasses
import itertools
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from towers.formatting import first_line
from towers.options.run import Options
from towers.training.run.setup import RunContext, assemble, load_data

if TYPE_CHECKING:
    from scripts.gpu_checks import Gpus

MODELS = {
    "cnn": {"model": "models.cnn:cnn", "augment": "tutorial"},
    "resnet20": {"model": "models.resnet:resnet20", "augment": "resnet"},
}
BATCH_SIZES = (1024, 128)
WINDOWS, WINDOW_SECONDS = 3, 0.5
STEPS = 10  # of a call of the loop
PROFILED_STEPS = 20
WAYS = {"H2D": "host to GPU", "D2H": "GPU to host", "P2P": "GPU to GPU"}  # as CUPTI says it


class Skipped(Exception):
    """What cannot be tried here, for a reason that is no fault."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is varied."""

    model: str
    towers: int
    variables: str
    dtype: str = "float32"
    jit_compile: bool = False
    batch_size: int = BATCH_SIZES[0]

    def __str__(self) -> str:
        """Return "resnet20, 2 towers, replicated, float32, XLA, batch size 1024"."""
        towers = f"{self.towers} tower{'s' * (self.towers > 1)}"
        xla = ["XLA"] * self.jit_compile
        parts = [self.model, towers, self.variables, self.dtype, *xla]
        return ", ".join([*parts, f"batch size {self.batch_size}"])

    @property
    def name(self) -> str:
        """Return "step_resnet20_2_replicated_float32_xla_1024"."""
        xla = ["xla"] * self.jit_compile
        parts = [self.model, self.towers, self.variables, self.dtype, *xla, self.batch_size]
        return "_".join(map(str, ["step", *parts]))

    def options(self) -> Options:
        """Return the options of its run."""
        fields = dict(variables=self.variables, dtype=self.dtype, jit_compile=self.jit_compile)
        fields |= MODELS[self.model]
        if self.jit_compile:  # a program of XLA's meets no other
            fields |= {"batch_norm": "local"}
        return Options(**fields, num_towers=self.towers, batch_size=self.batch_size)


def settings(gpus: "Gpus") -> list[Setting]:
    """Return the settings that are timed, the most telling first: one thing varies at a time."""
    numbers = list(dict.fromkeys((gpus.number, 1)))
    sizes = [2 * gpus.number] if gpus.dry else BATCH_SIZES  # CPUs show only that all of it works
    timed = [
        Setting(model, number, "replicated", batch_size=size)
        for size in sizes
        for number in numbers
        for model in MODELS
    ]
    for number in numbers:
        plain = [Setting(model, number, "replicated", batch_size=sizes[0]) for model in MODELS]
        others = [{"dtype": "mixed_bfloat16"}, {"jit_compile": True}, {"variables": "cpu"}]
        if number > 1:  # on one GPU these lie where replicated ones do
            others.append({"variables": "sharded"})
        timed += [dataclasses.replace(one, **other) for other in others for one in plain]
    return timed


def measure(setting: Setting, gpus: "Gpus") -> Iterator[dict[str, Any]]:
    """Yield {"seconds_per_step", "examples_per_second"} of steps, then {"copies"} of one.

    Copies are those of a step on all GPUs: {"host to GPU": {"number": 2.0, "bytes": 400000.0}};
    None where nothing was recorded.

    Raises:
        Skipped: the batch is too large for the GPU.
    """
    names = gpus.devices(setting.towers)
    try:
        run = assemble(setting.options(), names, load_data(setting.options()))
        yield from _measured(run, setting.batch_size)
    except tf.errors.ResourceExhaustedError as error:
        raise Skipped(first_line(error, 300)) from None


def _measured(run: RunContext, batch_size: int) -> Iterator[dict[str, Any]]:
    """Time steps that nobody looks at, then profile some; the graph is built once."""
    loop, batches = run.train_loop(telemetry=False), iter(run.batches(0, 0))

    def make_steps(number: int) -> None:
        loop(batches, tf.constant(number))["loss"].numpy()  # which waits for all

    make_steps(1)
    seconds = statistics.median(_windows(lambda: make_steps(STEPS), STEPS))
    yield {"seconds_per_step": seconds, "examples_per_second": batch_size / seconds}
    yield {"seconds_per_step": seconds, "copies": _profiled(make_steps)}


def _windows(call: Callable[[], None], per_call: int) -> list[float]:
    """Return the seconds of each part of a call, in each of WINDOWS, after a call that warms up."""
    call()
    windows = []
    for _ in range(WINDOWS):
        start, calls, passed = time.perf_counter(), 0, 0.0
        while passed < WINDOW_SECONDS:
            call()
            calls += 1
            passed = time.perf_counter() - start
        windows.append(passed / calls / per_call)
    return windows


def _profiled(make_steps: Callable[[int], None]) -> dict[str, dict[str, float]] | None:
    """Return what was copied in a step: what a call copies whatever its steps is taken off."""
    try:
        few, many = (_copied(make_steps, number) for number in (1, 1 + PROFILED_STEPS))
    except Exception:  # of any kind: the seconds are worth more than a profile
        return None
    if few is None or many is None:
        return None
    return {
        way: {
            "number": (many[way][0] - few[way][0]) / PROFILED_STEPS,
            "bytes": (many[way][1] - few[way][1]) / PROFILED_STEPS,
        }
        for way in many
    }


def _copied(make_steps: Callable[[int], None], number: int) -> dict[str, tuple[int, int]] | None:
    """Return what was copied in a call of so many steps."""
    with tempfile.TemporaryDirectory() as folder:
        tf.test.experimental.sync_devices()
        tf.profiler.experimental.start(folder)
        try:
            make_steps(number)
            tf.test.experimental.sync_devices()
        finally:
            tf.profiler.experimental.stop()
        [path] = Path(folder).glob("plugins/profile/*/*.xplane.pb")
        return copies(xplane_pb2.XSpace.FromString(path.read_bytes()))


def copies(trace: xplane_pb2.XSpace) -> dict[str, tuple[int, int]] | None:
    """Return {"host to GPU": (number, bytes), ...} of what all GPUs copied; None without a GPU."""
    totals = {way: [0, 0] for way in WAYS.values()}
    streams = [
        (plane, line)
        for plane in trace.planes
        for line in plane.lines
        if plane.name.startswith("/device:GPU:") and line.name.startswith("Stream")
    ]
    for plane, line in streams:
        names = {key: stat.name for key, stat in plane.stat_metadata.items()}
        for event in line.events:
            title = plane.event_metadata[event.metadata_id].name
            if way := WAYS.get(title.removeprefix("Memcpy")):
                # TensorFlow keeps texts that repeat once, as the name of a stat.
                stats = {names[s.metadata_id]: s.str_value or names.get(s.ref_value, "")
                         for s in event.stats}  # fmt: skip
                size = re.search(r"\bsize:(\d+)", stats.get("memcpy_details", ""))
                totals[way][0] += 1
                totals[way][1] += int(size[1]) if size else 0
    return {way: (number, size) for way, (number, size) in totals.items()} if streams else None


# ---------------------------------------------------------------------------- Ring against NCCL

SUM_BYTES = {"1 MiB": 2**20, "64 MiB": 2**26}
_keys = itertools.count(50_000_000)  # far from those of a step


def ring_against_nccl(names: Sequence[str]) -> Iterator[dict[str, dict[str, float]]]:
    """Yield {"nccl": {"1 MiB": seconds of an all-sum}, "ring": ...}, as it grows; sums are exact.

    Raises:
        ArithmeticError: a sum is wrong.
    """
    seconds: dict[str, dict[str, float]] = {}
    for hint in ("nccl", "ring"):
        for title, size in SUM_BYTES.items():
            values, tokens = [], []
            for name in names:
                with tf.device(name):
                    values.append(tf.Variable(tf.range(size // 4, dtype=tf.float32) % 1000))
                    tokens.append(tf.Variable(0.0))
            sums = _make_sums(names, values, tokens, hint)
            for name, total in zip(names, sums(), strict=True):
                expected = len(names) * (tf.range(size // 4, dtype=tf.float32) % 1000)
                if not bool(tf.reduce_all(total == expected)):
                    raise ArithmeticError(f"{hint}: a wrong sum of {title} on {name}")
            call = lambda sums=sums: [total[:1].numpy() for total in sums()]  # noqa: E731
            seconds.setdefault(hint, {})[title] = statistics.median(_windows(call, 1))
            yield seconds


def _make_sums(
    names: Sequence[str], values: Sequence[tf.Variable], tokens: Sequence[tf.Variable], hint: str
) -> Callable[[], list[tf.Tensor]]:
    group, instance = next(_keys), next(_keys)

    @tf.function(autograph=False)
    def sums() -> list[tf.Tensor]:
        totals = []
        for name, value, token in zip(names, values, tokens, strict=True):
            with tf.device(name):
                total = tf.raw_ops.CollectiveReduceV2(
                    input=value.read_value(), group_size=len(names), group_key=group,
                    instance_key=instance, merge_op="Add", final_op="Id", communication_hint=hint,
                    ordering_token=[token.handle],  # one for all would order the GPUs
                )  # fmt: skip
            totals.append(total)
        return totals

    return sums
